"""Drills on a cluster: a replica is taken as the platform takes one, and says so (`DRILLED`). What is done to
its ranks from inside (`ranks.py`) is no taking, and leaves no such mark."""

from __future__ import annotations

from collections.abc import Sequence

import structlog

from holdfast_controller.cluster import HoldfastError, Invalid, NotReady
from holdfast_controller.drills import DrillKind
from holdfast_controller.jobs import TrainingJob
from holdfast_controller.pod_settings import PodSettings

from . import ranks
from .connection import MERGE_PATCH, Connection, Document
from .errors import answer_to_who_asks
from .observation import DRILLED, first_made
from .pieces import Pieces, pod_path
from .pod_state import node_of

KILL_GRACE_SECONDS = 1
"""Not 0: the apiserver would call the pod gone at once, while its processes still run."""
CORDONED = "holdfast.dev/cordoned-for"
"""On a node: the job of which a drill took it."""

log = structlog.get_logger(__name__)


def refuse(kind: DrillKind, settings: PodSettings) -> None:
    """Raises Invalid for what cannot be done on this cluster."""
    if kind in (DrillKind.FREEZE, DrillKind.OOM) and not settings.exec_in_pods:
        raise Invalid(
            f"{kind.value}: it runs a program in the job's pod, and the operator of this cluster has not "
            "allowed that (jobs.execInPods in the chart's values): try kill, notice or evict"
        )
    if kind is DrillKind.NODE and not settings.drill_nodes:
        raise Invalid(
            "node: it cordons a node that others use too, and the operator of this cluster has not allowed "
            "that (jobs.drillNodes in the chart's values): try evict, notice or kill"
        )


async def take(
    connection: Connection, pieces: Pieces, job: TrainingJob, attempt: int, replica: int, kind: DrillKind
) -> None:
    """Disrupt a replica that runs. Raises NotReady where it has no pod any more."""
    pods = pieces.pods_of(job, attempt)
    one = first_made(pods)[0].get(replica)
    if one is None:
        raise NotReady(f"replica {replica} of {job.key} has no pod any more: there is nothing to disrupt")
    if kind is DrillKind.FREEZE:
        await ranks.freeze(connection, job, replica, one)
        return
    if kind is DrillKind.OOM:
        await ranks.overfill(connection, job, one)
        return
    hit = [one]
    if kind is DrillKind.NODE:
        node = node_of(one)
        if node is None:
            raise NotReady(f"replica {replica} of {job.key} has no node yet: there is nothing to take")
        hit = [pod for pod in pods if node_of(pod) == node]
        cordon = {"metadata": {"annotations": {CORDONED: job.key}}, "spec": {"unschedulable": True}}
        await connection.patch(f"/api/v1/nodes/{node}", cordon, MERGE_PATCH)
    left = list(hit)
    try:
        with answer_to_who_asks():
            for pod in hit:  # all of them, before the first one's end can be taken for a fault
                await _mark(connection, pod, kind.value)
            while left:
                await _end(connection, left[0], kind)
                del left[0]
    except BaseException:
        await _unmark(connection, left)
        raise


async def _mark(connection: Connection, pod: Document, drilled: str | None) -> None:
    await connection.patch(pod_path(pod), {"metadata": {"annotations": {DRILLED: drilled}}}, MERGE_PATCH)


async def _unmark(connection: Connection, pods: Sequence[Document]) -> None:
    """Of pods that stay, or whose end nobody can tell: what ends them later is none of the drill's."""
    for pod in pods:
        try:
            await _mark(connection, pod, None)
        except HoldfastError as error:
            log.warning("a pod passes for drilled", pod=pod["metadata"]["name"], error=str(error))


async def _end(connection: Connection, pod: Document, kind: DrillKind) -> None:
    path, meta = pod_path(pod), pod["metadata"]
    if kind is DrillKind.KILL:
        await connection.delete(path, {"gracePeriodSeconds": KILL_GRACE_SECONDS})
    elif kind is DrillKind.NOTICE:
        await connection.delete(path)  # with the pod's own grace
    else:
        eviction = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": meta["name"], "namespace": meta["namespace"]},
        }
        await connection.post(f"{path}/eviction", eviction)
