"""How much work an attempt lost, and how much of a job's time went into work that counts.

**Lost steps** of an attempt: its last step done less the step the job went on from. While the next
attempt has not told where it resumed, that is the newest step known to be durable; once it has, the
figure is corrected, for a checkpoint may have become durable in the last instant, or turn out damaged.
An attempt that finished the job loses nothing: no step of it is done again.

**Goodput**: time on steps that count / wall time since the job's first attempt started. A step counts
in the last attempt that did it; earlier runs of the same step were lost and count for nothing. The trainer
adds it up over the attempts (`useful_seconds`), so that nobody has to read a line for each step. When an
attempt has ended, what its durable steps took is what counts. Wall time is all of it: starting, saving,
waiting for room, backing off, being suspended. A status has the figure of its last write; while no step is
done nothing may be written for days, so whoever is shown a job is shown what it has come to (`goodput_at`).

An attempt's own goodput: its share of that time, those of its steps that count / wall time from its start
to its end. Where a later attempt goes on from an older step than its newest durable one, fewer of them do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Protocol, get_args

from holdfast_controller.cluster import AttemptObservation
from holdfast_controller.jobs import JobProgress, Phase, Status, TrainingJob, Verdict
from holdfast_trainer.contract import STILL_SECONDS, Outcome, Progress, is_count, is_figure, is_time, legible

from .cost import meter_of

Line = Mapping[str, Any]
"""A line of ledger.jsonl or steps.jsonl with its "attempt" (contract.py)."""
TEXTS = 8
"""Of a resume, that are kept: differences, and checkpoints that it passed over."""
TEXT_CHARACTERS = 200
"""Of each of them."""
OUTCOMES = get_args(Outcome)
DIGEST_CHARACTERS = 128
STAGES = ("import", "rendezvous", "build", "load")
"""Of a trainer's start, one after the other, as it tells them itself."""


@dataclass(frozen=True)
class Work:
    """What one attempt did; None where nobody said."""

    resumed_step: int | None
    last_step: int | None
    durable_step: int | None
    first_step_at: float | None = None
    """Seconds since the epoch."""
    first_step: int | None = None
    world_size: int | None = None
    resume_differences: tuple[str, ...] = ()
    """What was not as it was where its checkpoint was written, as the trainer tells it."""
    passed_over: tuple[str, ...] = ()
    """Newer checkpoints, with why they could not be gone on from, likewise."""
    checkpoints: int | None = None
    outcome: str | None = None
    digest: str | None = None
    """Of the state in the checkpoint of `durable_step`."""
    durable_seconds: float | None = None
    """Spent on the steps up to `durable_step`, by all attempts that count."""
    resumed_seconds: float | None = None
    """Likewise, up to `resumed_step`."""
    last_sign: float | None = None
    """When it was last heard of, in seconds since the epoch."""
    process_time: float | None = None
    """When rank 0's process began, in seconds since the epoch."""
    startup: Mapping[str, float] = field(default_factory=dict)
    """Seconds of the stages that came next, by `STAGES`."""


def told(observation: AttemptObservation | None, known: JobProgress | None = None) -> list[Progress]:
    """What rank 0 is on record with, oldest first: as the status keeps it, as it last served it, its last
    word. One that a dead controller had asked is in the status alone."""
    if observation is None:
        return []
    found = []
    if known is not None and known.attempt == observation.attempt:
        found.append(
            Progress(
                known.attempt,
                known.step,
                known.total_steps,
                known.durable_step,
                known.training_phase,
                checkpoints=known.checkpoints,
                durable_seconds=known.durable_seconds,
                updated=known.updated_at.timestamp() if known.updated_at else 0.0,
            )
        )
    if observation.progress is not None:
        found.append(observation.progress)
    messages = [replica.termination for replica in observation.replicas if replica.termination]
    found += [message.progress for message in messages if message.progress is not None]
    return found


def work_of(
    attempt: int,
    ledger: Iterable[Line],
    steps: Iterable[Line],
    observation: AttemptObservation | None = None,
    known: JobProgress | None = None,
) -> Work:
    """Gather an attempt's work from everything that tells of it; the highest figure is the true one.

    `known` is the progress that the job's status remembers.
    """
    gathered = _Gathered()
    for line in ledger:
        if line.get("attempt") == attempt:
            gathered.take_line(line)
    for line in steps:
        if line.get("attempt") == attempt:
            if "val_loss" not in line:  # a validation may come before the end of its step
                gathered.last.append(_int(line, "step") or 0)
            gathered.sign(line.get("time"))
    for progress in told(observation, known):
        gathered.take_progress(progress)
    for replica in observation.replicas if observation is not None else ():
        if replica.termination is not None:
            gathered.last.append(replica.termination.step)
            gathered.durable(replica.termination.durable_step)
            if replica.termination.progress is not None:
                gathered.facts["outcome"] = replica.termination.outcome
    return gathered.work()


class _Gathered:
    """Figures of one attempt, from several sources that may repeat each other."""

    def __init__(self) -> None:
        self.last: list[int] = []
        self.facts: dict[str, Any] = {}
        self._durable: dict[int, tuple[float | None, str | None]] = {}
        """By step: useful seconds up to it, digest."""
        self._signs: list[float] = []
        self._checkpoints: int | None = None

    def take_line(self, line: Line) -> None:
        event, step = line.get("event"), _int(line, "step") or 0
        seconds, digest = _float(line, "useful_seconds"), line.get("digest")
        self.sign(line.get("time"))
        if event == "attempt_start":
            resumed = _int(line, "resumed_step") or 0
            self._began(resumed, line.get("world_size"), seconds)
            self._started(line)
            self._resumed(line)
            self._checkpoints = self._checkpoints or 0
            self.durable(resumed, seconds)
        elif event == "first_step":
            self.last.append(step)
            self.facts["first_step"] = _int(line, "step")
            self.facts["first_step_at"] = line["time"] if is_time(line.get("time")) else None
        elif event == "differs":  # of an attempt that had nothing to tell as it began
            told = self.facts.get("resume_differences", ())
            self.facts["resume_differences"] = _texts([*told, line.get("difference")])
        elif event == "checkpoint":
            self._checkpoints = (self._checkpoints or 0) + 1
            self.last.append(step)
            self.durable(step, seconds, digest)
        elif event == "stop":
            self.durable(_int(line, "durable_step") or 0, seconds, digest)
            self.last.append(step)
            self.facts["outcome"] = line.get("outcome") if line.get("outcome") in OUTCOMES else None

    def take_progress(self, progress: Progress) -> None:
        self.last.append(progress.step)
        self.durable(progress.durable_step, progress.durable_seconds, progress.digest)
        self.sign(progress.updated or None)
        if progress.resumed_step is not None:
            self._began(progress.resumed_step, progress.world_size, progress.resumed_seconds)
        if progress.process_time is not None:
            seconds = {stage: getattr(progress, f"{stage}_seconds") for stage in STAGES}
            self.facts["process_time"] = progress.process_time
            self.facts["startup"] = {stage: told for stage, told in seconds.items() if told is not None}
        if progress.first_step is not None:
            self.facts["first_step"] = progress.first_step
            self.facts["first_step_at"] = progress.first_step_time
        if progress.checkpoints is not None:
            self._checkpoints = max(self._checkpoints or 0, progress.checkpoints)

    def _started(self, line: Line) -> None:
        """The stages end with the line itself."""
        stages, ended = line.get("startup"), _float(line, "time")
        if not isinstance(stages, Mapping) or ended is None or not is_time(ended):
            return
        seconds = {stage: told for stage in STAGES if (told := _float(stages, stage)) is not None}
        if len(seconds) == len(STAGES):
            self.facts["process_time"] = ended - sum(seconds.values())
            self.facts["startup"] = seconds

    def _resumed(self, line: Line) -> None:
        """With what differences, and past which checkpoints."""
        told, skipped = line.get("differences"), line.get("skipped")
        if isinstance(told, list):
            self.facts["resume_differences"] = _texts(told)
        if isinstance(skipped, list):
            bad = [one for one in skipped if isinstance(one, Mapping)]
            self.facts["passed_over"] = _texts(
                [f"{one.get('checkpoint')}: {one.get('reason')}" for one in bad]
            )

    def _began(self, resumed: int, world_size: object, seconds: float | None) -> None:
        self.facts["resumed_step"] = resumed
        if seconds is not None:
            self.facts["resumed_seconds"] = seconds
        self.facts["world_size"] = world_size if is_count(world_size) else None
        self.last.append(resumed)

    def durable(self, step: int, seconds: float | None = None, digest: object = None) -> None:
        before = self._durable.get(step, (None, None))
        text = legible(digest[:DIGEST_CHARACTERS]) if isinstance(digest, str) and digest else None
        self._durable[step] = (seconds if seconds is not None else before[0], text or before[1])

    def sign(self, time: object) -> None:
        if isinstance(time, int | float) and is_time(time):
            self._signs.append(float(time))

    def work(self) -> Work:
        last = max(self.last, default=None)
        durable = min(max(self._durable), last) if self._durable and last is not None else None
        seconds, digest = self._durable.get(durable, (None, None)) if durable is not None else (None, None)
        facts = {"resumed_step": None, **self.facts}
        return Work(
            last_step=last,
            durable_step=durable,
            durable_seconds=seconds,
            digest=digest,
            checkpoints=self._checkpoints,
            last_sign=max(self._signs, default=None),
            **facts,
        )


def lost_steps(work: Work, verdict: Verdict, next_resumed: int | None = None) -> int | None:
    """Steps that were done and have to be done again; None where no step is on record."""
    if verdict is Verdict.FINISHED:
        return 0
    if work.last_step is None:
        return None
    kept = next_resumed if next_resumed is not None else (work.durable_step or 0)
    return max(0, work.last_step - kept)


class Told(Protocol):
    """What a record and an account of an attempt have in common."""

    @property
    def verdict(self) -> Verdict | None: ...
    @property
    def reason(self) -> str: ...
    @property
    def started_at(self) -> datetime | None: ...
    @property
    def first_step_at(self) -> datetime | None: ...
    @property
    def ended_at(self) -> datetime | None: ...
    @property
    def resumed_step(self) -> int | None: ...
    @property
    def last_step(self) -> int | None: ...


def lost_unheard(attempts: Iterable[Told]) -> bool:
    """Whether work may be lost that nobody can count: a program was ended, or failed, and no attempt of it
    ever told a step, as those of a script without Holdfast in it."""
    told = [one for one in attempts if one.started_at is not None]
    silent = all(one.resumed_step is None and one.last_step is None for one in told)
    return silent and any(one.ended_at and one.verdict is not Verdict.FINISHED for one in told)


def known_lost_steps(status: Status) -> int | None:
    """Over all attempts; None where nobody knows. Progress is remembered longer than attempts are."""
    unheard = status.progress is None and lost_unheard(status.attempts)
    return None if unheard else status.lost_steps


def goodput(useful_seconds: float | None, wall_seconds: float) -> float | None:
    """Between 0 and 1; None before anything is known of either."""
    if useful_seconds is None or wall_seconds <= 0:
        return None
    return min(1.0, useful_seconds / wall_seconds)


def idle_from(status: Status) -> datetime | None:
    """From when on a job's wall time goes on and that of its steps does not; None while neither is so. While
    it trains it is where the trainer, which answers, has no speed to tell any more: it hangs."""
    progress = status.progress
    if status.phase.final:
        return None
    if status.phase is not Phase.RUNNING:
        return datetime.min.replace(tzinfo=UTC)
    if progress is None or progress.updated_at is None or _has_speed(progress) or progress.unheard_since:
        return None
    return progress.updated_at + timedelta(seconds=STILL_SECONDS)


def _has_speed(progress: JobProgress) -> bool:
    """Whether a training is known to do steps."""
    return any(
        rate is not None
        for rate in (progress.tokens_per_second, progress.samples_per_second, progress.eta_seconds)
    )


def goodput_at(
    written: float | None,
    useful_seconds: float | None,
    started: datetime | None,
    idle: datetime | None,
    now: datetime,
) -> float | None:
    """What a job's goodput is by `now`, where its status says `written`: that of its newest progress or of
    its end, and of now where it is `idle_from` a time that has come."""
    if started is None or idle is None or now < idle:
        return written
    known = goodput(useful_seconds, (now - started).total_seconds())
    return written if known is None else known


def shown(job: TrainingJob, now: datetime) -> TrainingJob:
    """The job as it is to be shown at `now`: with the figures that move though nothing is written."""
    status, idle, changes = job.status, idle_from(job.status), dict[str, Any]()
    if (meter := meter_of(status)) is not None:
        changes |= {"cost": meter.at(now), "cost_currency": meter.currency}
    if idle is not None and now >= idle:
        known = goodput_at(status.goodput, status.useful_seconds, status.first_started_at, idle, now)
        changes["goodput"] = known
        if status.attempts and (last := status.attempts[-1]).verdict is None:
            known = goodput_at(last.goodput, last.useful_seconds, last.started_at, idle, now)
            changes["attempts"] = [*status.attempts[:-1], last.model_copy(update={"goodput": known})]
    if not changes:
        return job
    return job.model_copy(update={"status": status.model_copy(update=changes)})


def _texts(told: Iterable[object]) -> tuple[str, ...]:
    """Those of a list that are texts; few and short, as a status is bounded."""
    texts = [legible(one[:TEXT_CHARACTERS]) for one in told if isinstance(one, str)]
    return tuple(texts[:TEXTS])


def _int(line: Line, name: str) -> int | None:
    value = line.get(name)
    return value if is_count(value) else None


def _float(line: Line, name: str) -> float | None:
    value = line.get(name)
    return float(value) if is_figure(value) else None
