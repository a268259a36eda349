"""Why a cluster does not take a job: what its operator allows, and what pods cannot do without."""

from __future__ import annotations

from holdfast_controller.jobs import TrainingJob
from holdfast_controller.pod_settings import JobsKind, Limits, PodSettings

from .gpu_request import NO_DEVICES, VISIBLE
from .images import allowed, is_reference
from .quantity import quantity


def refusals(job: TrainingJob, settings: PodSettings) -> tuple[str, ...]:
    """A sentence for each thing in the way, with its key and the remedy; () where nothing is."""
    return (
        *_image(job, settings),
        *_storage(job, settings),
        *_queue(job, settings),
        *_priority(job, settings),
        *_fewer_replicas(job),
        *_devices(job),
        *_caps(job, settings.limits),
    )


def _image(job: TrainingJob, settings: PodSettings) -> list[str]:
    image = job.spec.image or settings.default_image
    if not image:
        return ["spec.image is empty and this cluster has no default image: name the image to run"]
    if not is_reference(image):
        return [f"spec.image {image!r} is not an image's name, such as registry.example.org/team/trainer:1"]
    # The operator's own choice needs no permission.
    if job.spec.image and not allowed(image, settings.allowed_images):
        patterns = ", ".join(settings.allowed_images)
        return [f"spec.image {image!r} is not among the images this cluster allows ({patterns})"]
    return []


def _storage(job: TrainingJob, settings: PodSettings) -> list[str]:
    if job.spec.storage or settings.default_claim:
        return []
    return [
        "spec.storage.claim is missing and this cluster has no default: name a PersistentVolumeClaim that "
        "every node can mount (ReadWriteMany), for a pod's own disk goes with the pod"
    ]


def _queue(job: TrainingJob, settings: PodSettings) -> list[str]:
    """Kueue 0.15, which the tests have, says where pods may run in a field that TrainJobs have no more since
    Trainer 2.2: they would run beside the quota that they were given."""
    if job.spec.queue is None or settings.kind is not JobsKind.TRAIN_JOB:
        return []
    return [
        f"spec.queue {job.spec.queue!r} is for clusters whose attempts are PyTorchJobs, and here they are "
        "TrainJobs (jobs.kind of the chart): leave out spec.queue"
    ]


def _priority(job: TrainingJob, settings: PodSettings) -> list[str]:
    priority, permitted = job.spec.priority, settings.allowed_priorities
    if priority is None:
        return []
    if job.spec.queue is None:
        return [f"spec.priority {priority!r} is one among the jobs of a queue: name the queue (spec.queue)"]
    if permitted and priority not in permitted:
        return [
            f"spec.priority {priority!r} is not among those that this cluster allows ({', '.join(permitted)})"
        ]
    return []


def _fewer_replicas(job: TrainingJob) -> list[str]:
    if job.spec.min_replicas is None or job.spec.queue is None:
        return []
    return [
        f"spec.minReplicas {job.spec.min_replicas} is for jobs without a queue: Kueue gives places to all "
        "replicas or to none; leave out spec.minReplicas or spec.queue"
    ]


def _devices(job: TrainingJob) -> list[str]:
    if job.spec.env.get(VISIBLE, NO_DEVICES) == NO_DEVICES:
        return []
    return [
        f"spec.env.{VISIBLE} would show the job GPUs of its node that it did not ask for, and that others "
        "have: leave it out, and say in spec.gpus how many it needs"
    ]


def _caps(job: TrainingJob, limits: Limits) -> list[str]:
    spec = job.spec
    found = []
    # What is left out counts as what the replica would get: a core a rank, and all of the node's memory.
    cpu = spec.resources.cpu or str(spec.processes_per_replica)
    cpu_key = "spec.resources.cpu" if spec.resources.cpu else "spec.resources.cpu (not given: one a rank)"
    if limits.memory is not None and spec.resources.memory is None:
        found.append(
            f"spec.resources.memory is missing and this cluster allows at most {limits.memory}: name it"
        )
    asked = (
        ("spec.replicas", str(spec.replicas), limits.replicas),
        ("spec.gpus", spec.gpus, limits.gpus),
        (cpu_key, cpu, limits.cpu),
        ("spec.resources.memory", spec.resources.memory, limits.memory),
    )
    for key, value, limit in asked:
        if value is not None and limit is not None and quantity(value) > quantity(str(limit)):
            found.append(f"{key} is {value} and this cluster allows at most {limit}")
    return found
