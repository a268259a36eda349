"""What one pod's document says of it, without judgement. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Literal, get_args

from holdfast_controller.attempt_kind import AttemptKind
from holdfast_controller.manifests import KINDS
from holdfast_controller.pytorchjobs import PYTORCH_JOB
from holdfast_trainer.contract import Termination

from .rank_ends import rank_ends

Document = Mapping[str, Any]

SIGNAL_BASE = 128
"""An exit code above says that a signal ended it, and which."""
_NOT_STARTED = ("StartError", "ContainerCannotRun")
"""As containerd says it, and Docker; others keep such a container waiting (pending.py)."""

Condition = Literal["PodScheduled", "Ready", "DisruptionTarget"]
CONDITIONS = frozenset(get_args(Condition))
"""Of a pod's those that are read; the others are not kept."""


def kind_of_pod(pod: Document) -> AttemptKind:
    """For which kind of attempt object it was made, as its labels say; any of them where they do not."""
    labels = pod["metadata"].get("labels") or {}
    return next((kind for kind in KINDS.values() if kind.index_label in labels), PYTORCH_JOB)


def index_of(pod: Document) -> int:
    """-1 where its label is no number: others may write such labels too."""
    index = pod["metadata"]["labels"].get(kind_of_pod(pod).index_label, "")
    return int(index) if index.isdecimal() else -1


def node_of(pod: Document) -> str | None:
    """The name of the node it was put on."""
    name = (pod.get("spec") or {}).get("nodeName")
    return str(name) if name else None


def container_state(pod: Document) -> Mapping[str, Any]:
    """Of the training container: `waiting`, `running` or `terminated`; empty where nothing is known."""
    container = kind_of_pod(pod).container
    for status in pod["status"].get("containerStatuses") or []:
        if status["name"] == container:
            state: Mapping[str, Any] = status.get("state") or {}
            return state
    return {}


def running(pod: Document) -> bool:
    """Whether its container runs now."""
    return "running" in container_state(pod)


def last_output(pod: Document) -> str:
    """What its kubelet kept of its container's output, up to 2 KiB: it does so where that failed and wrote no
    message of its own (`terminationMessagePolicy: FallbackToLogsOnError`); empty otherwise."""
    end = container_state(pod).get("terminated") or {}
    said = str(end.get("message") or "").rstrip("\n")
    own = Termination.from_json(said) is not None or bool(rank_ends(said))
    return "" if own or end.get("reason") not in ("Error", "OOMKilled") else said


def terminated(pod: Document) -> bool:
    """Whether its container has ended."""
    return "terminated" in container_state(pod)


def outlived(pod: Document) -> bool:
    """Whether its container has ended while another one in it, that somebody's webhook put there, runs on."""
    states = [status.get("state") or {} for status in pod["status"].get("containerStatuses") or []]
    return terminated(pod) and any("running" in state for state in states)


def before_it(pod: Document) -> Document:
    """The status of the init container that keeps its container from starting; empty where none does.

    No pod of ours is made with one: an admission webhook has put it there. Where one fails, those before it
    that stay, as sidecars do, are ended after it.
    """
    if container_state(pod).keys() - {"waiting"}:
        return {}
    left: list[Document] = []
    for status in pod["status"].get("initContainerStatuses") or []:
        state = status.get("state") or {}
        is_done = (state.get("terminated") or {}).get("exitCode") == 0
        if not is_done and not ("running" in state and status.get("started")):
            left.append(status)
    failed = [one for one in reversed(left) if "terminated" in (one.get("state") or {})]
    return min(failed, key=_finished) if failed else next(iter(left), {})


def _finished(status: Document) -> str:
    return status["state"]["terminated"].get("finishedAt") or ""


def unstartable(pod: Document) -> str:
    """Why its container has ended without having run, or never will: its node rejects it or could not start
    it, or an init container before it has failed. Empty otherwise."""
    end, status = container_state(pod).get("terminated") or {}, pod["status"]
    where = f" (node {node_of(pod)})" if node_of(pod) else ""
    if is_rejected(pod):
        return f"{status['reason']}{where}: {str(status['message']).strip('. ')}"
    if end.get("reason") in _NOT_STARTED:
        return f"{end['reason']}{where}: {' '.join((end.get('message') or '').split())}".rstrip(": ")
    first = before_it(pod)
    failed = (first.get("state") or {}).get("terminated") or {}
    if not failed or status.get("phase") != "Failed" or ended_by_deletion(pod, failed):
        return ""
    said = " ".join((failed.get("message") or failed.get("reason") or "").split())
    return f"{init_container(first)} ended with exit code {failed.get('exitCode')}: {said}".rstrip(": ")


def is_rejected(pod: Document) -> bool:
    """Whether its node does not take it, as one that has less to give than the scheduler believed. One that
    is rejected while it runs, as after the kubelet's restart, is taken."""
    status = pod["status"]
    rejected = status.get("reason") and str(status.get("message", "")).startswith("Pod was rejected")
    return bool(rejected) and not container_state(pod).keys() - {"waiting"} and not is_disrupted(pod)


def init_container(status: Document) -> str:
    return f"init container {status['name']}"


def ended_by_deletion(pod: Document, end: Document) -> bool:
    """Whether a container ended in that way because its pod was deleted, and not before.

    The kubelet's last delete takes the grace away, and with it the time of the first one: then only the way
    in which it ended can tell. That tells more than times do, too: one is by the apiserver's clock, and the
    end by the node's.
    """
    asked = asked_to_go(pod)
    if asked is None:
        return False
    if pod["metadata"].get("deletionGracePeriodSeconds"):
        return (seconds(end.get("finishedAt")) or asked) >= asked
    return bool(end.get("exitCode", 0) > SIGNAL_BASE)


def started(pod: Document) -> datetime | None:
    """When its container did."""
    state = container_state(pod)
    at = (state.get("running") or state.get("terminated") or {}).get("startedAt")
    return datetime.fromisoformat(at) if at and not unstartable(pod) else None  # of such it is 1970


def condition_of(pod: Document, kind: Condition) -> Document:
    """The pod's, of which it has one of a kind; empty where it has none."""
    conditions = pod["status"].get("conditions") or []
    return next((one for one in conditions if one["type"] == kind), {})


def is_disrupted(pod: Document) -> bool:
    """Whether the platform has said that it takes it."""
    return condition_of(pod, "DisruptionTarget").get("status") == "True"


def scheduled(pod: Document) -> datetime | None:
    """When it got its node."""
    condition = condition_of(pod, "PodScheduled")
    at = condition.get("lastTransitionTime") if condition.get("status") == "True" else None
    return datetime.fromisoformat(at) if at else None


def memory_limit(pod: Document) -> str | None:
    """What the kubelet says that it allows the container; empty: all there is. None where it does not say."""
    container = kind_of_pod(pod).container
    for status in pod["status"].get("containerStatuses") or []:
        if status["name"] == container and (resources := status.get("resources")):
            return str((resources.get("limits") or {}).get("memory") or "")
    return None


def is_wanted(pod: Document) -> bool:
    """Whether nobody has asked it to go, and it has not ended."""
    return "deletionTimestamp" not in pod["metadata"] and pod["status"].get("phase") in (
        None,
        "Pending",
        "Running",
    )


def forced(pod: Document) -> bool:
    """Deleted without grace: nobody waits for its node, and nobody will hear of it again."""
    meta = pod["metadata"]
    return "deletionTimestamp" in meta and not meta.get("deletionGracePeriodSeconds")


def asked_to_go(pod: Document) -> float | None:
    """When its deletion was asked for: the timestamp is that of the end of the grace."""
    end = seconds(pod["metadata"].get("deletionTimestamp"))
    return None if end is None else end - float(pod["metadata"].get("deletionGracePeriodSeconds") or 0)


def seconds(time: str | None) -> float | None:
    """A time of Kubernetes in seconds since the epoch."""
    return datetime.fromisoformat(time).timestamp() if time else None
