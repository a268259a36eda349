"""Where this process stands: what the engine told it through the environment, with defaults for none."""

from __future__ import annotations

import errno
import os
import socket
import stat
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

from . import contract
from .checkpoint.bucket import Bucket, is_bucket
from .checkpoint.errors import CheckpointError, StorageUnavailable, may_pass
from .checkpoint.stores import admit, open_store
from .contract import RunDir, exists
from .ledger import trained_before
from .parallel import Gang
from .records import Records
from .schema import ConfigError, place_of
from .utilization import process_age

DEFAULT_RUN_DIR = "holdfast-run"
SEEN_SECONDS = 10.0
"""Within which a rank sees what another one has made: file systems of several machines may be late."""
N = TypeVar("N", int, float)
_admitted: set[RunDir] = set()
"""Those of the Runs that this process has had."""


@dataclass(frozen=True)
class Place:
    """Read once at start; `attempt` and `keep` are None where no engine gave them."""

    run_dir: RunDir
    attempt: int | None
    grace_seconds: float
    host: str
    port: int
    keep: int | None

    @classmethod
    def read(cls, run_dir: str | Path | None = None) -> Place:
        """From the environment; `run_dir` counts where HOLDFAST_RUN_DIR is not set. Raises ConfigError."""
        env = os.environ
        return cls(
            run_dir=run_directory(str(env.get(contract.ENV_RUN_DIR) or run_dir or DEFAULT_RUN_DIR)),
            attempt=_number(contract.ENV_ATTEMPT, int, 1),
            grace_seconds=grace_seconds(),
            host=env.get(contract.ENV_HOST) or "127.0.0.1",
            port=_number(contract.ENV_PORT, int, 0, 65535) or 0,
            keep=_number(contract.ENV_CHECKPOINT_KEEP, int, 1),
        )

    def admit(self, gang: Gang) -> Admitted:
        """This attempt, with the fence at it; alone, one more than the fence. Collective.

        Raises ConfigError where this process has had a Run there: a second training, such as the next fold,
        would take the first one's checkpoints for its own. Raises CheckpointError on every rank where the
        run directory cannot be written, or ranks see others, StorageUnavailable where that may pass, Fenced
        where a newer attempt was admitted already.
        """
        if self.run_dir in _admitted:
            raise ConfigError(_second_run(self.run_dir))
        _admitted.add(self.run_dir)
        answer = gang.broadcast(self._admit() if gang.rank == 0 else None)
        if isinstance(answer, CheckpointError):
            raise answer
        assert isinstance(answer, Admitted)
        if gang.world_size > 1 and not self.run_dir.objects:
            where = (socket.gethostname(), str(self.run_dir.path))
            told = gang.gather((*where, _sees(self.run_dir.ledger(answer.attempt))))
            if blind := [rank for rank, (*_, sees) in enumerate(told) if not sees]:
                raise _not_shared(blind[0], *told[blind[0]][:2], first=told[0][0])
        return answer

    def _was_used(self) -> bool:
        """Whether the run directory has anything of a training before; an engine may have made it anew."""
        run = self.run_dir
        return bool(run.objects) or trained_before(run, self.attempt or 1) or bool(open_store(run, 0).steps())

    def _admit(self) -> Admitted | CheckpointError:
        run = self.run_dir
        try:
            if (step := contract.saved_before()) and not self._was_used():
                return _another(run, step)
            attempt = admit(run, self.attempt)
            run.attempt(attempt).mkdir(parents=True, exist_ok=True)
            run.ledger(attempt).touch()  # what the others have to see
            Records(run, attempt).fetch()
            return Admitted(attempt, trained_before(run, attempt))
        except (OSError, ValueError) as error:
            return cannot_begin(run, error)
        except CheckpointError as error:
            return error


def _sees(path: Path) -> bool:
    """Whether this rank sees what rank 0 has made; false, too, where it cannot look."""
    deadline = time.monotonic() + SEEN_SECONDS
    while True:
        with suppress(OSError):
            if exists(path):
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)


def _not_shared(rank: int, host: str, path: str, *, first: str) -> CheckpointError:
    kind = CheckpointError if contract.saved_before() is None else StorageUnavailable
    return kind(
        f"rank {rank} on {host} does not see in run directory {path} what rank 0 on {first} has just made in "
        "its own: all ranks need the same one. See that its volume is mounted on every machine, name a "
        "directory on storage that they share (NFS, Lustre), or an object store (s3://BUCKET/PREFIX)"
    )


def _another(run: RunDir, step: int) -> StorageUnavailable:
    """Of one that is not what earlier attempts have had: begun anew in it, their work would be lost."""
    return StorageUnavailable(
        f"run directory {run.path} has nothing of the attempts before, which saved step {step} in theirs: is "
        "its volume mounted, was storage.claim changed, or the directory removed? Nothing is begun anew over "
        "saved work; where that is meant, delete the job and submit it again"
    )


def _second_run(run: RunDir) -> str:
    where = f"this process has a Run in {run.objects or run.path} already, with checkpoints of its own"
    if os.environ.get(contract.ENV_RUN_DIR):
        return f"{where}; {contract.ENV_RUN_DIR} names it for the whole job, so make each training a job"
    return f"{where}; give each training its own: Run(run_dir=...)"


def cannot_begin(run: RunDir, error: OSError | ValueError) -> CheckpointError:
    """Why an attempt cannot, whose run directory could not be written to or read; says what to do."""
    code = error.errno if isinstance(error, OSError) else None
    if code == errno.EIO:
        return StorageUnavailable(
            f"run directory {run.path} does not answer: {error}. See to its mount's server, or to its disk"
        )
    if code in contract.AWAY:
        return StorageUnavailable(
            f"run directory {run.path} does not answer: {error}. See to its server, or to its mount on this "
            "machine; what was saved is still there"
        )
    if code == errno.EROFS:
        return StorageUnavailable(
            f"run directory {run.path} is read-only: {error}. Mount its file system for writing; if it was, "
            "its disk has failed, so see to that first; what was saved is still there"
        )
    if may_pass(error):
        return StorageUnavailable(
            f"there is no room to begin in run directory {run.path}: {error}. Free some, or "
            "enlarge the volume; what was saved is still there"
        )
    if isinstance(error, OSError) and contract.saved_before() is not None:
        return StorageUnavailable(
            f"run directory {run.path} cannot be used: {error}. Attempts before have trained: is its volume "
            "mounted, and does it still have the owner and the rights that it had?"
        )
    return CheckpointError(f"run directory {run.path} cannot be used: {error}. Name another one, or mend it")


class Admitted(NamedTuple):
    """What rank 0 found when this attempt was admitted; the others may have no records of the past."""

    attempt: int
    trained_before: bool
    """Whether an earlier attempt did a step."""


def run_directory(text: str) -> RunDir:
    """The run directory that `text` names: a path, or s3://BUCKET/PREFIX with a local place beside it.

    Raises ConfigError.
    """
    if is_bucket(text):
        try:
            bucket = Bucket(text)
        except CheckpointError as error:
            raise ConfigError(f"the run directory {error}") from error
        local = os.environ.get(contract.ENV_LOCAL_DIR)
        base = Path(local) if local else _of_ours(Path(tempfile.gettempdir()) / f"holdfast-{os.getuid()}")
        return RunDir((base / bucket.url.removeprefix("s3://")).absolute(), bucket.url)
    if "://" in text:
        raise ConfigError(
            f"the run directory {text!r}: give a path or s3://BUCKET/PREFIX; other stores are reached by "
            "their S3 interface, at AWS_ENDPOINT_URL"
        )
    return RunDir(place_of(text).absolute())


def _of_ours(base: Path) -> Path:
    """`base`, made where there is none, in which nobody else writes: all of this machine may make one of its
    name, and what they put into the compile cache there would run as this user. Raises ConfigError.
    """
    with suppress(OSError):  # why it cannot be made is told where something is to be written there
        base.mkdir(mode=0o700)
    if not os.path.lexists(base):
        return base
    found = base.stat() if exists(base) else None  # else a link that leads nowhere
    owners = set() if found is None else {base.lstat().st_uid, found.st_uid}
    if found is None or owners != {os.getuid()} or not stat.S_ISDIR(found.st_mode):
        raise ConfigError(
            f"{base}, for logs and compiled code of runs in buckets, is no directory of yours: another user "
            f"may have made it. Have it removed, or name one of your own in {contract.ENV_LOCAL_DIR}"
        )
    others = stat.S_IWGRP | stat.S_IWOTH
    if found.st_mode & others:
        base.chmod(stat.S_IMODE(found.st_mode) & ~others)
    return base


def grace_seconds() -> float:
    """Seconds from a notice to the end, as the engine says. Raises ConfigError."""
    return _number(contract.ENV_GRACE_SECONDS, float, 0) or contract.DEFAULT_GRACE_SECONDS


def _number(name: str, kind: Callable[[str], N], low: float, high: float = float("inf")) -> N | None:
    """The number in an environment variable, None where it is not set or empty."""
    text = os.environ.get(name)
    if not text:
        return None
    try:
        value = kind(text)
    except ValueError:
        raise ConfigError(f"environment {name}={text!r} is not a number") from None
    if not low <= value <= high:
        raise ConfigError(f"environment {name}={text!r} is not between {low:g} and {high:g}")
    return value


def process_seconds() -> float:
    """How long this process has run."""
    try:
        return process_age(Path("/proc/self"))
    except (OSError, ValueError, IndexError):
        return 0.0
