"""Of each thing that keeps a pod waiting: what is said, in Kubernetes' own words, and what would help."""

from __future__ import annotations

from dataclasses import replace

import pytest

from holdfast_controller.cluster import AttemptObservation, NotReady, ReplicaObservation, ReplicaState
from holdfast_controller.policy.explain import starting, training, unreported
from holdfast_controller.policy.refused import could_not_start
from holdfast_controller.policy.waits import explain_wait
from holdfast_trainer.contract import Progress

SAID = [
    (
        "Unschedulable: 0/3 nodes are available: 1 Insufficient nvidia.com/gpu, 2 node(s) had untolerated "
        "taint {node-role.kubernetes.io/control-plane: }. preemption: 0/3 nodes are available: 1 No "
        "preemption victims found for incoming pod, 2 Preemption is not helpful for scheduling.",
        "no node has so much nvidia.com/gpu free: wait for a job to end, ask for less (gpus), or add nodes",
    ),
    (
        "Unschedulable: 0/1 nodes are available: 1 Insufficient nvidia.com/gpu.shared.",
        "no node has a free share of a GPU: wait for a job to end, or add shared nodes",
    ),
    (
        "Unschedulable: 0/2 nodes are available: 2 Insufficient cpu.",
        "no node has so much cpu free: ask for less (resources.cpu), or add nodes",
    ),
    (
        "Unschedulable: 0/2 nodes are available: 1 Insufficient memory, 1 Too many pods.",
        "no node has so much memory free: ask for less (resources.memory), or add nodes",
    ),
    (
        "Unschedulable: 0/2 nodes are available: 1 Insufficient cpu, 2 Insufficient memory.",
        "no node has so much cpu and memory free: ask for less (resources.cpu and memory), or add nodes",
    ),
    (
        "Unschedulable: 0/1 nodes are available: 1 node(s) had untolerated taint {nvidia.com/gpu: present}.",
        "the taint nvidia.com/gpu keeps it away: choose another capacity, let jobs put up with it (the "
        "chart's jobs.tolerations), or take it off nodes that are for them",
    ),
    (
        "Unschedulable: 0/1 nodes are available: 1 node(s) had untolerated taint(s).",
        "a taint keeps it away (`kubectl describe nodes` names it): choose another capacity, let jobs put up "
        "with it (the chart's jobs.tolerations), or take it off nodes that are for them",
    ),
    (
        "Unschedulable: 0/1 nodes are available: 1 node(s) didn't match Pod's node affinity/selector.",
        "no node carries the labels that its capacity and gpus ask for: choose another capacity, or label "
        "the nodes",
    ),
    (
        "Unschedulable: 0/1 nodes are available: 1 node(s) were unschedulable.",
        "nodes are cordoned: `kubectl uncordon` them, or wait until they come back",
    ),
    (
        'Unschedulable: 0/1 nodes are available: persistentvolumeclaim "runs" not found.',
        "make the claim runs, or name another one (storage.claim)",
    ),
    (
        'Unschedulable: 0/2 nodes are available: persistentvolumeclaim "runs" is being deleted. not found',
        "somebody has deleted the claim runs, and it goes once no pod uses it, those that have ended too: "
        "make it again then, or name another one (storage.claim)",
    ),
    (
        "Unschedulable: 0/1 nodes are available: pod has unbound immediate PersistentVolumeClaims.",
        "the claim of storage.claim has no volume: look at `kubectl describe pvc`",
    ),
    (
        'Unschedulable: 0/2 nodes are available: persistentvolumeclaim "runs" bound to non-existent '
        'persistentvolume "pv-7". not found',
        "the claim runs has lost its volume: restore that, or name another claim (storage.claim)",
    ),
    (  # of a storage class that makes volumes for their first consumer
        'SchedulerError: running PreBind plugin "VolumeBinding": binding volumes: context deadline exceeded',
        "the claim of storage.claim has no volume: look at `kubectl describe pvc`",
    ),
    (
        "Unschedulable: 0/3 nodes are available: 3 node(s) unavailable due to PersistentVolumeClaim with "
        "ReadWriteOncePod access mode already in-use by another pod.",
        "another pod has the claim of storage.claim, which one alone may: wait until that ends, or use a "
        "claim of ReadWriteMany, without which replicas of one job keep each other out",
    ),
    (
        "Unschedulable: 0/5 nodes are available: 1 Insufficient nvidia.com/gpu, 4 node(s) didn't match "
        "PersistentVolume's node affinity.",
        "the claim's volume lives in a zone that has no room: add nodes there, or use storage that all "
        "zones reach",
    ),
    (
        "Unschedulable: 0/5 nodes are available: 5 node(s) had volume node affinity conflict.",
        "the claim's volume lives in a zone that has no room: add nodes there, or use storage that all "
        "zones reach",
    ),
    (
        "Unschedulable: no nodes available to schedule pods",
        "the cluster has no node that is ready: add nodes",
    ),
    (
        'ErrImagePull: failed to pull and unpack image "docker.io/acme/none:1": not found',
        "there is no such image: check its name and tag (image)",
    ),
    (
        "ImagePullBackOff: Back-off pulling image: pull access denied, insufficient_scope",
        "the registry refuses: give the namespace's service account a pull secret",
    ),
    (
        'ErrImagePull: failed to pull image "registry.example.org/train:1": unexpected status from HEAD '
        "request to https://registry.example.org/v2/train/manifests/1: 403 Forbidden",
        "the registry refuses: give the namespace's service account a pull secret",
    ),
    (  # no status in the tag, nor in the port
        'ErrImagePull: failed to pull image "registry.example.org/train:20260401": read tcp '
        "10.0.3.5:40388->192.0.2.7:443: i/o timeout",
        "the image cannot be pulled: check its name (image) and that the nodes reach its registry",
    ),
    (  # nor in the digest
        'ErrImagePull: failed to pull image "registry.example.org/train@sha256:0f404e": unexpected EOF',
        "the image cannot be pulled: check its name (image) and that the nodes reach its registry",
    ),
    (
        "ErrImagePull: dial tcp: lookup docker.io: no such host",
        "the image cannot be pulled: check its name (image) and that the nodes reach its registry",
    ),
    (  # CRI-O tells these two apart
        "RegistryUnavailable: image pull failed for registry.example.org/train:1 because the registry is "
        "unavailable",
        "the image cannot be pulled: check its name (image) and that the nodes reach its registry",
    ),
    (
        "SignatureValidationFailed: image pull failed for registry.example.org/train:1 because the signature "
        "validation failed: Source image rejected: A signature was required, but no signature exists",
        "the node wants a signature that the image does not have: sign it, or name another one (image)",
    ),
    (
        'ErrImageNeverPull: Container image "x" is not present with pull policy of Never',
        "the image is not on the node, and the platform forbids to pull it",
    ),
    (
        'CreateContainerConfigError: configmap "gpt-small-3" not found',
        "something that the pod mounts or reads is missing: restore it, or suspend and resume the job",
    ),
    (  # a claim on an NFS export as it is by default: root on the node is nobody on the server
        'CreateContainerConfigError: failed to create subPath directory for volumeMount "run" of container '
        '"pytorch"',
        "the node cannot make the job's directory on the volume of storage.claim: is that full, read-only or "
        "not reached, or does its NFS server take root for nobody (root_squash), who may not write at the "
        "top? Let everybody write there (chmod 1777), or export it with no_root_squash",
    ),
    (  # as CRI-O and containerd say it
        "CreateContainerError: container create failed: executable file `python` not found in $PATH: No such "
        "file or directory",
        "the image has no program python: name one that has it (image)",
    ),
    (
        'StartError: failed to create containerd task: exec: "python": stat /usr/bin/python: no such file or '
        "directory: unknown",
        "the image has no program python: name one that has it (image)",
    ),
    (
        "StartError: failed to create containerd task: error running prestart hook #0: exit status 1, stdout"
        ": , stderr: nvidia-container-cli: initialization error: nvml error: driver not loaded: unknown",
        "the node does not give a container its GPUs: see its driver and NVIDIA's container runtime there, "
        "or cordon it",
    ),
    (
        'FailedAttachVolume: Multi-Attach error for volume "pvc-1" Volume is already exclusively attached to '
        "one node and can't be attached to another",
        "a node still holds the volume of storage.claim, which one at a time may: wait until it lets go, or "
        "use a claim of ReadWriteMany",
    ),
    (
        "NetworkNotReady: network is not ready: container runtime network not ready: NetworkReady=false",
        "the node can make no pods: see its network plugin and container runtime, or cordon it",
    ),
    (
        'FailedCreatePod: pods "a-1-worker-0" is forbidden: exceeded quota: q0, requested: pods=1, used: '
        "pods=0, limited: pods=0",
        "the namespace's quota q0 has no room for it: wait until others end, ask for less (replicas, gpus, "
        "resources), or have it raised",
    ),
    (
        'FailedCreatePod: pods "a-1" is forbidden: failed quota: q1: must specify limits.memory for: pytorch',
        "the namespace's quota q1 is for pods that say what they take: give resources.cpu and "
        "resources.memory, or have a LimitRange say the rest",
    ),
    (  # whatever resources.cpu says, it is no limit
        'FailedCreatePod: pods "a-1-worker-0" is forbidden: failed quota: q1: must specify '
        "limits.memory for: pytorch; limits.cpu for: pytorch",
        "the namespace's quota q1 is for pods with limits that no job gives: have a LimitRange give them, "
        "none of them less than what a replica asks for",
    ),
    (
        'FailedCreatePod: pods "a-1-worker-0" is forbidden: unable to validate against any security context '
        'constraint: [provider "anyuid": Forbidden: not usable by user or serviceaccount, provider '
        "restricted-v2: .spec.securityContext.fsGroup: Invalid value: []int64{65532}: 65532 is not an "
        "allowed group]",
        "OpenShift lets pods have a user of their own choosing where their account may: `oc adm policy "
        "add-scc-to-user nonroot-v2 -z default -n NAMESPACE` allows it in the job's namespace",
    ),
    (
        'FailedCreatePod: pods "a-1-worker-0" is forbidden: maximum memory usage per Container is 100Mi, but '
        "limit is 256Mi",
        "the namespace's LimitRange allows other amounts of memory: change resources, or have it changed",
    ),
    (
        'FailedCreatePod: pods "a-1" is forbidden: [maximum memory usage per Container is 100Mi, but limit '
        "is 256Mi, maximum cpu usage per Container is 1, but limit is 2, maximum memory usage per Pod is "
        "100Mi, but limit is 256Mi]",
        "the namespace's LimitRange allows other amounts of memory and cpu: change resources, or have it "
        "changed",
    ),
    (
        'FailedCreatePod: Pod "a-1-worker-0" is invalid: spec.containers[0].resources.requests: Invalid '
        'value: "1": must be less than or equal to cpu limit of 200m',
        "the namespace's LimitRange gives a pod that names no limit one of 200m: ask for no more "
        "(resources.cpu), or have its default raised",
    ),
    (
        'FailedCreatePod: Internal error occurred: failed calling webhook "pods.example.com": failed to '
        'call webhook: Post "https://10.0.0.7:443/x?timeout=2s": dial tcp 10.0.0.7:443: connect: '
        "connection refused",
        "the cluster's admission webhook pods.example.com does not answer, and without it nothing of this "
        "kind is taken: whoever runs it has to bring it back",
    ),
    (
        'FailedCreatePod: pods "a-1-worker-0" already exists',
        "something else has the name a-1-worker-0: it is made when that is gone",
    ),
    (
        "NodeShutdown (node gpu-7): Pod was rejected: Pod was rejected as the node is shutting down",
        "",
    ),
    ("Gang: waits for 3 more replicas", ""),
]


@pytest.mark.parametrize(("reason", "remedy"), SAID)
def test_a_wait_says_what_would_help(reason: str, remedy: str) -> None:
    assert explain_wait(reason) == (f"{reason.rstrip('. ')}; {remedy}" if remedy else reason)


def test_what_the_apiserver_does_not_take_of_an_attempt_says_what_would_help_as_a_pod_does() -> None:
    said = (
        'POST /x: the apiserver refuses it: pytorchjobs.kubeflow.org "a-1" is forbidden: exceeded quota: jobs'
    )
    assert could_not_start(1, NotReady(said)) == (
        f"attempt 1 could not be started and is tried again: {said}; the namespace's quota jobs has no room "
        "for it: wait until others end, ask for less (replicas, gpus, resources), or have it raised"
    )


def test_of_a_long_message_both_ends_are_said() -> None:
    said = explain_wait(f"FailedMount: mount failed {'x' * 1000} unknown filesystem type 'nfs'")
    assert said.startswith("FailedMount: mount failed xxx")
    assert " … " in said
    assert "x unknown filesystem type 'nfs'; the node lacks the program that mounts such volumes" in said
    assert len(said) < 600


def test_an_attempt_that_is_half_up_says_what_keeps_the_rest() -> None:
    reason = "FailedMount: no; see the storage"
    replicas = (
        ReplicaObservation(0, ReplicaState.RUNNING),
        ReplicaObservation(1, ReplicaState.PENDING),
        ReplicaObservation(2, ReplicaState.PENDING, reason),
    )
    seen = AttemptObservation(1, exists=True, gone=False, replicas=replicas)
    assert starting(seen) == f"1 of 3 replicas are up; replica 2: {reason}"


def test_an_attempt_whose_rank_0_cannot_be_reached_does_not_blame_its_program() -> None:
    kept_out = "the controller gets no connection to rank 0 at 10.0.0.7:9090"
    seen = AttemptObservation(
        1, exists=True, gone=False, replicas=(ReplicaObservation(0, ReplicaState.RUNNING),), kept_out=kept_out
    )
    assert starting(seen) == f"replicas are up; {kept_out}"
    assert unreported(seen) == f"runs, and steps, loss and lost work are not known: {kept_out}"
    trained = replace(seen, progress=Progress(1, 46, 100, 40, "training"))
    heard = "step 46 of 100; step 40 is durable"
    assert training(trained, None) == f"{heard}; nothing was heard since: {kept_out}"
    assert training(replace(trained, kept_out=""), None) == heard
