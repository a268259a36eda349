"""GPUs in quarters on a real node: jobs, controller, kubelet, device plugin, exporter and all; only the
driver and the trainer stand in."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.cluster import Cluster
from tests.cluster.gpu_sharing import SLICES, Exporter, exporting, plugin_image, processes_of, shares, sliced
from tests.cluster.images import ImageStore
from tests.cluster.machine import Machine
from tests.cluster.test_kube_controller import World, world  # noqa: F401  a fixture
from tests.exporter.seen import Seen
from tests.nvml.stand_in import BESIDE, GIB, CannotCompile, Gpu, Process, Script, build, busy_gpu
from waiting import wait_until

from holdfast_controller.policy.gpu_request import SHARED

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

SECONDS = 180
NAMES = tuple(f"quarter-{number}" for number in range(2 * SLICES))
WORK = {name: number for number, name in enumerate(NAMES, start=1)}
"""What each job does: so many GiB, twice as many percent of its GPU's time."""
IDLE = NAMES[1]
"""Below 5 %, on a GPU that the others keep busy."""


@pytest.fixture
def machine(cluster: Cluster) -> Machine:
    if cluster.site is None:
        pytest.skip("the driver of a node of KUBECONFIG_UNDER_TEST's cluster cannot be stood in for")
    return Machine.running(cluster.site)


@pytest.fixture
def script(machine: Machine, tmp_path: Path) -> Script:
    """Two GPUs without work, in a directory that is the node's driver."""
    try:
        library = build(tmp_path)
    except CannotCompile as error:
        pytest.skip(str(error))
    ImageStore(machine.site, machine.enter).add([plugin_image(library)])
    made = Script(tmp_path / BESIDE, [busy_gpu(0), busy_gpu(1)])
    made.write()
    return made


@dataclass
class Shared:
    """The world of jobs on a node whose GPUs are shared, and what is seen of it."""

    world: World
    machine: Machine
    script: Script
    exporter: Exporter
    given: dict[str, Gpu] = field(default_factory=dict)
    """The GPU that each job was given, by name."""

    def submit(self, name: str) -> None:
        asks = {"gpus": "0.25", "idleSeconds": 30, "env": {"STEPS": "1000000", "PAUSE": "0.5"}}
        self.world.submit(name, **asks, resources={"cpu": "1m"})

    def pod(self, name: str) -> dict[str, Any]:
        return self.world.cluster.kubectl.get("pod", f"{name}-1-worker-0", f"-n={self.world.namespace}")

    def environment(self, name: str) -> list[str]:
        words = ("exec", f"-n={self.world.namespace}", f"{name}-1-worker-0", "--", "env")
        return self.world.cluster.kubectl.run(*words).splitlines()

    def running(self, *names: str) -> bool:
        return all(self.world.job(name).get("status", {}).get("phase") == "Running" for name in names)

    def patch(self, name: str, **spec: Any) -> None:
        change = json.dumps({"spec": spec})
        self.world.kubectl("patch", "tj", name, "--type=merge", f"-p={change}")

    def scrape(self) -> Seen:
        return Seen.of_text(self.exporter.scrape())

    def sources(self, nvml: int) -> Seen | None:
        """A scrape in which the kubelet and the apiserver answered, and NVML did or did not."""
        seen = self.scrape()
        well = {"nvml": nvml, "pod-resources": 1, "pods": 1}
        return seen if seen.by("source", "exporter_up") == well else None


@pytest.fixture
def shared(
    world: World,  # noqa: F811
    machine: Machine,
    script: Script,
    controller_image: str,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Shared]:
    cluster, namespace = world.cluster, world.namespace
    driver, node = script.path.parent, machine.site.name
    with (
        sliced(cluster, namespace, driver, node),
        exporting(cluster, namespace, driver, node, controller_image) as exporter,
    ):
        wait_until(lambda: shares(cluster, node) == 2 * SLICES, "eight shares of two GPUs", seconds=SECONDS)
        monkeypatch.setenv("HOLDFAST_GPU_EXPORTERS", exporter.address)
        monkeypatch.setenv("HOLDFAST_GPU_LOOK_SECONDS", "5")
        world.controller("one", "quarters")
        yield Shared(world, machine, script, exporter)


def start_all(shared: Shared) -> None:
    """Four jobs on each GPU, side by side."""
    for name in NAMES:
        shared.submit(name)
    wait_until(lambda: shared.running(*NAMES), "all eight quarters to run", seconds=SECONDS)
    for name in NAMES:
        told = shared.environment(name)
        shared.given[name] = next(
            gpu for gpu in shared.script.gpus if f"NVIDIA_VISIBLE_DEVICES={gpu.uuid}" in told
        )
    found = list(shared.given.values())
    assert [sum(gpu is each for each in found) for gpu in shared.script.gpus] == [SLICES, SLICES]


def work(shared: Shared) -> None:
    """Each does something else; the figures of a GPU are the sum of those who share it."""
    uids = {name: shared.pod(name)["metadata"]["uid"] for name in NAMES}

    def all_processes() -> dict[str, int] | None:
        there = processes_of(shared.machine, list(uids.values()))
        return there if len(there) == len(uids) else None

    found = wait_until(all_processes, "the process of each pod", seconds=SECONDS)
    assert found is not None
    for name, amount in WORK.items():
        shared.given[name].processes.append(Process(found[uids[name]], amount * GIB, 2 * amount))
    for gpu in shared.script.gpus:
        gpu.figures["memory.used"] = sum(process.bytes or 0 for process in gpu.processes)
        gpu.figures["utilization"] = sum(process.percent for process in gpu.processes)
    shared.script.write()


def check_figures(shared: Shared) -> None:
    """Of each pod what the script says of its process, and of each GPU their sum."""

    def whole() -> Seen | None:
        """The apiserver is asked for new pods every few seconds; a slow kubelet is asked again."""
        seen = shared.sources(nvml=1)
        return seen if seen and len(seen.all("process_memory_bytes")) == len(NAMES) else None

    seen = wait_until(whole, "figures of all eight pods", seconds=SECONDS)
    assert seen is not None
    for name, amount in WORK.items():
        whose = {
            "uuid": shared.given[name].uuid,
            "namespace": shared.world.namespace,
            "pod": f"{name}-1-worker-0",
            "container": "pytorch",
            "job": name,
            "attempt": "1",
            "replica": "0",
        }
        # torchrun tells a process its rank, and the stand-in runs without.
        assert seen.value("process_memory_bytes", **whose, rank="") == amount * GIB
        assert seen.value("process_sm_ratio", **whose, rank="") == pytest.approx(2 * amount / 100)
        assert seen.value("shares_allocated", **whose, resource=SHARED) == 1
    for gpu in shared.script.gpus:
        figures = {"uuid": gpu.uuid}
        memory = [value for _, value in seen.all("process_memory_bytes", **figures)]
        busy = [value for _, value in seen.all("process_sm_ratio", **figures)]
        assert len(memory) == SLICES
        assert sum(memory) == seen.value("memory_used_bytes", **figures)
        assert sum(busy) == pytest.approx(seen.value("utilization_ratio", **figures))
        assert seen.value("shares", **figures) == SLICES
    assert seen.all("unattributed_processes") == []

    # Whoever asks by the name of all exporters, as the controller in its pod does, hears the same.
    busy_for = {use.key: use.busy for use in shared.exporter.uses()}
    scripted = {f"{shared.world.namespace}/{name}": 2 * amount / 100 for name, amount in WORK.items()}
    assert {key: busy_for.get(key) for key in scripted} == pytest.approx(scripted)


def give_back(shared: Shared) -> None:
    """One that leaves its share unused is stopped where it says so, and the one that waits gets it."""
    shared.patch(IDLE, idle="Stop")
    status = shared.world.phase(IDLE, "Suspended")
    uuid = shared.given[IDLE].uuid
    assert (
        f"1 of 1 GPUs not used: {uuid} of replica 0 (no rank known to be on it), at most 4% busy since"
        in status["message"]
    )
    assert status["attempts"][0]["verdict"] == "Suspended"
    wait_until(lambda: shared.running("late"), "the ninth quarter to run", seconds=SECONDS)
    wait_until(
        lambda: shared.scrape().value("shares_allocated", job="late", uuid=uuid) == 1,
        "the share to change hands",
        seconds=SECONDS,
    )


def test_quarters_are_shared_seen_and_given_back(shared: Shared) -> None:
    start_all(shared)

    # One more waits, and its status says for what.
    shared.submit("late")
    status = shared.world.until(
        "late", "the reason to wait", lambda s: "Insufficient" in s.get("message", "")
    )
    assert status["phase"] == "Queued"
    assert f"Insufficient {SHARED}" in status["message"]
    assert (
        "no node has a free share of a GPU: wait for a job to end, or add shared nodes" in status["message"]
    )

    work(shared)
    check_figures(shared)
    give_back(shared)

    # The driver goes: what the kubelet has given is still true, what the GPUs do is not known.
    shared.script.remove()
    blind = wait_until(lambda: shared.sources(nvml=0), "the exporter to be blind", seconds=SECONDS)
    assert blind is not None
    assert blind.all("utilization_ratio") == []
    assert blind.by("uuid", "up") == {gpu.uuid: 0 for gpu in shared.script.gpus}
    assert blind.all("process_memory_bytes") == []
    assert len(blind.all("shares_allocated")) == 2 * SLICES
