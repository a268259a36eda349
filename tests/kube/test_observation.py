"""What pods of an attempt look like when things happen to them, and what we make of it."""

from __future__ import annotations

import copy
from datetime import UTC, datetime
from typing import Any

import pytest
from tests.kube.documents import (
    FINISHED,
    NOON,
    NOON_SECONDS,
    RUNNING,
    SAVED,
    UNREADY,
    disruption,
    ended,
    in_kind,
    job,
    limited,
    pod,
    verdict,
)

from holdfast_controller.attempt_kind import AttemptKind
from holdfast_controller.cluster import ReplicaObservation, ReplicaState
from holdfast_controller.jobs import Verdict
from holdfast_controller.kube.observation import (
    DRILLED,
    KILLED,
    STOPPED,
    TAKEN,
    attempt_observation,
    deleted_by_others,
)
from holdfast_controller.manifests import KINDS
from holdfast_controller.policy.classify import classify
from holdfast_controller.trainjobs import TRAIN_JOB
from holdfast_trainer.contract import Termination

REJECTED = "Pod was rejected: Node didn't have enough resource: cpu, requested: 100, used: 0, capacity: 50"
BY_NOTICE = '{"rank": 0, "signal": 15, "ended": 1777637400.0, "peak_bytes": 734003200}'
NOT_LOCATED = "The container could not be located when the pod was deleted"
FULL = 'Usage of EmptyDir volume "scratch" exceeds the limit "20Gi". '


NO_PROGRAM = (
    "failed to create containerd task: failed to create shim task: OCI runtime create failed: runc create "
    'failed: unable to start container process: exec: "python": executable file not found in $PATH: unknown'
)


def beside_sidecar(one: Any) -> Any:
    one["status"]["containerStatuses"].append({"name": "proxy", "state": RUNNING})
    return one


def behind_init(name: str, state: Any, one: Any, started: bool = False) -> Any:
    """With an init container that a webhook has put there, whose turn came before its own container's."""
    one["status"].setdefault("initContainerStatuses", []).append(
        {"name": name, "state": state, "started": started}
    )
    return one


INITIALIZING = {"waiting": {"reason": "PodInitializing"}}
PLACED = {"type": "PodScheduled", "status": "True", "lastTransitionTime": NOON}
FOREIGN = (
    "an admission webhook has put {} into the pod: see whoever runs that, or have it leave the pods of jobs "
    "alone"
)


CASES: list[tuple[str, Any, Any, dict[str, Any]]] = [
    ("runs", job(), pod(state=RUNNING), {"state": ReplicaState.RUNNING, "reason": ""}),
    (
        "finished",
        job(),
        pod(phase="Succeeded", state=ended(0, FINISHED, "Completed")),
        {"state": ReplicaState.SUCCEEDED, "exit_code": 0, "ended_at": NOON_SECONDS + 600},
    ),
    (
        "an exception",
        job(),
        pod(phase="Failed", state=ended(1, "Traceback ...")),
        {"state": ReplicaState.FAILED, "exit_code": 1, "termination": None, "disrupted": False},
    ),
    (
        "the container has ended and the phase is not yet told",
        job(),
        pod(phase="Running", state=ended(1)),
        {"state": ReplicaState.FAILED, "exit_code": 1},
    ),
    (
        "out of memory",
        job(),
        pod(phase="Failed", state=ended(137, reason="OOMKilled")),
        {
            "out_of_memory": True,
            "exit_signal": 9,
            "exit_code": None,
            "disrupted": False,
            "reason": "OutOfMemory: the container reached its limit of memory, or its node had none left",
        },
    ),
    (
        "out of memory, where the kubelet tells the limit",
        job(),
        limited(pod(phase="Failed", state=ended(137, reason="OOMKilled")), "512Mi"),
        {"reason": "OutOfMemory: the container reached its limit of 512Mi", "out_of_memory": True},
    ),
    (
        "out of memory, where its node had none left, for it has no limit",
        job(),
        limited(pod(phase="Failed", state=ended(137, reason="OOMKilled")), None),
        {
            "reason": "OutOfMemory: its node had no memory left, and the container has no limit: give "
            "resources.memory",
            "out_of_memory": True,
        },
    ),
    (
        "its node is no more",
        job(),
        pod(phase="Failed", state=RUNNING, conditions=[disruption("DeletionByPodGC", "no node")]),
        {"disrupted": True, "lost_node": True, "reason": "DeletionByPodGC: no node"},
    ),
    (
        "its node says nothing, and it was deleted by force",
        job(),
        pod(state=RUNNING, conditions=[disruption("DeletionByTaintManager"), UNREADY], deleted=(NOON, 0)),
        {"disrupted": True, "lost_node": True},
    ),
    (
        "tainted away from a node that works",
        job(),
        pod(state=ended(143), conditions=[disruption("DeletionByTaintManager"), UNREADY], deleted=(NOON, 0)),
        {"disrupted": True, "lost_node": False},
    ),
    (
        "no room yet",
        job(),
        pod(phase="Pending", conditions=[{"type": "PodScheduled", "status": "False", "reason": "x"}]),
        {"state": ReplicaState.PENDING, "stuck": Verdict.UNSCHEDULABLE},
    ),
    (
        "its image does not come",
        job(),
        pod(phase="Pending", state={"waiting": {"reason": "ImagePullBackOff", "message": "not found"}}),
        {"state": ReplicaState.PENDING, "stuck": Verdict.IMAGE_PULL},
    ),
    (
        "its node cannot pull its image",
        job(),
        pod(
            phase="Pending",
            state={"waiting": {"reason": "ErrImagePull", "message": "not found"}},
            conditions=[{"type": "PodScheduled", "status": "True", "lastTransitionTime": NOON}],
        ),
        {"stuck": Verdict.IMAGE_PULL, "placed_at": datetime.fromtimestamp(NOON_SECONDS, UTC)},
    ),
    (
        "its image is not signed as its node wants it",
        job(),
        pod(
            phase="Pending",
            state={"waiting": {"reason": "SignatureValidationFailed", "message": "image pull failed"}},
            conditions=[{"type": "PodScheduled", "status": "True", "lastTransitionTime": NOON}],
        ),
        {"stuck": Verdict.IMAGE_PULL, "placed_at": datetime.fromtimestamp(NOON_SECONDS, UTC)},
    ),
    (
        "its node cannot make its container",
        job(),
        pod(
            phase="Pending",
            state={"waiting": {"reason": "CreateContainerConfigError", "message": "must run as non-root"}},
            conditions=[{"type": "PodScheduled", "status": "True", "lastTransitionTime": NOON}],
        ),
        {"stuck": Verdict.UNSCHEDULABLE, "placed_at": datetime.fromtimestamp(NOON_SECONDS, UTC)},
    ),
    (
        "preempted by the scheduler, saved in time",
        job(),
        pod(
            phase="Failed",
            state=ended(1, SAVED),
            conditions=[disruption("PreemptionByScheduler", "preempted to admit a pod")],
            deleted=("2026-05-01T12:10:30Z", 45),
        ),
        {"disrupted": True, "reason": "PreemptionByScheduler: preempted to admit a pod"},
    ),
    (
        "evicted for memory of the node",
        job(),
        pod(phase="Failed", reason="Evicted"),
        {"disrupted": True, "reason": "Evicted: The node was low on resource: memory"},
    ),
    (
        "its node has less to give than the scheduler believed",
        job(),
        {**pod(phase="Failed", reason="OutOfcpu", message=REJECTED), "spec": {"nodeName": "gpu-7"}},
        {
            "state": ReplicaState.FAILED,
            "disrupted": False,
            "not_started": f"OutOfcpu (node gpu-7): {REJECTED}; the node does not take it, where the "
            "scheduler sees room: see whether its GPUs and device plugin are well (`kubectl describe node "
            "gpu-7`), or cordon it",
        },
    ),
    (
        "its node restarts with less and rejects it: a notice has ended it, and why is not told yet",
        job(),
        pod(phase="Running", state=ended(1, BY_NOTICE)),
        {"state": ReplicaState.RUNNING, "disrupted": False},
    ),
    (
        "its node restarted with less and rejected it",
        job(),
        pod(phase="Failed", state=ended(1, BY_NOTICE), reason="UnexpectedAdmissionError", message=REJECTED),
        {
            "state": ReplicaState.FAILED,
            "disrupted": True,
            "reason": f"UnexpectedAdmissionError: {REJECTED}",
        },
    ),
    (
        "its node was rebooted, and containerd finds it gone",
        job(),
        {**pod(phase="Failed", state=ended(255, reason="Unknown")), "spec": {"nodeName": "gpu-7"}},
        {
            "disrupted": True,
            "lost_node": True,
            "reason": "NodeRestarted: its node, or the container runtime there, started anew (node gpu-7)",
        },
    ),
    (
        "its node was rebooted, and the kubelet finds it gone",
        job(),
        pod(state=ended(137, f"{NOT_LOCATED}.  The container used to be Running", "ContainerStatusUnknown")),
        {"state": ReplicaState.FAILED, "disrupted": True, "lost_node": True},
    ),
    (
        "it was deleted before it had its image",
        job(annotations={KILLED: NOON}),
        pod(state=ended(137, NOT_LOCATED, "ContainerStatusUnknown"), deleted=(NOON, 0)),
        {"disrupted": False, "lost_node": False, "reason": "Killed: by Holdfast, with its peers"},
    ),
    (
        "a program that ends with 255 by itself",
        job(),
        pod(phase="Failed", state=ended(255)),
        {"disrupted": False, "lost_node": False, "exit_code": 255},
    ),
    (
        "it sent itself the signal of a notice",
        job(),
        pod(phase="Failed", state=ended(1, BY_NOTICE)),
        {"state": ReplicaState.FAILED, "disrupted": False, "exit_code": 1},
    ),
    (
        "it sent itself the signal of a notice, and somebody's sidecar runs on",
        job(),
        beside_sidecar(pod(phase="Running", state=ended(1, BY_NOTICE))),
        {"state": ReplicaState.FAILED, "disrupted": False, "exit_code": 1},
    ),
    (
        "the image of a mesh's proxy cannot be pulled",
        job(),
        behind_init(
            "istio-proxy",
            {"waiting": {"reason": "ImagePullBackOff", "message": "Back-off pulling image mesh/proxy:1"}},
            behind_init(
                "istio-init",
                ended(0, reason="Completed"),
                pod(phase="Pending", state=INITIALIZING, conditions=[PLACED]),
            ),
        ),
        {
            "state": ReplicaState.PENDING,
            "stuck": Verdict.IMAGE_PULL,
            "reason": "init container istio-proxy: ImagePullBackOff: Back-off pulling image mesh/proxy:1; "
            + FOREIGN.format("istio-proxy"),
        },
    ),
    (
        "a sidecar of a webhook ends as soon as it starts, again and again",
        job(),
        behind_init(
            "vault-agent",
            {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 5m0s restarting it"}},
            pod(phase="Pending", state=INITIALIZING, conditions=[PLACED]),
        ),
        {
            "stuck": Verdict.UNSCHEDULABLE,
            "reason": "init container vault-agent: CrashLoopBackOff: back-off 5m0s restarting it; "
            + FOREIGN.format("vault-agent"),
        },
    ),
    (
        "an init container of a webhook is at work",
        job(),
        behind_init("vault-agent-init", RUNNING, pod(phase="Pending", state=INITIALIZING)),
        {"state": ReplicaState.PENDING, "stuck": None, "reason": ""},
    ),
    (
        "it runs beside a sidecar that fails",
        job(),
        behind_init("proxy", {"waiting": {"reason": "CrashLoopBackOff"}}, pod(state=RUNNING)),
        {"state": ReplicaState.RUNNING, "stuck": None, "reason": ""},
    ),
    (
        "evicted for what it wrote itself",
        job(),
        pod(phase="Failed", reason="Evicted", message=FULL),
        {
            "disrupted": False,
            "over_limit": 'Evicted: Usage of EmptyDir volume "scratch" exceeds the limit "20Gi"; '
            "write less to /tmp and /dev/shm, and what is large to the run directory",
        },
    ),
    (
        "its node was shut down",
        job(),
        pod(phase="Failed", state=ended(143), conditions=[disruption("TerminationByKubelet")]),
        {"disrupted": True, "exit_signal": 15, "reason": "TerminationByKubelet"},
    ),
    (
        "a disruption that did not come about",
        job(),
        pod(state=RUNNING, conditions=[{**disruption("PreemptionByScheduler"), "status": "False"}]),
        {"state": ReplicaState.RUNNING, "disrupted": False},
    ),
    (
        "evicted, and still saving",
        job(),
        pod(state=RUNNING, conditions=[disruption("EvictionByEvictionAPI")], deleted=(NOON, 45)),
        {"state": ReplicaState.RUNNING, "disrupted": True, "due": NOON_SECONDS},
    ),
    (
        "the node is lost and the pod was deleted by force",
        job(),
        pod(state=RUNNING, conditions=[disruption("DeletionByTaintManager")], deleted=(NOON, 0)),
        {"state": ReplicaState.FAILED, "disrupted": True, "ended_at": NOON_SECONDS},
    ),
    (
        "somebody deleted the pod",
        job(),
        pod(phase="Failed", state=ended(143), deleted=("2026-05-01T12:10:30Z", 45)),
        {"disrupted": True, "reason": "Deleted: somebody deleted the pod"},
    ),
    (
        "we killed it with its peers",
        job(annotations={KILLED: "2026-05-01T12:09:59.7+00:00"}, going=True),
        pod(phase="Failed", state=ended(137), deleted=("2026-05-01T12:10:00Z", 1)),
        {"disrupted": False, "exit_signal": 9, "reason": "Killed: by Holdfast, with its peers"},
    ),
    (
        "it ran out of memory, and we killed it before it had ended",
        job(annotations={KILLED: "2026-05-01T12:09:59.7+00:00"}, going=True),
        limited(
            pod(phase="Failed", state=ended(137, reason="OOMKilled"), deleted=("2026-05-01T12:10:00Z", 1)),
            "512Mi",
        ),
        {"out_of_memory": True, "reason": "OutOfMemory: the container reached its limit of 512Mi"},
    ),
    (
        "somebody deleted it, then we killed the rest",
        job(annotations={KILLED: "2026-05-01T12:10:20+00:00"}, going=True),
        pod(
            phase="Failed",
            state=ended(143),
            annotations={TAKEN: "2026-05-01T12:10:20+00:00"},
            deleted=("2026-05-01T12:10:30Z", 45),
        ),
        {"disrupted": True, "reason": "Deleted: somebody deleted the pod"},
    ),
    (
        "it had failed before it was deleted",
        job(going=True),
        pod(phase="Failed", state=ended(1), deleted=("2026-05-01T12:12:00Z", 45)),
        {"disrupted": False, "exit_code": 1, "reason": ""},
    ),
    (
        "somebody deleted the pod, and the kubelet's last delete took the grace away",
        job(),
        pod(phase="Failed", state=ended(1, SAVED), deleted=("2026-05-01T12:10:02Z", 0)),
        {"disrupted": True, "reason": "Deleted: somebody deleted the pod"},
    ),
    (
        "it had failed, and was cleared away long after",
        job(going=True),
        pod(phase="Failed", state=ended(1, "Traceback ..."), deleted=("2026-05-01T12:10:02Z", 0)),
        {"disrupted": False, "exit_code": 1, "reason": ""},
    ),
    (
        "we killed it, and the kubelet's last delete took the grace away",
        job(annotations={KILLED: "2026-05-01T12:09:59.7+00:00"}, going=True),
        pod(phase="Failed", state=ended(137), deleted=("2026-05-01T12:10:02Z", 0)),
        {"disrupted": False, "reason": "Killed: by Holdfast, with its peers"},
    ),
    (
        "it was still saving for somebody else's deletion when we killed its peers",
        job(annotations={KILLED: "2026-05-01T12:09:58+00:00"}, going=True),
        pod(phase="Failed", state=ended(137), annotations={TAKEN: NOON}, deleted=(NOON, 0)),
        {"disrupted": True, "reason": "Deleted: somebody deleted the pod"},
    ),
    (
        "we killed it, and our clock is ahead of the apiserver's",
        job(annotations={KILLED: "2026-05-01T12:10:40+00:00"}, going=True),
        pod(phase="Failed", state=ended(137), deleted=("2026-05-01T12:10:02Z", 0)),
        {"disrupted": False, "reason": "Killed: by Holdfast, with its peers"},
    ),
    (
        "we killed it, and its node's clock is behind",
        job(annotations={KILLED: "2026-05-01T12:09:59.7+00:00"}, going=True),
        pod(phase="Failed", state=ended(137, at="2026-05-01T12:05:00Z"), deleted=("2026-05-01T12:10:02Z", 0)),
        {"disrupted": False, "reason": "Killed: by Holdfast, with its peers"},
    ),
    (
        "somebody deleted it, it saved, and its node's clock is behind",
        job(),
        pod(
            phase="Failed",
            state=ended(1, SAVED, at="2026-05-01T12:05:00Z"),
            deleted=("2026-05-01T12:10:30Z", 45),
        ),
        {"disrupted": True, "reason": "Deleted: somebody deleted the pod"},
    ),
    (
        "the queue took the room back from one that was saving when we killed its peers",
        job(annotations={KILLED: "2026-05-01T12:09:58+00:00"}, suspend=True),
        pod(phase="Failed", state=ended(137), annotations={TAKEN: NOON}, deleted=(NOON, 0)),
        {"disrupted": True, "reason": "Preempted: the queue suspended the attempt"},
    ),
    (
        "the queue took the room back",
        job(suspend=True),
        pod(phase="Failed", state=ended(143, SAVED), deleted=("2026-05-01T12:10:30Z", 45)),
        {"disrupted": True, "reason": "Preempted: the queue suspended the attempt"},
    ),
    (
        "somebody took the room back from a job that is in no queue",
        job(suspend=True, queue=""),
        pod(phase="Failed", state=ended(143, SAVED), deleted=("2026-05-01T12:10:30Z", 45)),
        {"disrupted": True, "reason": "Preempted: somebody suspended the attempt"},
    ),
    (
        "drilled",
        job(),
        pod(phase="Failed", state=ended(137), annotations={DRILLED: "kill"}, deleted=(NOON, 1)),
        {"disrupted": True, "reason": "Drilled: killed on request"},
    ),
    (
        "drilled with its node",
        job(),
        pod(phase="Failed", state=ended(1, SAVED), annotations={DRILLED: "node"}, deleted=(NOON, 45)),
        {"disrupted": True, "reason": "Drilled: its node drained on request"},
    ),
    (
        "never scheduled and deleted",
        job(annotations={STOPPED: NOON}),
        pod(phase="Pending", deleted=("2026-05-01T12:00:01Z", 0)),
        {"state": ReplicaState.FAILED, "disrupted": False, "exit_code": None},
    ),
    ("not made yet", job(), None, {"state": ReplicaState.PENDING}),
    ("never made", job(going=True), None, {"state": ReplicaState.FAILED, "disrupted": False}),
]


EACH_KIND = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


@EACH_KIND
@pytest.mark.parametrize(("attempt", "one", "expected"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_one_replica(attempt: Any, one: Any, expected: dict[str, Any], kind: AttemptKind) -> None:
    attempt, one = in_kind(kind, attempt), in_kind(kind, one)
    before = copy.deepcopy((attempt, one))
    seen = attempt_observation(1, 1, attempt, [one] if one else []).replicas[0]
    assert {name: getattr(seen, name) for name in expected} == expected
    assert (attempt, one) == before


@EACH_KIND
@pytest.mark.parametrize("attempt", [job(going=True), None], ids=["it waits for its pods", "it is gone"])
def test_whose_attempt_somebody_deleted_as_a_whole(attempt: Any, kind: AttemptKind) -> None:
    """It read as if somebody had deleted the pods, where the garbage collector did."""
    one = pod(phase="Failed", state=ended(143), deleted=("2026-05-01T12:10:30Z", 45))
    seen = attempt_observation(1, 1, in_kind(kind, attempt), [in_kind(kind, one)])
    assert classify(seen).reason == (
        f"replica 0: Deleted: somebody deleted the {kind.resource.kind} that it belongs to"
    )


def test_the_trainers_last_word_is_heard() -> None:
    seen = attempt_observation(1, 1, job(), [pod(phase="Failed", state=ended(1, SAVED))])
    assert seen.replicas[0].termination == Termination("interrupted", 812, 812)
    assert seen.gone
    assert seen.started_at is not None


def scheduled(message: str) -> dict[str, Any]:
    return {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}


WAITING: list[tuple[str, Any, list[Any], str]] = [
    ("no pods yet", job(), [], "waits for {operator} to make its pods; is it busy"),
    (
        "queued by Kueue",
        job(suspend=True),
        [],
        "waits for room in its queue 'team-queue': wait for its jobs to end, ask for less (replicas, gpus, "
        "resources), or have its quota raised; `kubectl describe workloads` shows its place, and says so "
        "where the queue is stopped, missing, or smaller than the job",
    ),
    (
        "suspended by a Kueue that takes all jobs",
        job(suspend=True, queue=""),
        [],
        "somebody keeps it suspended, though it is in no queue: a Kueue that takes jobs without one does "
        "(manageJobsWithoutQueueName); name its queue (queue), or have it leave such jobs alone",
    ),
    (
        "no room",
        job(),
        [pod(0, "Pending", conditions=[scheduled("0/3 nodes are available")]), pod(1, "Pending")],
        "replica 0: Unschedulable: 0/3 nodes are available",
    ),
    (
        "no room for either",
        job(),
        [pod(index, "Pending", conditions=[scheduled("0/3 nodes")]) for index in (0, 1)],
        "replica 0 (and 1 more replicas): Unschedulable: 0/3 nodes",
    ),
    (
        "an image that is not there",
        job(),
        [
            pod(0, "Pending", {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}),
            pod(1, "Pending"),
        ],
        "replica 0: ImagePullBackOff: no such image",
    ),
    (
        "being made",
        job(),
        [pod(0, "Pending", {"waiting": {"reason": "ContainerCreating"}}), pod(1, "Pending")],
        "",
    ),
    (
        "an init container's image that is not there, beside a sidecar that runs",
        job(),
        [
            behind_init(
                "scan",
                {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}},
                behind_init("proxy", RUNNING, pod(0, "Pending", INITIALIZING), started=True),
            ),
            pod(1, "Pending"),
        ],
        "replica 0: init container scan: ImagePullBackOff: no such image",
    ),
    ("one runs", job(), [pod(0, state=RUNNING), pod(1, "Pending", conditions=[scheduled("no")])], ""),
]


@EACH_KIND
@pytest.mark.parametrize(("attempt", "pods", "said"), [c[1:] for c in WAITING], ids=[c[0] for c in WAITING])
def test_why_an_attempt_waits(attempt: Any, pods: list[Any], said: str, kind: AttemptKind) -> None:
    seen = attempt_observation(1, 2, in_kind(kind, attempt), [in_kind(kind, pod) for pod in pods])
    assert seen.waiting.startswith(said.format(operator=kind.operator))
    assert bool(seen.waiting) == bool(said)
    assert (seen.exists, seen.gone) == (True, False)


@pytest.mark.parametrize(
    ("made", "gone", "stopping"),
    [
        pytest.param(2, True, True, id="it makes no pod any more"),
        pytest.param(1, False, False, id="it may still make one: the stop is not done"),
        pytest.param(0, False, False, id="it has made none"),
    ],
)
def test_a_train_job_that_we_end_stays_where_it_is(made: int, gone: bool, stopping: bool) -> None:
    pods = [pod(index, "Failed", ended(1, SAVED), deleted=(NOON, 30)) for index in range(made)]
    told = in_kind(TRAIN_JOB, job(annotations={STOPPED: NOON}))
    seen = attempt_observation(1, 2, told, [in_kind(TRAIN_JOB, one) for one in pods])
    assert (seen.gone, seen.stopping) == (gone, stopping)
    assert not any(replica.disrupted for replica in seen.replicas)


def test_an_attempt_nobody_started_is_gone() -> None:
    seen = attempt_observation(3, 2, None, [])
    assert (seen.attempt, seen.exists, seen.gone, seen.replicas) == (3, False, True, ())


@pytest.mark.parametrize(
    ("one", "others"),
    [
        pytest.param(pod(state=RUNNING, deleted=(NOON, 45)), True, id="and it is still saving"),
        pytest.param(pod(state=ended(1, SAVED), deleted=(NOON, 0)), True, id="and it has saved"),
        pytest.param(pod(state=ended(1, "Traceback"), deleted=(NOON, 0)), False, id="after it had failed"),
        pytest.param(pod(state=RUNNING), False, id="not at all"),
    ],
)
def test_what_others_have_deleted_is_noted_before_we_ask_for_the_end(one: Any, others: bool) -> None:
    assert deleted_by_others(one, job()) is others


def test_the_peers_of_an_evicted_rank_fail_first_and_loudest_and_it_is_one_disruption() -> None:
    evicted = pod(0, "Failed", ended(137), conditions=[disruption("EvictionByEvictionAPI", "drained")])
    peer = pod(1, "Failed", ended(1, Termination("failed", 800, 750, "gloo: Connection closed").to_json()))
    assert verdict(job(), evicted, peer) == (
        Verdict.DISRUPTED,
        "replica 0: EvictionByEvictionAPI: drained",
    )


def test_a_fault_is_a_failure_though_we_killed_the_rest() -> None:
    killed = job(annotations={KILLED: "2026-05-01T12:10:05+00:00"}, going=True)
    broken = pod(0, "Failed", ended(1, Termination("failed", 800, 750, "ValueError: nan").to_json()))
    peer = pod(1, "Failed", ended(137, at="2026-05-01T12:10:06Z"), deleted=("2026-05-01T12:10:06Z", 1))
    assert verdict(killed, broken, peer) == (Verdict.FAILED, "replica 0: ValueError: nan")


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (Termination("failed", 800, 750, "ValueError: nan").to_json(), "ValueError: nan"),
        ('{"rank": 0, "signal": 11, "ended": 1777637400.4, "peak_bytes": 1}', "rank 0 ended by SIGSEGV"),
    ],
)
def test_a_fault_is_a_failure_though_its_peer_took_our_end_for_a_notice(message: str, said: str) -> None:
    """It computed for a while, and met the broken connection in the second that it has then."""
    killed = job(annotations={KILLED: "2026-05-01T12:10:01+00:00"}, going=True)
    broken = pod(0, "Failed", ended(1, message), deleted=("2026-05-01T12:10:02Z", 1))
    peer = pod(1, "Failed", ended(1, SAVED, at="2026-05-01T12:10:02Z"), deleted=("2026-05-01T12:10:02Z", 1))
    assert verdict(killed, broken, peer) == (Verdict.FAILED, f"replica 0: {said}")


def test_a_replica_that_its_node_could_not_start_found_no_place_and_says_why() -> None:
    """containerd says that it ended with 128, and began in 1970: none of its ranks ever ran."""
    unstarted = ended(128, NO_PROGRAM, "StartError")
    unstarted["terminated"]["startedAt"] = "1970-01-01T00:00:00Z"
    pods = [
        {**pod(0, phase="Failed", state=unstarted), "spec": {"nodeName": "gpu-7"}},
        pod(1, phase="Failed", state=ended(137), deleted=("2026-05-01T12:10:03Z", 1)),
    ]
    seen = attempt_observation(1, 2, job(annotations={KILLED: NOON}, going=True), pods)
    assert classify(seen).verdict is Verdict.UNSCHEDULABLE
    assert classify(seen).reason == (
        f"replica 0: StartError (node gpu-7): {NO_PROGRAM}; the image has no program python: name one that "
        "has it (image)"
    )
    assert attempt_observation(1, 1, job(), pods[:1]).started_at is None


def test_what_a_node_says_of_a_working_directory_does_nothing_to_a_terminal() -> None:
    """runc names it as it is; the screen of who lists the jobs of all namespaces was cleared by it."""
    said = "error during container init: mkdir /\x1b[2J\x9b2Jx: read-only file system"
    seen = attempt_observation(1, 1, job(), [pod(0, phase="Failed", state=ended(128, said, "StartError"))])
    assert classify(seen).reason == (
        "replica 0: StartError: error during container init: mkdir /x: read-only file system"
    )
    waits = {"waiting": {"reason": "RunContainerError", "message": said}}
    seen = attempt_observation(1, 1, job(), [pod(0, phase="Pending", state=waits)])
    assert "mkdir /x: read-only" in seen.waiting


def test_a_replica_that_its_node_does_not_take_costs_its_job_no_disruption() -> None:
    """Nothing of it ran: one that its node's device plugin keeps out used up retries.disruptions."""
    message = "Pod was rejected: Allocate failed due to no healthy devices present"
    rejected = {
        **pod(0, phase="Failed", reason="UnexpectedAdmissionError", message=message),
        "spec": {"nodeName": "gpu-7"},
    }
    rejected["metadata"] |= {"deletionTimestamp": NOON, "deletionGracePeriodSeconds": 0}
    peer = pod(1, phase="Failed", state=ended(137), deleted=("2026-05-01T12:10:03Z", 1))
    found, said = verdict(job(annotations={KILLED: NOON}, going=True), rejected, peer)
    assert found is Verdict.UNSCHEDULABLE
    assert said.startswith(f"replica 0: UnexpectedAdmissionError (node gpu-7): {message}; the node does not")


def test_a_replica_whose_pod_a_webhook_has_spoilt_found_no_place_and_says_why() -> None:
    """It ended "without a trace": a disruption, after which it was made again for ever."""
    going = pod(0, "Failed", INITIALIZING, deleted=("2026-05-01T12:10:02Z", 0))
    broken = behind_init(
        "istio-validation",
        ended(126, "iptables is not set up\n"),
        behind_init("proxy", ended(143, at="2026-05-01T12:10:01Z"), going),
    )
    peer = behind_init(
        "istio-validation",
        ended(137),
        pod(1, "Failed", INITIALIZING, deleted=("2026-05-01T12:10:03Z", 0)),
    )
    killed = job(annotations={KILLED: NOON}, going=True)
    said = "init container istio-validation ended with exit code 126: iptables is not set up"
    assert verdict(killed, broken, peer) == (
        Verdict.UNSCHEDULABLE,
        f"replica 0: {said}; {FOREIGN.format('istio-validation')}",
    )
    failed = pod(0, "Failed", ended(1, Termination("failed", 8, 7, "ValueError: nan").to_json()))
    assert verdict(killed, failed, peer) == (Verdict.FAILED, "replica 0: ValueError: nan")


def test_a_stop_that_was_asked_for_is_a_suspension() -> None:
    stopped = job(annotations={STOPPED: NOON}, going=True)
    pods = [pod(i, "Failed", ended(1, SAVED), deleted=("2026-05-01T12:00:45Z", 45)) for i in (0, 1)]
    assert verdict(stopped, *pods)[0] is Verdict.SUSPENDED


@pytest.mark.parametrize(
    ("going", "pods", "under_way"),
    [
        pytest.param(False, [pod(state=RUNNING)], False, id="it died after its mark"),
        pytest.param(True, [pod(state=RUNNING)], False, id="it died before it deleted the pods"),
        pytest.param(True, [pod(phase="Pending")], False, id="the operator made a pod that late"),
        pytest.param(True, [pod(state=RUNNING, deleted=(NOON, 45))], True, id="all was asked to go"),
        pytest.param(False, [pod(phase="Failed", state=ended(1, SAVED))], True, id="it has ended by itself"),
    ],
)
def test_a_stop_is_under_way_when_everything_was_asked_to_go(
    going: bool, pods: list[Any], under_way: bool
) -> None:
    """Whoever finds a stop that a dead controller had begun must not wait for what nobody has asked."""
    stopped = job(annotations={STOPPED: NOON}, going=going)
    assert attempt_observation(1, 1, stopped, pods).stopping == under_way


def test_all_is_well_that_ends_well() -> None:
    pods = [pod(index, "Succeeded", ended(0, FINISHED)) for index in (0, 1)]
    assert verdict(job(), *pods)[0] is Verdict.FINISHED


def test_a_replica_observation_has_either_code_or_signal() -> None:
    for code in (0, 1, 78, 128, 137, 143, 255):
        seen: ReplicaObservation = attempt_observation(
            1, 1, job(), [pod(phase="Failed", state=ended(code))]
        ).replicas[0]
        assert (seen.exit_code is None) != (seen.exit_signal is None)


def test_the_gang_has_its_place_when_the_last_replica_has() -> None:
    def scheduled(at: str, status: str = "True") -> dict[str, str]:
        return {"type": "PodScheduled", "status": status, "lastTransitionTime": at}

    first = pod(0, state=RUNNING, conditions=[scheduled("2026-05-01T12:00:01Z")])
    last = pod(1, "Pending", conditions=[scheduled("2026-05-01T12:00:07Z")])
    waiting = pod(1, "Pending", conditions=[scheduled("2026-05-01T12:00:02Z", "False")])
    placed = attempt_observation(1, 2, job(), [first, last]).placed_at
    assert placed is not None
    assert placed.timestamp() == NOON_SECONDS + 7
    assert attempt_observation(1, 2, job(), [first, waiting]).placed_at is None
    assert attempt_observation(1, 2, job(), [first]).placed_at is None


@pytest.mark.parametrize("turn", [1, -1], ids=["as they came", "the other way round"])
def test_pods_of_a_job_that_is_made_again_are_no_replicas(turn: int) -> None:
    """Somebody deletes the Job of a TrainJob: JobSet makes another, and that pods of other names, which run
    on as if nothing had been. What was interrupted counts, and it is over once these have ended too."""

    def made(at: int, one: Any) -> Any:
        one["metadata"]["creationTimestamp"] = f"2026-05-01T12:{at:02}:00Z"
        return in_kind(TRAIN_JOB, one)

    first = [made(0, pod(index, state=ended(1, SAVED), deleted=(NOON, 30))) for index in (0, 1)]
    again = [made(10, pod(index, state=RUNNING)) for index in (0, 1)]
    seen = attempt_observation(1, 2, in_kind(TRAIN_JOB, job()), [*first, *again][::turn])
    assert not seen.gone
    assert [(one.state, one.disrupted) for one in seen.replicas] == [(ReplicaState.FAILED, True)] * 2
    killed = [made(10, pod(index, state=ended(137), deleted=(NOON, 1))) for index in (0, 1)]
    attempt = in_kind(TRAIN_JOB, job(annotations={KILLED: NOON}))
    over = attempt_observation(1, 2, attempt, [*first, *killed][::turn])
    assert over.gone
    assert classify(over).verdict is Verdict.DISRUPTED


def test_a_pod_that_somebody_labels_as_one_of_an_attempt_is_no_replica() -> None:
    """A number it has not: nothing may go wrong by it."""
    odd = pod(state=ended(1))
    odd["metadata"]["labels"]["training.kubeflow.org/replica-index"] = "first"
    (one,) = attempt_observation(1, 1, job(), [odd, pod(0, state=RUNNING)]).replicas
    assert one.state is ReplicaState.RUNNING
