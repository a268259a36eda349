"""What the trainer and the controller have agreed on, and nothing else.

The controller imports this module and no other of the trainer's: environment
names, the termination message, the layout of a run directory, the ledger's
lines and the progress document. Standard library only.

Run directory::

    fence                            the highest attempt that may write
    checkpoints/step-00000812/       rank-N.safetensors, manifest.json written last
    attempts/0003/ledger.jsonl       attempt start, durable checkpoints, stop
    attempts/0003/steps.jsonl        what each step did, by rank 0
    attempts/0003/rank-N.log         output of a rank, of a long one the beginning and the newest end;
                                     rank-N.exit how it ended
    attempts/0003/rank-N.stacks      where each thread of a rank stood when the gang hung
    attempts/0003/replica-N.log      output of torchrun; replica-N.exit how it ended
    attempts/0003/replica-N.termination
    attempts/0003/torchrun/          torchrun's own, on the local engine
"""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import math
import os
import re
import shutil
import stat
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeGuard, get_args

# ---------------------------------------------------------------- environment

ENV_RUN_DIR = "HOLDFAST_RUN_DIR"
ENV_JOB = "HOLDFAST_JOB"
"""`namespace/name`; for messages and metric labels only."""
ENV_ATTEMPT = "HOLDFAST_ATTEMPT"
ENV_DURABLE_STEP = "HOLDFAST_DURABLE_STEP"
"""The newest step that attempts before this one have saved, 0: they trained and saved none; not there where
none is known to have trained."""
ENV_CONFIG = "HOLDFAST_CONFIG"
"""Path of the YAML file that holds the job's `config`."""
ENV_GRACE_SECONDS = "HOLDFAST_GRACE_SECONDS"
"""Seconds from SIGTERM to SIGKILL."""
ENV_PORT = "HOLDFAST_PORT"
"""Where rank 0 serves `/metrics` and `/progress`; 0 takes any free port."""
ENV_HOST = "HOLDFAST_HOST"
"""Address rank 0 binds; loopback unless given, as in a pod it must be; 0.0.0.0: all, those of IPv6 too."""
ENV_REPLICA = "HOLDFAST_REPLICA"
ENV_TERMINATION_LOG = "HOLDFAST_TERMINATION_LOG"
ENV_LOG_BYTES = "HOLDFAST_LOG_BYTES"
"""The most that the log of a rank may take of the disk; 0 or not there: no limit."""
ENV_CHECKPOINT_EVERY = "HOLDFAST_CHECKPOINT_EVERY"
"""`auto`, `500` (steps) or `90s`; when set it wins over the config file."""
CHECKPOINT_EVERY = "auto|[1-9][0-9]{0,17}s?"
"""The regular expression of what it may be, all of it; the trainer, the controller and the CRD go by it."""
ENV_CHECKPOINT_KEEP = "HOLDFAST_CHECKPOINT_KEEP"
ENV_HANG_SECONDS = "HOLDFAST_HANG_SECONDS"
"""`auto`, or the seconds without a step from which on the gang counts as hung; 0: never."""
ENV_TELEMETRY = "HOLDFAST_TELEMETRY"
"""`off`: after the first, steps are counted and their losses checked, but neither timed, judged nor told one
by one. For measuring what that costs."""
ENV_LOCAL_DIR = "HOLDFAST_LOCAL_DIR"
"""Below it lie logs, ledgers and the compile cache of runs in buckets; a directory in /tmp unless given."""
ENV_STORAGE_TIMEOUT = "HOLDFAST_STORAGE_TIMEOUT_SECONDS"
"""How long a request to an object store may stand still before it counts as lost."""
ENV_ATTEMPT_UID = "HOLDFAST_ATTEMPT_UID"
"""Unique to one attempt on one machine; the local engine finds its processes by it."""
ATTEMPT_HEADER = "X-Holdfast-Attempt"
"""In each answer of rank 0's port: the attempt's uid, where the environment has it. A pod whose node is lost
may have its address no more while Kubernetes still says that it runs."""

DEFAULT_PORT = 9090
DEFAULT_GRACE_SECONDS = 30.0
DEFAULT_TERMINATION_LOG = "/dev/termination-log"

EXIT_CONFIG_ERROR = 78
"""sysexits.h EX_CONFIG: the job can never run as written; do not retry."""
STACK_SIGNAL = 60
"""A real-time signal, upon which a rank's main thread writes its stack and goes on."""


def rank_mark(rank: int) -> str:
    """What a line begins with where several ranks say theirs in one place."""
    return f"[rank {rank}] "


# -------------------------------------------------------------- run directory

MANIFEST = "manifest.json"
"""In a checkpoint's directory: with it, it is one."""
_STEP = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class RunDir:
    """Paths of a run directory; touches nothing by itself."""

    path: Path
    objects: str = ""
    """Where fence and checkpoints are, and a copy of the ledgers, if not below `path`: s3://BUCKET/PREFIX."""

    @property
    def fence(self) -> Path:
        return self.path / "fence"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def attempts(self) -> Path:
        return self.path / "attempts"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:08d}"

    def attempt(self, attempt: int) -> Path:
        return self.attempts / f"{attempt:04d}"

    def ledger(self, attempt: int) -> Path:
        return self.attempt(attempt) / "ledger.jsonl"

    def steps(self, attempt: int) -> Path:
        return self.attempt(attempt) / "steps.jsonl"

    def rank_log(self, attempt: int, rank: int) -> Path:
        return self.attempt(attempt) / f"rank-{rank}.log"

    def rank_exit(self, attempt: int, rank: int) -> Path:
        return self.attempt(attempt) / f"rank-{rank}.exit"

    def stacks(self, attempt: int, rank: int) -> Path:
        return self.attempt(attempt) / f"rank-{rank}.stacks"

    def replica_log(self, attempt: int, replica: int) -> Path:
        return self.attempt(attempt) / f"replica-{replica}.log"

    def replica_exit(self, attempt: int, replica: int) -> Path:
        return self.attempt(attempt) / f"replica-{replica}.exit"

    def termination(self, attempt: int, replica: int) -> Path:
        return self.attempt(attempt) / f"replica-{replica}.termination"

    def progress_address(self, attempt: int) -> Path:
        """Where rank 0 writes `host:port` of its endpoint once it listens."""
        return self.attempt(attempt) / "progress.address"

    def attempt_numbers(self) -> list[int]:
        """Attempts that left a directory, in order."""
        if not is_directory(self.attempts):
            return []
        return sorted(int(p.name) for p in self.attempts.iterdir() if p.name.isdigit())


def checkpoint_step(directory: Path) -> int | None:
    """The step in a checkpoint directory's name, or None for debris."""
    match = _STEP.fullmatch(directory.name)
    return int(match[1]) if match else None


def checkpoint_steps(run: RunDir) -> list[int]:
    """Steps of the checkpoints in its directory that are whole, the newest first. Raises OSError."""
    if not is_directory(run.checkpoints):
        return []
    found = [
        step
        for path in run.checkpoints.iterdir()
        if (step := checkpoint_step(path)) is not None and exists(path / MANIFEST)
    ]
    return sorted(found, reverse=True)


def exists(path: Path) -> bool:
    """As `Path.exists` was before Python 3.14, which says no, too, of a file on a disk that fails or does not
    let it look: whoever takes that for an answer begins anew where there is work. Raises OSError.

    What another machine has made is seen at once on NFS too, whose client remembers for up to a minute what
    was not there.
    """
    return _mode(path) is not None


def is_directory(path: Path) -> bool:
    """In place of `Path.is_dir`, as `exists`. Raises OSError."""
    mode = _mode(path)
    return mode is not None and stat.S_ISDIR(mode)


def is_file(path: Path) -> bool:
    """In place of `Path.is_file`, as `exists`. Raises OSError."""
    mode = _mode(path)
    return mode is not None and stat.S_ISREG(mode)


_NOT_THERE = frozenset((errno.ENOENT, errno.ENOTDIR, errno.ELOOP))


def _mode(path: Path) -> int | None:
    mode = _remembered_mode(path)
    return _remembered_mode(path) if mode is None and _look_anew(path.parent) else mode


def _remembered_mode(path: Path) -> int | None:
    try:
        return os.stat(path).st_mode
    except ValueError:  # no file has such a name
        return None
    except OSError as error:
        if error.errno in _NOT_THERE:
            return None
        raise


def _look_anew(directory: Path) -> bool:
    """Whether it is there, and no more may be remembered of what is in it than its server says: to open it
    asks that (close-to-open consistency, nfs(5))."""
    if _opens(directory):
        return True
    return directory != directory.parent and _look_anew(directory.parent) and _opens(directory)


def _opens(directory: Path) -> bool:
    try:
        os.close(os.open(directory, os.O_RDONLY | os.O_DIRECTORY))
    except ValueError:
        return False
    except OSError as error:
        return error.errno not in _NOT_THERE  # one may be there that cannot be opened
    return True


def replace_durably(path: Path, data: str | bytes | Iterable[bytes]) -> None:
    """Write `data`, text as UTF-8, so that after a crash `path` holds all of it or what it held before."""
    if isinstance(data, str | bytes):
        data = (data.encode() if isinstance(data, str) else data,)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.writelines(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_directory(path.parent)


def fsync_directory(path: Path) -> None:
    """Make the names in a directory durable: fsync of a file alone does not."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_directory(path: Path) -> None:
    """One that may exist already; what is missing of it is made, and is there after a crash."""
    if not is_directory(path):
        make_directory(path.parent)
        path.mkdir(exist_ok=True)
        fsync_directory(path.parent)


def read_fence(run: RunDir) -> int:
    """The highest attempt that may write; 0 where no attempt was ever admitted.

    Raises ValueError where the file holds anything but a number.
    """
    text = run.fence.read_text(encoding="ascii") if exists(run.fence) else "0"
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{run.fence} holds {text[:40]!r}, not an attempt number") from None


NO_MEMORY = (
    "DefaultCPUAllocator",
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "Cuda failure 'out of memory'",  # NCCL's, and that of newer ones
    "Cuda failure 2 'out of memory'",
)
"""How errors of no class of their own say that memory ran out: what asks the driver or the host for it, past
PyTorch's allocator, such as a context, a kernel's code or the workspace of a library."""
NO_ROOM = frozenset((errno.ENOSPC, errno.EDQUOT))
"""How the system says that a disk is full, or what its user may have of it."""
TAKES_NOTHING = NO_ROOM | {errno.EROFS}
"""How it says that nothing can be written there for now. EROFS: the kernel lets a file system be read alone
once its disk fails, until it is mounted anew."""
AWAY = frozenset(
    (errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.ESHUTDOWN, errno.ECONNABORTED, errno.ECONNRESET,
     errno.ECONNREFUSED, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENOLINK, errno.EIO)
)  # fmt: skip
"""How it says that a mount's server does not answer, or that the program behind it (FUSE) is gone. EIO: of an
NFS mount with `soft`; and of a disk that fails, which may have lost that file alone."""
MAY_PASS = TAKES_NOTHING | AWAY
"""What is no fault of the job that meets it, and may be otherwise later."""


def saved_before() -> int | None:
    """The newest step that attempts before have saved, as the engine knows; None: none has trained."""
    text = os.environ.get(ENV_DURABLE_STEP, "")
    return int(text) if text.isdecimal() else None


def raise_fence(run: RunDir, attempt: int | None) -> int:
    """Let `attempt` write and none before it; never lowers. Returns the fence now in force.

    None is the next attempt: of several that begin at once, each is another. Where the disk is full, what
    earlier attempts left of their saves gives way.
    """
    make_directory(run.path)
    lock = os.open(run.path / ".fence.lock", os.O_CREAT | os.O_RDWR, 0o644)
    try:
        _lock(lock, run.path)
        current = read_fence(run)
        fence = current + 1 if attempt is None else max(attempt, current)
        if fence > current:
            try:
                replace_durably(run.fence, str(fence))
            except OSError as error:
                if error.errno not in NO_ROOM or not remove_unfinished(run, fence):
                    raise
                replace_durably(run.fence, str(fence))
        return fence
    finally:
        os.close(lock)


def _lock(file: int, path: Path) -> None:
    """Wait for it. Where there are no locks a late attempt could lower the fence, so that is told."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
            raise
        why = f"{os.strerror(error.errno)}: its mount has no locks, which keep a late attempt from writing; "
        remedy = "mount Lustre with the option flock, NFS with version 4 or with its lock daemon"
        raise OSError(error.errno, f"{why}{remedy}", str(path)) from error


UNFINISHED = re.compile(r"\.step-(\d{8,})\.attempt-(\d+)(\.save-\d+)?")
"""The name of a save's directory until it is a checkpoint: its step, its attempt."""


def remove_unfinished(run: RunDir, attempt: int) -> int:
    """Remove what saves of `attempt` and earlier ones left half-done; returns how many there were."""
    removed = 0
    for path in list(run.checkpoints.iterdir()) if is_directory(run.checkpoints) else []:
        match = UNFINISHED.fullmatch(path.name)
        if match and int(match[2]) <= attempt:
            shutil.rmtree(path, ignore_errors=True)
            removed += 1
    return removed


# --------------------------------------------------------------------- ledger
# One JSON object a line, "event" first; times are seconds since the epoch.
#
#   {"event": "attempt_start", "time", "attempt", "world_size", "resumed_step", "resumed_from",
#    "useful_seconds", "skipped": [{"checkpoint", "reason"}], "differences": ["what: then -> now", or
#    "not deterministic: operation"],
#    "startup": {"import": s, "rendezvous": s, "build": s, "load": s}}: one after the other, up to "time"
#   {"event": "first_step", "time", "attempt", "step", "seconds"}
#   {"event": "checkpoint", "time", "attempt", "step", "bytes", "seconds", "stall_seconds", "digest",
#    "useful_seconds"}
#   {"event": "checkpoint_failed", "time", "attempt", "step", "error"}
#   {"event": "differs", "time", "attempt", "step", "difference"}: of a step done again, or of what
#       the first step after a resume shows to have begun anew, in words
#   {"event": "failure", "time", "attempt", "rank", "step", "error"}: by the rank that raised
#   {"event": "hang", "time", "attempt", "rank", "step", "seconds", "stands", "stacks"}: by each rank that
#       notices; the end of its stacks (8 KiB) for the 8 ranks that tell most, all of them in rank-N.stacks
#   {"event": "validation", "time", "attempt", "step", "val_loss"}: of the last step, which no later
#       checkpoint carries on
#   {"event": "stop", "time", "attempt", "outcome", "step", "durable_step", "error", "digest",
#    "useful_seconds"}: by rank 0;
#       digest (SHA-256 over the state of every rank) is that of the checkpoint of "durable_step"
#
# useful_seconds (null: not known) is what all attempts together spent on the steps that "resumed_step",
# "step" of a checkpoint, "durable_step" of a stop cover, each as it was last done.
#
# steps.jsonl: {"step", "time", "seconds", "data_seconds", "tokens", "loss", "loss_hex"} for each step when
# it ends (seconds of rank 0, tokens of all ranks); what is known of it a step later only has a further line
# without "seconds". The step that ends an epoch has {"epoch", "epoch_steps", "epoch_seconds",
# "epoch_tokens", "epoch_samples", "epoch_loss", "epoch_gpu_utilization" or "epoch_cpu_utilization"} too, of
# the steps that this attempt did of it.
# {"step", "time", "val_loss", "val_loss_hex"} for each validation. loss_hex is
# float.hex(): equality of curves is equality of bits.


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON objects of a .jsonl file; [] where it is missing, and a torn last line is left out."""
    with suppress(FileNotFoundError):  # its job may be deleted in this moment
        if exists(path):
            return parse_lines(path.read_text(encoding="utf-8", errors="replace"))
    return []


def newest_lines(path: Path, most: int) -> list[dict[str, Any]]:
    """As `read_lines`, but for what comes before the last `most` bytes."""
    return parse_lines(newest_bytes(path, most).decode("utf-8", "replace")) if exists(path) else []


def newest_bytes(path: Path, most: int) -> bytes:
    """The last `most` bytes of a file, all of it where there are fewer. Raises OSError."""
    with open(path, "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - most))
        return file.read()


def parse_lines(text: str) -> list[dict[str, Any]]:
    """The JSON objects among the lines; what is none is left out."""
    lines = []
    for line in text.splitlines():
        try:
            body = _parsed(line)
        except ValueError:
            continue
        if isinstance(body, dict):
            lines.append(body)
    return lines


def line_of(body: Mapping[str, Any]) -> bytes:
    """A line of a .jsonl file. JSON has no word for NaN and infinite: such a figure is null."""
    return (json.dumps(_in_json(body)) + "\n").encode()


def _in_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _in_json(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _parsed(text: str) -> Any:
    """Of a text that a program of anybody's may have written; a figure that is not finite is None, as
    nothing that we write can hold it. Raises ValueError."""
    try:
        value = _DECODER.decode(text)
    except RecursionError:
        raise ValueError(f"not JSON that can be read: {text[:40]!r}") from None
    if text.count("{") + text.count("[") > DEEPEST and deeper_than(DEEPEST, value):
        raise ValueError(f"nested deeper than {DEEPEST} levels: {text[:40]!r}")
    return value


def deeper_than(levels: int, value: object) -> bool:
    """Whether mappings and lists lie deeper within one another; without recursion, however deep they are."""
    here: list[Any] = [[value]]
    for _ in range(levels + 2):
        here = [
            item
            for holder in here
            for item in (holder.values() if isinstance(holder, dict) else holder)
            if isinstance(item, dict | list)
        ]
        if not here:
            return False
    return True


def _finite(digits: str) -> float | None:
    value = float(digits)
    return value if math.isfinite(value) else None


DEEPEST = 100
"""Mappings and lists within one another: from some 250 on nothing can write them as JSON again."""
_DECODER = json.JSONDecoder(parse_constant=lambda _: None, parse_float=_finite)
"""One for all lines: to make it takes longer than to read one."""


# ------------------------------------------------------------------- progress


STILL_SECONDS = 30.0
"""A trainer that does nothing for longer than this, and than ten of its steps take, has no speed to tell."""


@dataclass(frozen=True)
class Progress:
    """What rank 0 answers at `/progress`, and says in its termination message when it ends.

    Measured in this attempt, but for `useful_seconds`, `durable_seconds` and `resumed_seconds`. None means
    not known yet, never zero. `tokens_per_second` and `samples_per_second` are over the recent steps, of all
    ranks together; `data_wait_fraction` is the share of step time spent waiting for data; `eta_seconds`
    covers the steps that are left, with validations and saves between them as often as there were so far.
    These, `mfu` and how busy the device is are None also where nothing was done for `STILL_SECONDS` and
    for as long as ten steps take: a run that hangs has no speed, nor has one whose loop is over.
    """

    attempt: int
    step: int
    total_steps: int | None
    durable_step: int
    phase: str
    """starting | training | validating | saving | stopping | finished"""
    loss: float | None = None
    loss_ema: float | None = None
    """Mean of the attempt's losses, each counting 2 % less than the one after it."""
    val_loss: float | None = None
    tokens_per_second: float | None = None
    samples_per_second: float | None = None
    step_seconds: float | None = None
    data_wait_fraction: float | None = None
    mfu: float | None = None
    gpu_utilization: float | None = None
    """Share of the newest second or two in which a kernel ran on rank 0's GPU, anybody's, as NVML says."""
    cpu_utilization: float | None = None
    """Of a rank 0 that computes on the CPU: what it used of the cores that it may compute on, likewise."""
    memory_bytes: int | None = None
    """Rank 0's at most so far: of a GPU what tensors took, else what was resident."""
    epoch: float | None = None
    """How often all attempts together went through the data."""
    grad_norm: float | None = None
    eta_seconds: float | None = None
    verdict: str | None = None
    """Where a step's time goes, what holds it back, and what to change."""
    attention: str | None = None
    """The kernel of scaled-dot-product attention: flash, flash and products, efficient, cudnn, math."""
    world_size: int | None = None
    resumed_step: int | None = None
    """The step of the checkpoint that this attempt went on from; 0: it began anew."""
    resumed_seconds: float | None = None
    """Spent on steps 1 to `resumed_step`, as `useful_seconds`."""
    first_step: int | None = None
    first_step_time: float | None = None
    """Seconds since the epoch at which this attempt's first step was done."""
    process_time: float | None = None
    """Seconds since the epoch at which rank 0's process began; from then on:"""
    import_seconds: float | None = None
    rendezvous_seconds: float | None = None
    build_seconds: float | None = None
    load_seconds: float | None = None
    checkpoints: int | None = None
    """How many this attempt has made durable."""
    save_fault: str | None = None
    """Why the newest save that has ended failed; None where it did not."""
    useful_seconds: float | None = None
    """Spent on steps 1 to `step`, each in the attempt whose work of it is the one that counts."""
    durable_seconds: float | None = None
    """Spent on steps 1 to `durable_step`, likewise."""
    digest: str = ""
    """Of the checkpoint of `durable_step`, where this attempt made it."""
    updated: float = 0.0
    """Seconds since the epoch at which this was true."""
    quiet_seconds: float | None = dataclasses.field(default=None, compare=False)
    """Since the last step or part of one, when this was asked."""
    quiet_limit: float | None = dataclasses.field(default=None, compare=False)
    """From so many quiet seconds on the gang cannot help itself: its own watchdogs would have ended it. None
    while these do not watch, as after the loop."""
    asked: float | None = dataclasses.field(default=None, compare=False)
    """Seconds since the epoch at which this was asked, by rank 0's clock, as all its times are."""

    def to_json(self) -> str:
        """Its sentences are cut to what `from_json` takes: an object store's error can be pages long."""
        return json.dumps(self._body())

    def _body(self) -> dict[str, Any]:
        told: dict[str, Any] = _in_json(dataclasses.asdict(self))
        words = {name: _shortened(value) for name, value in told.items() if isinstance(value, str)}
        return told | words

    @classmethod
    def from_json(cls, text: str) -> Progress:
        """Raises ValueError where the text is no progress document; unknown keys are ignored."""
        return cls.from_document(_parsed(text))

    @classmethod
    def from_document(cls, body: Any) -> Progress:
        """As `from_json`, of a text that was parsed. A program of anybody's may have written it."""
        if not isinstance(body, dict):
            raise ValueError(f"not a progress document: {str(body)[:40]!r}")  # noqa: TRY004  as all others
        kinds = {f.name: str(f.type) for f in dataclasses.fields(cls)}
        for name, kind in kinds.items():
            if name in body and not _is(name, kind, body[name]):
                raise ValueError(f"not a progress document: {name} is {str(body[name])[:40]!r}, no {kind}")
        told: dict[str, Any] = {
            name: legible(value) if isinstance(value, str) else value
            for name, value in body.items()
            if name in kinds
        }
        try:
            return cls(**told)
        except TypeError as error:
            raise ValueError(f"not a progress document: {error}") from error


_LARGEST_COUNT = 2**53
"""Counts below it are the same wherever JSON is read."""
_LATEST = 253_402_300_800
"""Seconds from the epoch to the year 10000, which no calendar here has."""
_LONGEST = 1000
"""Characters of a word or sentence."""


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def is_time(value: object) -> TypeGuard[float]:
    """Whether it can be seconds since the epoch."""
    return isinstance(value, int | float) and 0 <= value < _LATEST


def is_count(value: object) -> TypeGuard[int]:
    """Whether it can be a number of steps, ranks and the like."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _LARGEST_COUNT


_TO_A_TERMINAL = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?|(?:\x1b\]|\x9d)[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?|\x1b[ -/]*[0-~]?"
    r"|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]"
)
"""Colours, where the cursor goes, the window's title (ECMA-48), each also as one character of its own, and
all other control characters but the ends of lines and tabs."""


def legible(text: str) -> str:
    """As it is, but for what a program tells its terminal, and for what UTF-8 has no bytes for: half a
    surrogate pair, which JSON can spell."""
    return _TO_A_TERMINAL.sub("", text).encode("utf-8", "replace").decode()


def is_figure(value: object) -> TypeGuard[float]:
    """Whether it is a number that JSON and a metric can hold: finite."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < _LARGEST_COUNT if isinstance(value, int) else math.isfinite(value)


def _is(name: str, kind: str, value: object) -> bool:
    """Whether a value read from JSON may stand in a field so called and annotated."""
    if value is None:
        return kind.endswith("| None")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return kind.startswith("str") and isinstance(value, str) and len(value) <= _LONGEST
    if name in ("updated", "first_step_time", "process_time", "asked"):
        return is_time(value)
    if isinstance(value, int):
        return not kind.startswith("str") and is_count(value)
    return kind.startswith("float")


# -------------------------------------------------------- termination message

Outcome = Literal["finished", "interrupted", "failed", "hung"]
CUT = "..."
"""Before the end of an error, where the beginning found no room."""
TERMINATION_LIMIT = 4096
"""Kubernetes keeps at most 4 KiB of a termination message."""


@dataclass(frozen=True)
class Termination:
    """Why a replica ended, as the trainer itself saw it.

    `step` is the last step done, `durable_step` the newest one covered by a
    committed checkpoint (0: none). `config_error` marks what no retry can mend,
    `storage_unavailable` an end for want of room in the run directory to begin, or of an answer of its
    object store: no fault of the job's.
    `progress` is rank 0's last word on all its figures; of other ranks it is None.
    """

    outcome: Outcome
    step: int
    durable_step: int
    error: str = ""
    config_error: bool = False
    progress: Progress | None = dataclasses.field(default=None, compare=False)
    storage_unavailable: bool = False

    def to_json(self) -> str:
        """JSON of at most `TERMINATION_LIMIT` bytes. A long error keeps its end; the sentences of a progress
        that would leave it less than a quarter are left out."""
        body = _in_json(dataclasses.asdict(dataclasses.replace(self, progress=None)))
        if self.progress is not None:
            body["progress"] = self.progress._body()
            if len(json.dumps(body["progress"])) > TERMINATION_LIMIT * 3 // 4:
                body["progress"] |= {"verdict": None, "save_fault": None}
        text = json.dumps(body)
        while (over := len(text) - TERMINATION_LIMIT) > 0:
            body["error"] = CUT + body["error"][over + len(CUT) + over // 4 :]
            text = json.dumps(body)
        return text

    @classmethod
    def from_json(cls, text: str) -> Termination | None:
        """The message, or None where the text is not one of ours (never raises)."""
        try:
            body = _parsed(text)
            outcome, step, durable_step = body["outcome"], body["step"], body["durable_step"]
            if outcome not in get_args(Outcome) or not (is_count(step) and is_count(durable_step)):
                return None
            return cls(
                outcome,
                step,
                durable_step,
                legible(str(body.get("error", ""))),
                bool(body.get("config_error", False)),
                _progress_of(body.get("progress")),
                bool(body.get("storage_unavailable", False)),
            )
        except (ValueError, KeyError, TypeError):
            return None


def _progress_of(told: Any) -> Progress | None:
    """None also where it is none: the message counts without it."""
    try:
        return None if told is None else Progress.from_document(told)
    except ValueError:
        return None


def write_termination(path: Path, message: Termination | str) -> None:
    """Write the message unless one is there: of a replica's ranks the first to speak is heard.

    A missing or read-only file is no error: outside a job there is nobody to read it.
    """
    try:
        with open(path, "a+", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            if not file.read(1):
                file.write(message if isinstance(message, str) else message.to_json())
    except OSError:
        pass
