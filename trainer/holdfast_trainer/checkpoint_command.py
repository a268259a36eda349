"""The command line of `checkpoint`: what is in a run directory, whether it is whole, and how to get it out.

Exit status: 0 all is well; 1 something is bad, or two checkpoints differ; 2 the question cannot be answered.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .contract import is_directory
from .sizes import size_text

if TYPE_CHECKING:
    from .checkpoint.inspection import Listed, Opened
    from .contract import RunDir

EPILOG = """\
RUN names a run directory, such as ./holdfast-run, or s3://BUCKET/PREFIX; RUN@STEP one checkpoint of it, else
the newest is meant. A bucket's prefix that itself ends in @ and a number is named with a / behind it.

examples:
  python -m holdfast_trainer checkpoint ls runs/a
  python -m holdfast_trainer checkpoint verify runs/a            # reads every byte of every checkpoint
  python -m holdfast_trainer checkpoint export runs/a --out gpt.safetensors
  python -m holdfast_trainer checkpoint export runs/a@500 --format torch --all --out state.pt
  python -m holdfast_trainer checkpoint diff runs/a runs/twin    # do two runs end with the same bits?
  python -m holdfast_trainer checkpoint diff runs/a@500 runs/a@600
  python -m holdfast_trainer checkpoint verify s3://bucket/runs/a

Nothing here changes a run directory; a job may be running in it.
Exit status: 0 all is well, 1 something is bad or different, 2 the question cannot be answered.
"""
SHOWN = 10
"""Differences that `diff` shows unless told otherwise."""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m holdfast_trainer checkpoint",
        description="List, verify, export and compare the checkpoints of a run.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    # fmt: off
    ls = commands.add_parser("ls", help="what there is: step, attempt, ranks, size, age, digest, state",
        description="List checkpoints, newest first. 'good' means a sound manifest and files of the right "
                    "size; `verify` reads their contents. Equal digests mean equal bits on every rank.")
    ls.add_argument("run", metavar="RUN[@STEP]", help="without a step: all checkpoints")
    ls.add_argument("-o", "--output", choices=("table", "json"), default="table", help="(%(default)s)")

    verify = commands.add_parser("verify", help="read everything; name each bad file",
        description="Read every byte and compare with the checksums in the manifest. Exit status 1 where "
                    "anything is bad; a resume would pass over that checkpoint.")
    verify.add_argument("run", metavar="RUN[@STEP]", help="without a step: all checkpoints")

    export = commands.add_parser("export", help="weights (or all) as safetensors or a torch state_dict",
        description="Write the model's weights to one file, from a checkpoint of any number of ranks. "
                    "What is exported is verified first.")
    export.add_argument("run", metavar="RUN[@STEP]")
    export.add_argument("--out", type=Path, required=True, metavar="FILE", help="replaced when it is there")
    export.add_argument("--format", choices=("safetensors", "torch"), default="safetensors",
        help="torch: for torch.load(FILE, weights_only=True) and load_state_dict (%(default)s)")
    export.add_argument("--part", metavar="NAME", help="which model, where the run tracks several")
    export.add_argument("--all", action="store_true", help="every tracked part: optimizer state too")

    diff = commands.add_parser("diff", help="where two checkpoints part",
        description="Compare two checkpoints value by value, bit by bit. Values that all ranks share are "
                    "compared whatever the number of ranks. Both are verified first. Exit status 1 where "
                    "they differ.")
    diff.add_argument("left", metavar="RUN[@STEP]")
    diff.add_argument("right", metavar="RUN[@STEP]")
    diff.add_argument("--limit", type=_count, default=SHOWN, metavar="N",
        help="differences shown (%(default)s)")
    diff.add_argument("-o", "--output", choices=("table", "json"), default="table", help="(%(default)s)")
    # fmt: on
    return parser


def _count(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text} is below 0")
    return number


def main(argv: Sequence[str]) -> int:
    """Answer one question; returns the exit status."""
    options = build_parser().parse_args(argv)
    from .checkpoint import CheckpointError  # torch: only when the arguments make sense

    commands = {"ls": _ls, "verify": _verify, "export": _export, "diff": _diff}
    try:
        return commands[options.command](options)
    except CheckpointError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except PermissionError as error:
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2


def _target(text: str) -> tuple[RunDir, int | None]:
    """RUN or RUN@STEP. Raises CheckpointError."""
    from .checkpoint import CheckpointError
    from .checkpoint.bucket import is_bucket
    from .checkpoint.inspection import open_run

    path, at, step = text.rpartition("@")
    if not at or "/" in step or is_directory(Path(text)) or (is_bucket(text) and not step.isdigit()):
        return open_run(text), None
    if not step.isdigit():
        raise CheckpointError(f"{text!r}: after @ comes a step, such as {path}@500")
    return open_run(path), int(step)


def _open(text: str) -> Opened:
    from .checkpoint.inspection import Opened, choose

    run, step = _target(text)
    return Opened(run, choose(run, step))


# -------------------------------------------------------------------------- ls


def _ls(options: argparse.Namespace) -> int:
    from .checkpoint.inspection import OTHER_VERSION, choose, listing
    from .checkpoint.stores import open_store

    run, step = _target(options.run)
    found = [item for item in listing(run) if step is None or item.step == step]
    if step is not None and not found:
        choose(run, step)
    if options.output == "json":
        print(json.dumps([dataclasses.asdict(item) for item in found], indent=1))
    elif found:
        print(_table(found))
    else:
        print(f"no checkpoints in {open_store(run, 0).place}")
    return 1 if any(item.state in ("damaged", OTHER_VERSION) for item in found) else 0


def _table(items: Sequence[Listed]) -> str:
    rows = [("STEP", "ATTEMPT", "RANKS", "SIZE", "AGE", "DIGEST", "STATE")]
    for item in items:
        state = f"{item.state}: {item.reason}" if item.reason else item.state
        rows.append(
            (
                str(item.step),
                _or_dash(item.attempt),
                _or_dash(item.world_size),
                "-" if item.bytes is None else size_text(item.bytes),
                "-" if item.age_seconds is None else age_text(item.age_seconds),
                (item.digest or "-")[:12],
                state,
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(6)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[6]])
        for row in rows
    )


def _or_dash(value: Any) -> str:
    return "-" if value is None else str(value)


def age_text(seconds: float) -> str:
    """The two largest units: 42s, 3m10s, 5h02m, 2d4h."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02}m"
    return f"{whole // 86400}d{whole % 86400 // 3600}h"


# ---------------------------------------------------------------------- verify


def _verify(options: argparse.Namespace) -> int:
    from .checkpoint.inspection import choose, committed, faults, listing
    from .checkpoint.manifest import OtherVersion
    from .checkpoint.stores import open_store

    run, step = _target(options.run)
    before = committed(run)
    named = [item.step for item in listing(run) if item.state != "unfinished"]
    if step is not None and step not in named:
        choose(run, step)
    steps = named if step is None else [step]
    if not steps:
        print(f"no checkpoints in {open_store(run, 0).place}")
    bad = others = 0
    for number in steps:
        name = run.checkpoint(number).name
        try:
            found = faults(run, number)
        except OtherVersion as error:
            others += 1
            print(f"{name}: not verified: {error}", flush=True)
            continue
        if found and number in before - committed(run):
            print(f"{name}: removed by the run meanwhile", flush=True)
            continue
        bad += bool(found)
        print(
            f"{name}: good" if not found else "\n".join(f"{name}: BAD: {fault}" for fault in found),
            flush=True,
        )
    if bad:
        then = "a resume passes over what is damaged"
        if step is None and bad == len(steps):
            then = "a run with none that is good refuses to begin, as that would lose its work silently"
        print(
            f"{bad} of {len(steps)} checkpoints are bad; {then}",
            file=sys.stderr,
        )
    if others:
        print(
            f"{others} of {len(steps)} checkpoints are of a version that is not read here; a resume that "
            "comes to one ends with that, and does not go on from the one before",
            file=sys.stderr,
        )
    return 1 if bad or others else 0


# ---------------------------------------------------------------------- export


def _export(options: argparse.Namespace) -> int:
    from .checkpoint import CheckpointError
    from .checkpoint.export import export

    if options.all and options.part:
        raise CheckpointError("--all and --part exclude one another: give one of them")
    with _open(options.run) as opened:
        what = export(opened, options.out, options.format, part=options.part, everything=options.all)
        ranks, step = opened.manifest.world_size, opened.manifest.step
    size = size_text(options.out.stat().st_size)
    print(f"{options.out}: {what}, step {step} of {ranks} {'rank' if ranks == 1 else 'ranks'}, {size}")
    return 0


# ------------------------------------------------------------------------ diff


def _diff(options: argparse.Namespace) -> int:
    from .checkpoint.inspection import differences

    with _open(options.left) as left, _open(options.right) as right:
        found = differences(left, right)
        pair = (left, right)
        if options.output == "json":
            body = {
                "checkpoints": [
                    {"path": str(o.path), "step": o.manifest.step, "digest": o.manifest.digest} for o in pair
                ],
                "identical": not found,
                "differences": [dataclasses.asdict(d) for d in found],
            }
            print(json.dumps(body, indent=1))
            return 1 if found else 0
        for sign, opened in zip("-+", pair, strict=True):
            manifest = opened.manifest
            print(f"{sign} {opened.path}  {manifest.world_size} ranks  digest {manifest.digest[:12]}")
        if not found:
            print("identical: every value, bit for bit")
            return 0
        for difference in found[: options.limit]:
            gap = "" if difference.max_abs is None else f", at most {difference.max_abs:.3g} apart"
            print(f"{difference.name}: {difference.what}{gap}")
        if len(found) > options.limit:
            print(f"and {len(found) - options.limit} more (--limit {len(found)} shows all)")
    return 1
