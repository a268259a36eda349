"""The port between decisions and the world: a job store, an engine, and their errors.

Errors::

    HoldfastError
    ├── NotFound          no such job, attempt, rank
    ├── AlreadyExists     the name is taken
    ├── Conflict          somebody else wrote first: read again, decide again
    ├── Invalid           the request can never be carried out as it is written
    ├── NotReady          not now: nothing is running, no progress yet
    └── Unavailable       the store or the engine could not be reached; try again

Adapters live in `local/` and `kube/`; nothing else knows which one it talks to.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, Literal, Protocol

from holdfast_trainer.contract import Progress, Termination, legible

from .drills import DrillKind
from .heartbeat import Silence
from .jobs import Status, TrainingJob, Verdict


class HoldfastError(Exception):
    """The message names the offending value and what to do about it."""


class NotFound(HoldfastError):
    pass


class AlreadyExists(HoldfastError):
    @classmethod
    def of(cls, job: TrainingJob) -> AlreadyExists:
        """For another job of that name."""
        meta = job.metadata
        return cls(
            f"job {job.key} exists already; choose another name, as with --set metadata.name=NAME, or delete "
            f"it first: holdfast delete {meta.name} -n {meta.namespace}"
        )


class Conflict(HoldfastError):
    pass


class Invalid(HoldfastError):
    """`errors` holds one line per fault, each with the path of the offending key."""

    def __init__(self, message: str, errors: list[str] | None = None):
        super().__init__(message)
        self.errors = errors or []


class NotReady(HoldfastError):
    pass


class Unavailable(HoldfastError):
    retry_after = 0.0
    """Seconds after which to ask again, where whoever refused said so."""


# ------------------------------------------------------------------ job store


@dataclass(frozen=True)
class Change:
    """One event of a watch. `type` is ADDED, MODIFIED or DELETED."""

    type: str
    job: TrainingJob


@dataclass(frozen=True)
class Event:
    """Something worth telling about a job; kept with it."""

    time: datetime
    type: str
    """Normal or Warning"""
    reason: str
    message: str
    count: int = 1


@dataclass(frozen=True)
class Idempotency:
    """A client's promise that two requests with one key are one request (the Idempotency-Key header).

    `fingerprint` is a digest of the request's body: one key with two bodies is a client's mistake.
    """

    key: str
    fingerprint: str


class JobStore(Protocol):
    """Where TrainingJobs are kept. Every write is checked against `resourceVersion`."""

    @property
    def fault(self) -> str | None:
        """Why nothing can be written, so that what is read may be out of date; None as far as is known."""

    async def create(self, job: TrainingJob, *, idempotency: Idempotency | None = None) -> TrainingJob:
        """Keep a new job, or return the one that this key (within its namespace) made before.

        Raises AlreadyExists where the name is taken, Conflict where the key came with another
        fingerprint, or made a job that is no longer there.
        """

    async def get(self, namespace: str, name: str) -> TrainingJob:
        """Raises NotFound."""

    async def list_jobs(self, namespace: str | None = None) -> list[TrainingJob]:
        """All jobs (of a namespace), oldest first."""

    async def replace_spec(self, job: TrainingJob) -> TrainingJob:
        """Write spec, labels and annotations; adds 1 to generation where spec changed.

        Raises Conflict, NotFound.
        """

    async def replace_status(self, job: TrainingJob, status: Status, *events: Event) -> TrainingJob:
        """Write status alone, and keep the events that it comes with: in the same act where the store has
        such, else right after it, and one that cannot be kept is in the way of nothing then.

        Raises Conflict where `job` is not the newest version, NotFound; no event is kept then.
        """

    async def mark_deleted(
        self, namespace: str, name: str, *, known: TrainingJob | None = None
    ) -> TrainingJob:
        """Set deletionTimestamp; the reconciler stops what runs and then calls `remove`.

        Given the job as it is `known`, only where that is the newest version; raises Conflict else. Raises
        NotFound.
        """

    async def remove(self, job: TrainingJob) -> None:
        """Forget the job; no error where it is gone already or another job has its name now (uid).

        One that nobody has marked as deleted is forgotten only as it is known: an apiserver raises Conflict
        where `job` is not the newest version.
        """

    def watch(self, namespace: str | None = None) -> AsyncIterator[Change]:
        """All jobs, or a namespace's, as ADDED first, then every change, for ever; may merge a job's."""

    async def record_event(self, job: TrainingJob, event: Event) -> None:
        """Keep an event; a repeat of the newest (same reason and message) adds to its count."""

    async def events(self, namespace: str, name: str) -> list[Event]:
        """Oldest first, at most 200. Raises NotFound."""


# --------------------------------------------------------------------- engine


class ReplicaState(StrEnum):
    PENDING = "Pending"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


@dataclass(frozen=True)
class RankExit:
    """How one rank's process ended: exactly one of `code` and `signal` is set."""

    rank: int
    code: int | None = None
    signal: int | None = None
    ended: float = 0.0
    """Seconds since the epoch; the earliest is usually the cause, the others its victims."""
    peak_bytes: int | None = None
    """The most memory that one process of it had at a time."""
    said: str = ""
    """The last lines of what it wrote, where it ended with a code other than 0."""

    @classmethod
    def from_document(cls, rank: int, end: Mapping[str, Any]) -> RankExit:
        """As its supervisor tells it (holdfast_trainer/supervise.py). Raises KeyError where it does not."""
        said = end.get("said")
        words = legible(said) if isinstance(said, str) else ""
        return cls(rank, end.get("code"), end.get("signal"), end["ended"], end.get("peak_bytes"), words)


@dataclass(frozen=True)
class ReplicaObservation:
    """One replica of one attempt, as the engine sees it now."""

    index: int
    state: ReplicaState
    reason: str = ""
    """Why it waits, or why the platform took it (Drilled, Evicted, Vanished ...)."""
    disrupted: bool = False
    """The platform itself says that it took this replica."""
    lost_node: bool = False
    """Nobody could tell how it ended: its node is gone, or has fallen silent."""
    stuck: Verdict | None = None
    """What keeps one that waits from starting, where it is Unschedulable or ImagePull."""
    placed_at: datetime | None = None
    """When it got its node, and with it its GPUs; None where it has none, or has started."""
    out_of_memory: bool = False
    over_limit: str = ""
    """What the platform ended it for that it did itself, and what helps: its own disk was full."""
    not_started: str = ""
    """Why it could not be started on its node, and what helps: it has ended, and nothing of it ever ran."""
    exit_code: int | None = None
    exit_signal: int | None = None
    torchrun_said: str = ""
    """The last line, where it ended before it had started a rank: no rank can tell why."""
    termination: Termination | None = None
    ranks: tuple[RankExit, ...] = ()
    ended_at: float | None = None
    """Seconds since the epoch; None while it runs, and where nobody knows."""
    due: float | None = None
    """Of one that has not ended: when its grace is over, in seconds since the epoch; None: nobody took it."""


@dataclass(frozen=True)
class Place:
    """Where one replica was put, as far as its node says."""

    node: str
    capacity: Literal["Spot", "OnDemand"] | None = None
    instance_type: str = ""
    price_per_hour: float | None = None
    """Of the share of the node that the replica takes; None: nobody gave the node a price."""
    currency: str = ""


@dataclass(frozen=True)
class AttemptObservation:
    """A snapshot of one attempt. `gone` is true when nothing of it can run or write any more."""

    attempt: int
    exists: bool
    gone: bool
    replicas: tuple[ReplicaObservation, ...] = ()
    waiting: str = ""
    """Why it has not started, in a sentence that says what would help; empty when it has."""
    stopping: bool = False
    """A stop was asked for (suspend, delete) and is under way."""
    progress: Progress | None = None
    silence: Silence | None = None
    """How rank 0 has not been heard of; None where nobody has asked it."""
    kept_out: str = ""
    """What keeps rank 0 from being asked, in a sentence; empty where nothing does."""
    nameless: str = ""
    """Why replicas cannot find each other, though they run, likewise."""
    started_at: datetime | None = None
    places: tuple[Place, ...] = ()
    """Of the replicas that have one."""
    placed_at: datetime | None = None
    """When the last of them got it; None while one is missing."""
    put_aside: str = ""
    """Of one that is over: why its queue took it back, and wants no other; empty: the next one may queue."""

    @property
    def up(self) -> int:
        """How many replicas run."""
        return sum(replica.state is ReplicaState.RUNNING for replica in self.replicas)


@dataclass(frozen=True)
class Plan:
    """What a submission would do: the dry run. `reasons` says why it could not run here; empty: it can."""

    engine: str
    manifests: tuple[dict[str, Any], ...]
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())
    waits: str = ""
    """What it would wait for once it was started, where others wait for that by now."""


@dataclass(frozen=True)
class GpuUse:
    """What a replica of an attempt does with one GPU that it holds, at one moment."""

    key: str
    attempt: int
    replica: str
    gpu: str
    """UUID; of a MIG device its own."""
    busy: float | None
    """Share of the time in which it was at work for the replica, 0 to 1; None: nobody can tell."""
    ranks: str = ""
    """Whose processes are on it, such as `0` or `2,3`; empty where none are, or they are not told apart."""


@dataclass(frozen=True)
class GpuGrant:
    """A GPU of this machine, by its number, that the local engine has given to a replica."""

    key: str
    attempt: int
    replica: int
    gpu: int


class Engine(Protocol):
    """Runs attempts. Every call is idempotent: names are functions of job and attempt."""

    name: str

    def plan(self, job: TrainingJob) -> Plan:
        """Pure: what would run for the next attempt of this job, and every reason why it could not here."""

    async def objections(self, job: TrainingJob) -> tuple[str, ...]:
        """What the program that the job names says against its configuration, a line each; none where it has
        nothing to say, or cannot be asked here."""

    async def start(self, job: TrainingJob, attempt: int) -> None:
        """Raise the fence and start the gang, or queue it; at once, no waiting for processes."""

    async def observe(self, job: TrainingJob, attempt: int) -> AttemptObservation:
        """Never raises NotFound: an attempt nobody started is `exists=False, gone=True`."""

    async def stop(self, job: TrainingJob, attempt: int) -> None:
        """Give every replica its notice; SIGKILL after the grace. Returns at once."""

    async def kill(self, job: TrainingJob, attempt: int, *, stacks: bool = False) -> None:
        """SIGKILL whatever of the attempt still runs (peers of a lost replica). Returns at once.

        With `stacks` its ranks write where they stand to their logs first, where the engine can ask them to;
        called again it kills whatever did not end of that.
        """

    async def drill(self, job: TrainingJob, attempt: int, replica: int, kind: DrillKind) -> None:
        """Disrupt one replica.

        Raises NotReady where it is not running, Invalid where this engine cannot do it, or not to this job.
        """

    async def delete(self, job: TrainingJob) -> None:
        """Remove all that the engine keeps of the job, and its run directory where that is the engine's own.

        One on a PersistentVolumeClaim is the user's, and stays.
        """

    def run_directory(self, job: TrainingJob) -> str:
        """Where its checkpoints, logs and ledger are, or will be, as people find them."""

    async def ledger(self, job: TrainingJob) -> list[dict[str, Any]]:
        """All ledger lines of all attempts that can be reached, in order (contract.py has the format)."""

    async def steps(self, job: TrainingJob) -> list[dict[str, Any]]:
        """All lines of steps.jsonl of all attempts, each with its "attempt".

        Raises NotReady where they are out of reach, or more than have room here, and says where they are.
        """

    async def ends_of_steps(self, job: TrainingJob) -> list[dict[str, Any]]:
        """Of each attempt at least the first lines and the last of these, from which its first and its last
        step are known. Raises NotReady likewise."""

    async def keep_logs(self, job: TrainingJob, attempt: int) -> None:
        """See to it that `logs` has at least the last lines of every rank of an attempt that has ended, after
        its processes are gone. What cannot be kept is logged, not raised."""

    def logs(
        self, job: TrainingJob, attempt: int, rank: int, *, follow: bool = False, tail: int | None = None
    ) -> AsyncIterator[str]:
        """Lines of a rank's output; with `follow` until the attempt is gone. Raises NotFound."""

    def changes(self) -> AsyncIterator[str]:
        """Keys (`namespace/name`) of jobs whose attempts may have changed."""
