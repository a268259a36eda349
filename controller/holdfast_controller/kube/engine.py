"""Attempts on Kubernetes, made in the kind that the cluster's operator has chosen: an Engine (cluster.py).

`start` creates, and never changes what is there: an attempt's objects are named by job and attempt, and a
second call finds the first one's. The fence is not raised here, for the run directory is on storage that
the controller does not mount: rank 0 raises it when the attempt is admitted, before anything is read, by
the number that this engine gave it (holdfast_trainer/place.py). `stop` and `kill` mark the attempt
object with the time, then delete its pods and let no more be made (objects.py); ended pods stay as evidence
(observation.py) until `start` of the next attempt, `delete`, or the sweep of what no open attempt needs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

import structlog

from holdfast_controller.attempt_kind import AttemptKind
from holdfast_controller.cluster import (
    AttemptObservation,
    HoldfastError,
    Invalid,
    NotFound,
    NotReady,
    Place,
    Plan,
    ReplicaState,
    Unavailable,
)
from holdfast_controller.drills import DrillKind
from holdfast_controller.jobs import TrainingJob
from holdfast_controller.manifests import KINDS, kind_of
from holdfast_controller.pod_settings import PodSettings
from holdfast_controller.policy.cost import place_of
from holdfast_controller.policy.gpu_request import gpu_request, sharing_notes
from holdfast_controller.policy.peers import LOST_SECONDS
from holdfast_controller.policy.spec_notes import spec_notes

from . import ranks
from .connection import MERGE_PATCH, Connection, Document
from .endpoint import Endpoints
from .evidence import Evidence
from .going_on import going_on
from .last_words import LastWords, has_ended
from .nodes import Nodes
from .objects import Objects
from .observation import (
    KILLED,
    STOPPED,
    TAKEN,
    attempt_observation,
    deleted_by_others,
    first_made,
    without_pods,
)
from .pieces import Pieces, attempt_of, pod_path
from .pod_state import index_of, node_of, running
from .prepared import Prepared
from .queue_waits import put_aside, queue_waits
from .rank_logs import RankLogs
from .reflector import Reflector
from .slow_starts import slow_starts
from .steps import read_steps, run_directory
from .taking import KILL_GRACE_SECONDS, refuse, take
from .unmade import is_behind, unmade

log = structlog.get_logger(__name__)

AT_ONCE = 32
"""Pods of an attempt that something is done to at a time: where a webhook holds it up, other jobs go on."""


def no_operator(kind: AttemptKind) -> str:
    """Why no attempt can be made."""
    return (
        f"waits for {kind.operator}: the cluster has no CRD {kind.resource.crd}; "
        "install the operator (README, Kubernetes) and it goes on by itself"
    )


class KubeEngine:
    """Sees what `pieces`, `endpoints` and `jobs` see: those must be running, and `sweep` where it writes."""

    name = "kubernetes"

    def __init__(
        self,
        connection: Connection,
        pieces: Pieces,
        endpoints: Endpoints,
        jobs: Reflector,
        settings: PodSettings | None = None,
    ):
        """`connection` may be a guarded one; what is read (the others) may be shared with another engine."""
        self._connection = connection
        self._pieces = pieces
        self._endpoints = endpoints
        self._jobs = jobs
        self._settings = settings or PodSettings()
        self._kind = KINDS[self._settings.kind]
        self._prepared = Prepared(self._settings)
        self._objects = Objects(connection, pieces)
        self.last_words = LastWords(connection, pieces, endpoints, jobs)
        self._logs = RankLogs(connection, pieces, self.last_words)
        self._evidence = Evidence(connection, pieces, jobs, self.keep_logs)
        self._nodes = Nodes(connection, may_read=self._settings.read_nodes)
        self._slow_starts = slow_starts(connection, pieces)
        self._queue_waits = queue_waits(connection, pieces)
        self._unmade = unmade(connection, pieces)
        self._parsing = asyncio.Lock()

    # -------------------------------------------------------------- starting

    def plan(self, job: TrainingJob) -> Plan:
        try:
            manifests = self._prepared.manifests(job, job.status.attempt + 1)
        except Invalid as error:
            return Plan(self.name, (), tuple(error.errors or [str(error)]))
        notes = sharing_notes(job.spec.gpus)
        if notes and job.spec.replicas > 1:
            notes += ("Each replica gets a node of its own: NCCL refuses two ranks on one GPU.",)
        notes += tuple(note for _, note in spec_notes(job.spec))
        return Plan(self.name, tuple(manifests), notes=notes, waits=self._waits(job))

    def _waits(self, job: TrainingJob) -> str:
        """Known where `sweep` runs. A queue has to admit an attempt before anybody makes its pods."""
        waits = job.spec.queue is None and is_behind(self._unmade, self._pieces)
        return without_pods(self._kind) if waits else ""

    async def objections(self, job: TrainingJob) -> tuple[str, ...]:
        return ()  # it is in the job's image

    async def start(self, job: TrainingJob, attempt: int) -> None:
        if self._pieces.lacks(self._kind):
            return  # `observe` says what is missing, and once it is there, that the attempt is not started
        # Before it: once this attempt is there, it is started no more, and nobody would clear after us.
        earlier = [one for one in self._pieces.objects_of(job) if _number(one) < attempt]
        await asyncio.gather(*(self._objects.clear(job, _number(one), one) for one in earlier))
        if attempt > 1 and all(_number(one) != attempt - 1 for one in earlier):  # its object has gone already
            await self._objects.clear_beside(job, attempt - 1)
        there = self._pieces.object_of(job, attempt)
        if there is None or kind_of(there) is self._kind:  # not made before the kind was changed
            manifests = self._prepared.manifests(job, attempt)
            await self._objects.create(job, attempt, self._kind, manifests)
        ended = [pod for pod in self._pieces.all_pods_of(job) if _number(pod) < attempt]
        try:
            await _each(ended, partial(self._evidence.release, delete=True))
        except HoldfastError as error:  # without us they go too, with their object and the sweep
            log.warning("pods of an earlier attempt are still there", job=job.key, error=str(error))

    # ------------------------------------------------------------- observing

    async def observe(self, job: TrainingJob, attempt: int) -> AttemptObservation:
        await self._pieces.synced()
        attempt_object, pods = self._pieces.object_of(job, attempt), self._pieces.pods_of(job, attempt)
        if attempt_object is None and not pods and self._pieces.lacks(self._kind):
            if job.metadata.deletion_timestamp is not None or job.spec.suspend:
                return AttemptObservation(attempt, exists=False, gone=True)
            return AttemptObservation(attempt, exists=True, gone=False, waiting=no_operator(self._kind))
        record = job.status.record(attempt)
        is_open = record is not None and record.verdict is None
        if attempt_object is None and is_open and job.metadata.deletion_timestamp is None:
            attempt_object = await self._objects.find(job, attempt, self._kind)
            if attempt_object is not None and not pods and record is not None and record.started_at:
                raise Unavailable(
                    f"attempt {attempt} of {job.key} has started, and no watch has told of its pods yet; "
                    "nothing is decided before one does"
                )
        seen = attempt_observation(
            attempt,
            job.as_of(attempt).spec.replicas,
            attempt_object,
            pods,
            self._endpoints.progress_of(job, attempt),
            self._endpoints.silence_of(job, attempt),
            self._slow_starts.known,
            self._queue_waits.known,
            self._unmade.known,
        )
        judged = record is not None and record.verdict is not None
        # Of a job that is deleted no attempt is judged.
        if seen.exists and seen.gone and not judged and job.metadata.deletion_timestamp is None:
            seen = replace(seen, put_aside=await put_aside(self._connection, attempt_object))
        places = await self._places(job, attempt, pods)
        kept_out = self._endpoints.kept_out_of(job, attempt)
        seen = self._connection.clock.by_ours(self._endpoints.by_our_clock(job, seen))
        return replace(seen, places=places, kept_out=kept_out)

    async def _places(self, job: TrainingJob, attempt: int, pods: list[Document]) -> tuple[Place, ...]:
        """Where the replicas are, until the attempt's record has all of them. None is told of while a node
        cannot be read: what is on record is asked for no more, and a part has the price of a part."""
        spec, record = job.as_of(attempt).spec, job.status.record(attempt)
        made, _ = first_made(pods)
        named = [name for i in range(spec.replicas) if i in made and (name := node_of(made[i])) is not None]
        where = record.whereabouts if record is not None else None
        if where is not None and sum(where.capacity.values()) >= len(named):
            return ()
        nodes = await self._nodes.of(named, gpu_request(spec.gpus, spec.mig).resource)
        if any(name not in nodes for name in named):
            return ()
        return tuple(place_of(nodes[name], spec, self._settings.prices) for name in named)

    def changes(self) -> AsyncIterator[str]:
        return self._pieces.changes()

    async def sweep(self) -> None:
        """Keep what pods that go have said, let go of what nobody needs, and ask why others wait. Until
        cancelled."""
        works = {
            "last words": self.last_words.run,
            "evidence": self._evidence.sweep,
            "slow starts": self._slow_starts.run,
            "queue waits": self._queue_waits.run,
            "unmade": self._unmade.run,
        }
        async with asyncio.TaskGroup() as group:
            for what, work in works.items():
                group.create_task(going_on(what, work))

    def run_directory(self, job: TrainingJob) -> str:
        return run_directory(job)

    async def ledger(self, job: TrainingJob) -> list[dict[str, Any]]:
        known = await self._endpoints.ledger_of(job)
        return known if known or not self._is_over(job) else await self.last_words.ledger(job)

    def _is_over(self, job: TrainingJob) -> bool:
        """Whether rank 0 of the newest attempt can be asked no more. Its pod goes once that is judged."""
        record = job.status.record(job.status.attempt)
        if job.status.phase.final or (record is not None and record.verdict is not None):
            return True
        pods = self._pieces.pods_of(job, job.status.attempt)
        return any(index_of(pod) == 0 and has_ended(pod) for pod in pods)

    async def steps(self, job: TrainingJob) -> list[dict[str, Any]]:
        lines = await read_steps(job, self._pieces.pods_of(job, job.status.attempt), self._parsing)
        return self._endpoints.lines_by_our_clock(job, lines)

    async def ends_of_steps(self, job: TrainingJob) -> list[dict[str, Any]]:
        return await self.steps(job)

    async def keep_logs(self, job: TrainingJob, attempt: int) -> None:
        try:
            await self.last_words.keep_tails(job, attempt)
        except HoldfastError as error:  # readers alone miss them: they are in the run directory too
            log.warning(
                "the last lines of its ranks are not kept", job=job.key, attempt=attempt, error=str(error)
            )

    async def logs(
        self, job: TrainingJob, attempt: int, rank: int, *, follow: bool = False, tail: int | None = None
    ) -> AsyncIterator[str]:
        async for line in self._logs.lines(job, attempt, rank, follow=follow, tail=tail):
            yield line

    # ---------------------------------------------------------------- ending

    async def stop(self, job: TrainingJob, attempt: int) -> None:
        await self._end(job, attempt, STOPPED, None)

    async def kill(self, job: TrainingJob, attempt: int, *, stacks: bool = False) -> None:
        """Ranks are asked for their stacks once, and where the operator lets us run something in pods."""
        stacks = stacks and self._settings.exec_in_pods
        await self._end(job, attempt, KILLED, KILL_GRACE_SECONDS, stacks=stacks)

    async def _end(
        self, job: TrainingJob, attempt: int, mark: str, grace: int | None, *, stacks: bool = False
    ) -> None:
        """Mark, then delete: whoever sees a pod going can know by then that we asked for it.

        Pods before the attempt object: its deletion makes the garbage collector delete them with their whole
        grace, and a kubelet that has begun to wait for that does not always take less afterwards.
        """
        await self._pieces.synced()
        attempt_object = self._pieces.object_of(job, attempt)
        if attempt_object is not None:
            marks = set(attempt_object["metadata"].get("annotations") or {})
            if not {STOPPED, KILLED} & marks:
                await self._note_taken(job, attempt, attempt_object)
            # Of a job that is deleted nobody will ask who ended it.
            await self._objects.mark(attempt_object, mark, needed=job.metadata.deletion_timestamp is None)
            if stacks and KILLED not in marks:
                pods = self._pieces.pods_of(job, attempt)
                await ranks.abort(self._connection, [pod for pod in pods if running(pod)])
        pods = self._pieces.pods_of(job, attempt)
        if job.metadata.deletion_timestamp is None:
            await self.last_words.read(pods)
        all_made = len(pods) >= job.as_of(attempt).spec.replicas
        goes = attempt_object is not None and kind_of(attempt_object).ends_with_pods and not all_made
        noted = goes and job.metadata.deletion_timestamp is None  # at once, and the mark with it
        await _each(pods, partial(self._end_pod, grace=grace, mark=mark if noted else None))
        if attempt_object is not None and "deletionTimestamp" not in attempt_object["metadata"]:
            await self._objects.end(attempt_object, all_made=all_made)

    async def _note_taken(self, job: TrainingJob, attempt: int, attempt_object: Document) -> None:
        """Keep in mind which pods somebody else has deleted: later nothing would tell. Once, for each change
        of a pod wakes its job, and where its attempt cannot be marked this comes again in every pass."""
        for pod in self._pieces.pods_of(job, attempt):
            if deleted_by_others(pod, attempt_object):
                await self._note(pod, TAKEN)

    async def _note(self, pod: Document, what: str) -> None:
        """Write the time under this name on a pod, once."""
        if what not in (pod["metadata"].get("annotations") or {}):
            change = {"metadata": {"annotations": {what: datetime.now(UTC).isoformat()}}}
            with suppress(NotFound):
                await self._connection.patch(pod_path(pod), change, MERGE_PATCH)

    async def _end_pod(self, pod: Document, grace: int | None, mark: str | None) -> None:
        if mark is not None:
            await self._note(pod, mark)
        meta = pod["metadata"]
        going = "deletionTimestamp" in meta
        if going:
            left = float(meta.get("deletionGracePeriodSeconds") or 0)
            now = time.time() + self._connection.clock.ahead
            lost = now - datetime.fromisoformat(meta["deletionTimestamp"]).timestamp()
            if lost > LOST_SECONDS and left > 0:
                grace = 0
            elif grace is None or left <= grace:
                return
        options: Document = {"preconditions": {"uid": meta["uid"]}}
        if grace is not None:
            options["gracePeriodSeconds"] = grace
        with suppress(NotFound):
            await self._connection.delete(pod_path(pod), options)

    async def drill(self, job: TrainingJob, attempt: int, replica: int, kind: DrillKind) -> None:
        refuse(kind, self._settings)
        seen = await self.observe(job, attempt)
        if not seen.exists or seen.gone:
            raise NotReady(f"attempt {attempt} of {job.key} is not running")
        if not 0 <= replica < len(seen.replicas):
            raise NotFound(f"no replica {replica}: {job.key} has {len(seen.replicas)}, numbered from 0")
        found = seen.replicas[replica]
        if found.state is not ReplicaState.RUNNING or found.disrupted:
            raise NotReady(f"replica {replica} of {job.key} is not running: there is nothing to disrupt")
        await take(self._connection, self._pieces, job.as_of(attempt), attempt, replica, kind)

    async def delete(self, job: TrainingJob) -> None:
        """Remove all objects of the job. Its run directory stays: the controller does not mount it."""
        await self._pieces.synced()
        for attempt_object in self._pieces.objects_of(job):
            await self._objects.clear(job, _number(attempt_object), attempt_object)
        await _each(self._pieces.all_pods_of(job), partial(self._evidence.release, delete=True))


async def _each(pods: Sequence[Document], act: Callable[[Document], Awaitable[None]]) -> None:
    """Many at a time, for a gang may be wide, and none keeps the others from it. Raises the first error, once
    all are done."""
    free = asyncio.Semaphore(AT_ONCE)

    async def done(pod: Document) -> None:
        async with free:
            await act(pod)

    for error in await asyncio.gather(*map(done, pods), return_exceptions=True):
        if error is not None:
            raise error


def _number(piece: Document) -> int:
    """Of the attempt that one of a job's own pieces belongs to."""
    whose = attempt_of(piece)
    assert whose is not None  # by which it was found
    return whose[1]
