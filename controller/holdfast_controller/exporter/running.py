"""Wiring: which sources there are here, the endpoint over them, the end on a signal.

On a node of a cluster the kubelet and the apiserver are asked too; on one machine NVML and /proc are all.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import structlog

from holdfast_controller.cluster import HoldfastError
from holdfast_controller.manifests import KINDS
from holdfast_controller.pod_template import ATTEMPT_LABEL, JOB_LABEL

from .attribution import PodLabels
from .collector import AllocationSource, Collector, Snapshot
from .endpoint import served
from .pods import ACCOUNT, NodePods, from_apiserver
from .readings import Fault
from .sampling import DEADLINE_SECONDS, PATIENCE_SECONDS, Sampler

LABELS = PodLabels(JOB_LABEL, ATTEMPT_LABEL, tuple(kind.index_label for kind in KINDS.values()))

log = structlog.get_logger(__name__)


class ExporterError(HoldfastError):
    """The exporter cannot run as it was asked to."""


@dataclass(frozen=True)
class Options:
    """Of `holdfast exporter`."""

    host: str = "127.0.0.1"
    port: int = 9401
    deadline: float = DEADLINE_SECONDS
    """Seconds that NVML has for an answer."""
    patience: float = PATIENCE_SECONDS
    """Seconds of silence after which the process that reads NVML is replaced."""
    pod_resources: Path | None = None
    """The kubelet's socket; None: not on a node."""
    node: str | None = None
    """Name of the node whose pods are looked up; None: none are."""
    apiserver: str | None = None
    account: Path = ACCOUNT


@contextmanager
def collecting(options: Options) -> Iterator[Collector]:
    """A collector over the sources that `options` name. Raises ExporterError."""
    _needs("pynvml")
    with closing(Sampler(options.deadline, options.patience)) as sampler:
        node_pods = None
        if options.node:
            node_pods = NodePods(
                from_apiserver(_apiserver(options, os.environ), options.node, options.account)
            )
        with _kubelet(options.pod_resources) as kubelet:
            yield Collector(sampler.sample, LABELS, kubelet=kubelet, node_pods=node_pods)


def run(options: Options, started: Callable[[int], None]) -> None:
    """Serve until SIGTERM or SIGINT; `started` is told the port. Raises ExporterError."""
    with collecting(options) as collector, _asked_to_end() as ended:
        told = _Told()
        try:
            with served(lambda: told.after(collector.look()), options.host, options.port) as port:
                started(port)
                ended.wait()
        except OSError as error:
            raise ExporterError(
                f"cannot listen on {options.host}:{options.port}: {error.strerror or error}; "
                "choose another --port, or 0 for any that is free"
            ) from error


@contextmanager
def _asked_to_end() -> Iterator[threading.Event]:
    """Set by SIGTERM and SIGINT."""
    ended = threading.Event()
    before = {
        number: signal.signal(number, lambda *_: ended.set()) for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield ended
    finally:
        for number, action in before.items():
            signal.signal(number, action)


class _Told:
    """Logs a source's fault when it comes, changes its kind and goes, not at every scrape."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: dict[str, Fault | None] = {}

    def after(self, snapshot: Snapshot) -> Snapshot:
        with self._lock:
            for source, fault in snapshot.sources.items():
                before = self._last.get(source)
                if fault is not None and (before is None or before.reason != fault.reason):
                    log.warning(
                        "figures are missing", source=source, reason=fault.reason, message=fault.message
                    )
                elif fault is None and before is not None:
                    log.info("figures are there again", source=source)
                self._last[source] = fault
        return snapshot


def _needs(module: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise ExporterError(f"{module} is not installed: pip install 'holdfast[controller,exporter]'")


def _apiserver(options: Options, environment: Mapping[str, str]) -> str:
    if options.apiserver:
        return options.apiserver.rstrip("/")
    host, port = environment.get("KUBERNETES_SERVICE_HOST"), environment.get("KUBERNETES_SERVICE_PORT")
    if not host or not port:
        raise ExporterError(
            f"--node {options.node} is given, but no apiserver: KUBERNETES_SERVICE_HOST is not set, as it "
            "is in a pod; give --apiserver, or leave --node (NODE_NAME) out"
        )
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


def _kubelet(socket: Path | None) -> AbstractContextManager[AllocationSource | None]:
    """The client, closed at the end. gRPC is only loaded where a kubelet is asked."""
    if socket is None:
        return nullcontext()
    _needs("grpc")
    from .pod_resources import PodResources

    return closing(PodResources(socket))
