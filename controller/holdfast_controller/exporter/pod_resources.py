"""The kubelet's pod-resources API over its socket: who was given which device.

gRPC by hand-written method names and generated messages (pod_resources.proto): two calls, no stub class.
The channel connects anew by itself when the kubelet comes back; what must be mounted for that is the
socket's directory, as a new kubelet makes a new socket.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import grpc

from . import pod_resources_pb2 as messages
from .allocations import VENDOR, Allocations, device_uuid, held_by
from .readings import Fault, Reason

SOCKET = Path("/var/lib/kubelet/pod-resources/kubelet.sock")
TIMEOUT_SECONDS = 1.0
_SERVICE = "/v1.PodResourcesLister"


class PodResources:
    """One kubelet. Safe to call from several threads."""

    def __init__(self, socket: Path = SOCKET, timeout: float = TIMEOUT_SECONDS):
        self._socket = socket
        self._timeout = timeout
        self._channel = grpc.insecure_channel(
            f"unix://{socket}",
            options=[
                # A node with many pods answers more than gRPC's 4 MiB.
                ("grpc.max_receive_message_length", 64 << 20),
                ("grpc.max_reconnect_backoff_ms", 2000),
                ("grpc.enable_http_proxy", 0),
            ],
        )
        self._list = self._channel.unary_unary(
            f"{_SERVICE}/List",
            request_serializer=messages.ListPodResourcesRequest.SerializeToString,
            response_deserializer=messages.ListPodResourcesResponse.FromString,
        )
        self._allocatable = self._channel.unary_unary(
            f"{_SERVICE}/GetAllocatableResources",
            request_serializer=messages.AllocatableResourcesRequest.SerializeToString,
            response_deserializer=messages.AllocatableResourcesResponse.FromString,
        )

    def read(self) -> tuple[Allocations, Fault | None]:
        """What holds now as far as the kubelet says it, and why it does not say all."""
        try:
            listed = self._list(messages.ListPodResourcesRequest(), timeout=self._timeout)
        except grpc.RpcError as error:
            return Allocations(), self._fault(error)
        fault = None
        try:
            there = self._allocatable(messages.AllocatableResourcesRequest(), timeout=self._timeout)
        except grpc.RpcError as error:  # who holds what is still true
            there, fault = messages.AllocatableResourcesResponse(), self._fault(error)
        held = [
            allocation
            for pod in listed.pod_resources
            for container in pod.containers
            for resource, ids in _ids(container.devices).items()
            for allocation in held_by(pod.namespace, pod.name, container.name, resource, sorted(ids))
        ]
        shares = Counter(
            (device_uuid(one), resource)
            for resource, ids in _ids(there.devices).items()
            for one in sorted(ids)
        )
        return Allocations(tuple(held), dict(shares)), fault

    def close(self) -> None:
        self._channel.close()

    def _fault(self, error: grpc.RpcError) -> Fault:
        code, details = error.code(), error.details()
        if code in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNKNOWN):
            return Fault(
                Reason.ERROR,
                f"the kubelet refuses a call at {self._socket} ({code.name}: {details}): its feature "
                "gate KubeletPodResourcesGetAllocatable must be on, as it is by itself since Kubernetes 1.23",
            )
        reason = Reason.HUNG if code == grpc.StatusCode.DEADLINE_EXCEEDED else Reason.UNREACHABLE
        if "ermission denied" in str(details):
            reason = Reason.PERMISSION_DENIED
        return Fault(
            reason,
            f"the kubelet does not answer at {self._socket} ({code.name}: {details}): "
            "is its directory mounted, does this run as root?",
        )


def _ids(devices: Iterable[messages.ContainerDevices]) -> dict[str, set[str]]:
    """By resource. A kubelet tells each device apart, and again for each node of memory that it is near."""
    found: dict[str, set[str]] = {}
    for device in devices:
        if device.resource_name.startswith(VENDOR):
            found.setdefault(device.resource_name, set()).update(device.device_ids)
    return found
