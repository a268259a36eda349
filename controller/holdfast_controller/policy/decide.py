"""What to do with a job next: a pure function of what is known, so it can be asked at any time, twice,
and after a crash at any line.

The status is the plan. It names the attempt that should exist (`status.attempt`, with a record that has
no verdict yet) before the attempt is started; whoever finds such a record and no attempt starts it. A
record gets its verdict, and the next attempt its number, in one write, and only when nothing of the old
attempt is left: at no moment can two attempts run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from holdfast_controller.cluster import AttemptObservation, Event, ReplicaState
from holdfast_controller.jobs import SILENT_SECONDS, AttemptRecord, Phase, Status, TrainingJob, Verdict

from . import explain, idle, refused
from .backoff import LONGEST_SECONDS, backoff
from .books import Books
from .budget import spend
from .classify import Incident, classify
from .conditions import conditions_of
from .decision import Decision
from .half_placed import PLACE_SECONDS, half_placed, held_up_at, seconds_left
from .hang import hangs
from .lost_work import Line
from .peers import SETTLE_SECONDS, kill_at, lost_at
from .queue_waits import why_put_aside
from .recovery import CORRECTED, remembered
from .repeats import as_it_trained, next_capacity, remedy, same_failure, standstill, times_in_a_row
from .size import next_replicas
from .spec_notes import spec_notes
from .superseded import superseded_by
from .tails import bound_tails

TRUSTED_SECONDS = 300.0
"""From a controller's start until it deletes by the clock what had finished before: on a machine that has
just booted that may be hours ahead until NTP sets it, as where the hardware's is of local time."""

NOT_STARTED = "suspended before it started"


@dataclass(frozen=True)
class Evidence:
    """What has to be read to judge an attempt; empty where it was not needed."""

    ledger: Sequence[Line] = ()
    steps: Sequence[Line] = ()
    tails: dict[str, str] = field(default_factory=dict)
    refusals: Sequence[str] = ()
    """Why no attempt can start as the job is now."""
    waits: str = ""
    """What an attempt will wait for that is started now, where that is known before."""
    gpus: idle.GpuVerdict | None = None
    """Whether the attempt uses its GPUs; None where nobody looks."""
    watched_from: datetime | None = None
    """Since when it would be seen that the clock is set; None where nobody sets it."""


def open_record(status: Status) -> AttemptRecord | None:
    """The record of the attempt that should exist now."""
    if status.attempts and status.attempts[-1].verdict is None:
        return status.attempts[-1]
    return None


def _copy(status: Status) -> Status:
    """One whose fields, and those of its records, can be set. What they hold is shared, for nothing changes
    that in place here: a deep copy of 20 attempts would take longer than the decision."""
    return status.model_copy(update={"attempts": [record.model_copy() for record in status.attempts]})


def over(record: AttemptRecord, observation: AttemptObservation) -> bool:
    """Whether the attempt was started, and nothing of it is left."""
    return observation.gone and (observation.exists or record.started_at is not None)


def decide(
    job: TrainingJob,
    observation: AttemptObservation | None,
    evidence: Evidence,
    now: datetime,
    settle_seconds: float = SETTLE_SECONDS,
    place_seconds: float = PLACE_SECONDS,
) -> Decision:
    """The next step. `observation` is of `status.attempt`; None where there was no attempt yet."""
    return _Deciding(job, observation, evidence, now, settle_seconds, place_seconds).decide()


class _Deciding:
    """One decision in the making; lives for one call of `decide`."""

    def __init__(
        self,
        job: TrainingJob,
        observation: AttemptObservation | None,
        evidence: Evidence,
        now: datetime,
        settle_seconds: float,
        place_seconds: float,
    ):
        self.job = job
        self.spec = job.spec
        self.observation = observation
        self.evidence = evidence
        self.now = now
        self.settle_seconds = settle_seconds
        self.place_seconds = place_seconds
        self.status = _copy(job.status)
        self.status.observed_generation = job.metadata.generation
        self.books = Books(self.status, now)
        self.events: list[Event] = []
        self.works = False
        """Whether an attempt holds what it asked for, and is to go on with it."""

    def decide(self) -> Decision:
        if self.job.metadata.deletion_timestamp is not None:
            return self._delete()
        record = open_record(self.status)
        if record is not None:
            self.books.not_to_come(record)
        if record is None and self.observation is not None and self.observation.up:
            # It was made though no answer said so, and judged before it came to light.
            return self._done(kill=self.status.attempt, requeue_after=0.5)
        if self.status.phase.final:
            return self._expire()
        if record is None or self.observation is None:
            return self._between()
        if over(record, self.observation):
            return self._close(record, self.observation)
        if not self.observation.exists:
            return self._not_started(record)
        return self._carry_on(record, self.observation)

    # ----------------------------------------------------- one attempt is open

    def _not_started(self, record: AttemptRecord) -> Decision:
        if (ended_for := self._ended_for(record)) is not None:  # it waited, and nothing of it was made
            self.books.judged(record, ended_for)
            return self._after(record, ended_for)
        if self.spec.suspend:
            self.books.judged(record, Incident(Verdict.SUSPENDED, NOT_STARTED))
            return self._suspended()
        if self.evidence.refusals:
            return self._refused(self.evidence.refusals)
        self._size(record, self._fewer(self.status.attempts[:-1]))
        # It is Queued where the last try failed, and of all that wait when a controller comes back.
        if self.status.phase is not Phase.QUEUED:
            self._opens("starts now")
        return self._done(start=record.number, requeue_after=1.0)

    def _carry_on(self, record: AttemptRecord, observation: AttemptObservation) -> Decision:
        at = self._kill_at(record, observation)
        if self.spec.suspend:
            self._phase(Phase.SUSPENDING, "Suspending", "stops after a checkpoint")
            self.books.take_progress(record, observation, self.evidence.ledger)
            stop = None if observation.stopping else record.number
            return self._with_kill(record, at, stop=stop)
        if not observation.waiting:
            self.works = at is None and not observation.stopping
            self.books.take_progress(record, observation, self.evidence.ledger)
        record.held_up_at = held_up_at(record, observation, self.now)
        if at is None and record.ending is None:
            self._give_up(record, observation)
        if record.ending is not None:
            return self._end_it(record)
        if observation.waiting and at is None:
            self._phase(Phase.QUEUED, "Waiting", observation.waiting)
            return self._come_back(seconds_left(record, observation, self.now, self.place_seconds))
        if at is not None:
            self._phase(Phase.RECOVERING, "AttemptEnding", explain.ending(observation))
        elif observation.stopping:  # and since then the job was resumed
            self._phase(Phase.RECOVERING, "AttemptEnding", explain.RESUMED)
        elif record.first_step_at is not None:
            self.books.of_it_alone(record)
            self._phase(Phase.RUNNING, "Training", explain.training(observation, self.status.progress))
        else:
            left = self._left_to_report(record, observation)
            if left is None or left > 0:
                self._phase(Phase.STARTING, "Starting", explain.starting(observation))
                given_up = seconds_left(record, observation, self.now, self.place_seconds)
                return self._come_back(given_up if left is None else left)
            self.books.of_it_alone(record)
            self._phase(Phase.RUNNING, "Unreported", explain.unreported(observation))
        return self._with_kill(record, at)

    def _give_up(self, record: AttemptRecord, observation: AttemptObservation) -> None:
        """Put on record that an attempt is to be ended that can neither go on nor end by itself."""
        if self._is_outdated(record, observation):
            record.ending, record.reason = Verdict.SUSPENDED, CORRECTED
            return  # the user knows; what came of it is told with the verdict
        if hung := hangs(observation):
            record.ending, record.reason = Verdict.HUNG, hung
        elif left_out := half_placed(record, observation, self.now, self.place_seconds):
            record.ending, record.reason = left_out.verdict, left_out.reason
            if left_out.verdict is Verdict.UNSCHEDULABLE and observation.up:
                record.placed = observation.up
        if record.ending is not None:
            self._tell("Warning", record.ending.value, f"attempt {record.number} is ended: {record.reason}")

    def _is_outdated(self, record: AttemptRecord, observation: AttemptObservation) -> bool:
        """Whether it waits, with nothing of it started, as the job asked before its spec was changed."""
        if not observation.waiting or not observation.replicas or self.job.faults:
            return False
        return explain.is_edited(record, self.spec)

    def _end_it(self, record: AttemptRecord) -> Decision:
        """Kill it once it is on record why: who finds it gone after a crash must not take it for a loss."""
        self._phase(Phase.RECOVERING, "AttemptEnding", f"is being ended: {record.reason}")
        known = open_record(self.job.status)
        if known is None or known.ending is None:
            return self._done(requeue_after=0.0)
        return self._done(kill=record.number, stacks=record.ending is Verdict.HUNG, requeue_after=0.5)

    def _ended_for(self, record: AttemptRecord) -> Incident | None:
        """What is on record that it was to be ended for. One whose job is to rest by now is not made anew."""
        if record.ending is None:
            return None
        rests = self.spec.suspend and record.reason == CORRECTED
        return Incident(record.ending, NOT_STARTED if rests else record.reason)

    def _left_to_report(self, record: AttemptRecord, observation: AttemptObservation) -> float | None:
        """Seconds until one that says nothing of its steps is taken to run; None: it has, or cannot yet."""
        up = all(replica.state is ReplicaState.RUNNING for replica in observation.replicas)
        heard = observation.progress is not None or any(
            one.made_of == record.made_of and one.last_step is not None for one in self.status.attempts
        )
        if not up or heard or record.started_at is None:
            return None
        return SILENT_SECONDS - (self.now - record.started_at).total_seconds()

    def _kill_at(self, record: AttemptRecord, observation: AttemptObservation) -> float | None:
        """When to end the rest of a broken attempt, in seconds since the epoch; None: it is in order."""
        at = lost_at(observation)
        if at is None or at > self.now.timestamp():
            opened = self.job.as_of(record.number).spec
            known_at = min(record.detected_at or self.now, self.now).timestamp()
            ranks, grace = opened.processes_per_replica, opened.grace_seconds
            at = kill_at(observation, ranks, grace, known_at, self.settle_seconds)
        if at is not None:
            self.books.detected(record)
        return at

    def _with_kill(self, record: AttemptRecord, at: float | None, stop: int | None = None) -> Decision:
        """Kill what is left of a broken attempt from `at` on (see `_kill_at`); else come back for it."""
        if at is None:
            return self._come_back(stop=stop)
        left = at - self.now.timestamp()
        if left > 0:
            return self._done(stop=stop, requeue_after=left)
        return self._done(stop=stop, kill=record.number, requeue_after=0.5)

    def _come_back(self, seconds: float | None = None, stop: int | None = None) -> Decision:
        """In so many seconds, and before that once a replica that does not end is to be given up."""
        lost = lost_at(self.observation) if self.observation is not None else None
        due = [] if lost is None else [lost - self.now.timestamp()]
        after = min(due if seconds is None else [*due, seconds], default=None)
        return self._done(stop=stop, requeue_after=after)

    # ------------------------------------------------------- one attempt ended

    def _close(self, record: AttemptRecord, observation: AttemptObservation) -> Decision:
        ended = self._ended_for(record)
        superseded = superseded_by(observation, self.status.attempts)
        if observation.exists or ended is not None:
            incident = classify(observation, ended, superseded)
        else:
            incident = Incident(Verdict.DISRUPTED, "all that was known of it is gone")
        if incident.verdict is Verdict.CONFIG_ERROR and as_it_trained(record, self.status.attempts):
            incident = replace(incident, verdict=Verdict.FAILED)  # it can run: elsewhere, or later
        if incident.reason == observation.put_aside and not (self.spec.suspend or self.job.faults):
            # First: who comes after a crash would open the next attempt of a job that is not suspended.
            self._phase(Phase.SUSPENDING, "Suspending", incident.reason)
            return self._done(suspend=True, requeue_after=1.0)
        self.books.close(record, incident, observation, self.evidence.ledger, self.evidence.steps)
        record.log_tail = dict(self.evidence.tails)
        bound_tails(self.status.attempts)
        if superseded is not None:
            self.status.attempt = superseded[1]
        return self._after(record, incident)

    def _after(self, record: AttemptRecord, incident: Incident) -> Decision:
        """Book the incident, and open the next attempt at once where one may follow."""
        verdict = incident.verdict
        booked = spend(verdict, self.status.failures, self.status.disruptions, self.spec.retries)
        self.status.failures, self.status.disruptions = booked.failures, booked.disruptions
        text = explain.verdict(record)
        if verdict is Verdict.FINISHED:
            self._tell("Normal", "Finished", text)
            return self._final(Phase.SUCCEEDED, "Finished", text)
        lost = explain.to_do_again(record, self.status.progress)
        as_asked = verdict is Verdict.SUSPENDED and not lost
        self._tell("Normal" if as_asked else "Warning", verdict.value, f"{text}{lost}")
        if explain.edited_wrong(self.status, self.spec):
            return self._between()
        # What its spec did for sure says nothing of one that was corrected while it ran.
        corrected = explain.is_edited(record, self.spec)
        if not booked.again and not (corrected and verdict is Verdict.CONFIG_ERROR):
            return self._final(Phase.FAILED, verdict.value, f"{text}; {booked.reason}")
        progress = self.status.progress
        hopeless = same_failure(self.status.attempts, progress.total_steps if progress else None)
        if hopeless and not corrected:
            return self._final(Phase.FAILED, verdict.value, f"{text}; {hopeless}")
        if stuck := standstill(self.status.attempts):
            stuck = f"{stuck}: {remedy(self.spec.capacity)}"
            self._tell("Warning", "NoProgress", stuck)
        known = self.status.attempts
        wait = backoff(verdict, times_in_a_row(known, verdict), self.job.metadata.uid)
        if wait > 0 and not (record.placed and self._fewer(known)):  # for fewer there were places
            self.status.next_start_at = self.now + timedelta(seconds=wait)
        return self._between(stuck or incident.reason)

    # ---------------------------------------------------- no attempt is open

    def _between(self, reason: str = "") -> Decision:
        if self.spec.suspend:
            return self._suspended()
        start_at = self.status.next_start_at
        # Further ahead than any back-off lasts: a clock was set back while no controller ran.
        latest = self.now + timedelta(seconds=LONGEST_SECONDS)
        if start_at is not None and self.now < start_at <= latest:
            why = reason or (self.status.attempts[-1].reason if self.status.attempts else "")
            self._phase(Phase.RECOVERING, "BackOff", f"starts again after a back-off: {why}")
            return self._done(requeue_after=(start_at - self.now).total_seconds())
        if refusals := (*self.evidence.refusals, *explain.edited_wrong(self.status, self.spec)):
            return self._refused(refusals)
        number = self.status.attempt + 1
        self.status.attempt = number
        self.status.next_start_at = None
        capacity = next_capacity(self.spec.capacity, self.status.attempts)
        fewer = self._fewer(self.status.attempts)
        opened = AttemptRecord(number=number, opened_at=self.now, capacity=capacity)
        self._size(opened, fewer)
        self.status.attempts = remembered([*self.status.attempts, opened])
        size = f" with {fewer} of {self.spec.replicas} replicas" if fewer else ""
        if self.evidence.waits:
            self._phase(Phase.QUEUED, "Waiting", self.evidence.waits)  # in the one write, and not in the next
        else:
            self._opens(f"attempt {number} starts{size}{f': {reason}' if reason else ''}")
        self._tell("Normal", "AttemptOpened", f"attempt {number} opened{size}")
        if number == 1:
            for event, note in spec_notes(self.spec):
                self._tell("Warning", event, note)
        return self._done(start=number, requeue_after=1.0)

    def _fewer(self, ended: Sequence[AttemptRecord]) -> int | None:
        return next_replicas(self.spec, ended, self.now)

    def _size(self, record: AttemptRecord, fewer: int | None) -> None:
        """Put on record what the attempt is started with: the spec may be changed while it runs. Until it is
        started, whoever corrects the spec corrects the attempt too."""
        record.replicas = fewer or self.spec.replicas
        record.processes = self.spec.processes_per_replica
        record.gpus, record.mig = self.spec.gpus, self.spec.mig
        record.grace_seconds = self.spec.grace_seconds
        record.checkpoint_every = self.spec.checkpoint.every
        record.made_of = self.spec.of_attempt

    def _refused(self, reasons: Sequence[str]) -> Decision:
        """Wait for another spec; told once, and again when the reason is another one."""
        message = refused.waits(reasons)
        if message != self.job.status.message:
            self._tell("Warning", "Refused", message)
        self._phase(Phase.QUEUED, "Refused", message)
        return self._done()

    def _suspended(self) -> Decision:
        if self.status.phase is not Phase.SUSPENDED:
            self._tell("Normal", "Suspended", "suspended; checkpoints are kept, resume to go on")
        self.status.next_start_at = None
        last = self.status.attempts[-1].reason if self.status.attempts else ""
        why = idle.why_stopped(self.status) or why_put_aside(last)
        self._phase(Phase.SUSPENDED, "Suspended", f"suspended{why}; resume to go on")
        return self._done()

    def _final(self, phase: Phase, reason: str, message: str) -> Decision:
        self.books.over()
        self._phase(phase, reason, message)
        if phase is Phase.FAILED:
            self._tell("Warning", "JobFailed", message)
        return self._done(requeue_after=self.spec.ttl_seconds_after_finished)

    # --------------------------------------------------------------- the end

    def _expire(self) -> Decision:
        ttl, finished = self.spec.ttl_seconds_after_finished, self.status.finished_at
        if ttl is None or finished is None:
            return self._done()
        left = ttl - (self.now - finished).total_seconds()  # which may be more than there are dates for
        watched = self.evidence.watched_from
        if watched is not None and finished < watched:
            left = max(left, TRUSTED_SECONDS - (self.now - watched).total_seconds())
        return self._done(requeue_after=left) if left > 0 else self._done(remove=True)

    def _delete(self) -> Decision:
        record = open_record(self.status)
        observation = self.observation
        if record is None or observation is None or observation.gone:
            if self.job.kept_by and not self.status.phase.final:
                self._kept(record)
            return self._done(remove=True)
        self.status.message = "being deleted: its processes are being stopped"
        stop = None if observation.stopping else record.number
        if observation.waiting:
            return self._done(stop=stop, requeue_after=0.1)
        return self._with_kill(record, self._kill_at(record, observation), stop=stop)

    def _kept(self, record: AttemptRecord | None) -> None:
        """Nothing of it is left, and it is not gone: it must not seem to run until it is."""
        if record is not None:
            self.books.judged(record, Incident(Verdict.SUSPENDED, "the job was deleted"))
        self.status.next_start_at = None
        self._phase(Phase.SUSPENDED, "Deleted", explain.kept(self.job.kept_by))

    # --------------------------------------------------------------- writing

    def _opens(self, message: str) -> None:
        """An attempt is about to be made; with a queue it waits for that to admit it."""
        phase = Phase.STARTING if self.status.attempt == 1 else Phase.RECOVERING
        self._phase(phase, "Starting", message, queued=self.spec.queue is not None)

    def _phase(self, phase: Phase, reason: str, message: str, *, queued: bool = False) -> None:
        self.status.phase = phase
        record = open_record(self.status)
        if phase in (Phase.STARTING, Phase.RUNNING) and record is not None and not self.job.faults:
            message += explain.edited_since(record, self.spec, self.evidence.refusals)
        if self.job.faults and record is not None and reason != "Refused":
            message = refused.goes_on(message, self.job.faults)
            if refused.UNREADABLE not in self.job.status.message:
                self._tell("Warning", "Refused", message)
        self.status.message = message
        self.status.conditions = conditions_of(self.status, reason, self.now, queued=queued)

    def _tell_resumes(self) -> None:
        """Once, when it becomes known of an attempt that it went on from what nobody would expect."""
        before = None
        for record in self.status.attempts:
            known = self.job.status.record(record.number)
            earlier = explain.resumed_earlier(before, record)
            if record.passed_over:
                if known is None or not known.passed_over:
                    self._tell("Warning", "CheckpointPassedOver", explain.passed_over(record))
            elif earlier and (known is None or known.resumed_step is None):
                self._tell("Warning", "ResumedEarlier", earlier)
            if record.resume_differences and (known is None or not known.resume_differences):
                self._tell("Warning", "ResumeDiffers", explain.resume_differs(record))
            before = record if record.durable_step is not None else before

    def _tell_saves(self) -> None:
        told = explain.saving(self.job.status.progress, self.status.progress)
        if told is not None:
            self._tell(*told)

    def _tell(self, kind: str, reason: str, message: str) -> None:
        self.events.append(Event(self.now, kind, reason, message))

    def _done(
        self,
        *,
        stop: int | None = None,
        kill: int | None = None,
        stacks: bool = False,
        start: int | None = None,
        remove: bool = False,
        suspend: bool = False,
        requeue_after: float | None = None,
    ) -> Decision:
        self._tell_resumes()
        self._tell_saves()
        if self.works:
            verdict = self.evidence.gpus
            told = idle.judged(self.status, verdict, self.spec, self.now)
            if told:
                self._tell("Warning", idle.CONDITION, told)
            suspend = idle.to_be_stopped(self.status, self.spec.idle) and not self.job.faults
            if verdict is not None and verdict.decided_in is not None:
                requeue_after = min(verdict.decided_in, requeue_after or verdict.decided_in)
        else:
            idle.at_rest(self.status, self.spec, self.now)
        return Decision(
            self.status, stop, kill, stacks, start, remove, suspend, tuple(self.events), requeue_after
        )
