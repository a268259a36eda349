"""The composition root on Kubernetes. Only wires.

Every replica keeps copies of jobs, attempt objects and pods, asks attempts how far they are, and answers
REST. The one that holds the Lease also reconciles and sweeps, over a connection that refuses to write from
the moment in which it may have lost the Lease.
"""

from __future__ import annotations

import asyncio
import contextlib

import structlog

from .api import create_app
from .clock import ClockWatch
from .gpu_exporters import GpuExporters
from .gpu_watch import GpuWatch
from .kube.access import ClusterAccess
from .kube.connection import connect
from .kube.endpoint import Endpoints
from .kube.engine import KubeEngine
from .kube.leader import Leadership
from .kube.pieces import Pieces
from .kube.prerequisites import missing, wake_when_complete
from .kube.reflector import Reflector
from .kube.resource import JOBS
from .kube.store import KubeStore
from .manifests import KINDS
from .metrics import Metrics, WatchMetrics
from .pod_settings import PodSettings, load_pod_settings
from .reconciler import Reconciler
from .server import Background, Controller, bind, serve, signals_set
from .settings import ClusterSettings

WORKERS = 16
"""Passes under way at once: they spend their time waiting for the apiserver."""
PROGRESS_SECONDS = 3.0
"""Between two writes of a job's figures: a thousand running jobs must not flood the apiserver."""
WAITING_SECONDS = 2.0
"""Between two writes of why a job waits: of the four reasons of its first second it says one."""
RESYNC_SECONDS = 300.0
"""After which a job nobody told of is looked at. The reflectors list everything anew by themselves: this is
for what only time changes."""

log = structlog.get_logger(__name__)


async def run(settings: ClusterSettings) -> None:
    """Until SIGINT or SIGTERM. Raises our errors where it cannot start or its work ends."""
    pods = load_pod_settings(settings.pod_settings) if settings.pod_settings else PodSettings()
    kind = KINDS[pods.kind]
    asked_to_end, closing = asyncio.Event(), asyncio.Event()
    metrics = Metrics()
    watches = WatchMetrics(metrics.registry)
    connection = await connect(
        settings.kubeconfig,
        per_second=settings.requests_per_second,
        burst=settings.burst,
        metrics=watches,
    )
    jobs = Reflector(connection, JOBS, metrics=watches)
    pieces = Pieces(connection, metrics=watches)
    endpoints = Endpoints(pieces, jobs)
    leadership = Leadership(
        connection,
        settings.pod_namespace,
        settings.leader_election,
        settings.pod_name,
        metrics=watches,
    )

    leading = connection.guarded(lambda: leadership.leads)
    acting = KubeEngine(leading, pieces, endpoints, jobs, pods)
    looks = GpuExporters(settings.gpu_exporters) if settings.gpu_exporters else None
    gpus = GpuWatch(looks.look, settings.gpu_look_seconds) if looks else None
    reconciler = Reconciler(
        KubeStore(leading, jobs, cached=True),
        acting,
        metrics=metrics,
        place_seconds=pods.place_seconds,
        workers=WORKERS,
        progress_seconds=PROGRESS_SECONDS,
        waiting_seconds=WAITING_SECONDS,
        resync_seconds=RESYNC_SECONDS,
        gpus=gpus,
        watch=ClockWatch(),
    )
    led = Background(
        reconciler=reconciler.run,
        sweep=acting.sweep,
        operator=lambda: wake_when_complete(jobs, pieces, kind),
    )
    background = Background(
        jobs=jobs.run, pieces=pieces.run, endpoints=endpoints.run, leader=lambda: leadership.run(led.run)
    )
    answering = connection.impatient()
    app = create_app(
        KubeStore(answering, jobs, cached=False),
        KubeEngine(answering, pieces, endpoints, jobs, pods),
        gate=ClusterAccess(answering),
        series=metrics.text,
        reconciler_fault=lambda: background.fault or jobs.fault or pieces.fault,
        missing=lambda: missing(jobs, pieces, kind),
        closing=closing,
    )

    def announce() -> None:
        host, port = bound.getsockname()[:2]
        log.info("answers", host=host, port=port, cluster=connection.server, identity=settings.pod_name)

    try:
        async with signals_set(asked_to_end):
            with contextlib.closing(bind(settings.listen_host, settings.listen_port)) as bound:
                await serve(Controller(app, closing, background.run), bound, announce, asked_to_end)
    finally:
        await connection.close()
