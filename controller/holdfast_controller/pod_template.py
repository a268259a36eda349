"""The pod of one replica, as a plain dict: no field of it comes from a user except by way of a narrow one.

It fits the restricted Pod Security Standard: not root, no capabilities, no privilege to gain, the
runtime's seccomp profile, a root file system nobody can write, no service-account token. What can be
written is /tmp, /dev/shm and the job's own directory of its claim.

torchrun is PID 1, so a notice reaches it without a shell between. Kubernetes expands `$(NAME)` in
commands and in values of the environment; what users wrote is escaped, so that it arrives as written.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast_trainer.contract import DEFAULT_PORT, ENV_HOST, ENV_PORT, ENV_REPLICA, RunDir

from .gang import TORCHRUN, rank_environment, rendezvous_id, run_name, shutdown_timeout, supervised_rank
from .jobs import TrainingJob
from .pod_settings import PodSettings
from .policy.gpu_request import NO_DEVICES, VISIBLE, GpuRequest, gpu_request
from .policy.placement import affinity, notice_seconds, tolerations
from .policy.pod_labels import passed_on
from .policy.quantity import quantity

RUN = RunDir(Path("/holdfast/run"))
DATA_PATH = "/holdfast/data"
CONFIG_DIRECTORY = "/etc/holdfast"
CONFIG_FILE = "config.yaml"
METRICS_PORT = "metrics"
RENDEZVOUS = 23456
"""The port of replica 0 at which the replicas meet."""
PEERS_SECONDS = 2 * 3600
"""For torchrun to wait for the other replicas. A node may pull the image for long, and no failure of the job
is made of that; when a peer cannot come, the controller ends the attempt sooner."""
SPARE_SECONDS = 15
"""Between torchrun's own SIGKILL of its ranks and the kubelet's of the pod."""

JOB_LABEL = "holdfast.dev/job"
UID_LABEL = "holdfast.dev/job-uid"
ATTEMPT_LABEL = "holdfast.dev/attempt"
MANAGED_BY = {"app.kubernetes.io/managed-by": "holdfast"}


def attempt_labels(job: TrainingJob, attempt: int) -> dict[str, str]:
    """On everything of an attempt; with the replica's index they say whose every pod is."""
    return {
        **MANAGED_BY,
        JOB_LABEL: job.metadata.name,
        UID_LABEL: job.metadata.uid,
        ATTEMPT_LABEL: str(attempt),
    }


def pod_template(
    job: TrainingJob,
    attempt: int,
    settings: PodSettings,
    *,
    container: str,
    port: str,
    master: str,
    index_label: str,
    config_map: str,
) -> dict[str, Any]:
    """One template for all replicas of `job` as of this attempt: each finds its number in `index_label`,
    which its creator sets.

    `container` and `port` are the names that the creator asks for; `master` is the address of replica 0,
    `config_map` holds the job's configuration.
    """
    gpus = gpu_request(job.spec.gpus, job.spec.mig)
    labels = attempt_labels(job, attempt)
    capacity = job.spec.capacity
    grace = notice_seconds(settings.provider, capacity, job.spec.grace_seconds, settings.spot_notice_seconds)
    spec: dict[str, Any] = {
        "automountServiceAccountToken": False,
        # A Service named `holdfast` beside the job would set HOLDFAST_PORT to an address of its own.
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": shutdown_timeout(grace) + SPARE_SECONDS,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": settings.user_id,
            "runAsGroup": settings.user_id,
            "fsGroup": settings.user_id,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [
            {
                "name": container,
                "image": job.spec.image or settings.default_image,
                "command": list(_command(job, attempt, grace, master)),
                "env": _environment(job, attempt, settings, grace, gpus, index_label),
                "ports": [
                    {"name": port, "containerPort": RENDEZVOUS, "protocol": "TCP"},
                    {"name": METRICS_PORT, "containerPort": DEFAULT_PORT, "protocol": "TCP"},
                ],
                "resources": _resources(job, settings, gpus),
                "securityContext": {
                    "allowPrivilegeEscalation": False,
                    "capabilities": {"drop": ["ALL"]},
                    "readOnlyRootFilesystem": True,
                },
                # A rank that dies before it can speak leaves its last words in the pod's record.
                "terminationMessagePolicy": "FallbackToLogsOnError",
                "volumeMounts": _mounts(job),
            }
        ],
        "volumes": _volumes(job, settings, config_map),
    }
    if job.spec.working_dir is not None:
        spec["containers"][0]["workingDir"] = job.spec.working_dir
    if settings.image_pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in settings.image_pull_secrets]
    if settings.node_selector:
        spec["nodeSelector"] = dict(settings.node_selector)
    accepted = tolerations(settings.provider, capacity, gpus)
    if accepted := accepted + [one.document() for one in settings.tolerations]:
        spec["tolerations"] = accepted
    where = affinity(
        settings.provider,
        capacity,
        gpus,
        replicas=job.spec.replicas,
        attempt_labels=labels,
        slices_label=settings.slices_label,
    )
    if where:
        spec["affinity"] = where
    return {
        "metadata": {"labels": {**passed_on(job.metadata.labels, settings.pod_labels), **labels}},
        "spec": spec,
    }


def escaped(text: str) -> str:
    """So that Kubernetes' expansion of `$(NAME)` and `$$` gives `text` back."""
    return text.replace("$", "$$")


def _command(job: TrainingJob, attempt: int, grace: float, master: str) -> tuple[str, ...]:
    """torchrun with static rendezvous around supervised ranks; every word but the node's rank is known."""
    spec = job.spec
    # The controller does not see ranks end: each pod must end by itself when its ranks have saved.
    rank = supervised_rank(job, attempt, RUN, ("--tee", "--fail-on-notice", "--tell-exit"))
    return (
        "python",
        "-m",
        TORCHRUN,
        f"--nnodes={spec.replicas}",
        f"--node-rank=$({ENV_REPLICA})",
        f"--nproc-per-node={spec.processes_per_replica}",
        "--rdzv-backend=static",
        f"--rdzv-id={rendezvous_id(job, attempt)}",
        f"--rdzv-conf=timeout={PEERS_SECONDS}",
        f"--master-addr={master}",
        f"--master-port={RENDEZVOUS}",
        "--max-restarts=0",
        "--monitor-interval=0.1",
        f"--shutdown-timeout={shutdown_timeout(grace)}",
        "--",
        *(escaped(word) for word in rank),
    )


def _environment(
    job: TrainingJob,
    attempt: int,
    settings: PodSettings,
    grace: float,
    gpus: GpuRequest,
    index_label: str,
) -> list[dict[str, Any]]:
    """The platform's names win over the job's `env`, and that over the operator's."""
    threads = max(1, math.floor(_cores(job) / job.spec.processes_per_replica))
    values: Mapping[str, str] = {
        **(settings.nccl_environment if gpus.on_gpu else {}),
        # The same on every node: another number of threads adds floats in another order.
        "OMP_NUM_THREADS": str(threads),
        **job.spec.env,
        **({} if gpus.on_gpu else {VISIBLE: NO_DEVICES}),
        **rank_environment(
            job,
            attempt,
            RUN,
            config=f"{CONFIG_DIRECTORY}/{CONFIG_FILE}",
            grace_seconds=grace,
            log_limit=settings.log_limit,
        ),
        ENV_PORT: str(DEFAULT_PORT),
        ENV_HOST: "0.0.0.0",
    }
    index = {"fieldRef": {"apiVersion": "v1", "fieldPath": f"metadata.labels['{index_label}']"}}
    return [
        {"name": ENV_REPLICA, "valueFrom": index},
        *({"name": name, "value": escaped(value)} for name, value in values.items()),
    ]


def _cores(job: TrainingJob) -> float:
    """Asked for, or one a rank."""
    asked = job.spec.resources.cpu
    return float(quantity(asked)) if asked else float(job.spec.processes_per_replica)


def _resources(job: TrainingJob, settings: PodSettings, gpus: GpuRequest) -> dict[str, Any]:
    """CPU is requested and not limited: a throttled rank holds up its whole gang."""
    memory = job.spec.resources.memory
    devices = dict(gpus.resources)
    if gpus.on_gpu and job.spec.replicas > 1:
        devices |= settings.rdma_resources
    requests = {"cpu": job.spec.resources.cpu or str(job.spec.processes_per_replica), **devices}
    limits = dict(devices)
    if memory:
        requests["memory"] = limits["memory"] = memory
    return {"requests": requests, **({"limits": limits} if limits else {})}


def _claims(job: TrainingJob, settings: PodSettings) -> tuple[str, str | None]:
    """Of the run directory and of the data."""
    storage = job.spec.storage
    return (storage.claim, storage.data) if storage else (settings.default_claim, None)


def _volumes(job: TrainingJob, settings: PodSettings, config_map: str) -> list[dict[str, Any]]:
    runs, data = _claims(job, settings)
    volumes: list[dict[str, Any]] = [
        {"name": "run", "persistentVolumeClaim": {"claimName": runs}},
        {"name": "config", "configMap": {"name": config_map}},
        {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": settings.shared_memory}},
        {"name": "scratch", "emptyDir": {"sizeLimit": settings.scratch}},
    ]
    if data is not None:
        volumes.append({"name": "data", "persistentVolumeClaim": {"claimName": data}})
    return volumes


def _mounts(job: TrainingJob) -> list[dict[str, Any]]:
    mounts: list[dict[str, Any]] = [
        # Of a shared claim a job sees its own directory alone.
        {"name": "run", "mountPath": str(RUN.path), "subPath": run_name(job)},
        {"name": "config", "mountPath": CONFIG_DIRECTORY, "readOnly": True},
        {"name": "shared-memory", "mountPath": "/dev/shm"},
        {"name": "scratch", "mountPath": "/tmp"},
    ]
    if job.spec.storage and job.spec.storage.data is not None:
        mounts.append({"name": "data", "mountPath": DATA_PATH, "readOnly": True})
    return mounts
