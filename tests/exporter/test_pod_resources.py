"""The kubelet's socket: shares are read from it; one that is gone, silent or back is no surprise."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import grpc
from waiting import wait_until

from holdfast_controller.exporter import pod_resources_pb2 as messages
from holdfast_controller.exporter.allocations import Allocation, Allocations
from holdfast_controller.exporter.pod_resources import PodResources
from holdfast_controller.exporter.readings import Fault, Reason

SHARED = "nvidia.com/gpu.shared"


def listing() -> messages.ListPodResourcesResponse:
    devices = [
        messages.ContainerDevices(resource_name=SHARED, device_ids=["GPU-a::1"]),
        messages.ContainerDevices(resource_name="rdma/hca", device_ids=["mlx5_0"]),
    ]
    container = messages.ContainerResources(name="pytorch", devices=devices)
    idle = messages.ContainerResources(name="sidecar")
    pod = messages.PodResources(name="gpt-1-worker-0", namespace="team-a", containers=[container, idle])
    return messages.ListPodResourcesResponse(pod_resources=[pod])


@contextmanager
def kubelet(
    socket: Path, answer: Callable[[], messages.ListPodResourcesResponse] = listing
) -> Iterator[None]:
    """A server of the API, as a kubelet is one."""
    devices = [messages.ContainerDevices(resource_name=SHARED, device_ids=[f"GPU-a::{n}"]) for n in range(4)]
    allocatable = messages.AllocatableResourcesResponse(devices=devices)

    def method(reply: Callable[[], Any]) -> grpc.RpcMethodHandler:
        return grpc.unary_unary_rpc_method_handler(lambda request, context: reply().SerializeToString())

    handlers = {"List": method(answer), "GetAllocatableResources": method(lambda: allocatable)}
    with ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool)
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("v1.PodResourcesLister", handlers),)
        )
        server.add_insecure_port(f"unix://{socket}")
        server.start()
        try:
            yield
        finally:
            server.stop(None).wait()


def read_well(client: PodResources) -> Allocations | None:
    found = client.read()
    return found if isinstance(found, Allocations) else None


def test_shares_of_gpus_and_nothing_else(tmp_path: Path) -> None:
    socket = tmp_path / "kubelet.sock"
    with kubelet(socket), closing(PodResources(socket, timeout=60)) as client:
        found = client.read()
    assert found == Allocations(
        (Allocation("GPU-a", SHARED, "team-a", "gpt-1-worker-0", "pytorch", 1),), {("GPU-a", SHARED): 4}
    )


def test_no_kubelet_yet_then_one_then_another(tmp_path: Path) -> None:
    socket = tmp_path / "kubelet.sock"
    with closing(PodResources(socket, timeout=5)) as client:
        fault = client.read()
        assert isinstance(fault, Fault)
        assert fault.reason == Reason.UNREACHABLE
        assert f"the kubelet does not answer at {socket}" in fault.message
        assert "is its directory mounted" in fault.message
        for _ in range(2):
            with kubelet(socket):
                wait_until(lambda: read_well(client), "the kubelet's answer", seconds=120)
            assert isinstance(client.read(), Fault)


def test_a_kubelet_that_does_not_answer_holds_up_nobody(tmp_path: Path) -> None:
    let_go = threading.Event()

    def silent() -> messages.ListPodResourcesResponse:
        let_go.wait()
        return listing()

    socket = tmp_path / "kubelet.sock"
    with kubelet(socket, silent), closing(PodResources(socket, timeout=0.2)) as client:
        fault = client.read()
        let_go.set()
    assert isinstance(fault, Fault)
    assert fault.reason in (Reason.HUNG, Reason.UNREACHABLE)
