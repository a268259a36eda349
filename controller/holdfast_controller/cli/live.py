"""Live views of jobs, on a terminal and as plain lines elsewhere."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ..cluster import Change, Unavailable
from ..jobs import Phase, TrainingJob
from . import formats
from .description import step_bar
from .documents import print_document
from .showing import Output, TableOutput
from .tables import (
    PHASE_STYLES,
    Column,
    console,
    event_columns,
    fit,
    job_columns,
    phase_text,
    redraws,
    table,
)

if TYPE_CHECKING:
    from ..client import Client

BAR_WIDTH = 14
ABOVE_ROWS = 2
"""An empty line, and the titles of the columns."""


def show_top(client: Client, namespace: str | None, selector: str, interval: float, once: bool) -> None:
    """Draw all jobs again and again; a controller that stops answering is told, its last figures stay."""
    screen = console()
    jobs = client.list_jobs(namespace, selector=selector)
    answered = datetime.now(UTC)
    if once:
        screen.print(top_view(jobs, client.server, screen.width, None))
        return
    with Live(console=screen, screen=True, auto_refresh=False) as live:
        silent, pause = None, interval
        while True:
            frame = top_view(jobs, client.server, screen.width, silent, height=screen.height)
            live.update(frame, refresh=True)
            time.sleep(pause)
            try:
                jobs = client.list_jobs(namespace, selector=selector)
                answered, silent, pause = datetime.now(UTC), None, interval
            except Unavailable as error:
                silent, pause = answered, max(interval, error.retry_after)


def top_view(
    jobs: Sequence[TrainingJob],
    server: str,
    width: int,
    silent_since: datetime | None,
    *,
    height: int | None = None,
) -> RenderableType:
    """One frame of `holdfast top`: a line of totals, then a row a job, running ones first; of a terminal of
    `height` lines, on which no more can be seen, as many as it has room for."""
    counts = Counter(job.status.phase for job in jobs)
    speeds = [
        job.status.progress.tokens_per_second
        for job in jobs
        if job.status.phase == Phase.RUNNING and job.status.progress
    ]
    known = [speed for speed in speeds if speed is not None]
    head = Text.assemble(("Holdfast ", "bold"), (server, "dim"), "   ")
    for phase in Phase:
        if counts[phase]:
            head.append(f"{counts[phase]} {phase.value}", PHASE_STYLES[phase]).append("   ")
    if known:
        head.append(f"{formats.count(sum(known))} tokens/s")
    parts: list[RenderableType] = [head]
    if silent_since is not None:
        parts.append(
            Text(
                f"No answer for {formats.age(silent_since)}; jobs run on, these are the last figures.",
                "yellow",
            )
        )
    if not jobs:
        return Group(*parts, Text(), Text("No jobs. Submit one: holdfast submit job.yaml"))
    order = [Phase.RUNNING, *(phase for phase in Phase if phase != Phase.RUNNING)]
    ordered = sorted(jobs, key=lambda job: order.index(job.status.phase))
    room = len(ordered) if height is None else max(1, height - len(parts) - ABOVE_ROWS)
    if room < len(ordered):  # to lay out thousands of rows takes ten seconds
        shown = max(1, room - 1)
        parts.append(Text(f"{shown} of {len(ordered):,} jobs fit here; holdfast get tells of all", "dim"))
        ordered = ordered[:shown]
    return Group(*parts, Text(), _top_table(ordered, width))


def _top_table(jobs: Sequence[TrainingJob], width: int) -> RenderableType:
    namespaces = len({job.metadata.namespace for job in jobs}) > 1
    wide = job_columns(jobs, wide=True, namespaces=namespaces)
    weights = {"NAMESPACE": 0, "NAME": 0, "PHASE": 0, "STEP": 0, "TOKENS/S": 1, "LOSS": 2, "ATTEMPT": 3}
    weights |= {"DISRUPTIONS": 6, "LOST": 5, "GOODPUT": 4, "ETA": 2, "MESSAGE": 8}
    columns = [column for column in wide if column.title in weights]
    for column in columns:
        column.weight = weights[column.title]
    bar = Column("PROGRESS", 7, cells=[_bar(job) for job in jobs])
    columns.insert([column.title for column in columns].index("STEP"), bar)
    return table(fit(columns, width), width)


def _bar(job: TrainingJob) -> Text:
    progress = job.status.progress
    if progress is None or not progress.total_steps:
        return Text("")
    share = min(1.0, progress.step / progress.total_steps)
    done = int(BAR_WIDTH * share)
    durable = min(done, int(BAR_WIDTH * progress.durable_step / progress.total_steps))
    # Solid: covered by a checkpoint. Light: done, and lost if the machine went now.
    style = PHASE_STYLES[job.status.phase]
    solid, light, rest = "█▒·" if console().encoding.startswith("utf") else "#=."
    return Text.assemble(
        (solid * durable, style), (light * (done - durable), style), (rest * (BAR_WIDTH - done), "dim")
    )


def follow_job(looks: Iterable[TrainingJob]) -> TrainingJob:
    """Show one job until it is final, and return it as it ended."""
    screen = console()
    if not redraws():
        return _follow_in_lines(looks)
    job = None
    with Live(console=screen, auto_refresh=False) as live:
        for job in looks:
            live.update(_one_line(job), refresh=True)
            if job.status.phase.final:
                break
    assert job is not None
    return job


def _one_line(job: TrainingJob) -> RenderableType:
    status, progress = job.status, job.status.progress
    line = Table.grid(padding=(0, 2, 0, 0))
    cells: list[RenderableType] = [phase_text(status.phase), Text(f"attempt {status.attempt}"), step_bar(job)]
    if progress is not None and status.phase == Phase.RUNNING:
        cells.append(Text(f"loss {formats.figure(progress.loss)}"))
        cells.append(Text(f"{formats.count(progress.tokens_per_second)} tokens/s"))
    line.add_row(*cells)
    if status.message and status.phase != Phase.RUNNING:
        return Group(line, Text(status.message, "dim"))
    return line


def _follow_in_lines(looks: Iterable[TrainingJob]) -> TrainingJob:
    last: tuple[object, ...] = ()
    job = None
    for job in looks:
        status, progress = job.status, job.status.progress
        tenth = 10 * progress.step // progress.total_steps if progress and progress.total_steps else None
        if (now := (status.phase, status.attempt, tenth)) != last:
            last = now
            step = formats.steps(progress.step, progress.total_steps) if progress else formats.UNKNOWN
            words = [status.phase.value, f"attempt {status.attempt}", f"step {step}"]
            if progress and progress.loss is not None:
                words.append(f"loss {formats.figure(progress.loss)}")
            if status.message:
                words.append(status.message)
            typer.echo("  ".join(words))
        if status.phase.final:
            return job
    assert job is not None
    return job


class _Rows:
    """A table whose rows come one by one: under a header that is printed once, in columns with a width that
    hardly any row exceeds."""

    def __init__(self, widths: Mapping[str, int]):
        self._widths = widths
        self._titled = False

    def print(self, columns: Sequence[Column]) -> None:
        screen = console()
        for column in columns:
            at_least = self._widths.get(column.title, 0)
            column.title = column.title.rjust(at_least) if column.right else column.title.ljust(at_least)
        drawn = table(columns, screen.width)
        drawn.show_header = not self._titled
        self._titled = True
        screen.print(drawn)


class ChangeLines:
    """`get -w`: prints what changed, a row under a header that is printed once.

    Rows tell phase, attempt and message; a new step alone is no row, or a fast job would flood the screen.
    """

    def __init__(self, output: Output, *, namespaces: bool):
        self._output = output
        self._namespaces = namespaces
        self._shown: dict[str, tuple[TrainingJob, tuple[object, ...]]] = {}
        widths = {"NAME": 20, "NAMESPACE": 12, "STEP": 13, "PHASE": 10, "TOKENS/S": 10, "ETA": 7, "LOSS": 8}
        self._rows = _Rows(widths)

    def show(self, change: Change) -> None:
        job, status = change.job, change.job.status
        state = (change.type == "DELETED", status.phase, status.attempt, status.message, status.disruptions)
        _, before = self._shown.pop(job.metadata.uid, (job, ()))
        if change.type != "DELETED":
            self._shown[job.metadata.uid] = (job, state)
        if before == state:
            return
        match self._output:
            case Output.NAME:
                typer.echo(job.key if self._namespaces else job.metadata.name)
            case Output.JSON | Output.YAML:
                _one_of_many(job.to_dict(), self._output.value)
            case _:
                self._row(change)

    def only(self, there: Sequence[TrainingJob]) -> None:
        """All that were shown and are not `there` are gone: their deletion was told while nobody listened."""
        uids = {job.metadata.uid for job in there}
        for uid, (job, _) in list(self._shown.items()):
            if uid not in uids:
                self.show(Change("DELETED", job))

    def _row(self, change: Change) -> None:
        columns = job_columns([change.job], wide=self._output == Output.WIDE, namespaces=self._namespaces)
        if change.type == "DELETED":
            next(column for column in columns if column.title == "PHASE").cells[0] = Text("(gone)", "dim")
        self._rows.print(columns)


class EventLines:
    """`events -w`: a row, or a document, for each event, and another where it came once more."""

    def __init__(self, output: TableOutput):
        self._output = output
        self._told: Sequence[dict[str, Any]] = ()
        self._rows = _Rows({"TYPE": 7, "REASON": 18})

    def show(self, events: Sequence[dict[str, Any]]) -> None:
        """Those that were not among the events of the look before."""
        for event in (event for event in events if event not in self._told):
            if self._output == TableOutput.TABLE:
                self._rows.print(event_columns([event], moments=True))
            else:
                _one_of_many(event, self._output.value)
        self._told = events


def _one_of_many(document: Any, output: str) -> None:
    """A stream of YAML needs a line between two documents."""
    if output == "yaml":
        typer.echo("---")
    print_document(document, output)
