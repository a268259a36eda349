"""Whose process is it, whose share: every way that a cgroup, an environment and a pod can say it."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast_controller.exporter.allocations import Allocation, device_uuid, held_by
from holdfast_controller.exporter.attribution import Holder, PodLabels, allocated, holder_of, parents_of, uses
from holdfast_controller.exporter.pods import Pods, pods_of
from holdfast_controller.exporter.processes import Origin, job_names, origins, pod_of_cgroup
from holdfast_controller.exporter.readings import DeviceReading, MigReading, ProcessReading

UID = "0b9ba6b0-7b5d-4a7e-a2b9-c8b1a1d1e0aa"
UNDERSCORED = UID.replace("-", "_")
MAIN, SIDE = "a" * 64, "b" * 64
LABELS = PodLabels("holdfast.dev/job", "holdfast.dev/attempt", ("completion-index", "replica-index"))


@pytest.mark.parametrize(
    ("cgroup", "expected"),
    [
        (f"0::/kubepods/burstable/pod{UID}/{MAIN}\n", (UID, MAIN)),
        (f"0::/kubepods/pod{UID}/{MAIN}/nested/by-the-job\n", (UID, MAIN)),
        (
            f"0::/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{UNDERSCORED}.slice/"
            f"cri-containerd-{MAIN}.scope\n",
            (UID, MAIN),
        ),
        (f"0::/../../kubepods-pod{UNDERSCORED}.slice/crio-{MAIN}.scope\n", (UID, MAIN)),
        (f"12:memory:/site/kubepods/pod{UID}/{MAIN}\n1:name=systemd:/\n", (UID, MAIN)),
        (f"1:cpu:/\n4:devices:/kubepods/pod{UID}/{MAIN}\n", (UID, MAIN)),
        (
            "0::/kubepods/pod0123456789abcdef0123456789abcdef/" + MAIN,
            ("0123456789abcdef0123456789abcdef", MAIN),
        ),
        (f"0::/kubepods/pod{UID}\n", (UID, "")),
        ("0::/system.slice/docker-" + MAIN + ".scope\n", ("", "")),
        ("0::/user.slice/user-0.slice/session-1.scope\n", ("", "")),
        ("0::/\n", ("", "")),
        ("", ("", "")),
        (f"0::/podium-{UID}/{MAIN}\n", ("", "")),
    ],
)
def test_pod_and_container_of_a_cgroup(cgroup: str, expected: tuple[str, str]) -> None:
    assert pod_of_cgroup(cgroup) == expected


def test_of_the_environment_only_a_jobs_names_are_read() -> None:
    text = b"SECRET=x\0HOLDFAST_JOB=a/b=c\0RANK=1\0HOLDFAST_TOKEN=y\0LANG=\xff\0"
    assert job_names(text) == {"HOLDFAST_JOB": "a/b=c", "RANK": "1"}


def test_a_process_that_has_ended_has_no_origin(tmp_path: Path) -> None:
    there = tmp_path / "10"
    there.mkdir()
    (there / "cgroup").write_text(f"0::/kubepods/pod{UID}/{MAIN}\n")
    assert origins([10, 11], tmp_path) == {10: Origin(UID, MAIN, {})}


@pytest.fixture
def pods() -> Pods:
    def item(name: str, uid: str, **metadata: object) -> dict[str, object]:
        statuses = [
            {"name": "pytorch", "containerID": f"containerd://{MAIN}"},
            {"name": "starting", "containerID": ""},
        ]
        status = {"containerStatuses": statuses, "initContainerStatuses": None}
        return {"metadata": {"namespace": "team-a", "name": name, "uid": uid, **metadata}, "status": status}

    mirror = dict.fromkeys(("kubernetes.io/config.hash", "kubernetes.io/config.mirror"), "f" * 32)
    labels = {"holdfast.dev/job": "gpt", "holdfast.dev/attempt": "2", "replica-index": "1", "app": "x"}
    return pods_of(
        [
            item("gpt-2-worker-1", UID, labels=labels),
            item("notebook", "other"),
            item("static", "made-up", annotations=mirror),
        ]
    )


WORKER = Holder("team-a", "gpt-2-worker-1", "pytorch", "gpt", "2", "1")


def test_a_jobs_pod_is_known_by_its_labels(pods: Pods) -> None:
    assert holder_of(Origin(UID, MAIN), pods, LABELS) == WORKER
    assert holder_of(Origin(UID, SIDE), pods, LABELS) == Holder(
        "team-a", "gpt-2-worker-1", "", "gpt", "2", "1"
    ), "a container that the apiserver does not know yet"
    assert holder_of(Origin("f" * 32, MAIN), pods, LABELS) == Holder("team-a", "static", "pytorch")
    assert holder_of(Origin("unknown", MAIN), pods, LABELS) is None


@pytest.mark.parametrize(
    ("environment", "rank"),
    [
        ({"HOLDFAST_JOB": "team-a/gpt", "HOLDFAST_ATTEMPT": "2", "RANK": "5"}, "5"),
        ({"HOLDFAST_JOB": "team-b/other", "HOLDFAST_ATTEMPT": "2", "RANK": "5"}, ""),
        ({"HOLDFAST_JOB": "team-a/gpt", "HOLDFAST_ATTEMPT": "9", "RANK": "5"}, ""),
        ({"HOLDFAST_JOB": "team-a/gpt", "HOLDFAST_ATTEMPT": "2", "RANK": "5\n"}, ""),
        ({"RANK": "5"}, ""),
    ],
)
def test_a_process_in_a_pod_may_say_its_rank_and_nothing_else(
    pods: Pods, environment: dict[str, str], rank: str
) -> None:
    assert holder_of(Origin(UID, MAIN, environment), pods, LABELS) == Holder(**{**vars(WORKER), "rank": rank})


def test_a_process_in_a_notebook_cannot_claim_to_be_a_job(pods: Pods) -> None:
    claims = {"HOLDFAST_JOB": "team-a/gpt", "HOLDFAST_ATTEMPT": "2", "RANK": "0"}
    assert holder_of(Origin("other", MAIN, claims), pods, LABELS) == Holder("team-a", "notebook", "pytorch")


@pytest.mark.parametrize("told", ["team-a/\x1b[2Jgpt", "\x1b]0;renamed\x07/gpt", "team-a/gpt\n", "gpt", ""])
def test_what_is_no_name_names_no_job(pods: Pods, told: str) -> None:
    """`sudo holdfast gpus` shows what strangers' processes carry: one had the screen of root cleared."""
    assert holder_of(Origin(environment={"HOLDFAST_JOB": told}), pods, LABELS) is None
    of_job = holder_of(Origin(environment={"HOLDFAST_JOB": "team-a/gpt"}), pods, LABELS)
    assert of_job == Holder(namespace="team-a", job="gpt")


def test_use_is_summed_by_holder_and_an_unknown_part_makes_it_unknown(pods: Pods) -> None:
    of_pod, of_nobody = Origin(UID, MAIN), Origin()
    processes = (
        ProcessReading(1, 10.0, 0.25),
        ProcessReading(2, 20.0, None),
        ProcessReading(3, 5.0, 0.5),
        ProcessReading(4, 5.0, 0.5),
    )
    device = DeviceReading(0, "GPU-a", processes=processes)
    found = uses(device, {1: of_pod, 2: of_pod, 3: of_nobody}, pods, LABELS)
    assert [(use.holder, use.processes, use.memory_bytes, use.sm_ratio) for use in found] == [
        (WORKER, 2, 30.0, None),
        (None, 1, 5.0, 0.5),
    ]


def test_processes_of_mig_devices_are_kept_apart(pods: Pods) -> None:
    mig = (MigReading("MIG-a", 1, 3), MigReading("MIG-b", 2, 2))
    processes = (ProcessReading(1, 1.0, None, 1), ProcessReading(2, 2.0, None, 2))
    device = DeviceReading(0, "GPU-a", processes=processes, mig=mig)
    found = uses(device, {1: Origin(UID, MAIN), 2: Origin(UID, MAIN)}, pods, LABELS)
    assert [(use.mig, use.memory_bytes) for use in found] == [("MIG-a", 1.0), ("MIG-b", 2.0)]


def test_what_gkes_device_plugin_gives_out_is_known_by_the_number_of_its_device_file(pods: Pods) -> None:
    """It names no UUIDs: what was held stood beside the GPUs as one more, and that of all nodes as one."""
    given = ["nvidia1", "nvidia0/gi7", "nvidia3/vgpu0", "nvidia3/vgpu2", "nvidia0/gi9/vgpu1", "nvidia5"]
    held = held_by("team-a", "gpt-2-worker-1", "pytorch", "nvidia.com/gpu", given)
    cut = (MigReading("MIG-a", 7, 3), MigReading("MIG-b", 9, 2))
    devices = [
        DeviceReading(0, "GPU-x", minor=3),
        DeviceReading(1, "GPU-y", minor=0, mig=cut),
        DeviceReading(2, "GPU-z", minor=1),
        DeviceReading(3, "", minor=4),
    ]
    found = allocated(held, parents_of(devices), pods, LABELS)
    assert {(one.uuid, one.mig, one.shares) for one in found} == {
        ("GPU-z", "", 1),
        ("GPU-y", "MIG-a", 1),
        ("GPU-y", "MIG-b", 1),
        ("GPU-x", "", 2),
        ("nvidia5", "", 1),
    }, "of the last one NVML has not told"


def test_shares_are_counted_by_device(pods: Pods) -> None:
    assert [device_uuid(each) for each in ("GPU-a::3", "GPU-a", "MIG-b")] == ["GPU-a", "GPU-a", "MIG-b"]
    held = held_by(
        "team-a", "gpt-2-worker-1", "pytorch", "nvidia.com/gpu.shared", ["GPU-b::0", "GPU-a::1", "GPU-b::2"]
    )
    assert [(one.uuid, one.shares) for one in held] == [("GPU-a", 1), ("GPU-b", 2)]
    strange = Allocation("MIG-x", "nvidia.com/mig-1g.10gb", "team-b", "unknown-pod", "main", 1)
    device = DeviceReading(0, "GPU-a", mig=(MigReading("MIG-x", 1, 1),))
    found = allocated([*held, strange], parents_of([device]), pods, LABELS)
    assert [(one.uuid, one.mig, one.shares) for one in found] == [
        ("GPU-a", "", 1),
        ("GPU-b", "", 2),
        ("GPU-a", "MIG-x", 1),
    ]
    assert found[0].holder == WORKER
    assert found[2].holder == Holder("team-b", "unknown-pod", "main")
