"""The table of faults: what hits a job, and what has to come of it. To add a fault, add a row.

Faults of one group hit one job, one after the other; its end is compared with that of an untouched twin.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass

from tests.cluster import kueue
from tests.cluster.faults import grounds, hits
from tests.cluster.faults.hits import Hit

NO_QUEUE = "such jobs take no queue (policy/refusals.py)"
PACE = 0.2
"""A step a fifth of a second: a job lasts through all faults of its group, and leaves the machine to them."""


@dataclass(frozen=True)
class Fault:
    """One row."""

    name: str
    hit: Hit
    verdict: str
    """Of the attempt that is hit; empty where it has to go on as if nothing were."""
    says: str
    """What the reason in the job's status begins with, after the replica's number; a regular expression."""
    notice: bool = False
    """Whether the ranks can save first: then no step may be lost."""
    group: str = "platform"
    spare: bool = False
    """Whether it takes a node away, so that the next attempt needs another one."""
    follows: bool = False
    """Whether it is the attempt after an eviction that is judged: nothing of it trains."""
    pace: float = PACE
    """Seconds that a step rests while this fault is under way."""
    short: bool = False
    """Part of FAULTS=short."""
    not_as_train_jobs: str = ""
    """Why it is not tried where attempts are TrainJobs."""


FAULTS = (
    # The platform takes a replica.
    Fault("eviction", hits.evicted, "Disrupted", "EvictionByEvictionAPI", notice=True, short=True),
    Fault(
        "drain of its node", hits.drained, "Disrupted", "EvictionByEvictionAPI", notice=True, spare=True,
    ),
    Fault("NoExecute taint", hits.tainted, "Disrupted", "DeletionByTaintManager", notice=True, spare=True),
    Fault(
        "preemption by priority", hits.preempted, "Disrupted", "PreemptionByScheduler", notice=True,
        spare=True,
    ),
    Fault("pod deleted with grace", hits.deleted, "Disrupted", "Deleted", notice=True),
    Fault("pod deleted without grace", hits.deleted_by_force, "Disrupted", "Deleted"),
    # The next gang finds no place for a part of it.
    Fault(
        "eviction with room for one replica alone", hits.room_for_one, "Unschedulable",
        r"1 of 2 replicas ran for 300 s and waited for replica \d: Unschedulable: 0/\d nodes are available",
        notice=True, group="places", follows=True,
    ),
    Fault(
        "eviction where the image is gone", hits.without_image(), "ImagePull",
        r"1 of 2 replicas ran for 300 s and waited for replica \d: (ErrImagePull|ImagePullBackOff): ",
        notice=True, group="places", follows=True,
    ),
    Fault(
        "eviction where the image is gone from both nodes", hits.without_image(everywhere=True), "ImagePull",
        r"it held places for 300 s and waited for replica \d: (ErrImagePull|ImagePullBackOff): ",
        notice=True, group="places", follows=True,
    ),
    # A rank ends, or stands still.
    Fault(
        "exception in a rank", hits.told_to_be("broken"), "Failed",
        r"ValueError: label 7 of 2 classes, on rank \d$", group="ranks",
    ),
    Fault(
        "SIGKILL of a rank", hits.signalled(signal.SIGKILL), "Failed", r"rank \d ended by SIGKILL$",
        group="ranks", short=True,
    ),
    Fault(
        "SIGSEGV in a rank", hits.signalled(signal.SIGSEGV), "Failed", r"rank \d ended by SIGSEGV$",
        group="ranks",
    ),
    Fault(
        "out of memory", hits.told_to_be("greedy"), "OutOfMemory",
        r"OutOfMemory: the container reached its limit of 1Gi; rank \d had \d+ MiB at its peak$",
        group="ranks",
    ),
    Fault(
        "SIGSTOP of a rank", hits.signalled(signal.SIGSTOP), "Hung",
        r"no step for \d+ s: rank \d says nothing", group="hangs",
    ),
    Fault(
        "network to a pod cut", hits.cut_off, "Hung", r"no step for \d+ s: every rank stands at",
        group="hangs",
    ),
    # The cluster around it.
    Fault("apiserver restarted", hits.restarted("kube-apiserver"), "", "", group="control"),
    Fault("etcd restarted", hits.restarted("etcd"), "", "", group="control"),
    Fault("operator restarted", hits.operator_killed, "", "", group="control"),
    Fault("controller killed", hits.controller_killed, "", "", group="control", short=True),
    Fault(
        "DNS down during a restart", hits.evicted_while(hits.without_dns), "Disrupted",
        "EvictionByEvictionAPI", notice=True, group="control",
    ),
    # Its storage.
    Fault("full disk under the run directory", grounds.full_disk, "", "", group="storage"),
    Fault(
        "eviction onto a full disk", grounds.evicted_onto_a_full_disk, "StorageUnavailable",
        "there is no room to begin in run directory |cannot write the log .*: No space left on device",
        notice=True, group="storage", follows=True,
    ),
    Fault(
        "eviction where the volume is mounted no more", grounds.evicted_without_its_volume,
        "StorageUnavailable",
        "cannot write the log .*: Permission denied, though attempts before have trained: ",
        notice=True, group="disk", follows=True,
    ),
    Fault(
        "eviction from a disk that has failed", grounds.evicted_from_a_failed_disk, "StorageUnavailable",
        "cannot write the log .*: Read-only file system", group="disk", follows=True,
    ),
    # Its nodes' clocks.
    Fault(
        "eviction where a clock is 10 minutes ahead", grounds.evicted_at_another_time(600), "Disrupted",
        "EvictionByEvictionAPI", notice=True, group="ahead",
    ),
    Fault(
        "eviction where a clock is 10 minutes behind", grounds.evicted_at_another_time(-600), "Disrupted",
        "EvictionByEvictionAPI", notice=True, group="behind",
    ),
    # Nodes.
    Fault(
        "node without power", hits.without_power, "LostNode", "DeletionByPodGC", group="nodes", spare=True,
    ),
    Fault(
        "kubelet stopped", hits.without_kubelet, "LostNode", "DeletionByTaintManager", group="nodes",
        spare=True, pace=0.5,
    ),
    # Kueue, which stays on the cluster once it is there: the last ones.
    Fault(
        "preemption by Kueue", grounds.preempted_in_its_queue, "Disrupted",
        "Preempted: the queue suspended the attempt$", notice=True, group="queue",
        not_as_train_jobs=NO_QUEUE,
    ),
    Fault(
        "Workload made inactive in Kueue", grounds.made_inactive_in_its_queue, "Suspended",
        f"its Workload in queue '{kueue.QUEUE}' was made inactive: ", notice=True, group="queue",
        not_as_train_jobs=NO_QUEUE,
    ),
)  # fmt: skip
