"""The guide, measured: what `diagnose` says of three bad set-ups, and what following it gains.

For each set-up: `diagnose` names a cause; `tune --grow` is run on it as it stands, and, where the guide asks
for a change of code, on the changed code too. Then the set-up and what came out take turns.

  by settings alone   the code as it was, with the settings that tune wrote
  by the guide        with the change of code that diagnose asks for, and tune's settings for that

`guide_*` is speed by the guide over speed as it was. A step then takes more samples (--grow), so this is
samples a second, not the time to a loss: tune says how the learning rate follows. `estimate_error` is
|estimated - taken| / taken of `diagnose` just before a real `train`, the median of the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console

from holdfast_trainer.parallel import Gang
from holdfast_trainer.tune.measure import Effort, measure
from holdfast_trainer.tune.own import OwnTrial
from holdfast_trainer.tune.settings import Settings

from .report import RESULTS, ROOT, Measure, Report, ReportError, refuse_unwritable, run, scratch, take_turns
from .training.work import write_tokens
from .tuning import setups

UNITS = {"speed": "samples/s", "error": "ratio", "estimated": "s", "taken": "s"}
AS_IT_WAS, BY_SETTINGS, BY_GUIDE = "as it was", "by settings alone", "by the guide"
CAUSES = {
    "loader": {"batch", "data", "optimizer"},
    "ragged": {"python"},
    "precision": {"precision", "optimizer"},
}
"""What is wrong with each on purpose: on a device without bf16, fp32 is not among it."""
ESTIMATED = "diagnose, then train"
LONGEST_SECONDS = 400


class Guide:
    """Runs the commands that a user would, in processes of their own."""

    def __init__(self, folder: Path, effort: Sequence[str], heard: Callable[[str], None]) -> None:
        self._folder, self._effort, self._heard = folder, effort, heard
        self.said: dict[str, Any] = {}
        """For the report's facts: what was found and changed, by set-up."""

    def command(self, *words: str | Path) -> str:
        """Its output. Raises ReportError with its last words."""
        done = subprocess.run(
            [sys.executable, "-m", "holdfast_trainer", *map(str, words)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "trainer"), str(ROOT)])},
            capture_output=True,
            text=True,
            timeout=LONGEST_SECONDS,
            check=False,
        )
        if done.returncode:
            raise ReportError(f"{words[0]} {words[1]} ended with {done.returncode}: {done.stderr[-600:]}")
        return done.stdout

    def subjects(self, name: str) -> dict[str, Measure]:
        """The set-up as it was and what the guide made of it, ready to be measured."""
        target = f"bench.tuning.setups:{name}"
        self._heard(f"{name}: diagnose")
        findings = json.loads(self.command("diagnose", target, "--steps", "5", "-o", "json"))["findings"]
        mended = f"{name}_mended" if hasattr(setups, f"{name}_mended") else name
        by_settings = self._tuned(name)
        by_guide = self._tuned(mended) if mended != name else by_settings
        first = findings[0]
        self.said[name] = {
            "diagnose says": first["message"],
            "cause": first["cause"],
            "named the true cause": first["cause"] in CAUSES[name],
            BY_SETTINGS: by_settings.told(),
            BY_GUIDE: by_guide.told() + (", with the code changed" if mended != name else ""),
        }
        self._heard(f"{name}: {first['cause']}: {first['message']}")
        today = getattr(setups, name)().settings
        return {
            f"{name}, {AS_IT_WAS}": measured(name, today, self._effort),
            f"{name}, {BY_SETTINGS}": measured(name, by_settings, self._effort),
            f"{name}, {BY_GUIDE}": measured(mended, by_guide, self._effort),
        }

    def _tuned(self, name: str) -> Settings:
        out = self._folder / name
        self._heard(f"{name}: tune")
        words = (
            "tune",
            f"bench.tuning.setups:{name}",
            "--grow",
            "--no-compile",
            "--rounds",
            "1",
            "--out",
            out,
        )
        self.command(*words, *self._effort)
        return Settings.read(out / "tuned.yaml")


def measured(name: str, settings: Settings, effort: Sequence[str]) -> Measure:
    """Samples a second of a set-up with some settings, in this process."""
    gang = Gang(0, 1, 0, torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu"))
    steps, seconds = int(effort[1]), float(effort[3])

    def once() -> Mapping[str, float]:
        workload = getattr(setups, name)()
        build = lambda settings, alone: OwnTrial(workload, settings, gang, alone=alone)  # noqa: E731
        outcome = measure(build, settings, gang, Effort(steps, seconds))
        if outcome.fault:
            raise ReportError(f"{name} with {settings.told()}: {outcome.fault}")
        return {"speed": outcome.speed}

    return once


def estimated(guide: Guide, folder: Path, steps: int) -> Measure:
    """The estimate of a run just before it, and how long it took."""
    write_tokens(folder / "data")
    config = folder / "gpt.yaml"
    body = {
        "model": {"vocab_size": 512, "layers": 4, "heads": 4, "width": 256, "context": 128},
        "data": {"path": str(folder / "data")},
        "train": {"steps": steps, "global_batch": 8, "threads": 1},
        "optim": {"learning_rate": 1e-3, "warmup_steps": 2},
    }
    config.write_text(yaml.safe_dump(body), encoding="utf-8")

    def once() -> Mapping[str, float]:
        run = Path(tempfile.mkdtemp(prefix="run-", dir=folder))
        words = ("diagnose", config, "-o", "json", "--run-dir", run, "--steps", str(max(5, steps // 5)))
        expected = float(json.loads(guide.command(*words))["estimated_seconds"])
        began = time.monotonic()
        guide.command("train", "--config", config, "--run-dir", run)
        taken = time.monotonic() - began
        return {"estimated": expected, "taken": taken, "error": abs(expected - taken) / taken}

    return once


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="make bench-tune", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="samples of each subject (%(default)s)")
    parser.add_argument("--steps", type=int, default=3, help="at least, a sample (%(default)s)")
    parser.add_argument("--seconds", type=float, default=1.0, help="at least, a sample (%(default)s)")
    parser.add_argument(
        "--run-steps", type=int, default=60, help="of the run that is estimated (%(default)s)"
    )
    parser.add_argument("--only", choices=[*CAUSES, "estimate"], nargs="*", help="leave the others out")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the JSON goes")
    parser.add_argument("--place", type=Path, default=ROOT / "build", help="for what is written meanwhile")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: at least 1 is needed")
    refuse_unwritable(parser, options.out)
    console, report, began = Console(), Report("tune"), time.monotonic()

    def heard(text: str) -> None:
        console.print(f"{time.monotonic() - began:5.0f} s  {text}", highlight=False)

    wanted = options.only or [*CAUSES, "estimate"]
    with scratch(options.place, "tune") as folder:
        guide = Guide(folder, ("--steps", str(options.steps), "--seconds", str(options.seconds)), heard)
        for name in CAUSES:
            if name in wanted:
                take_turns(report, guide.subjects(name), UNITS, rounds=options.rounds, warmup=0, heard=heard)
                was, guided = f"{name}, {AS_IT_WAS}", f"{name}, {BY_GUIDE}"
                report.ratio(f"guide_{name}", "speed", guided, was)
                report.ratio(f"guide_{name}_by_settings_alone", "speed", f"{name}, {BY_SETTINGS}", was)
        if "estimate" in wanted:
            subjects = {ESTIMATED: estimated(guide, folder, options.run_steps)}
            take_turns(report, subjects, UNITS, rounds=options.rounds, warmup=0, heard=heard)
            report.ratios["estimate_error"] = report.median(ESTIMATED, "error")
    report.facts["guide"] = guide.said
    report.finish(console, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(run("tune", main))
