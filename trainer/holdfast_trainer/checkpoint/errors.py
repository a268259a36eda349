"""What can go wrong with a checkpoint::

    CheckpointError              a save or a load failed; training state in memory is unharmed
    ├── Fenced                   a newer attempt may write; this one must not, and must stop
    ├── StorageUnavailable       not the job's fault, and later it may be otherwise: a disk was full
    ├── ObjectStoreError         the object store refuses, or does not answer
    │   └── ObjectStoreAway      the latter, which is StorageUnavailable too
    └── WrongConfiguration       the run directory belongs to another configuration, or to another Holdfast

`BadManifest` and `UnreadableFile` say that bytes are not what was written; a load then takes an older
checkpoint, but where a sound manifest is of a version that is not read here (`OtherVersion`): a load ends
with that. An object store that does not answer says nothing of the bytes, nor does a file that the system
does not let this process read (`not_looked_at`): a load ends with that. What the system did not give
(`not_given`) is asked for again once an older checkpoint could be read.
"""

from __future__ import annotations

import errno

from ..contract import AWAY, MAY_PASS


class UnsupportedState(TypeError):
    """A value in the state can be saved neither as a tensor nor as JSON, or there is too much of that."""


class CheckpointError(Exception):
    """A save or a load failed; training state in memory is unharmed."""


class Fenced(CheckpointError):
    """A newer attempt may write; this one must not, and must stop."""


class StorageUnavailable(CheckpointError):
    """The run directory is full, or read-only, or its store does not answer; later it may be otherwise.

    It is no fault of the job's, and the last words of a rank that ends for it say so."""


def may_pass(error: BaseException | None) -> bool:
    """Whether it, or what it came from, is a disk that is full or read-only, or a store or a mount that does
    not answer."""
    while error is not None:
        if isinstance(error, StorageUnavailable):
            return True
        if isinstance(error, OSError) and error.errno in MAY_PASS:
            return True
        error = error.__cause__
    return False


_NOT_THE_FILE = (AWAY - {errno.EIO}) | {errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM}
"""How the system says that it does not read a file for us, whatever is in it. EIO is said by mounts, and by
disks that have lost the file: see `not_given`."""


def not_looked_at(where: object, error: OSError) -> CheckpointError | None:
    """What to raise where `error` says nothing of the bytes of `where`; None where it does: they are gone, or
    the disk cannot give them."""
    if error.errno not in _NOT_THE_FILE:
        return None
    return (StorageUnavailable if error.errno in AWAY else CheckpointError)(
        f"{where} cannot be looked at ({error.strerror}), which says nothing of what is in it: see to that, "
        "and start again"
    )


def not_given(error: BaseException) -> bool:
    """Whether it came of bytes that the system did not give this time (EIO): their disk has lost them, or the
    server of an NFS mount with `soft` did not answer in time."""
    return isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EIO


class ObjectStoreError(CheckpointError):
    """The object store refuses, or does not answer; the message says what would help."""


class ObjectStoreAway(ObjectStoreError, StorageUnavailable):
    """The object store does not answer, or that it is too busy, or that the credentials have expired."""


class WrongConfiguration(CheckpointError):
    """The run directory belongs to another configuration, or Holdfast: trying again cannot mend that."""
