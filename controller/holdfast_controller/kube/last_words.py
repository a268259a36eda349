"""What nobody could ask for any more once a pod is gone: its last lines, and the ledger that rank 0 served.

As soon as a pod that is being deleted has ended, its kubelet removes the container, and the log with it, long
before the attempt is judged. So the log of a pod that is to go is read while it is there, what it has said so
far and beside that all of it to its end, and its last lines are noted on the pod itself, which our finalizer
keeps until the attempt has its verdict: a controller that comes later finds them. When these pods go, status
has the lines of a few ranks; those of a larger gang are in a ConfigMap beside the attempt. The ledger goes
into another when rank 0 has ended, for the run directory is on storage that we do not mount.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from typing import Any

import structlog
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_fixed

from holdfast_controller.cluster import AlreadyExists, HoldfastError, NotFound
from holdfast_controller.jobs import ATTEMPTS_KEPT, TrainingJob
from holdfast_controller.manifests import attempt_name, config_map
from holdfast_controller.policy.tails import end_of, last_of_each
from holdfast_trainer.contract import parse_lines

from .connection import MERGE_PATCH, Connection, Document
from .endpoint import Endpoints
from .observation import first_made
from .pieces import Pieces, attempt_of, job_of, pod_path
from .pod_state import forced, index_of, is_disrupted, last_output, running, terminated
from .podlogs import pod_lines
from .reflector import Notice, Reflector, uid_of
from .resource import decode

log = structlog.get_logger(__name__)

TAIL = "holdfast.dev/log-tail"
"""On a pod: the last lines of its output."""
LINES = 20
"""Of each rank."""
CHARACTERS = 4000
"""Likewise."""
LOOKED_AT = 1000
"""Lines of a pod with several ranks, among which those are that each of them said last."""
LOOKED_AT_CHARACTERS = 64 * CHARACTERS
"""Of these lines together: whoever writes them may make each as long as he likes."""
LEDGER_FILE = "ledger.jsonl"
LEDGER_CHARACTERS = 512 * 1024
"""Kubernetes keeps 1 MiB in a ConfigMap; of a longer ledger the newest lines are kept."""
READ_SECONDS = 2.0
"""For the logs of all pods that are about to be deleted: a lost node never answers."""
FOLLOW_SECONDS = 3600.0
KEPT_BYTES = 800 * 1024
"""Of the last lines of all pods of an attempt together, which are one ConfigMap."""
NOTED_BYTES = 200 * 1024
"""Of those of one pod: Kubernetes keeps 256 KiB of annotations."""
KEEP_TRIES = 30
TAILS_TRIES = 3
"""To keep last lines where an earlier job's are: the next attempt waits for it."""
KEEP_AGAIN_SECONDS = 1.0
"""Between two tries: who could write it has it in memory alone."""
FOLLOWED = 32
"""Logs that are followed at a time, each on a connection of its own; of more pods what they said before."""


class _Said:
    """By one pod, which has `ranks` of them, from `first` on."""

    def __init__(self, ranks: int, first: int) -> None:
        self._ranks, self._first = ranks, first
        lines = LINES if ranks == 1 else LOOKED_AT
        self.so_far: deque[str] = deque(maxlen=lines)
        self.to_the_end: deque[str] = deque(maxlen=lines)
        """As it comes."""
        self.followed = False
        """Whether that is read, or was."""
        self.over = asyncio.Event()
        """That nothing more of it will come."""
        self.broken_off = False
        """Whether we led no more before that."""
        self.noted = ""
        self.noting = asyncio.Lock()

    def text(self) -> str:
        """The last lines of each rank."""
        longer = len(self.so_far) > len(self.to_the_end)  # else it was torn before it had come as far
        last = self.so_far if longer else self.to_the_end
        if self._ranks == 1:
            return "\n".join(last)[-CHARACTERS:]
        return "\n".join(last_of_each(last, self._first, LINES, CHARACTERS))


class LastWords:
    """Of all pods of ours; `run` listens where we lead."""

    def __init__(self, connection: Connection, pieces: Pieces, endpoints: Endpoints, jobs: Reflector):
        self._connection = connection
        self._pieces = pieces
        self._endpoints = endpoints
        self._jobs = jobs
        self._free = asyncio.Semaphore(FOLLOWED)
        self._said: dict[str, _Said] = {}
        """Of pods that are to go, by uid."""
        self._kept: set[str] = set()
        """Pods whose ledger was kept, by uid."""

    async def run(self) -> None:
        """Until cancelled."""
        await self._jobs.synced()
        await self._pieces.synced()
        async with asyncio.TaskGroup() as group:

            def take(notice: Notice) -> None:
                if notice.type == "DELETED":
                    self._said.pop(uid_of(notice.object), None)
                    self._kept.discard(uid_of(notice.object))
                else:
                    self._see(notice.object, group)

            stop = self._pieces.pods.listen(take)
            try:
                for pod in self._pieces.pods.all():
                    self._see(pod, group)
                await asyncio.Event().wait()
            finally:
                stop()
                # Not every task that was made has begun: for when we lead again.
                self._kept.clear()
                for said in self._said.values():
                    said.broken_off = not said.over.is_set()

    def _see(self, pod: Document, group: asyncio.TaskGroup) -> None:
        uid = uid_of(pod)
        if attempt_of(pod) is None:
            return
        said = self._said.get(uid)
        # One whose end is heard together with its deletion has its log for a moment yet.
        if (running(pod) or has_ended(pod)) and _to_go(pod) and (said is None or said.broken_off):
            self._said[uid] = self._nothing_said(pod)
            # Both at once: it may end, and its log go, before what it has said so far was read and noted.
            group.create_task(_harmless(self._read, pod))
            group.create_task(_harmless(self._follow, pod))
        # Of one that was taken without grace, with its node perhaps, nobody may ever say that it has ended.
        if index_of(pod) == 0 and (has_ended(pod) or forced(pod)) and uid not in self._kept:
            self._kept.add(uid)
            group.create_task(_harmless(self._keep_ledger, pod))

    def _job_of(self, pod: Document) -> TrainingJob | None:
        """None where it is gone or going: nobody will ask. Raises Invalid where it cannot be read."""
        document = job_of(pod, self._jobs)
        if document is None or "deletionTimestamp" in document["metadata"]:
            return None
        return decode(document)

    # ------------------------------------------------------------------ tails

    async def read(self, pods: Sequence[Document]) -> None:
        """Note what these pods have said, which are about to be deleted; once each, and not for long."""
        new = [pod for pod in pods if uid_of(pod) not in self._said]
        self._said |= {uid_of(pod): self._nothing_said(pod) for pod in new}
        with suppress(TimeoutError):
            async with asyncio.timeout(READ_SECONDS):
                await asyncio.gather(*(_harmless(self._read, pod) for pod in new))

    async def tail_of(self, pod: Document) -> list[str] | None:
        """What it said last, as we heard it or a controller before; None where nobody did. That of a pod
        which has ended may be on its way, and is waited for, though not for long."""
        said = self._said.get(uid_of(pod))
        if said is not None and said.followed and has_ended(pod):
            with suppress(TimeoutError):
                await asyncio.wait_for(said.over.wait(), READ_SECONDS)
        text = said.text() if said is not None else ""
        text = text or str((pod["metadata"].get("annotations") or {}).get(TAIL, ""))
        return text.split("\n") if text else None

    async def keep_tails(self, job: TrainingJob, attempt: int) -> None:
        """Write down beside the attempt what its pods said last, which will go when it is judged; and remove
        that of an attempt which status has no more."""
        made, _ = first_made(self._pieces.pods_of(job, attempt))
        if not made:
            return
        pods = list(made.values())
        await self.read(pods)
        most = KEPT_BYTES // len(pods)
        tails = zip(pods, await asyncio.gather(*(self.tail_of(pod) for pod in pods)), strict=True)
        said = {index_of(pod): "\n".join(tail or ()) or last_output(pod) for pod, tail in tails}
        data = {str(index): _last_bytes(text, most) for index, text in said.items() if text}
        body = config_map(job, attempt, data, name=tails_name(job, attempt))
        await self._write(_config_maps(job), body, TAILS_TRIES, AlreadyExists)
        old = attempt - ATTEMPTS_KEPT
        if old > 0 and job.status.record(old) is None:
            with suppress(NotFound):
                await self._connection.delete(f"{_config_maps(job)}/{tails_name(job, old)}")

    async def kept_tail(self, job: TrainingJob, attempt: int, replica: int) -> list[str] | None:
        """What `keep_tails` wrote down; None where it did not."""
        with suppress(NotFound):
            text = (await self._read_map(job, attempt, tails_name(job, attempt))).get(str(replica))
            return text.split("\n") if text else None
        return None

    def _nothing_said(self, pod: Document) -> _Said:
        whose, ranks = attempt_of(pod), 1
        with suppress(HoldfastError):  # who reads will hear of it
            if whose is not None and (job := self._job_of(pod)) is not None:
                ranks = job.as_of(whose[1]).spec.processes_per_replica
        return _Said(ranks, ranks * (index_of(pod) or 0))

    async def _read(self, pod: Document) -> None:
        """What it has said so far."""
        said = self._said.get(uid_of(pod))
        if said is None or self._job_of(pod) is None:
            return
        await self._listen(pod, said.so_far, follow=False)
        await self._note(pod, said)

    async def _follow(self, pod: Document) -> None:
        said = self._said.get(uid_of(pod))
        if said is None or self._job_of(pod) is None:
            return
        async with self._free, asyncio.timeout(FOLLOW_SECONDS):
            said.followed = True
            try:
                await self._listen(pod, said.to_the_end, follow=True)
            finally:
                said.over.set()
            await self._note(pod, said)

    async def _listen(self, pod: Document, to: deque[str], *, follow: bool) -> None:
        lines = pod_lines(self._connection, pod, tail=to.maxlen, follow=follow, over=lambda: True)
        size = 0
        with suppress(NotFound):
            async with aclosing(lines):
                async for line in lines:
                    if len(to) == to.maxlen:
                        size -= len(to.popleft())
                    to.append(end_of(line, CHARACTERS))
                    size += len(to[-1])
                    while size > LOOKED_AT_CHARACTERS:
                        size -= len(to.popleft())

    async def _note(self, pod: Document, said: _Said) -> None:
        """On the pod, for a controller that comes later."""
        async with said.noting:
            text = _last_bytes(said.text(), NOTED_BYTES)
            if not text or text == said.noted:
                return
            with suppress(NotFound):
                change = {"metadata": {"annotations": {TAIL: text}}}
                await self._connection.patch(pod_path(pod), change, MERGE_PATCH)
            said.noted = text

    # ----------------------------------------------------------------- ledger

    async def _keep_ledger(self, pod: Document) -> None:
        whose, job = attempt_of(pod), self._job_of(pod)
        if whose is None or job is None:
            return
        lines = [json.dumps(line) for line in await self._endpoints.ledger_of(job)]
        if not lines:
            return
        while lines and sum(map(len, lines)) + len(lines) > LEDGER_CHARACTERS:
            del lines[: max(1, len(lines) // 10)]
        name = ledger_name(job, whose[1])
        try:
            body = config_map(job, whose[1], {LEDGER_FILE: "\n".join(lines)}, name=name)
            await self._write(_config_maps(job), body, KEEP_TRIES, HoldfastError)
        except BaseException:
            self._kept.discard(uid_of(pod))  # for when we lead again, or the pod changes
            raise

    async def _write(self, path: str, body: Document, tries: int, error: type[HoldfastError]) -> None:
        """Unless it is there; after an `error` the apiserver is asked again, as where it has yet to remove an
        earlier job's, which is AlreadyExists."""
        again = AsyncRetrying(
            wait=wait_fixed(KEEP_AGAIN_SECONDS),
            stop=stop_after_attempt(tries),
            retry=retry_if_exception_type(error),
            reraise=True,
        )
        async for attempt in again:
            with attempt:
                try:
                    await self._connection.post(path, body)
                except AlreadyExists:
                    with suppress(NotFound):  # it may have gone since
                        there = await self._connection.get(f"{path}/{body['metadata']['name']}")
                        if attempt_of(there) == attempt_of(body):
                            return
                    raise

    async def ledger(self, job: TrainingJob) -> list[dict[str, Any]]:
        """What was kept of it when its newest attempt, or the one before, ended; empty where nothing was."""
        for attempt in range(job.status.attempt, max(0, job.status.attempt - 2), -1):
            with suppress(NotFound):
                kept = await self._read_map(job, attempt, ledger_name(job, attempt))
                return parse_lines(kept.get(LEDGER_FILE, ""))
        return []

    async def _read_map(self, job: TrainingJob, attempt: int, name: str) -> dict[str, str]:
        """What a ConfigMap of this attempt holds. Raises NotFound, also where it is an earlier job's."""
        kept = await self._connection.get(f"{_config_maps(job)}/{name}")
        if attempt_of(kept) != (job.metadata.uid, attempt):
            raise NotFound(f"ConfigMap {job.metadata.namespace}/{name} is an earlier job's")
        return dict(kept.get("data") or {})


def _last_bytes(text: str, most: int) -> str:
    """Whole characters, of which one may have four."""
    return text.encode()[-most:].decode(errors="ignore")


def _to_go(pod: Document) -> bool:
    """Whether somebody wants its end."""
    return "deletionTimestamp" in pod["metadata"] or is_disrupted(pod)


def has_ended(pod: Document) -> bool:
    """Whether nothing of it runs any more: that its container has ended is told before its phase says so,
    and is enough for a verdict."""
    return not running(pod) and (terminated(pod) or pod["status"].get("phase") in ("Succeeded", "Failed"))


def _config_maps(job: TrainingJob) -> str:
    return f"/api/v1/namespaces/{job.metadata.namespace}/configmaps"


def tails_name(job: TrainingJob, attempt: int) -> str:
    return f"{attempt_name(job, attempt)}-tails"


def ledger_name(job: TrainingJob, attempt: int) -> str:
    return f"{attempt_name(job, attempt)}-ledger"


async def _harmless(work: Callable[[Document], Awaitable[None]], pod: Document) -> None:
    """What cannot be kept is missed by readers alone; the whole of it is in the run directory."""
    try:
        await work(pod)
    except (HoldfastError, TimeoutError) as error:
        log.info("its last words are not kept", pod=pod["metadata"]["name"], error=str(error) or "no answer")
    except Exception:  # whatever a job's own program has written must not end the others' controller
        log.exception("its last words cannot be read", pod=pod["metadata"]["name"])
