"""One controller acts, the others stand by: a Lease (coordination.k8s.io/v1) says which.

Whoever holds it renews it; whoever wants it waits until it was not renewed for its whole duration, by his
own clock from when he saw the last renewal: clocks of different machines are never compared. The holder
counts from before its request was sent, and only two thirds of the duration: it stops writing (see
`Connection.guarded`) before anybody else can start, even where it is paused or cut off meanwhile. A
request that was under way at that moment may still arrive; resourceVersions and names that follow from
job and attempt make it a conflict or a repetition.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime

import structlog

from holdfast_controller.cluster import AlreadyExists, Conflict, HoldfastError, NotFound
from holdfast_controller.metrics import WatchMetrics

from .connection import Connection, Document

PER_SECOND, BURST = 50.0, 50
"""Requests of its own, more than it ever sends."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class LeaseTiming:
    """In seconds; whole ones for the duration, as the API keeps it."""

    duration: int = 15
    retry: float = 2.0


@dataclass(frozen=True)
class Seen:
    """A record of the lease, and when we first saw it."""

    version: str
    at: float


class Leadership:
    """Of the lease `name`, for `identity`; a name nobody else may have."""

    def __init__(
        self,
        connection: Connection,
        namespace: str,
        name: str,
        identity: str,
        *,
        timing: LeaseTiming | None = None,
        metrics: WatchMetrics | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        # It is too late when all that waits its turn was sent, or a busy apiserver wants to be asked again.
        self._connection = connection.for_lease(PER_SECOND, BURST)
        self._collection = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._namespace = namespace
        self._name = name
        self._identity = identity
        self._timing = timing or LeaseTiming()
        self._clock = clock
        self._until = float("-inf")
        self._seen = Seen("", 0.0)
        if metrics is not None:
            metrics.leader.set_function(lambda: float(self.leads))

    @property
    def leads(self) -> bool:
        """Whether this one may write now."""
        return self._clock() < self._until

    async def run(self, work: Callable[[], Awaitable[None]]) -> None:
        """Until cancelled: stand by, and do `work` whenever and as long as we lead.

        What `work` raises ends it. The lease is given back at the end.
        """
        working: asyncio.Future[None] | None = None
        try:
            while True:
                await self._try()
                if self.leads and working is None:
                    log.info("leads", lease=self._name, identity=self._identity)
                    working = asyncio.ensure_future(work())
                elif not self.leads and working is not None:
                    log.warning("leads no more", lease=self._name, identity=self._identity)
                    await _ended(working)
                    working = None
                await self._pause(working)
        finally:
            if working is not None:
                await _ended(working)
            await self._give_back()

    async def _pause(self, working: asyncio.Future[None] | None) -> None:
        """Until it is time to try again, we lead no more, or the work has ended by itself."""
        seconds = self._timing.retry
        if working is None:
            await asyncio.sleep(seconds)
            return
        await asyncio.wait((working,), timeout=max(0.0, min(seconds, self._until - self._clock())))
        if working.done():
            working.result()
            raise RuntimeError("the leader's work ended though nobody asked it to")

    async def _try(self) -> None:
        """Renew or take the lease, where it can be had."""
        began = self._clock()
        try:
            # Whoever leads must not find out later than it may write that nobody answers.
            async with asyncio.timeout(self._timing.duration / 3):
                if await self._write():
                    self._until = began + self._timing.duration * 2 / 3
        except (HoldfastError, TimeoutError) as error:
            log.warning("the lease cannot be written", lease=self._name, error=str(error) or "no answer")

    async def _write(self) -> bool:
        """Whether it is ours now."""
        try:
            lease = await self._connection.get(f"{self._collection}/{self._name}")
        except NotFound:
            fresh = {
                "apiVersion": "coordination.k8s.io/v1",
                "kind": "Lease",
                "metadata": {"name": self._name, "namespace": self._namespace},
                "spec": self._spec(None),
            }
            with suppress(AlreadyExists):
                await self._connection.post(self._collection, fresh)
                return True
            return False
        spec = lease.get("spec") or {}
        if spec.get("holderIdentity") not in (None, "", self._identity) and not self._ran_out(lease, spec):
            self._until = float("-inf")
            return False
        lease["spec"] = self._spec(spec)
        try:
            await self._connection.put(f"{self._collection}/{self._name}", lease)
        except Conflict:
            return False
        return True

    def _ran_out(self, lease: Document, spec: Document) -> bool:
        version = lease["metadata"]["resourceVersion"]
        if version != self._seen.version:
            self._seen = Seen(version, self._clock())
        duration = spec.get("leaseDurationSeconds") or self._timing.duration
        return self._clock() - self._seen.at > duration

    def _spec(self, old: Document | None) -> Document:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        mine = old is not None and old.get("holderIdentity") == self._identity
        before = old or {}
        return {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": self._timing.duration,
            "acquireTime": before.get("acquireTime", now) if mine else now,
            "renewTime": now,
            "leaseTransitions": int(before.get("leaseTransitions") or 0) + (0 if mine or old is None else 1),
        }

    async def _give_back(self) -> None:
        """So that the next one need not wait. What we hold no more is left alone."""
        if not self.leads:
            return
        self._until = float("-inf")
        path = f"{self._collection}/{self._name}"
        with suppress(HoldfastError, TimeoutError):
            async with asyncio.timeout(self._timing.duration / 3):
                lease = await self._connection.get(path)
                if lease["spec"].get("holderIdentity") == self._identity:
                    lease["spec"]["holderIdentity"] = ""
                    await self._connection.put(path, lease)


async def _ended(working: asyncio.Future[None]) -> None:
    working.cancel()
    await asyncio.gather(working, return_exceptions=True)
