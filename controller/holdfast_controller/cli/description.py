"""A job in full, as `holdfast describe` tells it; plain values in, rich renderables out."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from holdfast_trainer.contract import legible

from ..jobs import JobProgress, Phase, TrainingJob
from ..policy.explain import passed_over, resume_differs
from ..policy.lost_work import idle_from
from ..policy.tails import most_telling
from . import formats
from .tables import event_columns, ledger_columns, phase_text, table

EVENTS_SHOWN = 10
TAIL_LINES = 12
OLD = timedelta(minutes=1)
"""Figures of a training that are older say so: a step is long, or a rank hangs."""


def describe_job(
    job: TrainingJob, account: dict[str, Any], events: Sequence[dict[str, Any]], width: int
) -> RenderableType:
    """Everything worth knowing, most important first."""
    parts: list[RenderableType] = [_title(job), Text(), _facts(job, account.get("runDirectory"))]
    if account["attempts"]:
        parts += _section("Attempts", table(ledger_columns(account["attempts"]), width - 2))
        parts += [Padding(totals_line(account["totals"]), (1, 0, 0, 2), expand=False)]
    if events:
        parts += _section("Events", table(event_columns(events[-EVENTS_SHOWN:]), width - 2))
    parts += list(_last_words(job))
    return Group(*parts)


def _section(title: str, body: RenderableType) -> list[RenderableType]:
    return [Text(), Text(title, "bold"), Padding(body, (0, 0, 0, 2), expand=False)]


def _title(job: TrainingJob) -> Text:
    title = Text.assemble((job.key, "bold"), "  ", phase_text(job.status.phase))
    if job.status.message:
        title.append(f"\n{job.status.message}")
    if job.metadata.deletion_timestamp:
        title.append("\nIt is being deleted.", "yellow")
    return title


def _facts(job: TrainingJob, run_directory: str | None) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in _fact_rows(job):
        grid.add_row(f"  {name}", value)
    if run_directory is not None:
        grid.add_row("  directory", run_directory)
    return grid


def _fact_rows(job: TrainingJob) -> Iterator[tuple[str, RenderableType]]:
    spec, status, progress = job.spec, job.status, job.status.progress
    if progress:
        yield "step", step_bar(job)
        yield "loss", ", ".join(_loss_words(progress))
        yield "saved", f"up to step {progress.durable_step}" if progress.durable_step else "nothing yet"
        if progress.save_fault and status.phase is Phase.RUNNING:
            yield "save failed", Text(progress.save_fault, "yellow")
        if status.phase == Phase.RUNNING:
            yield "speed", ", ".join(_speed_words(job))
            if progress.verdict:
                yield "diagnosis", progress.verdict
        if progress.memory_bytes is not None:
            yield "memory", f"rank 0 took {progress.memory_bytes / 1e9:.2f} GB at most"
    for record in status.attempts:
        if record.passed_over:
            yield "resumed", Text(passed_over(record), "yellow")
        if record.resume_differences:
            yield "resumed", Text(resume_differs(record), "yellow")
    opened = job.as_of(status.attempt).spec
    gpus = opened.gpus
    device = "on CPU" if gpus == "0" else f"{gpus} GPU{'' if gpus == '1' else 's'} per replica"
    if opened.mig:
        device = f"a part of a GPU per replica ({opened.mig})"
    there = opened.replicas
    ranks = f"{_many(opened.processes_per_replica, 'rank')}{' each' if there > 1 else ''}"
    number = _many(there, "replica") if there >= spec.replicas else f"{there} of {spec.replicas} replicas"
    yield "size", f"{number}, {ranks}, {device}"
    yield "command", legible(shlex.join(spec.command))
    if spec.image:
        yield "image", legible(spec.image)
    saves = opened.checkpoint
    every = {"auto": "as often as measured costs allow"}.get(saves.every)
    unit = "" if saves.every.endswith("s") else " steps"
    yield "saves", f"{every or f'every {saves.every}{unit}'}, the newest {saves.keep} kept"
    allowed = "any number" if spec.retries.disruptions is None else str(spec.retries.disruptions)
    yield "disruptions", f"{status.disruptions} ({allowed} allowed)"
    yield "failures", f"{status.failures} ({_many(spec.retries.failures, 'restart')} allowed)"
    if status.goodput is not None:
        yield "goodput", formats.percent(status.goodput)
    if job.metadata.labels:
        yield "labels", ", ".join(f"{key}={value}" for key, value in job.metadata.labels.items())
    yield "submitted", f"{formats.moment(job.metadata.creation_timestamp)}"
    if status.next_start_at and not status.phase.final:
        yield "next start", formats.moment(status.next_start_at)
    if status.finished_at:
        yield "finished", formats.moment(status.finished_at)


def _loss_words(progress: JobProgress) -> Iterator[str]:
    yield formats.figure(progress.loss)
    figures = (
        ("smoothed", progress.loss_ema),
        ("validation", progress.val_loss),
        ("gradient norm", progress.grad_norm),
    )
    for name, value in figures:
        if value is not None:
            yield f"{name} {formats.figure(value)}"
    if progress.epoch is not None:
        yield f"epoch {progress.epoch:.2f}"


def _speed_words(job: TrainingJob) -> Iterator[str]:
    progress, idle = job.status.progress, idle_from(job.status)
    assert progress is not None
    if progress.unheard_since is not None:
        yield f"not known: rank 0 has not answered for {formats.age(progress.unheard_since)}"
        return
    if progress.tokens_per_second is not None:
        yield f"{formats.count(progress.tokens_per_second)} tokens/s"
    elif progress.samples_per_second is not None:
        yield f"{formats.count(progress.samples_per_second)} samples/s"
    elif progress.memory_bytes is not None and idle is not None and idle < datetime.now(UTC):  # it did one
        yield f"none: no step was done for {formats.age(progress.updated_at)}"
        return
    elif progress.verdict:  # by then its steps are measured
        yield "not known: the script tells run.log no samples"
    else:
        yield "not measured yet"
    if progress.mfu is not None:
        yield f"MFU {formats.percent(progress.mfu)}"
    for name, share in (("GPU", progress.gpu_utilization), ("CPU", progress.cpu_utilization)):
        if share is not None:
            yield f"{name} {formats.percent(share)} busy"
    if progress.data_wait_fraction is not None:
        yield f"{formats.percent(progress.data_wait_fraction)} of it waiting for data"
    if _is_older(progress, OLD):
        yield f"all as of {formats.age(progress.updated_at)} ago"


def _is_older(progress: JobProgress, age: timedelta) -> bool:
    return progress.updated_at is not None and datetime.now(UTC) - progress.updated_at > age


def step_bar(job: TrainingJob, width: int = 24) -> RenderableType:
    """`812/2000` with a bar, and the time that is left while the job trains."""
    progress = job.status.progress
    if progress is None:
        return Text(formats.UNKNOWN)
    words = Text(formats.steps(progress.step, progress.total_steps))
    if not progress.total_steps:
        return words
    words.append(f"  {100 * progress.step // progress.total_steps}%")
    if job.status.phase == Phase.RUNNING and progress.eta_seconds is not None:
        words.append(f", {formats.duration(progress.eta_seconds)} left")
    row = Table.grid(padding=(0, 2, 0, 0))
    row.add_row(
        ProgressBar(
            total=progress.total_steps, completed=min(progress.step, progress.total_steps), width=width
        ),
        words,
    )
    return row


def totals_line(totals: dict[str, Any]) -> Text:
    """The account of all attempts in a sentence."""
    recoveries = totals["recoverySeconds"]
    parts = [
        _many(totals["attempts"], "attempt"),
        _many(totals["disruptions"], "disruption"),
        _many(totals["failures"], "failure"),
        "lost steps not known"
        if totals["lostSteps"] is None
        else f"{_many(totals['lostSteps'], 'step')} lost",
    ]
    if recoveries:
        shown = ", ".join(formats.duration(seconds) for seconds in recoveries[:5])
        parts.append(f"back after {shown}{' ...' if len(recoveries) > 5 else ''}")
    if totals["goodput"] is not None:
        parts.append(f"goodput {formats.percent(totals['goodput'])}")
    if totals["wallSeconds"] is not None:
        parts.append(f"{formats.duration(totals['wallSeconds'])} in all")
    if totals["cost"] is not None:
        parts.append(formats.money(totals["cost"], totals["costCurrency"]))
    return Text("; ".join(parts))


def _many(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _last_words(job: TrainingJob) -> Iterator[RenderableType]:
    """The end of what the rank to blame wrote in the newest attempt that went wrong, unless the job came
    through: its peers tell of a broken connection."""
    if job.status.phase == Phase.SUCCEEDED:
        return
    for record in reversed(job.status.attempts):
        rank = most_telling(record, job.as_of(record.number).spec.processes_per_replica)
        if rank is not None:
            yield Text()
            yield Text(f"Last lines of rank {rank} in attempt {record.number}", "bold")
            lines = record.log_tail[rank].rstrip().splitlines()[-TAIL_LINES:]
            yield Padding(_coloured("\n".join(lines)), (0, 0, 0, 2), expand=False)
            return


def _coloured(output: str) -> Text:
    """A program's colours stay, and end with it; what else it tells its terminal (to be cleared, say, or to
    have another name) is not for whoever looks at it here."""
    text = Text.from_ansi(output)
    return text if (plain := legible(text.plain)) == text.plain else Text(plain)
