"""PyTorchJobs under the real Training Operator: pods find each other, ranks of our image reduce together."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.cluster.cluster import Cluster
from waiting import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(2400)]

RANKS = 2

REDUCE = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
import holdfast_trainer
print("sum", total.item(), "of", dist.get_world_size(), "as", os.getuid(), flush=True)
dist.destroy_process_group()
"""


def pytorch_job(name: str, container: dict[str, Any], **pod: Any) -> dict[str, Any]:
    """A PyTorchJob of two pods, as one attempt of a job is: never restarted, pods kept to be looked at."""
    template = {"spec": {**pod, "containers": [{"name": "pytorch", **container}]}}
    replica = {"replicas": 1, "restartPolicy": "Never", "template": template}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": name},
        "spec": {
            "runPolicy": {"cleanPodPolicy": "None"},
            "nprocPerNode": "1",
            "pytorchReplicaSpecs": {"Master": replica, "Worker": replica},
        },
    }


def logs(cluster: Cluster, namespace: str, name: str, line: str) -> dict[str, str]:
    """Log of each pod of a PyTorchJob that must succeed, by the pod's name, once all have said `line`.

    The job succeeds with its master; its other pods may still be at it.
    """
    ended = cluster.kubectl.attempt(
        "wait",
        f"-n={namespace}",
        f"pytorchjob/{name}",
        "--for=condition=Succeeded",
        "--timeout=300s",
    )
    selected = f"--selector=training.kubeflow.org/job-name={name}"
    pods = [
        pod["metadata"]["name"] for pod in cluster.kubectl.get("pods", f"-n={namespace}", selected)["items"]
    ]

    def said() -> dict[str, str]:
        return {pod: cluster.kubectl.attempt("logs", f"-n={namespace}", pod).stdout for pod in pods}

    def all_said() -> dict[str, str] | None:
        found = said()
        return found if all(line in text for text in found.values()) else None

    assert ended.returncode == 0, (ended.stderr, said())
    assert len(pods) == RANKS
    return wait_until(all_said, f"every pod to say {line!r}") or {}


def test_pods_of_a_job_know_their_rank_and_find_rank_zero(cluster: Cluster, namespace: str) -> None:
    names = (
        "RANK WORLD_SIZE MASTER_ADDR MASTER_PORT PET_NODE_RANK PET_NNODES PET_NPROC_PER_NODE PET_MASTER_ADDR"
    )
    shown = " ".join(f"{name}=${name}" for name in names.split())
    # The job succeeds with rank 0 alone, and a pod has a name only while it is ready: so each waits.
    script = (
        f"echo {shown}; [ $RANK = 0 ] || exec sleep 1000; until nslookup ranks-worker-0; do sleep 0.2; done"
    )
    container = {"image": cluster.busybox, "command": ["sh", "-c", script]}
    cluster.kubectl.apply(
        pytorch_job("ranks", container, terminationGracePeriodSeconds=0), namespace=namespace
    )
    said = logs(cluster, namespace, "ranks", "RANK=")

    assert sorted(said) == ["ranks-master-0", "ranks-worker-0"]
    for rank, pod in enumerate(sorted(said)):
        # What nslookup says on the way comes through another pipe, and may be logged first.
        (line,) = (line for line in said[pod].splitlines() if line.startswith("RANK="))
        told = dict(word.split("=") for word in line.split())
        assert told == {
            "RANK": str(rank),
            "WORLD_SIZE": str(RANKS),
            "MASTER_ADDR": "ranks-master-0",
            "MASTER_PORT": "23456",
            "PET_NODE_RANK": str(rank),
            "PET_NNODES": str(RANKS),
            "PET_NPROC_PER_NODE": "1",
            "PET_MASTER_ADDR": "ranks-master-0",
        }


def test_a_job_without_a_pytorch_container_is_refused_by_the_webhook(
    cluster: Cluster, namespace: str
) -> None:
    job = pytorch_job("nameless", {"image": cluster.busybox})
    for replica in job["spec"]["pytorchReplicaSpecs"].values():
        replica["template"]["spec"]["containers"][0]["name"] = "main"
    done = cluster.kubectl.attempt("create", f"-n={namespace}", "-f", "-", document=json.dumps(job))
    assert done.returncode == 1
    assert "must have at least one container with name pytorch" in done.stderr


def test_two_pods_of_the_trainer_image_reduce_together(
    cluster: Cluster, namespace: str, trainer_image: str
) -> None:
    """Our own image, by its own entry point, as a restricted pod with a read-only root."""
    script = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "reduce"},
        "data": {"reduce.py": REDUCE},
    }
    container = {
        "image": trainer_image,
        "imagePullPolicy": "IfNotPresent",
        "args": ["/job/reduce.py"],
        "env": [{"name": "OMP_NUM_THREADS", "value": "1"}],
        "volumeMounts": [{"name": "job", "mountPath": "/job"}, {"name": "tmp", "mountPath": "/tmp"}],
        "securityContext": {
            "readOnlyRootFilesystem": True,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
    }
    restricted = {
        # For the whole pod: the image of the operator's init container names no user, and would be refused.
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 65532,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "volumes": [{"name": "job", "configMap": {"name": "reduce"}}, {"name": "tmp", "emptyDir": {}}],
        "automountServiceAccountToken": False,
    }
    cluster.kubectl.apply(script, pytorch_job("reduce", container, **restricted), namespace=namespace)
    logs(cluster, namespace, "reduce", "sum 3.0 of 2 as 65532")
