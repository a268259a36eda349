"""Tables of jobs, attempts and events: plain values in, rich renderables out.

A column that does not fit the terminal is left out, least important first; a name is never cut, because
people copy it. Into a pipe everything is written in full.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from ..jobs import JobProgress, Phase, TrainingJob
from ..policy.lost_work import known_lost_steps
from . import formats

GAP = 2
PIPE_WIDTH = 10_000
WRAPPED_WIDTH = 24
"""Below this a sentence is no longer readable."""

PHASE_STYLES = {
    Phase.QUEUED: "yellow",
    Phase.STARTING: "cyan",
    Phase.RUNNING: "bold cyan",
    Phase.RECOVERING: "yellow",
    Phase.SUSPENDING: "blue",
    Phase.SUSPENDED: "blue",
    Phase.SUCCEEDED: "green",
    Phase.FAILED: "bold red",
}
VERDICT_STYLES = {
    "Finished": "green",
    "Disrupted": "yellow",
    "LostNode": "yellow",
    "Unschedulable": "yellow",
    "ImagePull": "yellow",
    "StorageUnavailable": "yellow",
    "Suspended": "blue",
    "running": "cyan",
    "waiting": "",
    formats.UNKNOWN: "",
}


def console() -> Console:
    """Standard output; as wide as the terminal, or unbounded into a pipe.

    What users and programs wrote is shown as it is: neither `[bold]` nor `:warning:` means anything here.
    """
    return _Output(
        file=sys.stdout,
        width=None if sys.stdout.isatty() else PIPE_WIDTH,
        markup=False,
        emoji=False,
        highlight=False,
        soft_wrap=False,
    )


def redraws() -> bool:
    """Whether what was shown can be drawn over: not in a file or a pipe, whatever FORCE_COLOR says of
    colours, and not on a terminal that only goes on (TERM=dumb, as in an editor)."""
    return sys.stdout.isatty() and not console().is_dumb_terminal


class _Output(Console):
    def on_broken_pipe(self) -> None:
        """All commands end alike where nobody reads on (app.py); rich's own way is exit code 1."""
        raise BrokenPipeError


@dataclass
class Column:
    """A title and a cell for each row.

    `weight` 0 stays always; the highest is left out first. A column of sentences `wraps`.
    """

    title: str
    weight: int = 0
    right: bool = False
    wraps: bool = False
    cells: list[Text] = field(default_factory=list)

    @property
    def width(self) -> int:
        """Cells it needs at least."""
        return min(self.whole_width, WRAPPED_WIDTH) if self.wraps else self.whole_width

    @cached_property
    def whole_width(self) -> int:
        """Cells it needs for each sentence on one line; to be asked for once it has all its cells."""
        return max(len(self.title), *(cell.cell_len for cell in self.cells), 0)


def fit(columns: Sequence[Column], width: int) -> list[Column]:
    """The columns that fit side by side into `width`; those of weight 0 in any case."""
    kept = list(columns)
    while _least_width(kept) > width:
        droppable = [column for column in kept if column.weight]
        if not droppable:
            break
        kept.remove(max(droppable, key=lambda column: column.weight))
    return kept


def _least_width(columns: Sequence[Column]) -> int:
    return sum(column.width + GAP for column in columns) - GAP


def full_width(columns: Sequence[Column]) -> int:
    """Cells that all columns need side by side, sentences on one line."""
    return sum(column.whole_width + GAP for column in columns)


class _Lines:
    """A table of which each row is a line: drawn at once, where rich takes more than a millisecond a row, and
    without blanks at the end, which a terminal may wrap."""

    def __init__(self, columns: Sequence[Column]):
        self.show_header = True
        self._columns = columns
        self._widths = [column.whole_width for column in columns]

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        width = sum(self._widths) + GAP * (len(self._widths) - 1)
        return Measurement(width, width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        rows = zip(*(column.cells for column in self._columns), strict=True)
        titles = tuple(Text(column.title, "bold") for column in self._columns)
        for row in itertools.chain([titles] if self.show_header else [], rows):
            for index, (column, width, cell) in enumerate(zip(self._columns, self._widths, row, strict=True)):
                blank = " " * (width - cell.cell_len)
                before, after = (blank, "") if column.right else ("", blank)
                after = "" if index == len(row) - 1 else after + " " * GAP
                yield Segment(before)
                if cell.spans:
                    yield from cell.render(console)
                else:
                    yield Segment(cell.plain, console.get_style(cell.style) if cell.style else None)
                yield Segment(after)
            yield Segment.line()


def _is_of_lines(columns: Sequence[Column], width: int) -> bool:
    """Whether no row of it needs a second line."""
    cells = (cell.plain for column in columns for cell in column.cells)
    return full_width(columns) - GAP <= width and not any("\n" in cell or "\t" in cell for cell in cells)


def table(columns: Sequence[Column], width: int) -> Table | _Lines:
    """Columns side by side under their titles, without rules."""
    kept = fit(columns, width)
    if _is_of_lines(kept, width):
        return _Lines(kept)
    drawn = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold")
    left = width - sum(column.width + GAP for column in kept if not column.wraps)
    for column in kept:
        drawn.add_column(
            column.title,
            justify="right" if column.right else "left",
            no_wrap=not column.wraps,
            # What does not fit beside the others is cut at the terminal's edge; a sentence wraps before.
            min_width=min(column.width, max(left, len(column.title))) if column.wraps else column.width,
            overflow="fold",
        )
    for row in zip(*(column.cells for column in kept), strict=True):
        drawn.add_row(*row)
    return drawn


def show(columns: Sequence[Column], screen: Console) -> None:
    """Print them; where not even those that always stay fit, as long names leave no room for a sentence, in
    lines that the terminal wraps: there nothing is cut."""
    kept = fit(columns, screen.width)
    if _least_width(kept) > screen.width:
        screen.width = full_width(kept) - GAP
    screen.print(table(kept, screen.width))


def phase_text(phase: Phase) -> Text:
    return Text(phase.value, PHASE_STYLES[phase])


def job_columns(
    jobs: Sequence[TrainingJob], *, wide: bool = False, namespaces: bool = False, now: datetime | None = None
) -> list[Column]:
    """What `get` shows of each job."""
    now = now or datetime.now(UTC)
    columns = [Column("NAME"), Column("PHASE"), Column("STEP", 1, True), Column("ATTEMPT", 3, True)]
    columns += [Column("DISRUPTIONS", 4, True), Column("LOST", 5, True), Column("GOODPUT", 6, True)]
    if wide:
        columns += [Column("FAILURES", 7, True), Column("LOSS", 7, True), Column("TOKENS/S", 7, True)]
        columns += [Column("ETA", 7, True), Column("REPLICAS", 9, True), Column("GPUS", 9, True)]
    columns += [Column("AGE", 2, True)]
    if wide:
        columns += [Column("MESSAGE", 8, wraps=True)]
    if namespaces:
        columns.insert(0, Column("NAMESPACE"))
    for job in jobs:
        status, progress = job.status, job.status.progress
        cells = [Text(job.metadata.name), phase_text(status.phase)]
        cells.append(
            Text(formats.steps(progress.step, progress.total_steps) if progress else formats.UNKNOWN)
        )
        counted = (status.attempt, status.disruptions, known_lost_steps(status))
        cells += [Text(formats.integer(n)) for n in counted]
        cells.append(Text(formats.percent(status.goodput)))
        if wide:
            cells += [Text(str(status.failures)), *_speed(job, progress)]
            opened = job.as_of(status.attempt).spec
            cells += [Text(str(opened.replicas)), Text(opened.mig or opened.gpus)]
        cells.append(Text(formats.age(job.metadata.creation_timestamp, now)))
        if wide:
            cells.append(Text(status.message))
        if namespaces:
            cells.insert(0, Text(job.metadata.namespace))
        for column, cell in zip(columns, cells, strict=True):
            column.cells.append(cell)
    return columns


def _speed(job: TrainingJob, progress: JobProgress | None) -> list[Text]:
    """Loss, tokens/s and ETA. Speed and ETA are of the moment: a job that does not train has none."""
    if progress is None:
        return [Text(formats.UNKNOWN)] * 3
    running = job.status.phase == Phase.RUNNING
    return [
        Text(formats.figure(progress.loss)),
        Text(formats.count(progress.tokens_per_second if running else None)),
        Text(formats.duration(progress.eta_seconds if running else None)),
    ]


def ledger_columns(attempts: Sequence[dict[str, Any]]) -> list[Column]:
    """One row an attempt, as `holdfast ledger` shows it."""
    columns = [Column("ATTEMPT", 0, True), Column("VERDICT"), Column("RESUMED", 4, True)]
    columns += [Column("FIRST", 5, True), Column("LAST", 0, True), Column("DURABLE", 1, True)]
    columns += [Column("LOST", 0, True), Column("SAVES", 6, True), Column("RECOVERY", 2, True)]
    columns += [Column("TIME", 3, True), Column("GOODPUT", 5, True), Column("REASON", 7, wraps=True)]
    for attempt in attempts:
        running = attempt is attempts[-1] and not attempt["endedAt"]
        where = "running" if attempt["startedAt"] else "waiting"
        verdict = attempt["verdict"] or (where if running else formats.UNKNOWN)
        lost = attempt["lostSteps"]
        cells = [
            Text(str(attempt["attempt"])),
            Text(verdict, VERDICT_STYLES.get(verdict, "red")),
            *(
                Text(formats.integer(attempt[key]))
                for key in ("resumedStep", "firstStep", "lastStep", "durableStep")
            ),
            Text(formats.integer(lost), "yellow" if lost else ""),
            Text(formats.integer(attempt["checkpoints"])),
            Text(formats.duration(attempt["recoverySeconds"])),
            Text(formats.duration(elapsed(attempt, running))),
            Text(formats.percent(attempt.get("goodput"))),
            Text(attempt["reason"]),
        ]
        for column, cell in zip(columns, cells, strict=True):
            column.cells.append(cell)
    return columns


def elapsed(attempt: dict[str, Any], running: bool) -> float | None:
    """Seconds from an attempt's start to its end, or to now while it runs; None where one is not known."""
    if not attempt["startedAt"] or not (attempt["endedAt"] or running):
        return None
    end = datetime.now(UTC) if running else datetime.fromisoformat(attempt["endedAt"])
    return (end - datetime.fromisoformat(attempt["startedAt"])).total_seconds()


def event_columns(
    events: Sequence[dict[str, Any]], *, moments: bool = False, jobs: bool = False
) -> list[Column]:
    """What happened to a job, or with `jobs` to which of several; with `moments` when it was, for rows that
    stay: an age does not stay true."""
    when = Column("TIME") if moments else Column("AGE", 0, True)
    columns = [when, Column("TYPE", 1), Column("REASON"), Column("MESSAGE", wraps=True)]
    if jobs:
        columns.insert(1, Column("JOB"))
    for event in events:
        times = f" (x{event['count']})" if event["count"] > 1 else ""
        style = "yellow" if event["type"] == "Warning" else ""
        time = datetime.fromisoformat(event["time"])
        cells = [
            Text(formats.moment(time) if moments else formats.age(time)),
            Text(event["type"], style),
            Text(event["reason"], style),
            Text(event["message"] + times),
        ]
        if jobs:
            cells.insert(1, Text(event["job"]))
        for column, cell in zip(columns, cells, strict=True):
            column.cells.append(cell)
    return columns
