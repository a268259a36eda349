"""What can go wrong with a checkpoint::

    CheckpointError              a save or a load failed; training state in memory is unharmed
    ├── Fenced                   a newer attempt may write; this one must not, and must stop
    ├── DiskFull                 there is no room to begin; an attempt that comes later may find some
    ├── ObjectStoreError         the object store refuses, or does not answer
    └── WrongConfiguration       the run directory belongs to another configuration

`BadManifest` and `UnreadableFile` say that bytes are not what was written; a load then takes an older
checkpoint. An object store that does not answer says nothing of the bytes: a load ends with that.
"""

from __future__ import annotations


class CheckpointError(Exception):
    """A save or a load failed; training state in memory is unharmed."""


class Fenced(CheckpointError):
    """A newer attempt may write; this one must not, and must stop."""


class DiskFull(CheckpointError):
    """The run directory has no room to begin an attempt: not the job's fault, and later there may be some."""


class ObjectStoreError(CheckpointError):
    """The object store refuses, or does not answer; the message says what would help."""


class WrongConfiguration(CheckpointError):
    """The run directory belongs to another configuration: trying again cannot mend that."""
