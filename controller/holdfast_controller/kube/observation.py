"""From what Kubernetes says of an attempt object and its pods to what happened to the attempt. Pure.

A pod that has ended is kept by our finalizer (`EVIDENCE`) until its attempt has a verdict: what it said
last, and who took it, cannot get lost while no controller looks; and an operator that would make it again
finds that it is there still. Where pods' names end at random that keeps nobody off: of a Job or a JobSet
that somebody deletes, Kubeflow Trainer makes another, and that its pods. Then the first pod of each replica
is the replica, whose end ends the attempt, and those that came after it have to end too: no replica is ever
restarted in place.

Who ended a pod: the platform says so itself (a DisruptionTarget condition; a reason of the pod's own, such as
Evicted, or OutOfcpu where its node rejects what ran there), or somebody deleted it before we did. A node that
rejects what runs there, as after its restart, says so a second or two after the container has ended: who was
ended by a notice that nobody explains has not ended before the pod's phase says so too. Our own stops and
kills are marked on the attempt object before they are done (on the pods too where that goes at once), and
before that mark what somebody else has deleted is marked on the pod (`deleted_by_others`), for it is also
deleted by us when the rest of its gang is.
No time of ours is compared with one of the cluster, nor one node's with another's: where their clocks differ,
a failure would pass for a disruption.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import TypeVar

from holdfast_controller.attempt_kind import AttemptKind
from holdfast_controller.cluster import AttemptObservation, ReplicaObservation, ReplicaState
from holdfast_controller.heartbeat import Silence
from holdfast_controller.jobs import Verdict
from holdfast_controller.manifests import QUEUE_LABEL, Manifests, kind_of
from holdfast_controller.policy.queue_waits import in_queue
from holdfast_controller.policy.waits import FAILED_SERVICE, explain_wait
from holdfast_trainer.contract import Progress, Termination

from .pending import Slow, stuck, why_pending
from .pod_state import (
    SIGNAL_BASE,
    Document,
    asked_to_go,
    condition_of,
    container_state,
    ended_by_deletion,
    forced,
    index_of,
    is_disrupted,
    is_rejected,
    is_wanted,
    kind_of_pod,
    memory_limit,
    node_of,
    outlived,
    running,
    scheduled,
    seconds,
    started,
    unstartable,
)
from .rank_ends import rank_ends

_Pod = TypeVar("_Pod", bound=Document)

EVIDENCE = "holdfast.dev/evidence"
STOPPED = "holdfast.dev/stopped-at"
KILLED = "holdfast.dev/killed-at"
DRILLED = "holdfast.dev/drilled"
TAKEN = "holdfast.dev/taken"
"""On a pod that somebody else had deleted when we first asked for the end of its attempt."""

_OVER_LIMIT = re.compile(
    r"exceeds the limit|exceeds the total limit of containers|exceeded its local ephemeral storage limit"
)
"""What the kubelet says of a pod that it evicts for what the pod itself has written, not for its node's need
(kubernetes, pkg/kubelet/eviction)."""
_WRITE_ELSEWHERE = "write less to /tmp and /dev/shm, and what is large to the run directory"
_DRILLED = {"kill": "killed", "node": "its node drained"}


def attempt_observation(
    attempt: int,
    replicas: int,
    attempt_object: Document | None,
    pods: Sequence[Document],
    progress: Progress | None = None,
    silence: Silence | None = None,
    slow: Slow | None = None,
    queued: Mapping[str, str] | None = None,
    unmade: Mapping[str, str] | None = None,
) -> AttemptObservation:
    """A snapshot. `replicas` is how many there should be; `slow`: what keeps pods from starting, `queued`:
    why its queue does not admit it, `unmade`: why its pods are not made, all by uid."""
    # What we mark; of an attempt object that had to go first its pods have the mark (KubeEngine._end).
    marked = pods if attempt_object is None else (attempt_object,)
    ours = any(_asked_by_us(one) for one in marked)
    stopped = any(_annotation(one, STOPPED) is not None for one in marked)
    by_index, again = first_made(pods)
    whole = attempt_object is not None and not _has_ended(attempt_object, len(pods) >= replicas)
    missing = _missing(attempt_object if whole else None, unmade or {})
    seen = tuple(
        _replica(index, by_index[index], ours, attempt_object, slow or {})
        if index in by_index
        else replace(missing, index=index)
        for index in range(replicas)
    )
    exists = attempt_object is not None or bool(pods)
    others = [_replica(index_of(pod), pod, ours, attempt_object, slow or {}) for pod in again]
    ended = all(one.state in (ReplicaState.SUCCEEDED, ReplicaState.FAILED) for one in (*seen, *others))
    gone = not exists or ended
    starts = [time for pod in pods if (time := started(pod)) is not None]
    # A controller may have died after its mark, before it deleted anything: then the stop is still to do.
    left = whole or any(is_wanted(pod) for pod in pods)
    return AttemptObservation(
        attempt,
        exists=exists,
        gone=gone,
        replicas=seen if exists else (),
        waiting=_waiting(seen, by_index, attempt_object, queued or {}) if exists else "",
        stopping=stopped and (gone or not left),
        progress=progress,
        silence=silence,
        started_at=min(starts, default=None),
        placed_at=_placed(by_index, replicas),
        nameless=_nameless(attempt_object, replicas, unmade or {}),
    )


def _nameless(attempt_object: Document | None, replicas: int, unmade: Mapping[str, str]) -> str:
    """Why its replicas cannot find each other; one alone need not."""
    why = "" if attempt_object is None else unmade.get(attempt_object["metadata"].get("uid", ""), "")
    return why if replicas > 1 and why.startswith(FAILED_SERVICE) else ""


def with_evidence(manifests: Manifests) -> Manifests:
    """With our finalizer on the pods that the operator will make."""
    manifests.pods["metadata"]["finalizers"] = [EVIDENCE]
    return manifests


def first_made(pods: Sequence[_Pod]) -> tuple[dict[int, _Pod], list[_Pod]]:
    """The pod of each replica, and those that were made again."""
    in_order = sorted(pods, key=lambda pod: str(pod["metadata"].get("creationTimestamp", "")))
    first = {index_of(pod): pod for pod in reversed(in_order)}
    return first, [pod for pod in in_order if first[index_of(pod)] is not pod]


def _missing(attempt_object: Document | None, unmade: Mapping[str, str]) -> ReplicaObservation:
    """A replica without a pod; `attempt_object`: whose operator may still make it."""
    if attempt_object is None:
        return ReplicaObservation(0, ReplicaState.FAILED, "Missing: it was never made, or is forgotten")
    why = unmade.get(attempt_object["metadata"].get("uid", ""), "")
    return ReplicaObservation(0, ReplicaState.PENDING, why, stuck=Verdict.UNSCHEDULABLE if why else None)


def _replica(
    index: int, pod: Document, ours: bool, attempt_object: Document | None, slow: Slow
) -> ReplicaObservation:
    taken, reason = _taken(pod, ours, attempt_object)
    end = container_state(pod).get("terminated")
    phase = pod["status"].get("phase", "Pending")
    told_all = end is not None and (ours or taken or outlived(pod) or not _noticed(end))
    if not told_all and phase in ("Pending", "Running", "Unknown") and not forced(pod):
        state = ReplicaState.RUNNING if running(pod) or phase == "Running" else ReplicaState.PENDING
        why = reason or why_pending(pod, slow)
        due = seconds(pod["metadata"].get("deletionTimestamp"))
        placed = scheduled(pod) if state is ReplicaState.PENDING else None
        return ReplicaObservation(
            index, state, why, disrupted=taken, stuck=stuck(pod, slow), placed_at=placed, due=due
        )
    code = end.get("exitCode") if end is not None else None
    well = code == 0 if end is not None else phase == "Succeeded"
    memory = end is not None and end.get("reason") == "OOMKilled" and not taken
    by_signal = code is not None and SIGNAL_BASE < code <= SIGNAL_BASE + 64
    message = (end or {}).get("message") or ""
    return ReplicaObservation(
        index,
        ReplicaState.SUCCEEDED if well else ReplicaState.FAILED,
        # It comes first: a container that reached its limit may be killed by us as well before it has ended.
        reason=_out_of_memory(pod) if memory else reason,
        disrupted=taken,
        lost_node=_lost_node(pod),
        out_of_memory=memory,
        over_limit=_over_limit(pod),
        not_started=explain_wait(why) if (why := unstartable(pod)) else "",
        exit_code=None if by_signal else code,
        exit_signal=code - SIGNAL_BASE if by_signal and code is not None else None,
        termination=Termination.from_json(message),
        ranks=rank_ends(message),
        ended_at=seconds((end or {}).get("finishedAt")) or asked_to_go(pod),
    )


def _out_of_memory(pod: Document) -> str:
    """Why the kernel killed it: on nodes with cgroup v2 that is said also where the node itself had no memory
    left, and not only where a limit was reached."""
    limit = memory_limit(pod)
    if limit is None:
        why = "the container reached its limit of memory, or its node had none left"
    elif limit:
        why = f"the container reached its limit of {limit}"
    else:
        where = f" {node_of(pod)}" if node_of(pod) else ""
        why = f"its node{where} had no memory left, and the container has no limit: give resources.memory"
    return f"OutOfMemory: {why}"


def deleted_by_others(pod: Document, attempt_object: Document | None) -> bool:
    """Whether somebody has deleted this pod, of an attempt whose end we have not asked for."""
    return "deletionTimestamp" in pod["metadata"] and _taken(pod, False, attempt_object)[0]


def _taken(pod: Document, ours: bool, attempt_object: Document | None) -> tuple[bool, str]:
    """Whether the platform took this pod, and the evidence in words; `ours`: we have asked for its end."""
    drill = _annotation(pod, DRILLED)
    if drill is not None:
        return True, f"Drilled: {_DRILLED.get(drill, 'given notice')} on request"
    if _over_limit(pod):
        return False, ""
    if is_disrupted(pod):
        condition = condition_of(pod, "DisruptionTarget")
        return True, f"{condition.get('reason', 'Disrupted')}: {condition.get('message', '')}".rstrip(": ")
    where = f" (node {node_of(pod)})" if node_of(pod) else ""
    if is_rejected(pod):
        return False, ""
    if reason := pod["status"].get("reason"):  # no end of its container's gives the pod itself one
        return True, f"{reason}: {str(pod['status'].get('message', '')).strip('. ')}".rstrip(": ") + where
    if _forgotten(pod):
        return True, f"NodeRestarted: its node, or the container runtime there, started anew{where}"
    if _annotation(pod, TAKEN) is None:
        if asked_to_go(pod) is None or not _ended_by_deletion(pod):
            return False, ""
        if ours:
            return False, "Killed: by Holdfast, with its peers"
    if attempt_object is not None and is_suspended(attempt_object):
        who = "the queue" if _queue_of(attempt_object) else "somebody"
        return True, f"Preempted: {who} suspended the attempt"
    if attempt_object is None or ("deletionTimestamp" in attempt_object["metadata"] and not ours):
        return True, f"Deleted: somebody deleted the {kind_of_pod(pod).resource.kind} that it belongs to"
    return True, "Deleted: somebody deleted the pod"


def _noticed(end: Document) -> bool:
    """Whether SIGTERM ended the container, or a rank of it that said nothing: its node may say yet why."""
    return end.get("exitCode") == SIGNAL_BASE + signal.SIGTERM or _rank_noticed(end)


def _rank_noticed(end: Document) -> bool:
    """As a program ends that knows of no notices: its torchrun ends with code 1."""
    return any(rank.signal == signal.SIGTERM for rank in rank_ends(end.get("message") or ""))


def _over_limit(pod: Document) -> str:
    """Why its node evicted it, and what helps, where that was its own doing; empty otherwise."""
    status = pod["status"]
    said = str(status.get("message", "")).strip(". ")
    if status.get("reason") != "Evicted" or not _OVER_LIMIT.search(said):
        return ""
    return f"Evicted: {said}; {_WRITE_ELSEWHERE}"


def _ended_by_deletion(pod: Document) -> bool:
    """Whether its end came of its deletion, which was asked for, and not before it."""
    end = container_state(pod).get("terminated")
    if end is None:
        return True
    said = Termination.from_json(end.get("message") or "")
    if said is not None and said.outcome == "interrupted":
        return True
    return _rank_noticed(end) or ended_by_deletion(pod, end)


def without_pods(kind: AttemptKind) -> str:
    """What an attempt waits for that has none yet, and nobody says why."""
    also = f", or is {kind.beneath} beneath it" if kind.beneath else ""
    return f"waits for {kind.operator} to make its pods; is it busy with other jobs', or down{also}?"


def _waiting(
    seen: Sequence[ReplicaObservation],
    pods: Mapping[int, Document],
    attempt_object: Document | None,
    queued: Mapping[str, str],
) -> str:
    """Why nothing has started; empty where something has, or is about to."""
    if any(one.state is not ReplicaState.PENDING for one in seen):
        return ""
    if not pods and attempt_object is not None:
        if is_suspended(attempt_object):
            told = queued.get(attempt_object["metadata"].get("uid", ""))
            return told or in_queue(_queue_of(attempt_object))
        if not any(one.reason for one in seen):
            return without_pods(kind_of(attempt_object))
    known = sorted((one for one in seen if one.reason), key=lambda one: one.stuck is None)
    if not known:
        return ""
    more = f" (and {len(known) - 1} more replicas)" if len(known) > 1 else ""
    return f"replica {known[0].index}{more}: {known[0].reason}"


def _lost_node(pod: Document) -> bool:
    """Whether its node went: the platform says so, or nobody ever told that, or how, its container has ended.

    Where a node falls silent, its Ready condition Unknown, Kubernetes writes no more into its pods than that
    they are not Ready: that is all there is until its taint evicts them, 5 minutes later by default.
    """
    if condition_of(pod, "DisruptionTarget").get("reason") == "DeletionByPodGC":
        return True
    if pod["status"].get("reason") == "NodeLost" or _forgotten(pod):
        return True
    return forced(pod) and running(pod) and condition_of(pod, "Ready").get("status") == "False"


def _forgotten(pod: Document) -> bool:
    """Whether its container ran, and those who ran it cannot tell how it ended: after a reboot they only find
    it gone. containerd then says Unknown, with the exit code 255 (internal/cri, restart.go); the kubelet
    says so of whatever the runtime does not know, also of what has never run.
    """
    end = container_state(pod).get("terminated") or {}
    ran = "used to be Running" in (end.get("message") or "")
    return end.get("reason") == "Unknown" or (end.get("reason") == "ContainerStatusUnknown" and ran)


def _placed(pods: Mapping[int, Document], replicas: int) -> datetime | None:
    """When the last replica got its node; None while one has none."""
    times = [scheduled(pods[index]) for index in range(replicas) if index in pods]
    known = [time for time in times if time is not None]
    return max(known) if len(known) == replicas else None


def _has_ended(attempt_object: Document, all_made: bool) -> bool:
    """Whether it makes no pods any more, since somebody asked for its end; `all_made`: it has made all."""
    if "deletionTimestamp" in attempt_object["metadata"]:
        return True
    return all_made and kind_of(attempt_object).ends_with_pods and _asked_by_us(attempt_object)


def _asked_by_us(marked: Document | None) -> bool:
    """Whether we have asked for the end of the whole attempt."""
    return any(_annotation(marked, name) is not None for name in (STOPPED, KILLED))


def is_suspended(attempt_object: Document | None) -> bool:
    """Whether its queue, or who plays one, keeps it from having pods."""
    return attempt_object is not None and kind_of(attempt_object).is_suspended(attempt_object)


def _queue_of(attempt_object: Document) -> str:
    """Empty: none. Kueue itself may have named one, where the job does not."""
    return str((attempt_object["metadata"].get("labels") or {}).get(QUEUE_LABEL, ""))


def _annotation(document: Document | None, name: str) -> str | None:
    if document is None:
        return None
    value = (document["metadata"].get("annotations") or {}).get(name)
    return None if value is None else str(value)
