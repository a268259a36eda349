"""Tell the story: prepare, submit, preempt twice, finish, run the untouched twin, compare.

Everything goes the way a user goes: the commands of the trainer, a controller started with
`holdfast up`, its REST API. Every figure of the report is computed from what the runs wrote.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from holdfast_controller.client import Client
from holdfast_controller.cluster import HoldfastError
from holdfast_controller.data_directory import DataDirectory, read_token
from holdfast_controller.jobs import Phase, TrainingJob

from . import proof, report

NAMESPACE, MAIN, TWIN = "demo", "gpt", "gpt-untouched"
DEADLINE_SECONDS = 1800.0
"""A job that takes longer than this has hung: the demo says so and fails."""

FEWEST_STEPS = 6


class DemoFailed(Exception):
    """The demo did not show what it is there to show."""


def main() -> int:
    parser = argparse.ArgumentParser(
        "make demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps", type=int, default=160, help=f"optimizer steps of each run (160), at least {FEWEST_STEPS}"
    )
    parser.add_argument("--out", type=Path, default=Path("build/demo"), help="where everything goes")
    arguments = parser.parse_args()
    if arguments.steps < FEWEST_STEPS:
        parser.error(
            f"--steps {arguments.steps}: give at least {FEWEST_STEPS}, for two disruptions in between"
        )
    # Into a file or a pipe a sentence is one line, however long; a terminal's are broken between words.
    console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
    signal.signal(signal.SIGTERM, _terminated)
    began = time.monotonic()
    try:
        evidence = tell(arguments.out.absolute(), arguments.steps, console)
        evidence.wall_seconds = time.monotonic() - began
        figures = proof.figures(evidence)
        report.show(evidence, figures, arguments.out, console)
        (arguments.out.parent / "demo.json").write_text(json.dumps(figures, indent=1) + "\n")
        console.print(f"figures: {arguments.out.parent / 'demo.json'}, curve: {arguments.out / 'loss.png'}")
        proof.check(figures, evidence)
    except (DemoFailed, HoldfastError, proof.Differs) as error:
        console.print(f"[bold red]the demo failed:[/] {error}")
        return 1
    except KeyboardInterrupt:
        console.print("interrupted; what ran was ended")
        return 130
    console.print(f"  preempted {figures['digest']}\n  untouched {figures['twin_digest']}")
    console.print("[bold green]resume proof: identical[/]")
    return 0


def tell(out: Path, steps: int, console: Console) -> proof.Evidence:
    """Run both jobs and gather what they wrote."""
    shutil.rmtree(out / "holdfast", ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)
    prepare(out / "data", console)
    with controller(out) as client, ended_at_exit(client):
        console.print(f"[bold]1[/] submit: two ranks of a 12 M-parameter GPT, {steps} steps, on CPU")
        submitted = time.time()
        client.submit(job(MAIN, out / "data", steps), NAMESPACE)
        with live(console, steps) as show:
            until_step(client, MAIN, steps // 3, show)
            client.drill(NAMESPACE, MAIN, 1, "kill")
            show.console.print("[bold]2[/] replica 1 is killed with SIGKILL: no notice, its machine is lost")
            until_step(client, MAIN, 2 * steps // 3, show, attempt=2)
            client.drill(NAMESPACE, MAIN, 0, "notice")
            show.console.print(
                "[bold]3[/] replica 0 gets its notice with SIGTERM: the spot market wants it back"
            )
            finished = until_done(client, MAIN, show)
        console.print("[bold]4[/] the untouched twin: the same job, left alone")
        client.submit(job(TWIN, out / "data", steps), NAMESPACE)
        with live(console, steps) as show:
            until_done(client, TWIN, show)
        return proof.Evidence(
            submitted=submitted,
            job=finished,
            ledger=client.ledger(NAMESPACE, MAIN),
            steps=client.steps(NAMESPACE, MAIN),
            twin_ledger=client.ledger(NAMESPACE, TWIN),
            twin_steps=client.steps(NAMESPACE, TWIN),
        )


def prepare(data: Path, console: Console) -> None:
    """Tokenise Python's own standard library: real text that every machine with Python has."""
    console.print("[bold]0[/] prepare: the standard library's sources become token shards")
    skip = [word for name in ("site-packages", "test", "tests", "idlelib") for word in ("--exclude", name)]
    source = sysconfig.get_paths()["stdlib"]
    command = [sys.executable, "-m", "holdfast_trainer", "prepare", "--source", source]
    command += ["--pattern", "*.py", *skip, "--validation-fraction", "0.03", "--out", str(data)]
    if subprocess.run(command, check=False).returncode:
        raise DemoFailed("the text could not be prepared; the lines above say why")


def job(name: str, data: Path, steps: int) -> dict[str, Any]:
    """What a user would write into job.yaml."""
    return {
        "apiVersion": "holdfast.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {
            "command": ["python", "-m", "holdfast_trainer", "train"],
            "replicas": 2,
            "checkpoint": {"every": str(max(2, steps // 8)), "keep": 3},
            "config": {
                "model": {
                    "vocab_size": 4096, "layers": 6, "heads": 6, "width": 384, "context": 128, "dropout": 0.1,
                },
                "data": {"path": str(data)},
                "train": {"steps": steps, "global_batch": 8, "micro_batch": 2, "log_every": 10},
                "optim": {"learning_rate": 1e-3, "warmup_steps": steps // 10},
                "validation": {"every": max(2, steps // 4), "batches": 4},
            },
        },
    }  # fmt: skip


# ------------------------------------------------------------------ controller


@contextmanager
def controller(out: Path) -> Iterator[Client]:
    """`holdfast up` on a free port, ended by its id."""
    directory = DataDirectory(out / "holdfast")
    log = out / "controller.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [
                str(Path(sys.executable).with_name("holdfast")),
                "up",
                "--data-dir",
                str(directory.path),
                "--port",
                "0",
            ],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"HOLDFAST_LOG_FORMAT": "json"},
            start_new_session=True,  # Ctrl-C is ours: the jobs end first
        )
    try:
        deadline = time.monotonic() + 180
        while (server := directory.read_server_file()) is None:
            if process.poll() is not None or time.monotonic() > deadline:
                raise DemoFailed(f"the controller did not start; {log} says why")
            time.sleep(0.05)
        with Client(server.url, read_token(directory.token)) as client:
            yield client
    finally:
        process.terminate()
        process.wait(timeout=300)


def _terminated(*_: object) -> None:
    # make passes on one that the whole group got: a second must not cut short what the first one ends.
    signal.signal(signal.SIGTERM, lambda *_: None)
    sys.exit(143)


@contextmanager
def ended_at_exit(client: Client) -> Iterator[None]:
    """Whatever happens, no job of ours runs on; finished ones stay to be looked at."""
    try:
        yield
    finally:
        running = [j for j in client.list_jobs(NAMESPACE) if not j.status.phase.final]
        for left in running:
            client.delete(NAMESPACE, left.metadata.name)
        deadline = time.monotonic() + 300
        while any(not j.status.phase.final for j in client.list_jobs(NAMESPACE)):
            if time.monotonic() > deadline:
                raise DemoFailed("a job did not end in 300 s after it was deleted")
            time.sleep(0.2)


# -------------------------------------------------------------------- waiting


class Live:
    """A line that moves, and what is worth a line of its own."""

    def __init__(self, bar: Progress, steps: int) -> None:
        self.console = bar.console
        self._bar = bar
        self._task = bar.add_task("starting", total=steps, figures="")
        self._said = ""

    def update(self, current: TrainingJob) -> None:
        progress = current.status.progress
        figures = ""
        if progress is not None and progress.loss is not None:
            rate = f", {progress.tokens_per_second:,.0f} tokens/s" if progress.tokens_per_second else ""
            figures = f"loss {progress.loss:.3f}{rate}"
        step = progress.step if progress else 0
        what = f"{current.status.phase.value.lower()}, attempt {current.status.attempt}"
        self._bar.update(self._task, completed=step, description=what, figures=figures)
        if not self.console.is_terminal and what != self._said:
            self.console.print(f"  {what}, step {step} {figures}")
        self._said = what


@contextmanager
def live(console: Console, steps: int) -> Iterator[Live]:
    columns = [
        TextColumn("  {task.description:<22}"),
        BarColumn(30),
        TextColumn("{task.completed}/{task.total}"),
    ]
    with Progress(
        *columns, TextColumn("{task.fields[figures]}"), TimeElapsedColumn(),
        console=console, transient=not console.is_terminal, disable=not console.is_terminal,
    ) as bar:  # fmt: skip
        yield Live(bar, steps)


def polled(client: Client, name: str, show: Live) -> Iterator[TrainingJob]:
    """The job as it is now, several times a second; raises DemoFailed when it failed or hangs."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < deadline:
        current = client.get(NAMESPACE, name)
        show.update(current)
        if current.status.phase is Phase.FAILED:
            raise DemoFailed(f"{name} failed: {current.status.message}")
        yield current
        time.sleep(0.2)
    raise DemoFailed(f"{name} did not get on within {DEADLINE_SECONDS:.0f} s")


def until_step(client: Client, name: str, step: int, show: Live, attempt: int = 1) -> None:
    """Wait until `step` is done in attempt number `attempt`, by the run directory: status tells it later."""
    for current in polled(client, name, show):
        if current.status.phase.final:
            raise DemoFailed(
                f"{name} finished before it could be drilled at step {step}: give it more --steps"
            )
        done = [line["step"] for line in client.steps(NAMESPACE, name) if line["attempt"] >= attempt]
        if current.status.attempt >= attempt and max(done, default=0) >= step:
            return


def until_done(client: Client, name: str, show: Live) -> TrainingJob:
    for current in polled(client, name, show):
        if current.status.phase is Phase.SUCCEEDED:
            return current
    raise AssertionError("polled ends by raising")


if __name__ == "__main__":
    sys.exit(main())
