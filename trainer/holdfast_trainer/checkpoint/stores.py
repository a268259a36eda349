"""Which store a run's checkpoints are in: its directory, or objects where it names any."""

from __future__ import annotations

from .. import contract
from ..contract import RunDir
from .directory import CheckpointDirectory, check_fence
from .objects import CheckpointObjects
from .storage import Storage
from .store import CheckpointStore


def open_store(run: RunDir, attempt: int, storage: Storage | None = None) -> CheckpointStore:
    """The checkpoints of `run`, as `attempt` may use them (0: to look, from outside).

    `storage` are the file operations to use where it is a directory.
    """
    if run.objects:
        return CheckpointObjects(run, attempt)
    return CheckpointDirectory(run, attempt, storage)


def admit(run: RunDir, attempt: int | None) -> int:
    """Raise the fence to `attempt`, or one higher where None is given; returns the attempt's number.

    What earlier attempts left unfinished is removed. Raises Fenced where a newer attempt was admitted
    already, CheckpointError, OSError, and ValueError where the fence is unreadable.
    """
    if run.objects:
        return CheckpointObjects.admit(run, attempt)
    fence = contract.raise_fence(run, attempt)
    number = fence if attempt is None else attempt
    check_fence(run, number)
    contract.make_directory(run.checkpoints)
    CheckpointDirectory(run, number).sweep()
    return number
