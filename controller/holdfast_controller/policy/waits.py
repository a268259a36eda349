"""Why a pod waits, and what would help: the scheduler's and the kubelet's words in one sentence. Pure.

Both say precisely what is wrong and never what to do. The remedies name the job's own keys where the job
can be changed, and the platform's part where it cannot. What is not known here is passed on as it is said.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Remedy:
    """What to do where a message matches; `{1}` is the pattern's first group."""

    pattern: str
    help: str


SCHEDULING = (
    Remedy(
        r"(?:persistentvolumeclaim|PersistentVolumeClaim) \"([^\"]+)\" not found",
        "make the claim {1}, or name another one (storage.claim)",
    ),
    Remedy(
        r"unbound immediate PersistentVolumeClaims",
        "the claim of storage.claim has no volume: look at `kubectl describe pvc`",
    ),
    Remedy(
        r"volume node affinity conflict",
        "the claim's volume lives in a zone that has no room: add nodes there, or use storage that all "
        "zones reach",
    ),
    Remedy(
        r"Insufficient (nvidia\.com/gpu\.shared)",
        "no node has a free share of a GPU: wait for a job to end, or add shared nodes",
    ),
    Remedy(
        r"Insufficient ([\w.-]+/[\w.-]+)",
        "no node has so much {1} free: wait for a job to end, ask for less (gpus), or add nodes",
    ),
    Remedy(
        r"Insufficient (cpu|memory)",
        "no node has so much {1} free: ask for less (resources.{1}), or add nodes",
    ),
    Remedy(r"Insufficient ephemeral-storage", "free disk space on the nodes, or add nodes"),
    Remedy(r"Too many pods", "the nodes hold as many pods as they may: add nodes"),
    Remedy(
        r"node\(s\) were unschedulable",
        "nodes are cordoned: `kubectl uncordon` them, or wait until they come back",
    ),
    Remedy(
        r"untolerated taint(?:\(s\))? \{([\w./-]+)",
        "the taint {1} keeps it away: choose another capacity, or take the taint off nodes that are for it",
    ),
    Remedy(
        r"untolerated taint",
        "a taint keeps it away (`kubectl describe nodes` names it): choose another capacity, or take the "
        "taint off nodes that are for it",
    ),
    Remedy(
        r"didn't match Pod's node affinity/selector",
        "no node carries the labels that its capacity and gpus ask for: choose another capacity, or label "
        "the nodes",
    ),
    Remedy(r"didn't match pod anti-affinity rules", "each replica wants a node of its own: add nodes"),
    Remedy(r"no nodes available to schedule pods", "the cluster has no node that is ready: add nodes"),
)
STARTING = (
    Remedy(r"^ErrImageNeverPull", "the image is not on the node, and the platform forbids to pull it"),
    Remedy(
        r"^(?:ErrImagePull|ImagePullBackOff)(?=.*(?:unauthorized|denied|forbidden|401|403))",
        "the registry refuses: give the namespace's service account a pull secret",
    ),
    Remedy(
        r"^(?:ErrImagePull|ImagePullBackOff)(?=.*(?:not found|manifest unknown|404))",
        "there is no such image: check its name and tag (image)",
    ),
    Remedy(
        r"^(?:ErrImagePull|ImagePullBackOff)",
        "the image cannot be pulled: check its name (image) and that the nodes reach its registry",
    ),
    Remedy(r"^InvalidImageName", "correct the image's name (image)"),
    Remedy(
        r"^CreateContainerConfigError",
        "something that the pod mounts or reads is missing: restore it, or suspend and resume the job",
    ),
)


def explain_wait(reason: str) -> str:
    """`reason` (`Unschedulable: ...`, `ErrImagePull: ...`) with what would help; alone where nobody knows."""
    scheduling = reason.startswith(("Unschedulable", "SchedulerError", "Pending"))
    for remedy in SCHEDULING if scheduling else STARTING:
        found = re.search(remedy.pattern, reason, re.DOTALL)
        if found:
            said = remedy.help
            for number, group in enumerate(found.groups(), 1):
                said = said.replace(f"{{{number}}}", group or "")
            return f"{reason.rstrip('. ')}; {said}"
    return reason


def explain_queue(queue: str) -> str:
    """Why an attempt has no pods that Kueue has not admitted."""
    return (
        f"waits for room in its queue {queue!r}: wait for its jobs to end, ask for less (replicas, gpus, "
        "resources), or have its quota raised; `kubectl describe workloads` shows its place, and says so "
        "where the queue is stopped, missing, or smaller than the job"
    )
