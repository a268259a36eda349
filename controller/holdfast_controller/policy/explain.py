"""Say in one sentence why a job is where it is."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast_controller.cluster import AttemptObservation, ReplicaState
from holdfast_controller.jobs import AttemptRecord, JobProgress, Spec, Status, Verdict
from holdfast_trainer.contract import Progress

FAULT_CHARACTERS = 300

UNREPORTED = (
    "runs, and tells nothing of its steps: steps, loss and lost work are not known. "
    "`Run` from holdfast_trainer.run, in its loop, makes them known; where it is there, the ranks may not "
    "have found each other, and their logs tell why"
)

RESUMED = "the attempt still stops after a checkpoint, as the job was suspended; the next one goes on from it"


def starting(observation: AttemptObservation) -> str:
    """Of an attempt whose first step is not done yet."""
    if observation.up < len(observation.replicas):
        out = [replica for replica in observation.replicas if replica.state is ReplicaState.PENDING]
        why = next((f"; replica {replica.index}: {replica.reason}" for replica in out if replica.reason), "")
        return f"{observation.up} of {len(observation.replicas)} replicas are up{why}"
    if observation.nameless:
        return f"replicas are up and cannot find each other: {observation.nameless}"
    if observation.progress is None and observation.kept_out:
        return f"replicas are up; {observation.kept_out}"
    if observation.progress is None:
        return "replicas are up; rank 0 has not reported yet (a script without Run never does: see its log)"
    return f"replicas are up; rank 0 says: {observation.progress.phase}"


def unreported(observation: AttemptObservation) -> str:
    """Of an attempt that runs, and of whose steps nothing was ever heard."""
    if observation.nameless:
        return f"its replicas run and cannot find each other: {observation.nameless}"
    if observation.kept_out:
        return f"runs, and steps, loss and lost work are not known: {observation.kept_out}"
    return UNREPORTED


def training(observation: AttemptObservation, told: JobProgress | None) -> str:
    """Of an attempt that does steps; `told`: what it has told of them, be it to a controller before this."""
    known = told if told is not None and told.attempt == observation.attempt else None
    progress = observation.progress or known
    if progress is None:
        return "training"
    total = f" of {progress.total_steps}" if progress.total_steps is not None else ""
    fault = f"; {why}" if (why := save_fault(progress)) else ""
    since = ""
    if observation.kept_out:
        since = f"; nothing was heard since: {observation.kept_out}"
    elif known is not None and known.unheard_since is not None:
        since = f"; rank 0 has not answered since {known.unheard_since:%Y-%m-%d %H:%M:%S} UTC"
    saved = f"step {progress.durable_step} is durable" if progress.durable_step else "nothing is durable yet"
    return f"step {progress.step}{total}; {saved}{fault}{since}"


def is_edited(record: AttemptRecord, spec: Spec) -> bool:
    """Whether an attempt is as the job asked before its spec was changed."""
    return record.made_of not in (None, spec.of_attempt)


def edited_since(record: AttemptRecord, spec: Spec, refusals: Sequence[str]) -> str:
    """What is to be added of an attempt that runs and `is_edited`; `refusals`: why none can follow it so."""
    if not is_edited(record, spec):
        return ""
    changed = f"; the spec was changed since attempt {record.number} was made"
    if refusals:
        return f"{changed}, and no other can be made from it: {'; '.join(refusals)}"
    return f"{changed}: the next one is made from it"


def edited_wrong(status: Status, spec: Spec) -> tuple[str, ...]:
    """Why no attempt can follow one that the spec's last change keeps from going on with what is saved.

    A job is final whose configuration is wrong from the beginning. This one has checkpoints, which only it
    can go on from: another job has another run directory. So it waits for the spec to be corrected.
    """
    if not status.attempts or status.attempts[-1].verdict is not Verdict.CONFIG_ERROR:
        return ()
    *earlier, last = status.attempts
    saved = [one for one in earlier if one.durable_step and one.last_step]
    trained = [one for one in saved if one.made_of not in (None, last.made_of)]
    if not trained or last.made_of != spec.of_attempt:
        return ()
    since = f"the spec was changed since attempt {trained[-1].number}, whose checkpoints are kept"
    return (f"{verdict(last)} ({since})",)


def verdict(record: AttemptRecord) -> str:
    """Of an attempt that is over."""
    return f"attempt {record.number}: {record.reason}"


def save_fault(progress: Progress | JobProgress) -> str | None:
    """What the trainer says of a save that failed, if the newest did; bounded, as a status is."""
    return progress.save_fault[:FAULT_CHARACTERS] if progress.save_fault else None


def to_do_again(record: AttemptRecord, progress: JobProgress | None) -> str:
    """Of an attempt that is over, what is to be added where steps of it were lost, and why they were."""
    if not record.lost_steps:
        return ""
    unsaved = progress.save_fault if progress is not None and progress.attempt == record.number else None
    why = f": {unsaved}" if unsaved and unsaved not in record.reason else ""
    return f"; {record.lost_steps} steps are to be done again{why}"


def saving(before: JobProgress | None, now: JobProgress | None) -> tuple[str, str, str] | None:
    """An event's type, reason and message where saves of an attempt begin to fail, or do so no more."""
    if now is None:
        return None
    failed = before is not None and before.attempt == now.attempt and before.save_fault is not None
    if now.save_fault is not None and not failed:
        risk = f"only step {now.durable_step} is durable" if now.durable_step else "nothing is durable yet"
        return (
            "Warning",
            "SaveFailed",
            f"{now.save_fault}; training goes on and another save is tried, but {risk}",
        )
    if now.save_fault is None and failed:
        return "Normal", "SavedAgain", f"step {now.durable_step} is durable"
    return None


def passed_over(record: AttemptRecord) -> str:
    """Of an attempt that could not go on from the newest checkpoint."""
    return (
        f"attempt {record.number} goes on from step {record.resumed_step}, as nothing newer can be used: "
        f"{'; '.join(record.passed_over)}"
    )


def resume_differs(record: AttemptRecord) -> str:
    """Of an attempt that is not computed as the one before was."""
    return (
        f"attempt {record.number} goes on from step {record.resumed_step}, and from there bits may differ: "
        f"{'; '.join(record.resume_differences)}"
    )


def resumed_earlier(before: AttemptRecord | None, record: AttemptRecord) -> str | None:
    """Of an attempt that does not go on from what `before` it was durable: nothing else tells why."""
    if before is None or before.durable_step is None or record.resumed_step is None:
        return None
    if record.resumed_step >= before.durable_step:
        return None
    return (
        f"attempt {record.number} goes on from step {record.resumed_step}, though step {before.durable_step} "
        f"was durable in attempt {before.number}: that is not in its run directory, or cannot be read. Was "
        "storage.claim changed, or something removed or damaged there? The log of its rank 0 says more"
    )


def ending(observation: AttemptObservation) -> str:
    """Of an attempt that has lost a member and waits for the others to end."""
    taken = [replica for replica in observation.replicas if replica.disrupted]
    ended = taken or [r for r in observation.replicas if r.state is not ReplicaState.RUNNING]
    if not ended:
        return "a rank ended; the others are being ended"
    reason = f" ({ended[0].reason})" if ended[0].reason else ""
    return f"replica {ended[0].index} is gone{reason}; the others are being ended"


def kept(by: Sequence[str]) -> str:
    """Of a job that is deleted, and of which nothing is left."""
    names = " and ".join(by)
    return (
        f"deleted, and nothing of it runs any more; it stays until its finalizer {names}, which is not "
        "Holdfast's, is taken off"
    )
