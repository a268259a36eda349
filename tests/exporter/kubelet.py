"""A server of the kubelet's pod-resources API, for tests and measurements without a kubelet."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

from holdfast_controller.exporter import pod_resources_pb2 as messages

SHARED = "nvidia.com/gpu.shared"


def pod(name: str, *device_ids: str, other: str = "") -> messages.PodResources:
    """A pod of team-a whose container `pytorch` holds these shares; `other` is a device of another vendor."""
    devices = _each(device_ids)
    if other:
        devices.append(messages.ContainerDevices(resource_name="rdma/hca", device_ids=[other]))
    containers = [
        messages.ContainerResources(name="pytorch", devices=devices),
        messages.ContainerResources(name="sidecar"),
    ]
    return messages.PodResources(name=name, namespace="team-a", containers=containers)


def _each(device_ids: Sequence[str]) -> list[messages.ContainerDevices]:
    """As a kubelet tells them: one after the other, each again for another node of memory that it is near."""
    return [messages.ContainerDevices(resource_name=SHARED, device_ids=[one]) for one in device_ids]


@contextmanager
def kubelet(
    socket: Path, pods: Callable[[], Sequence[messages.PodResources]], offered: Sequence[str] | None
) -> Iterator[None]:
    """Answers with `pods()` and the shares in `offered`; None: it refuses to say what there is to give, as
    where its feature gate for that is off."""

    def allocatable() -> messages.AllocatableResourcesResponse:
        if offered is None:
            raise RuntimeError("Pod Resources API GetAllocatableResources disabled")
        return messages.AllocatableResourcesResponse(devices=_each(offered))

    def method(reply: Callable[[], Any]) -> grpc.RpcMethodHandler:
        return grpc.unary_unary_rpc_method_handler(lambda request, context: reply().SerializeToString())

    handlers = {
        "List": method(lambda: messages.ListPodResourcesResponse(pod_resources=pods())),
        "GetAllocatableResources": method(allocatable),
    }
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
