"""From what Kubernetes says of a PyTorchJob and its pods to what happened to the attempt. Pure.

A pod that has ended is kept by our finalizer (`EVIDENCE`) until its attempt has a verdict: what it said
last, and who took it, cannot get lost while no controller looks; and the Training Operator, which makes
every pod again that is missing, finds the name taken, so no replica is ever restarted in place.

Who ended a pod: the platform says so itself (a DisruptionTarget condition, a reason such as Evicted), or
somebody deleted it before we did. Our own stops and kills are marked on the PyTorchJob before they are done,
and before that mark what somebody else has deleted is marked on the pod (`deleted_by_others`), for it is
also deleted by us when the rest of its gang is. No time of ours is compared with one of the cluster, nor one
node's with another's: where their clocks differ, a failure would pass for a disruption.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from holdfast_controller.cluster import AttemptObservation, ReplicaObservation, ReplicaState
from holdfast_controller.heartbeat import Silence
from holdfast_controller.jobs import Verdict
from holdfast_controller.manifests import CONTAINER, INDEX_LABEL, QUEUE_LABEL, Manifests
from holdfast_controller.policy.waits import explain_queue, explain_wait
from holdfast_trainer.contract import Progress, Termination

from .rank_ends import rank_ends

Document = Mapping[str, Any]

EVIDENCE = "holdfast.dev/evidence"
STOPPED = "holdfast.dev/stopped-at"
KILLED = "holdfast.dev/killed-at"
DRILLED = "holdfast.dev/drilled"
TAKEN = "holdfast.dev/taken"
"""On a pod that somebody else had deleted when we first asked for the end of its attempt."""

_TAKEN = ("Evicted", "NodeLost", "NodeShutdown", "Preempting", "Shutdown", "Terminated")
"""Reasons of a pod's status that mean the node, not the program, ended it."""
_OVER_LIMIT = re.compile(
    r"exceeds the limit|exceeds the total limit of containers|exceeded its local ephemeral storage limit"
)
"""What the kubelet says of a pod that it evicts for what the pod itself has written, not for its node's need
(kubernetes, pkg/kubelet/eviction)."""
_WRITE_ELSEWHERE = "write less to /tmp and /dev/shm, and what is large to the run directory"
_DRILLED = {"kill": "killed", "node": "its node drained"}
_STUCK = (
    "CreateContainerConfigError",
    "CreateContainerError",
    "ErrImageNeverPull",
    "ErrImagePull",
    "ImagePullBackOff",
    "InvalidImageName",
    "RunContainerError",
)
_NO_IMAGE = ("ErrImageNeverPull", "ErrImagePull", "ImagePullBackOff", "InvalidImageName")
_SIGNAL_BASE = 128


def attempt_observation(
    attempt: int,
    replicas: int,
    pytorch_job: Document | None,
    pods: Sequence[Document],
    progress: Progress | None = None,
    silence: Silence | None = None,
) -> AttemptObservation:
    """A snapshot. `replicas` is how many there should be."""
    ours = _asked_by_us(pytorch_job)
    by_index = {index_of(pod): pod for pod in pods}
    whole = pytorch_job is not None and "deletionTimestamp" not in pytorch_job["metadata"]
    seen = tuple(_replica(index, by_index.get(index), ours, pytorch_job, whole) for index in range(replicas))
    exists = pytorch_job is not None or bool(pods)
    ended = all(one.state in (ReplicaState.SUCCEEDED, ReplicaState.FAILED) for one in seen)
    gone = not exists or ended
    starts = [time for pod in pods if (time := _started(pod)) is not None]
    # A controller may have died after its mark, before it deleted anything: then the stop is still to do.
    left = whole or any(_runs_on(pod) for pod in pods)
    return AttemptObservation(
        attempt,
        exists=exists,
        gone=gone,
        replicas=seen if exists else (),
        waiting=_waiting(seen, by_index, pytorch_job) if exists else "",
        stopping=_annotation(pytorch_job, STOPPED) is not None and (gone or not left),
        progress=progress,
        silence=silence,
        started_at=min(starts, default=None),
        placed_at=_placed(by_index, replicas),
    )


def with_evidence(manifests: Manifests) -> Manifests:
    """With our finalizer on the pods that the operator will make."""
    for replica in manifests.pytorch_job["spec"]["pytorchReplicaSpecs"].values():
        replica["template"]["metadata"]["finalizers"] = [EVIDENCE]
    return manifests


def index_of(pod: Document) -> int:
    """-1 where its label is no number: others may write such labels too."""
    index = pod["metadata"]["labels"].get(INDEX_LABEL, "")
    return int(index) if index.isdecimal() else -1


def _runs_on(pod: Document) -> bool:
    """Whether nobody has asked it to go, and it has not ended."""
    return "deletionTimestamp" not in pod["metadata"] and pod["status"].get("phase") in (
        None,
        "Pending",
        "Running",
    )


def running(pod: Document) -> bool:
    """Whether its container runs now."""
    return "running" in _state(pod)


def terminated(pod: Document) -> bool:
    """Whether its container has ended."""
    return "terminated" in _state(pod)


def _replica(
    index: int, pod: Document | None, ours: bool, pytorch_job: Document | None, whole: bool
) -> ReplicaObservation:
    if pod is None:
        if whole:
            return ReplicaObservation(index, ReplicaState.PENDING)
        return ReplicaObservation(index, ReplicaState.FAILED, "Missing: it was never made, or is forgotten")
    taken, reason = _taken(pod, ours, pytorch_job)
    end = _state(pod).get("terminated")
    phase = pod["status"].get("phase", "Pending")
    if end is None and phase in ("Pending", "Running", "Unknown") and not forced(pod):
        state = ReplicaState.RUNNING if running(pod) or phase == "Running" else ReplicaState.PENDING
        why = reason or _why_pending(pod)
        due = _seconds(pod["metadata"].get("deletionTimestamp"))
        return ReplicaObservation(index, state, why, disrupted=taken, stuck=_stuck(pod), due=due)
    code = end.get("exitCode") if end is not None else None
    well = code == 0 if end is not None else phase == "Succeeded"
    memory = end is not None and end.get("reason") == "OOMKilled" and not taken
    by_signal = code is not None and _SIGNAL_BASE < code <= _SIGNAL_BASE + 64
    message = (end or {}).get("message") or ""
    return ReplicaObservation(
        index,
        ReplicaState.SUCCEEDED if well else ReplicaState.FAILED,
        reason=reason or (f"OutOfMemory: the container reached its limit of {_limit(pod)}" if memory else ""),
        disrupted=taken,
        lost_node=taken and _lost_node(pod),
        out_of_memory=memory,
        over_limit=_over_limit(pod),
        exit_code=None if by_signal else code,
        exit_signal=code - _SIGNAL_BASE if by_signal and code is not None else None,
        termination=Termination.from_json(message),
        ranks=rank_ends(message),
        ended_at=_seconds((end or {}).get("finishedAt")) or _asked_to_go(pod),
    )


def deleted_by_others(pod: Document, pytorch_job: Document | None) -> bool:
    """Whether somebody has deleted this pod, of an attempt whose end we have not asked for."""
    return "deletionTimestamp" in pod["metadata"] and _taken(pod, False, pytorch_job)[0]


def _taken(pod: Document, ours: bool, pytorch_job: Document | None) -> tuple[bool, str]:
    """Whether the platform took this pod, and the evidence in words; `ours`: we have asked for its end."""
    drill = _annotation(pod, DRILLED)
    if drill is not None:
        return True, f"Drilled: {_DRILLED.get(drill, 'given notice')} on request"
    if _over_limit(pod):
        return False, ""
    if is_disrupted(pod):
        condition = _condition(pod, "DisruptionTarget")
        return True, f"{condition.get('reason', 'Disrupted')}: {condition.get('message', '')}".rstrip(": ")
    reason = pod["status"].get("reason")
    if reason in _TAKEN:
        return True, f"{reason}: {pod['status'].get('message', '')}".rstrip(": ")
    if _annotation(pod, TAKEN) is None:
        asked = _asked_to_go(pod)
        if asked is None or not _ended_by_deletion(pod, asked):
            return False, ""
        if ours:
            return False, "Killed: by Holdfast, with its peers"
    if _suspended(pytorch_job):
        return True, "Preempted: the queue suspended the attempt"
    return True, "Deleted: somebody deleted the pod"


def _over_limit(pod: Document) -> str:
    """Why its node evicted it, and what helps, where that was its own doing; empty otherwise."""
    status = pod["status"]
    said = str(status.get("message", "")).strip(". ")
    if status.get("reason") != "Evicted" or not _OVER_LIMIT.search(said):
        return ""
    return f"Evicted: {said}; {_WRITE_ELSEWHERE}"


def _ended_by_deletion(pod: Document, asked: float) -> bool:
    """Whether its end came of its deletion, and not before it.

    The kubelet's last delete takes the grace away, and with it the time of the first one: then only the way
    in which it ended can tell. That tells more than times do, too: `asked` is by the apiserver's clock, and
    the end by the node's.
    """
    end = _state(pod).get("terminated")
    if end is None:
        return True
    message = end.get("message") or ""
    said = Termination.from_json(message)
    if said is not None and said.outcome == "interrupted":
        return True
    # A program that knows of no notices ends by it, and its torchrun with code 1.
    if any(rank.signal == signal.SIGTERM for rank in rank_ends(message)):
        return True
    if pod["metadata"].get("deletionGracePeriodSeconds"):
        return (_seconds(end.get("finishedAt")) or asked) >= asked
    return bool(end.get("exitCode", 0) > _SIGNAL_BASE)


def _waiting(
    seen: Sequence[ReplicaObservation], pods: Mapping[int, Document], pytorch_job: Document | None
) -> str:
    """Why nothing has started; empty where something has, or is about to."""
    if any(one.state is not ReplicaState.PENDING for one in seen):
        return ""
    if not pods:
        if _suspended(pytorch_job):
            queue = (pytorch_job or {})["metadata"].get("labels", {}).get(QUEUE_LABEL, "")
            return explain_queue(queue)
        return "waits for the Training Operator to make its pods; is it installed and running?"
    reasons = [(one.index, one.reason) for one in seen if one.reason]
    if not reasons:
        return ""
    index, reason = reasons[0]
    more = f" (and {len(reasons) - 1} more replicas)" if len(reasons) > 1 else ""
    return f"replica {index}{more}: {reason}"


def _why_pending(pod: Document) -> str:
    waiting = _state(pod).get("waiting") or {}
    if waiting.get("reason") in _STUCK:
        return explain_wait(f"{waiting['reason']}: {waiting.get('message', '')}".rstrip(": "))
    condition = _condition(pod, "PodScheduled")
    if condition.get("status") != "False":
        return ""
    return explain_wait(f"{condition.get('reason', 'Pending')}: {condition.get('message', '')}".rstrip(": "))


def _stuck(pod: Document) -> Verdict | None:
    """What keeps it from starting, where that is the scheduler's or the image's."""
    if (_state(pod).get("waiting") or {}).get("reason") in _NO_IMAGE:
        return Verdict.IMAGE_PULL
    return Verdict.UNSCHEDULABLE if _condition(pod, "PodScheduled").get("status") == "False" else None


def _lost_node(pod: Document) -> bool:
    """Whether its node went: the platform says so, or nobody ever told that its container has ended."""
    if _condition(pod, "DisruptionTarget").get("reason") == "DeletionByPodGC":
        return True
    if pod["status"].get("reason") == "NodeLost":
        return True
    return forced(pod) and running(pod) and _condition(pod, "Ready").get("status") == "False"


def is_disrupted(pod: Document) -> bool:
    """Whether the platform has said that it takes it."""
    return _condition(pod, "DisruptionTarget").get("status") == "True"


def _condition(pod: Document, kind: str) -> Document:
    """The pod's, of which it has one of a kind; empty where it has none."""
    conditions = pod["status"].get("conditions") or []
    return next((one for one in conditions if one["type"] == kind), {})


def _limit(pod: Document) -> str:
    """What the kubelet says that it allows the container."""
    for status in pod["status"].get("containerStatuses") or []:
        limit = ((status.get("resources") or {}).get("limits") or {}).get("memory")
        if status["name"] == CONTAINER and limit:
            return str(limit)
    return "memory"


def _state(pod: Document) -> Mapping[str, Any]:
    for status in pod["status"].get("containerStatuses") or []:
        if status["name"] == CONTAINER:
            state: Mapping[str, Any] = status.get("state") or {}
            return state
    return {}


def _started(pod: Document) -> datetime | None:
    state = _state(pod)
    at = (state.get("running") or state.get("terminated") or {}).get("startedAt")
    return datetime.fromisoformat(at) if at else None


def node_of(pod: Document) -> str | None:
    """The name of the node it was put on."""
    name = (pod.get("spec") or {}).get("nodeName")
    return str(name) if name else None


def _placed(pods: Mapping[int, Document], replicas: int) -> datetime | None:
    """When the last replica got its node; None while one has none."""
    times = [_scheduled(pods[index]) for index in range(replicas) if index in pods]
    known = [time for time in times if time is not None]
    return max(known) if len(known) == replicas else None


def _scheduled(pod: Document) -> datetime | None:
    condition = _condition(pod, "PodScheduled")
    at = condition.get("lastTransitionTime") if condition.get("status") == "True" else None
    return datetime.fromisoformat(at) if at else None


def forced(pod: Document) -> bool:
    """Deleted without grace: nobody waits for its node, and nobody will hear of it again."""
    meta = pod["metadata"]
    return "deletionTimestamp" in meta and not meta.get("deletionGracePeriodSeconds")


def _asked_to_go(pod: Document) -> float | None:
    """When its deletion was asked for: the timestamp is that of the end of the grace."""
    end = _seconds(pod["metadata"].get("deletionTimestamp"))
    return None if end is None else end - float(pod["metadata"].get("deletionGracePeriodSeconds") or 0)


def _asked_by_us(pytorch_job: Document | None) -> bool:
    """Whether we have asked for the end of the whole attempt."""
    return any(_annotation(pytorch_job, name) is not None for name in (STOPPED, KILLED))


def _suspended(pytorch_job: Document | None) -> bool:
    run_policy = ((pytorch_job or {}).get("spec") or {}).get("runPolicy") or {}
    return bool(run_policy.get("suspend"))


def _annotation(document: Document | None, name: str) -> str | None:
    if document is None:
        return None
    value = (document["metadata"].get("annotations") or {}).get(name)
    return None if value is None else str(value)


def _seconds(time: str | None) -> float | None:
    return datetime.fromisoformat(time).timestamp() if time else None
