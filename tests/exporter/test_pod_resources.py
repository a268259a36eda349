"""The kubelet's socket: shares are read from it; one that is gone, silent or back is no surprise."""

from __future__ import annotations

import threading
from contextlib import closing
from pathlib import Path

from tests.exporter.kubelet import SHARED, kubelet, pod
from waiting import wait_until

from holdfast_controller.exporter import pod_resources_pb2 as messages
from holdfast_controller.exporter.allocations import Allocation, Allocations
from holdfast_controller.exporter.pod_resources import PodResources
from holdfast_controller.exporter.readings import Fault, Reason

OFFERED = [f"GPU-a::{number}" for number in range(4)]


def one_pod() -> list[messages.PodResources]:
    return [pod("gpt-1-worker-0", "GPU-a::1", other="mlx5_0")]


def read_well(client: PodResources) -> Allocations | None:
    found, fault = client.read()
    return None if fault else found


def test_shares_of_gpus_and_nothing_else(tmp_path: Path) -> None:
    socket = tmp_path / "kubelet.sock"
    with kubelet(socket, one_pod, OFFERED), closing(PodResources(socket, timeout=60)) as client:
        found = client.read()[0]
    assert found == Allocations(
        (Allocation("GPU-a", SHARED, "team-a", "gpt-1-worker-0", "pytorch", 1),), {("GPU-a", SHARED): 4}
    )


def test_what_a_container_holds_of_a_gpu_is_one_allocation(tmp_path: Path) -> None:
    """Two shares of one GPU were two of one share each, and two series of one name; and a device that is near
    to two nodes of memory was two devices."""
    socket = tmp_path / "kubelet.sock"
    held = [pod("two", "GPU-a::0", "GPU-a::2", "GPU-b::1", "GPU-a::0")]
    offered = [*OFFERED, "GPU-b::0", "GPU-b::1", "GPU-b::1"]
    with kubelet(socket, lambda: held, offered), closing(PodResources(socket, timeout=60)) as client:
        found = client.read()[0]
    assert [(one.uuid, one.shares) for one in found.held] == [("GPU-a", 2), ("GPU-b", 1)]
    assert found.shares == {("GPU-a", SHARED): 4, ("GPU-b", SHARED): 2}


def test_who_holds_what_is_told_where_the_kubelet_does_not_say_what_there_is(tmp_path: Path) -> None:
    socket = tmp_path / "kubelet.sock"
    with kubelet(socket, one_pod, None), closing(PodResources(socket, timeout=60)) as client:
        found, fault = client.read()
    assert [(one.uuid, one.pod) for one in found.held] == [("GPU-a", "gpt-1-worker-0")]
    assert found.shares == {}
    assert fault is not None
    assert fault.reason == Reason.ERROR
    assert "GetAllocatableResources disabled" in fault.message
    assert "KubeletPodResourcesGetAllocatable must be on" in fault.message


def test_no_kubelet_yet_then_one_then_another(tmp_path: Path) -> None:
    socket = tmp_path / "kubelet.sock"
    with closing(PodResources(socket, timeout=5)) as client:
        found, fault = client.read()
        assert found == Allocations()
        assert isinstance(fault, Fault)
        assert fault.reason == Reason.UNREACHABLE
        assert f"the kubelet does not answer at {socket}" in fault.message
        assert "is its directory mounted" in fault.message
        for _ in range(2):
            with kubelet(socket, one_pod, OFFERED):
                wait_until(lambda: read_well(client), "the kubelet's answer")
            assert isinstance(client.read()[1], Fault)


def test_a_kubelet_that_does_not_answer_holds_up_nobody(tmp_path: Path) -> None:
    let_go = threading.Event()

    def silent() -> list[messages.PodResources]:
        let_go.wait()
        return one_pod()

    socket = tmp_path / "kubelet.sock"
    with kubelet(socket, silent, OFFERED), closing(PodResources(socket, timeout=0.2)) as client:
        _, fault = client.read()
        let_go.set()
    assert isinstance(fault, Fault)
    assert fault.reason in (Reason.HUNG, Reason.UNREACHABLE)
