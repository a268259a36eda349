"""Why a pod waits, and what would help: what Kubernetes says, in one sentence. Pure.

Both say precisely what is wrong and never what to do. The remedies name the job's own keys where the job
can be changed, and the platform's part where it cannot. What is not known here is passed on as it is said.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast_trainer.contract import legible

FAILED_POD, FAILED_SERVICE = "FailedCreatePod: ", "FailedCreateService: "
"""What a reason begins with where the apiserver refuses a replica's pod, or its name."""
SAID_LIMIT = 400
"""Characters of what Kubernetes says."""


@dataclass(frozen=True)
class Remedy:
    """What to do where a message matches; `{1}` is the pattern's first group, in each place that matches."""

    pattern: str
    help: str


SCHEDULING = (
    Remedy(
        r"(?:persistentvolumeclaim|PersistentVolumeClaim) \"([^\"]+)\" not found",
        "make the claim {1}, or name another one (storage.claim)",
    ),
    Remedy(
        r"persistentvolumeclaim \"([^\"]+)\" is being deleted",
        "somebody has deleted the claim {1}, and it goes once no pod uses it, those that have ended too: "
        "make it again then, or name another one (storage.claim)",
    ),
    Remedy(
        r"persistentvolumeclaim \"([^\"]+)\" bound to non-existent persistentvolume",
        "the claim {1} has lost its volume: restore that, or name another claim (storage.claim)",
    ),
    Remedy(
        r"unbound immediate PersistentVolumeClaims|available persistent volumes to bind|binding volumes: ",
        "the claim of storage.claim has no volume: look at `kubectl describe pvc`",
    ),
    Remedy(
        r"ReadWriteOncePod access mode",
        "another pod has the claim of storage.claim, which one alone may: wait until that ends, or use a "
        "claim of ReadWriteMany, without which replicas of one job keep each other out",
    ),
    Remedy(  # in the words of older and newer Kubernetes
        r"volume node affinity conflict|PersistentVolume's node affinity|no available volume zone",
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
        "the taint {1} keeps it away: choose another capacity, let jobs put up with it (the chart's "
        "jobs.tolerations), or take it off nodes that are for them",
    ),
    Remedy(
        r"untolerated taint",
        "a taint keeps it away (`kubectl describe nodes` names it): choose another capacity, let jobs put up "
        "with it (the chart's jobs.tolerations), or take it off nodes that are for them",
    ),
    Remedy(
        r"didn't match Pod's node affinity/selector",
        "no node carries the labels that its capacity and gpus ask for: choose another capacity, or label "
        "the nodes",
    ),
    Remedy(r"didn't match pod anti-affinity rules", "each replica wants a node of its own: add nodes"),
    Remedy(r"no nodes available to schedule pods", "the cluster has no node that is ready: add nodes"),
)
_ALONE = r"(?<![\w.:@/-])"
"""Before a registry's status: what stands within a tag, a digest or a port is none."""
STARTING = (
    Remedy(
        r"^init container ([\w.-]+)",
        "an admission webhook has put {1} into the pod: see whoever runs that, or have it leave the pods of "
        "jobs alone",
    ),
    Remedy(r"^ErrImageNeverPull", "the image is not on the node, and the platform forbids to pull it"),
    Remedy(
        r"^(?:\w+: .*)?SignatureValidationFailed",
        "the node wants a signature that the image does not have: sign it, or name another one (image)",
    ),
    Remedy(
        rf"^(?:ErrImagePull|ImagePullBackOff)(?=.*(?:unauthorized|denied|forbidden|{_ALONE}40[13]\b))",
        "the registry refuses: give the namespace's service account a pull secret",
    ),
    Remedy(
        rf"^(?:ErrImagePull|ImagePullBackOff)(?=.*(?:not found|manifest unknown|{_ALONE}404\b))",
        "there is no such image: check its name and tag (image)",
    ),
    Remedy(
        r"^(?:ErrImagePull|ImagePullBackOff|RegistryUnavailable)",
        "the image cannot be pulled: check its name (image) and that the nodes reach its registry",
    ),
    Remedy(
        r"(?:exec: \"|executable file `)([^\"`]+)[\"`].*(?:not found|no such file or directory)",
        "the image has no program {1}: name one that has it (image)",
    ),
    Remedy(
        r"nvidia-container-cli|nvidia-container-runtime|CDI device",
        "the node does not give a container its GPUs: see its driver and NVIDIA's container runtime there, "
        "or cordon it",
    ),
    Remedy(
        r"\(node (\S+)\): Pod was rejected(?!.*shutting down)",
        "the node does not take it, where the scheduler sees room: see whether its GPUs and device plugin "
        "are well (`kubectl describe node {1}`), or cordon it",
    ),
    Remedy(r"^InvalidImageName", "correct the image's name (image)"),
    Remedy(
        r"^CreateContainerConfigError: failed to (?:create|prepare) subPath",
        "the node cannot make the job's directory on the volume of storage.claim: is that full, read-only or "
        "not reached, or does its NFS server take root for nobody (root_squash), who may not write at the "
        "top? Let everybody write there (chmod 1777), or export it with no_root_squash",
    ),
    Remedy(
        r"^CreateContainerConfigError",
        "something that the pod mounts or reads is missing: restore it, or suspend and resume the job",
    ),
    Remedy(
        r"^FailedMount: .*configmap \"[^\"]+\" not found",
        "what the pod mounts is gone: suspend and resume the job, and it is made anew",
    ),
    Remedy(r"^FailedMount: .*secret \"([^\"]+)\" not found", "make the secret {1} in the job's namespace"),
    Remedy(
        r"^FailedMount: .*driver name ([\w.-]+) not found",
        "the node has no driver {1}: install it there, or name a claim of another storage class "
        "(storage.claim)",
    ),
    Remedy(
        r"^FailedMount: .*(?:unknown filesystem type|/sbin/mount\.<type>|bad option)",
        "the node lacks the program that mounts such volumes (nfs-common for NFS): install it there",
    ),
    Remedy(
        r"^FailedAttachVolume: Multi-Attach",
        "a node still holds the volume of storage.claim, which one at a time may: wait until it lets go, or "
        "use a claim of ReadWriteMany",
    ),
    Remedy(
        r"^Failed(?:Mount|AttachVolume)",
        "the node does not get the volume of storage.claim: see whether the storage and its driver on the "
        "node are up",
    ),
    Remedy(
        r"^FailedCreatePodSandBox: .*no runtime for \"([^\"]+)\" is configured",
        "the container runtime of the node does not know {1}: set it up there, or take the node out",
    ),
    Remedy(
        r"^(?:FailedCreatePodSandBox|NetworkNotReady)",
        "the node can make no pods: see its network plugin and container runtime, or cordon it",
    ),
    Remedy(
        r"^Pulling",
        "the node is fetching the image: wait; it is quick where the node has it already",
    ),
)
MAKING = (
    Remedy(
        r"unable to validate against any security context constraint",
        "OpenShift lets pods have a user of their own choosing where their account may: `oc adm policy "
        "add-scc-to-user nonroot-v2 -z default -n NAMESPACE` allows it in the job's namespace",
    ),
    Remedy(
        r"exceeded quota: ([\w.-]+)",
        "the namespace's quota {1} has no room for it: wait until others end, ask for less (replicas, gpus, "
        "resources), or have it raised",
    ),
    Remedy(
        r"failed quota: ([\w.-]+): must specify .*limits\.(?:cpu|ephemeral-storage)",
        "the namespace's quota {1} is for pods with limits that no job gives: have a LimitRange give them, "
        "none of them less than what a replica asks for",
    ),
    Remedy(
        r"failed quota: ([\w.-]+): must specify",
        "the namespace's quota {1} is for pods that say what they take: give resources.cpu and "
        "resources.memory, or have a LimitRange say the rest",
    ),
    Remedy(
        r"(?:maximum|minimum) ([\w.-]+) usage per ",
        "the namespace's LimitRange allows other amounts of {1}: change resources, or have it changed",
    ),
    Remedy(
        r"must be less than or equal to ([\w.-]+) limit of (\S+)",
        "the namespace's LimitRange gives a pod that names no limit one of {2}: ask for no more "
        "(resources.{1}), or have its default raised",
    ),
    Remedy(
        r"failed calling webhook \"([^\"]+)\"",
        "the cluster's admission webhook {1} does not answer, and without it nothing of this kind is taken: "
        "whoever runs it has to bring it back",
    ),
    Remedy(r"\"([^\"]+)\" already exists", "something else has the name {1}: it is made when that is gone"),
)


def explain_wait(reason: str) -> str:
    """`reason` (`Unschedulable: ...`, `ErrImagePull: ...`) with what would help; alone where nobody knows."""
    if reason.startswith(("Unschedulable", "SchedulerError", "Pending")):
        return explain(reason, SCHEDULING)
    return explain(reason, MAKING if reason.startswith((FAILED_POD, FAILED_SERVICE)) else STARTING)


def explain(reason: str, remedies: Sequence[Remedy]) -> str:
    """`reason` with the first remedy that fits it. A node's words have the job's in them, such as its working
    directory, and with them what those would do to the terminal of whoever lists jobs."""
    reason = legible(reason)
    for remedy in remedies:
        found = list(re.finditer(remedy.pattern, reason, re.DOTALL))
        if found:
            said = remedy.help
            for number, groups in enumerate(zip(*(match.groups() for match in found), strict=True), 1):
                said = said.replace(f"{{{number}}}", " and ".join(dict.fromkeys(filter(None, groups))))
            return f"{_short(reason).rstrip('. ')}; {said}"
    return _short(reason)


def _short(reason: str) -> str:
    """Both ends of it, for a mount's whole command line lies between what failed and why."""
    if len(reason) <= SAID_LIMIT:
        return reason
    return f"{reason[: SAID_LIMIT // 2].rstrip()} … {reason[-SAID_LIMIT // 2 :].lstrip()}"
