"""GPUs in quarters on a real node: kubelet, device plugin, exporter and all; only the driver stands in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.cluster.cluster import Cluster
from tests.cluster.gpu_sharing import exporting, plugin_image, processes_of, quarter, said, shares, sliced
from tests.cluster.images import ImageStore
from tests.cluster.machine import Machine
from tests.exporter.seen import Seen
from tests.nvml.stand_in import BESIDE, GIB, CannotCompile, Process, Script, build, busy_gpu
from waiting import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

SECONDS = 180
SLICES = 4


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


def test_quarters_are_shared_seen_and_given_back(
    cluster: Cluster, machine: Machine, namespace: str, script: Script, controller_image: str
) -> None:
    kubectl, driver, node = cluster.kubectl, script.path.parent, machine.site.name

    def pods(*names: str) -> list[dict[str, Any]]:
        return [kubectl.get("pod", f"{name}-1-worker-0", f"-n={namespace}") for name in names]

    def running(*names: str) -> bool:
        return all(pod["status"]["phase"] == "Running" for pod in pods(*names))

    with (
        sliced(cluster, namespace, driver, node),
        exporting(cluster, namespace, driver, node, controller_image) as metrics,
    ):

        def scrape() -> Seen:
            return Seen.of_text(kubectl.run("get", "--raw", metrics))

        wait_until(lambda: shares(cluster, node) == 2 * SLICES, "eight shares of two GPUs", seconds=SECONDS)

        # Four jobs on each GPU, side by side.
        names = [f"quarter-{number}" for number in range(2 * SLICES)]
        kubectl.apply(*(quarter(name, cluster.busybox, namespace) for name in names), namespace=namespace)
        wait_until(lambda: running(*names), "all eight quarters to run", seconds=SECONDS)
        told = {
            name: kubectl.run("exec", f"-n={namespace}", f"{name}-1-worker-0", "--", "env") for name in names
        }
        given = {
            name: next(
                gpu for gpu in script.gpus if f"NVIDIA_VISIBLE_DEVICES={gpu.uuid}" in text.splitlines()
            )
            for name, text in told.items()
        }
        assert sorted(sum(gpu is each for each in given.values()) for gpu in script.gpus) == [SLICES, SLICES]

        # One more waits, and its pod says for what.
        kubectl.apply(quarter("late", cluster.busybox, namespace), namespace=namespace)
        reason = wait_until(
            lambda: next((said(pod) for pod in pods("late") if "Insufficient" in said(pod)), ""),
            "the ninth quarter's reason to wait",
            seconds=SECONDS,
        )
        assert "Insufficient nvidia.com/gpu.shared" in reason

        # Each does something else; the figures of a GPU are the sum of those who share it.
        uids = {pod["metadata"]["labels"]["holdfast.dev/job"]: pod["metadata"]["uid"] for pod in pods(*names)}

        def all_processes() -> dict[str, int] | None:
            there = processes_of(machine, list(uids.values()))
            return there if len(there) == len(uids) else None

        found = wait_until(all_processes, "the process of each pod", seconds=SECONDS)
        for number, name in enumerate(names, start=1):
            given[name].processes.append(Process(found[uids[name]], number * GIB, 2 * number))
        for gpu in script.gpus:
            gpu.figures["memory.used"] = sum(process.bytes or 0 for process in gpu.processes)
            gpu.figures["utilization"] = sum(process.percent for process in gpu.processes)
        script.write()

        def whole() -> Seen | None:
            """The apiserver is asked for new pods every few seconds; a slow kubelet is asked again."""
            seen = scrape()
            well = seen.by("source", "exporter_up") == {"nvml": 1, "pod-resources": 1, "pods": 1}
            return seen if well and len(seen.all("process_memory_bytes")) == len(names) else None

        seen = wait_until(whole, "figures of all eight pods", seconds=SECONDS)
        for number, name in enumerate(names, start=1):
            whose = {
                "uuid": given[name].uuid,
                "namespace": namespace,
                "pod": f"{name}-1-worker-0",
                "container": "pytorch",
                "job": name,
                "attempt": "1",
                "replica": "0",
            }
            assert seen.value("process_memory_bytes", **whose, rank="0") == number * GIB
            assert seen.value("process_sm_ratio", **whose, rank="0") == pytest.approx(2 * number / 100)
            assert seen.value("shares_allocated", **whose, resource="nvidia.com/gpu.shared") == 1
        for gpu in script.gpus:
            figures = {"uuid": gpu.uuid}
            memory = [value for _, value in seen.all("process_memory_bytes", **figures)]
            busy = [value for _, value in seen.all("process_sm_ratio", **figures)]
            assert len(memory) == SLICES
            assert sum(memory) == seen.value("memory_used_bytes", **figures)
            assert sum(busy) == pytest.approx(seen.value("utilization_ratio", **figures))
            assert seen.value("shares", **figures) == SLICES
        assert seen.all("unattributed_processes") == []

        # What one gives back, the one that waits gets.
        kubectl.run("delete", "pod", "quarter-0-1-worker-0", f"-n={namespace}")
        wait_until(lambda: running("late"), "the ninth quarter to run", seconds=SECONDS)
        freed = given["quarter-0"].uuid
        wait_until(
            lambda: scrape().value("shares_allocated", job="late", uuid=freed) == 1,
            "the share to change hands",
            seconds=SECONDS,
        )

        # The driver goes: what the kubelet has given is still true, what the GPUs do is not known.
        script.remove()

        def without_driver() -> Seen | None:
            seen = scrape()
            return (
                seen
                if seen.by("source", "exporter_up") == {"nvml": 0, "pod-resources": 1, "pods": 1}
                else None
            )

        blind = wait_until(without_driver, "the exporter to be blind", seconds=SECONDS)
        assert blind.all("utilization_ratio") == []
        assert blind.by("uuid", "up") == {gpu.uuid: 0 for gpu in script.gpus}
        assert blind.all("process_memory_bytes") == []
        assert len(blind.all("shares_allocated")) == 2 * SLICES
