"""What is written down of attempts: figures while they run, and what they came to.

Keeps a status that is being made for one decision (decide.py); no decision is made here.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from holdfast_controller.cluster import AttemptObservation
from holdfast_controller.jobs import AttemptRecord, JobProgress, Status, Verdict
from holdfast_trainer.contract import Progress, is_figure

from .classify import Incident
from .cost import cost_of, counted, whereabouts
from .explain import save_fault
from .lost_work import Line, Work, goodput, lost_steps, told, work_of
from .recovery import breakdown, lost_in, recovery_seconds

OF_NOW = (
    "tokens_per_second", "samples_per_second", "data_wait_fraction", "mfu", "gpu_utilization",
    "cpu_utilization", "eta_seconds", "verdict",
)  # fmt: skip
"""Of a progress, what is true only while it is told."""
OF_ONE_ATTEMPT = (*OF_NOW, "memory_bytes", "unheard_since")
"""What is true of the attempt alone that told it, and not of where the job stands."""


class Books:
    """The accounts of one job: `status` is changed in place, as of `now`."""

    def __init__(self, status: Status, now: datetime):
        self.status = status
        self.now = now

    def not_to_come(self, record: AttemptRecord) -> None:
        """What an open attempt has behind it was by now at the latest: the clock of a leader before this one
        may have been ahead, and what counts from then would wait for as long as the two differ."""
        for name in ("opened_at", "placed_at", "held_up_at", "started_at", "first_step_at"):
            at = getattr(record, name)
            setattr(record, name, at and min(at, self.now))
        begun = self.status.first_started_at
        self.status.first_started_at = begun and min(begun, self.now)

    def take_progress(
        self, record: AttemptRecord, observation: AttemptObservation, ledger: Sequence[Line]
    ) -> None:
        """What an attempt that runs tells of itself."""
        self._note_start(record, observation)
        work = work_of(record.number, ledger, (), observation)
        self._note_work(record, work)
        self._note_places(record, observation)
        self._note_unpriced(record)
        self._note_recovery(record, work)
        said = told(observation)
        if not said:
            self._hear_no_more(record, observation)
            return
        progress = said[-1]
        if record.first_step_at is None and progress.step > (record.resumed_step or 0):
            record.first_step_at = self.now
            self._note_recovery(record, work)
        when = self._ours(record, progress.updated) if progress.updated else self.now
        self._note_cost(record, when)
        if progress.useful_seconds is not None:
            self._note_useful(progress.useful_seconds, when)
        _note_goodput(record, progress.useful_seconds, when)
        if self.status.progress is not None and progress.resumed_step is None and not progress.step:
            return  # it has not looked yet what it goes on from: the job stands where it stood
        before = self._stood_there(progress)
        since = self._unheard_since(record, observation)
        self.status.progress = JobProgress(
            attempt=progress.attempt,
            step=progress.step,
            total_steps=progress.total_steps,
            durable_step=progress.durable_step,
            durable_seconds=progress.durable_seconds,
            checkpoints=progress.checkpoints,
            save_fault=save_fault(progress),
            training_phase=progress.phase,
            loss=progress.loss if before is None else before.loss,
            loss_ema=progress.loss_ema,
            val_loss=progress.val_loss,
            grad_norm=progress.grad_norm,
            epoch=progress.epoch if before is None else before.epoch,
            tokens_per_second=progress.tokens_per_second,
            samples_per_second=progress.samples_per_second,
            data_wait_fraction=progress.data_wait_fraction,
            mfu=progress.mfu,
            gpu_utilization=progress.gpu_utilization,
            cpu_utilization=progress.cpu_utilization,
            memory_bytes=progress.memory_bytes,
            eta_seconds=progress.eta_seconds,
            verdict=progress.verdict,
            updated_at=when,
            unheard_since=since,
        )
        if since is not None:
            self._drop(OF_NOW)

    def of_it_alone(self, record: AttemptRecord) -> None:
        """The attempt runs, and has not told how fast yet, or is of a program that never does: how fast
        another one was is not told of it."""
        known = self.status.progress
        if known is not None and known.attempt != record.number:
            self._drop(OF_ONE_ATTEMPT)

    def _drop(self, figures: Sequence[str]) -> None:
        if self.status.progress is not None:
            self.status.progress = self.status.progress.model_copy(update=dict.fromkeys(figures))

    def _hear_no_more(self, record: AttemptRecord, observation: AttemptObservation) -> None:
        """What is known of the attempt it told a controller before this one, which it may not answer."""
        known, since = self.status.progress, self._unheard_since(record, observation)
        if known is not None and known.attempt == record.number and since is not None:
            self.status.progress = known.model_copy(update={"unheard_since": since})
            self._drop(OF_NOW)

    def _unheard_since(self, record: AttemptRecord, observation: AttemptObservation) -> datetime | None:
        """What is on record of it stays: counted anew each time it would be another moment each time."""
        if observation.silence is None or not observation.silence.outdates:
            return None
        known = self.status.progress
        if known is not None and known.attempt == record.number and known.unheard_since is not None:
            return known.unheard_since
        return self.now - timedelta(seconds=observation.silence.unheard)

    def _stood_there(self, progress: Progress) -> JobProgress | None:
        """What is known of the step that an attempt goes on from, while it has done none itself: it may have
        none to do, as where its training ended before, and what comes after that did not."""
        known = self.status.progress
        return known if known and known.step == progress.step and progress.first_step is None else None

    def _ours(self, record: AttemptRecord, seconds: float) -> datetime:
        """A time that a node tells: not before the attempt was opened, and not to come. Clocks differ."""
        told = min(datetime.fromtimestamp(seconds, UTC), self.now)
        return told if record.opened_at is None else max(told, record.opened_at)

    def _note_useful(self, seconds: float, when: datetime) -> None:
        """`when` the figure was true: the goodput of one progress is the same whenever it is computed."""
        self.status.useful_seconds = seconds
        if self.status.first_started_at is not None:
            wall = (when - self.status.first_started_at).total_seconds()
            self.status.goodput = goodput(seconds, wall)

    def over(self) -> None:
        """No attempt follows."""
        self.status.finished_at = self.now
        ended = self.status.wall_ended_at
        if ended is not None and self.status.useful_seconds is not None:
            self._note_useful(self.status.useful_seconds, ended)

    def detected(self, record: AttemptRecord) -> None:
        """It is known that the attempt cannot go on, since now at the latest: the clock of a leader before
        this one may have been ahead."""
        record.detected_at = min(record.detected_at or self.now, self.now)

    def _note_places(self, record: AttemptRecord, observation: AttemptObservation) -> None:
        """Replicas are placed one by one: the observation that knows most of them counts."""
        if record.placed_at is None:
            record.placed_at = observation.placed_at and min(observation.placed_at, self.now)
        known = sum(record.whereabouts.capacity.values()) if record.whereabouts else 0
        if len(observation.places) > known:
            record.whereabouts = whereabouts(observation.places)

    def _note_recovery(self, record: AttemptRecord, work: Work) -> None:
        """Once, when the first step is done: what the time up to it went into."""
        if record.first_step_at is None or record.breakdown is not None:
            return
        earlier = [one for one in self.status.attempts if one.number < record.number]
        last = earlier[lost_in(earlier)] if earlier else None
        record.recovery_seconds = recovery_seconds(last, record)
        record.breakdown = breakdown(last, record, work)

    def _note_unpriced(self, record: AttemptRecord) -> None:
        """While one runs whose price is not known, what the others came to is not what the job costs."""
        runs = record.verdict is None and record.started_at is not None
        if runs and counted(self.status, record, self.now.timestamp()) is None:
            self.status.cost = self.status.cost_currency = None

    def _note_cost(self, record: AttemptRecord, when: datetime) -> None:
        """As of `when`; of all attempts together only where each of them has a price."""
        running = counted(self.status, record, when.timestamp())
        if record.verdict is not None or self.status.unpriced_attempts or running is None:
            return
        self.status.cost = self.status.ended_cost + running
        self.status.cost_currency = record.whereabouts.currency if record.whereabouts else None

    def _settle_cost(self, record: AttemptRecord) -> None:
        """The attempt is over. One that never started cost nothing."""
        if record.started_at is None:
            return
        record.cost = cost_of(record, self.now.timestamp())
        added = counted(self.status, record, self.now.timestamp())
        if added is None:
            self.status.unpriced_attempts += 1
            self.status.cost = self.status.cost_currency = None
            return
        self.status.ended_cost += added
        if not self.status.unpriced_attempts:
            self.status.cost = self.status.ended_cost
            self.status.cost_currency = record.whereabouts.currency if record.whereabouts else None

    def _note_start(self, record: AttemptRecord, observation: AttemptObservation) -> None:
        if record.started_at is None and observation.started_at is not None:
            record.started_at = self._ours(record, observation.started_at.timestamp())
        if self.status.first_started_at is None:
            self.status.first_started_at = record.started_at

    def _note_work(self, record: AttemptRecord, work: Work) -> None:
        """Where the attempt resumed tells what the one before it truly lost."""
        record.world_size = record.world_size or work.world_size
        record.first_step = record.first_step or work.first_step
        if record.first_step_at is None and work.first_step_at is not None:
            record.first_step_at = self._ours(record, work.first_step_at)
        if record.resumed_step is None and work.resumed_step is not None:
            record.resumed_step = work.resumed_step
            self._correct_before(record, work.resumed_step)
        if record.resumed_seconds is None and work.resumed_seconds is not None:
            record.resumed_seconds = work.resumed_seconds
            self._correct_goodput_before(record.number, work.resumed_seconds)
        record.resume_differences = record.resume_differences or list(work.resume_differences)
        record.passed_over = record.passed_over or list(work.passed_over)

    def _correct_before(self, record: AttemptRecord, resumed: int) -> None:
        before = [
            old
            for old in self.status.attempts
            if old.number < record.number and old.last_step is not None and not _did_not_begin(old)
        ]
        if not before or before[-1].verdict in (None, Verdict.FINISHED):
            return
        last = before[-1]
        true = max(0, (last.last_step or 0) - resumed)
        self.status.lost_steps += true - (last.lost_steps or 0)
        last.lost_steps = true

    def _correct_goodput_before(self, number: int, resumed: float) -> None:
        """What came after the step that `number` resumed from counts no more. Of the attempt that did its
        step last the seconds up to it are known now, be it that a last save was not heard of."""
        begun = [old for old in self.status.attempts if old.number < number and not _did_not_begin(old)]
        for old in begun:
            if old.resumed_seconds is None or old.ended_at is None:
                continue
            counted = resumed
            if old is not begun[-1]:
                if old.useful_seconds is None:
                    continue
                counted = min(old.resumed_seconds + old.useful_seconds, resumed)
            _note_goodput(old, counted, old.ended_at)

    def close(
        self,
        record: AttemptRecord,
        incident: Incident,
        observation: AttemptObservation,
        ledger: Sequence[Line],
        steps: Sequence[Line],
    ) -> None:
        """All that is to be written down of an attempt that is over."""
        self.detected(record)
        work = work_of(record.number, ledger, steps, observation, self.status.progress)
        self.judged(record, incident, work)
        self.take_progress(record, observation, ledger)
        self._drop(["unheard_since"])
        self._settle_progress(record, work, steps)
        ends = [replica.ended_at for replica in observation.replicas if replica.ended_at is not None]
        if ends:
            record.ended_at = self._ours(record, max(ends) + _behind(record, observation))
        self._settle_cost(record)
        _note_goodput(record, work.durable_seconds, record.ended_at or self.now)
        useful = work.durable_seconds if work.durable_seconds is not None else self.status.useful_seconds
        if useful is not None:
            self._note_useful(useful, self.now)

    def _settle_progress(self, record: AttemptRecord, work: Work, steps: Sequence[Line]) -> None:
        """The trainer was last asked a little before its end: what it wrote knows the end itself."""
        if work.last_step is None or (self.status.progress is not None and _did_not_begin(record)):
            return
        known = self.status.progress or JobProgress(updated_at=self.now)
        changes: dict[str, Any] = {
            "attempt": record.number,
            "step": work.last_step,
            "durable_step": work.durable_step or 0,
        }
        for key in ("loss", "val_loss"):
            told = [x[key] for x in steps if x.get("attempt") == record.number and key in x]
            if told:
                changes[key] = told[-1] if is_figure(told[-1]) else None
        if known.epoch is not None and known.step:
            changes["epoch"] = known.epoch * work.last_step / known.step
        if known.total_steps is not None and work.last_step >= known.total_steps:
            changes["eta_seconds"] = 0.0
        self.status.progress = known.model_copy(update=changes)

    def judged(self, record: AttemptRecord, incident: Incident, work: Work | None = None) -> None:
        """The record gets its verdict."""
        record.verdict = incident.verdict
        record.reason = incident.reason
        record.ended_at = self.now
        if work is not None:
            record.last_step = work.last_step
            record.durable_step = work.durable_step
            if work.durable_step is not None and work.resumed_step is None and _did_not_begin(record):
                record.durable_step = self.status.durable_before(record.number) or 0
            record.checkpoints, record.outcome, record.digest = work.checkpoints, work.outcome, work.digest
            if work.last_sign is not None:
                record.last_sign_at = self._ours(record, work.last_sign)
            record.lost_steps = lost_steps(work, incident.verdict)
            self.status.lost_steps += record.lost_steps or 0


def _note_goodput(record: AttemptRecord, seconds: float | None, until: datetime) -> None:
    """Of the attempt alone, up to `until`: `seconds` is of all attempts, as what it went on from is."""
    begun = record.resumed_seconds
    record.useful_seconds = None if seconds is None or begun is None else max(0.0, seconds - begun)
    wall = 0.0 if record.started_at is None else (until - record.started_at).total_seconds()
    record.goodput = goodput(record.useful_seconds, wall)


def _behind(record: AttemptRecord, observation: AttemptObservation) -> float:
    """By how many seconds at least the clock is behind that told of its start, where that was taken for the
    moment in which it was opened: so start and end lie as far apart as on that clock."""
    told, opened = observation.started_at, record.opened_at
    if told is None or opened is None or record.started_at != opened:
        return 0.0
    return max(0.0, (opened - told).total_seconds())


def _did_not_begin(record: AttemptRecord) -> bool:
    """Whether it ended before it knew what it goes on from, as while it compiled: that it tells of step 0
    says nothing of the job."""
    return record.resumed_step is None and not record.last_step
