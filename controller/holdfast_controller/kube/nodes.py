"""What nodes say of themselves, asked for one by one when a pod lands there, and kept for a while.

Of a thousand nodes those are read that a job runs on. Whoever does not let the controller read nodes
(`jobs.readNodes` of the chart) gets attempts whose capacity and cost are unknown; nothing else changes. What
an apiserver in trouble does not answer is no such answer: it is asked again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import structlog

from holdfast_controller.cluster import HoldfastError, NotFound
from holdfast_controller.policy.cost import Node, offers
from holdfast_controller.policy.gpu_request import MIG

from .connection import Connection
from .errors import NotPermitted

log = structlog.get_logger(__name__)

KEPT_SECONDS = 600.0
"""Labels and sizes hardly ever change while a node lives."""
CUT_SECONDS = 10.0
"""Of a node with MIG devices: cut otherwise it has another number of the same ones."""
UNREAD_SECONDS = 10.0
"""Until one that could not be read is asked for again."""
NODES_KEPT = 10_000


class Nodes:
    """A cache of nodes by name."""

    def __init__(
        self, connection: Connection, clock: Callable[[], float] = time.monotonic, *, may_read: bool = True
    ):
        self._connection = connection
        self._may_read = may_read
        self._clock = clock
        self._known: dict[str, tuple[float, Node | None]] = {}
        """Until when, and what; None where nothing is known."""
        self._warned = False

    async def of(self, names: Iterable[str], resource: str = "") -> dict[str, Node]:
        """By name; without those that could not be read this time. Of one that is gone, or that the
        controller has no right to read, nothing but the name is known. `resource`: what a pod was given
        there; a node that had none of it has been read before its GPUs came, or were cut anew."""
        found = {name: await self._one(name, resource) for name in set(names)}
        return {name: node for name, node in found.items() if node is not None}

    async def _one(self, name: str, resource: str) -> Node | None:
        if not self._may_read:
            return Node(name, {}, {})
        now = self._clock()
        until, known = self._known.get(name, (0.0, None))
        outdated = known is not None and bool(resource and known.allocatable) and not offers(known, resource)
        if now < until and not outdated:
            return known
        seconds, node = KEPT_SECONDS, None if outdated else known
        try:
            node = Node.of(await self._connection.get(f"/api/v1/nodes/{name}"))
            if any(offered.startswith(MIG) for offered in node.allocatable):
                seconds = CUT_SECONDS
        except NotFound:
            node = known or Node(name, {}, {})  # taken back already: what was known of it holds
        except HoldfastError as error:
            if not self._warned:
                log.warning("cannot read a node; its capacity is not known", node=name, error=str(error))
            self._warned, seconds = True, UNREAD_SECONDS
            if isinstance(error, NotPermitted):
                node = known or Node(name, {}, {})
        if len(self._known) >= NODES_KEPT:
            self._known.clear()
        self._known[name] = (now + seconds, node)
        return node
