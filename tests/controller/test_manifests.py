"""What an attempt becomes on Kubernetes: reviewed files for whole documents, tables for what decides them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from golden import assert_golden
from hypothesis import given
from hypothesis import strategies as st

from holdfast_controller.attempt_kind import AttemptKind
from holdfast_controller.cluster import Invalid
from holdfast_controller.jobs import AttemptRecord, TrainingJob
from holdfast_controller.manifests import KINDS, Manifests, attempt_manifests, attempt_name
from holdfast_controller.pod_settings import JobsKind, Limits, PodSettings, Toleration
from holdfast_controller.pod_template import escaped
from holdfast_controller.policy.placement import Provider

GOLDEN = Path(__file__).parent / "golden"
UID = "0b0c6c5e-6a53-4a3e-9d55-0f5a37a2b8a1"


LABELS = {"team": "vision", "app": "database", "cost.example.org/center": "17"}


def a_job(name: str = "gpt-small", namespace: str = "team-a", **spec: Any) -> TrainingJob:
    body = {
        "image": "registry.example.org/team/trainer:1",
        "command": ["python", "-m", "holdfast_trainer", "train"],
        "storage": {"claim": "training-runs"},
        **spec,
    }
    return TrainingJob.model_validate(
        {
            "metadata": {"name": name, "namespace": namespace, "uid": UID, "labels": LABELS},
            "spec": body,
        }
    )


def pod_of(job: TrainingJob, settings: PodSettings | None = None, attempt: int = 1) -> dict[str, Any]:
    spec: dict[str, Any] = attempt_manifests(job, attempt, settings or PodSettings()).pods["spec"]
    return spec


def environment(pod: dict[str, Any]) -> dict[str, str]:
    return {one["name"]: one["value"] for one in pod["containers"][0]["env"] if "value" in one}


CASES = {
    "cpu-two-replicas": (
        a_job(replicas=2, config={"train": {"steps": 300}, "data": {"path": "/holdfast/data/stdlib"}}),
        1,
        PodSettings(),
    ),
    "spot-gpus-rdma": (
        a_job(
            replicas=4,
            gpus=8,
            capacity="Spot",
            queue="team-a",
            priority="urgent",
            graceSeconds=120,
            checkpoint={"every": "90s", "keep": 5},
            resources={"cpu": "64", "memory": "512Gi"},
            storage={"claim": "training-runs", "data": "corpus"},
            env={"NCCL_DEBUG": "INFO", "PRICE": "$(HOME) costs $$5"},
        ),
        12,
        PodSettings(
            provider=Provider.EKS,
            allowed_images=("registry.example.org/team/*",),
            pod_labels=("team", "cost.example.org/*"),
            image_pull_secrets=("registry",),
            node_selector={"kubernetes.io/os": "linux", "pool": "training"},
            tolerations=(
                Toleration(key="sku", value="gpu", effect="NoSchedule"),
                Toleration(key="team", operator="Exists"),
                Toleration(key="node.kubernetes.io/unreachable", effect="NoExecute", toleration_seconds=60),
            ),
            nccl_environment={"NCCL_DEBUG": "WARN", "NCCL_SOCKET_IFNAME": "eth0"},
            rdma_resources={"vpc.amazonaws.com/efa": "4"},
            shared_memory="64Gi",
        ),
    ),
    "gpu-share": (
        a_job(gpus="0.25", replicas=2, capacity="OnDemand", image="", storage=None),
        3,
        PodSettings(
            provider=Provider.GKE, default_image="holdfast-trainer:0.1", default_claim="training-runs"
        ),
    ),
}


def as_train_job(
    job: TrainingJob, attempt: int, settings: PodSettings
) -> tuple[TrainingJob, int, PodSettings]:
    """Which takes no queue."""
    spec = job.spec.model_copy(update={"queue": None, "priority": None})
    kind = settings.model_copy(update={"kind": JobsKind.TRAIN_JOB})
    return job.model_copy(update={"spec": spec}), attempt, kind


CASES |= {f"trainjob-{name}": as_train_job(*case) for name, case in CASES.items()}


@pytest.mark.parametrize("name", CASES)
def test_golden_attempts(name: str) -> None:
    job, attempt, settings = CASES[name]
    documents = list(attempt_manifests(job, attempt, settings))
    assert_golden(GOLDEN / f"{name}.yaml", yaml.safe_dump_all(documents, sort_keys=False, width=110))


def test_the_working_directory_is_the_images_own_unless_the_job_names_one() -> None:
    assert "workingDir" not in pod_of(a_job())["containers"][0]
    assert pod_of(a_job(workingDir="/workspace"))["containers"][0]["workingDir"] == "/workspace"
    with pytest.raises(ValueError, match="workingDir"):
        a_job(workingDir="relative")


def test_it_is_pure_and_the_same_every_time() -> None:
    job, attempt, settings = CASES["spot-gpus-rdma"]
    before = job.to_dict()
    assert attempt_manifests(job, attempt, settings) == attempt_manifests(job, attempt, settings)
    assert job.to_dict() == before


# ------------------------------------------------------------------------- the pod


@pytest.mark.parametrize("name", CASES)
def test_every_pod_fits_the_restricted_standard_and_carries_no_credential(name: str) -> None:
    job, attempt, settings = CASES[name]
    pod = pod_of(job, settings, attempt)
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not {"hostNetwork", "hostPID", "hostIPC", "initContainers"} & set(pod)
    (container,) = pod["containers"]
    assert container["name"] == KINDS[settings.kind].container
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }
    assert {kind for volume in pod["volumes"] for kind in volume} <= {
        "name",
        "persistentVolumeClaim",
        "configMap",
        "emptyDir",
    }
    assert all(
        "secretKeyRef" not in str(one) and "configMapKeyRef" not in str(one) for one in container["env"]
    )


def test_an_attempt_that_was_opened_with_fewer_replicas_is_one_of_fewer() -> None:
    job = a_job(replicas=4, minReplicas=1)
    job.status.attempts = [AttemptRecord(number=1), AttemptRecord(number=2, replicas=1)]
    for attempt, replicas, master in ((1, 4, "gpt-small-1-worker-0"), (2, 1, "127.0.0.1")):
        made = attempt_manifests(job, attempt, PodSettings())
        assert made.attempt_object["spec"]["pytorchReplicaSpecs"]["Worker"]["replicas"] == replicas
        assert {f"--nnodes={replicas}", f"--master-addr={master}"} <= set(command_of(made))
    as_train_jobs = PodSettings(kind=JobsKind.TRAIN_JOB)
    for attempt, replicas, master in ((1, 4, "gpt-small-1-node-0-0.gpt-small-1"), (2, 1, "127.0.0.1")):
        made = attempt_manifests(job, attempt, as_train_jobs)
        assert made.beside[1]["spec"]["mlPolicy"] == {"numNodes": replicas}
        assert {f"--nnodes={replicas}", f"--master-addr={master}"} <= set(command_of(made))


def command_of(made: Manifests) -> list[str]:
    command: list[str] = made.pods["spec"]["containers"][0]["command"]
    return command


def test_a_train_job_has_what_its_operators_want_and_nothing_of_it_starts_again() -> None:
    job, attempt, settings = CASES["trainjob-cpu-two-replicas"]
    made = attempt_manifests(job, attempt, settings)
    assert [one["kind"] for one in made] == ["ConfigMap", "TrainingRuntime", "TrainJob"]
    _, runtime, train_job = made
    assert (
        train_job["spec"]["runtimeRef"]["name"]
        == runtime["metadata"]["name"]
        == train_job["metadata"]["name"]
    )
    job_set = runtime["spec"]["template"]["spec"]
    assert job_set["failurePolicy"] == {"maxRestarts": 0}
    (pods,) = job_set["replicatedJobs"]
    assert pods["replicas"] == 1
    assert pods["template"]["spec"]["backoffLimitPerIndex"] == 0
    assert pods["template"]["spec"]["podReplacementPolicy"] == "Failed"
    assert pods["template"]["spec"]["template"] is made.pods, "what is added to it is in the runtime"
    assert made.pods["spec"]["restartPolicy"] == "Never"
    assert "torch" not in runtime["spec"]["mlPolicy"], "rendezvous is ours"


def test_what_users_wrote_arrives_as_written() -> None:
    job = a_job(command=["echo", "$(MASTER_PORT) $$ $HOME"], env={"PRICE": "$(HOME) costs $$5"})
    pod = pod_of(job)
    assert expanded(pod["containers"][0]["command"][-1]) == "$(MASTER_PORT) $$ $HOME"
    assert expanded(environment(pod)["PRICE"]) == "$(HOME) costs $$5"


def expanded(text: str) -> str:
    """Kubernetes' rule for a container in which no name is known: `$$` is `$`, an unknown name stays."""
    return re.sub(r"\$\$|\$\([^)]*\)", lambda found: "$" if found[0] == "$$" else "expanded!", text)


@given(st.text(alphabet="$()ab ", max_size=12))
def test_escaping_survives_any_dollars(text: str) -> None:
    assert expanded(escaped(text)) == text


def test_the_platforms_names_win_over_the_jobs_and_those_over_the_operators() -> None:
    settings = PodSettings(nccl_environment={"NCCL_DEBUG": "WARN", "OMP_NUM_THREADS": "99"})
    env = environment(pod_of(a_job(gpus=1, env={"NCCL_DEBUG": "INFO"}), settings))
    assert env["NCCL_DEBUG"] == "INFO"
    assert env["OMP_NUM_THREADS"] == "1"
    assert env["HOLDFAST_RUN_DIR"] == "/holdfast/run"
    assert "NCCL_DEBUG" not in environment(pod_of(a_job(), settings)), "there is no NCCL on CPU"


def test_a_job_without_gpus_sees_none_of_its_node_whatever_its_image_says() -> None:
    assert environment(pod_of(a_job()))["NVIDIA_VISIBLE_DEVICES"] == "void"
    said = a_job(env={"NVIDIA_VISIBLE_DEVICES": "void"})
    assert environment(pod_of(said))["NVIDIA_VISIBLE_DEVICES"] == "void"
    for asked in ({"gpus": 1}, {"gpus": "0.25"}, {"gpus": 1, "mig": "1g.10gb"}):
        assert "NVIDIA_VISIBLE_DEVICES" not in environment(pod_of(a_job(**asked))), "the device plugin says"


@pytest.mark.parametrize(
    ("cpu", "processes", "threads"), [(None, None, "1"), ("8", 2, "4"), ("500m", None, "1"), ("7", 2, "3")]
)
def test_threads_are_the_same_on_every_node(cpu: str | None, processes: int | None, threads: str) -> None:
    job = a_job(resources={"cpu": cpu}, processes=processes)
    assert environment(pod_of(job))["OMP_NUM_THREADS"] == threads


@pytest.mark.parametrize(
    ("capacity", "asked", "provider", "given", "grace", "kill_after", "pod_grace"),
    [
        ("OnDemand", 300, Provider.GKE, None, "300", 270, 285),
        ("Spot", 300, Provider.GKE, None, "15", 13, 28),
        ("Spot", 300, Provider.EKS, None, "120", 108, 123),
        ("Spot", 20, Provider.EKS, None, "20", 18, 33),
        ("Any", 300, Provider.AUTO, None, "15", 13, 28),
        ("OnDemandFirst", 300, Provider.EKS, None, "120", 108, 123),
        ("Any", 300, Provider.AUTO, 60, "60", 54, 69),
    ],
)
def test_ranks_are_told_the_notice_that_they_get(
    capacity: str,
    asked: int,
    provider: Provider,
    given: float | None,
    grace: str,
    kill_after: int,
    pod_grace: int,
) -> None:
    job = a_job(capacity=capacity, graceSeconds=asked)
    pod = pod_of(job, PodSettings(provider=provider, spot_notice_seconds=given))
    assert environment(pod)["HOLDFAST_GRACE_SECONDS"] == grace
    assert f"--shutdown-timeout={kill_after}" in pod["containers"][0]["command"]
    assert pod["terminationGracePeriodSeconds"] == pod_grace >= kill_after + 15


def test_a_job_sees_its_own_directory_of_the_claim() -> None:
    mounts = {mount["mountPath"]: mount for mount in pod_of(a_job())["containers"][0]["volumeMounts"]}
    assert mounts["/holdfast/run"]["subPath"] == "team-a/gpt-small-0b0c6c5e"
    assert "/holdfast/data" not in mounts
    with_data = pod_of(a_job(storage={"claim": "training-runs", "data": "training-runs"}))
    mounts = {mount["mountPath"]: mount for mount in with_data["containers"][0]["volumeMounts"]}
    assert mounts["/holdfast/data"] == {"name": "data", "mountPath": "/holdfast/data", "readOnly": True}


def test_rdma_is_for_gangs_on_gpus() -> None:
    settings = PodSettings(rdma_resources={"rdma/hca": "1"})
    for job, expected in (
        (a_job(gpus=8, replicas=2), True),
        (a_job(gpus=8), False),
        (a_job(replicas=2), False),
    ):
        resources = pod_of(job, settings)["containers"][0]["resources"]
        assert ("rdma/hca" in resources["requests"]) is expected
        assert ("rdma/hca" in resources.get("limits", {})) is expected


# ------------------------------------------------------------------------- names

DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
names = st.from_regex(r"[a-z]([-a-z0-9]{0,48}[a-z0-9])?", fullmatch=True)


each_kind = st.sampled_from(list(KINDS.values()))


@given(names, st.integers(1, 99_999), each_kind)
def test_every_name_is_a_label_of_dns(name: str, attempt: int, kind: AttemptKind) -> None:
    made = attempt_name(a_job(name=name), attempt, kind)
    for label in (made, f"{made}{kind.longest_suffix}", *kind.address(made).split(".")):
        assert len(label) <= 63
        assert DNS_1035.fullmatch(label)


@given(names, names, st.integers(1, 2000), st.integers(1, 2000), each_kind)
def test_two_attempts_never_share_a_name(
    one: str, other: str, first: int, second: int, kind: AttemptKind
) -> None:
    if (one, first) != (other, second):
        assert attempt_name(a_job(name=one), first, kind) != attempt_name(a_job(name=other), second, kind)


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("spec", "settings", "message"),
    [
        (
            {"image": "docker.io/stranger/miner:1"},
            PodSettings(allowed_images=("registry.example.org/team/*",)),
            "spec.image 'docker.io/stranger/miner:1' is not among the images this cluster allows "
            "(registry.example.org/team/*)",
        ),
        *(
            (
                {"gpus": gpus, "env": {"NVIDIA_VISIBLE_DEVICES": "all"}},
                PodSettings(limits=Limits(gpus=1)),
                "spec.env.NVIDIA_VISIBLE_DEVICES would show the job GPUs of its node that it did not ask "
                "for, and that others have: leave it out, and say in spec.gpus how many it needs",
            )
            for gpus in (0, 1)
        ),
        (
            {"priority": "urgent"},
            PodSettings(),
            "spec.priority 'urgent' is one among the jobs of a queue: name the queue (spec.queue)",
        ),
        (
            {"priority": "urgent", "queue": "training"},
            PodSettings(allowed_priorities=("routine", "low")),
            "spec.priority 'urgent' is not among those that this cluster allows (routine, low)",
        ),
        (
            {"minReplicas": 1, "queue": "training"},
            PodSettings(),
            "spec.minReplicas 1 is for jobs without a queue: Kueue gives places to all replicas or to none; "
            "leave out spec.minReplicas or spec.queue",
        ),
        (
            {"queue": "training"},
            PodSettings(kind=JobsKind.TRAIN_JOB),
            "spec.queue 'training' is for clusters whose attempts are PyTorchJobs, and here they are "
            "TrainJobs (jobs.kind of the chart): leave out spec.queue",
        ),
        ({"image": ""}, PodSettings(), "spec.image is empty and this cluster has no default image"),
        ({"image": "Not An Image"}, PodSettings(), "spec.image 'Not An Image' is not an image's name"),
        ({"storage": None}, PodSettings(), "spec.storage.claim is missing"),
        (
            {"gpus": 16},
            PodSettings(limits=Limits(gpus=8)),
            "spec.gpus is 16 and this cluster allows at most 8",
        ),
        ({"gpus": "0.5"}, PodSettings(limits=Limits(gpus=0)), "spec.gpus is 0.5"),
        ({"replicas": 65}, PodSettings(limits=Limits(replicas=64)), "spec.replicas is 65"),
        (
            {"resources": {"memory": "1Ti"}},
            PodSettings(limits=Limits(memory="512Gi")),
            "spec.resources.memory is 1Ti and this cluster allows at most 512Gi",
        ),
        ({"resources": {"cpu": "9"}}, PodSettings(limits=Limits(cpu="8500m")), "spec.resources.cpu is 9"),
        # What a job leaves out is no way around a cap.
        (
            {"processes": 64, "gpus": "0", "resources": {"memory": "1Gi"}},
            PodSettings(limits=Limits(cpu="8")),
            "spec.resources.cpu (not given: one a rank) is 64 and this cluster allows at most 8",
        ),
        (
            {"resources": {}},
            PodSettings(limits=Limits(memory="64Gi")),
            "spec.resources.memory is missing and this cluster allows at most 64Gi: name it",
        ),
        ({"command": ["python", "a\0b"]}, PodSettings(), "spec.command[1] has a NUL character in it"),
        (
            {"resources": {"memory": "64"}},
            PodSettings(),
            "spec.resources.memory is 64, in which no replica can start: write the unit, as in 64Gi",
        ),
        ({"config": {"table": "x" * 600_000}}, PodSettings(), "spec.config has 600008 bytes"),
        ({"config": {"table": [0] * 700_000}}, PodSettings(), "spec.config has more than 100000 values"),
    ],
)
def test_a_job_that_the_cluster_does_not_take_is_told_why(
    spec: dict[str, Any], settings: PodSettings, message: str
) -> None:
    with pytest.raises(Invalid) as refused:
        attempt_manifests(a_job(**spec), 1, settings)
    assert message in str(refused.value)
    assert "team-a/gpt-small cannot run on this cluster" in str(refused.value)
    assert len(refused.value.errors) == 1


def test_all_that_is_wrong_is_told_at_once() -> None:
    with pytest.raises(Invalid) as refused:
        attempt_manifests(a_job(image="", storage=None, gpus=4), 1, PodSettings(limits=Limits(gpus=1)))
    assert len(refused.value.errors) == 3


def test_a_text_of_the_configuration_stays_text() -> None:
    """The trainer would take a bare 1e5 for a number."""
    configuration = next(iter(attempt_manifests(a_job(config={"run": "1e5", "lr": 1e-5}), 1, PodSettings())))
    assert configuration["data"] == {"config.yaml": "run: '1e5'\nlr: 1.0e-05\n"}
