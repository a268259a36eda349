"""Looks at this machine's own GPUs for the jobs of the local engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import structlog

from .cluster import GpuGrant, GpuUse
from .exporter.job_uses import uses_of_jobs
from .exporter.running import ExporterError, Options, collecting
from .gpu_watch import GpuWatch

log = structlog.get_logger(__name__)


@contextmanager
def watching(
    gpus: bool, grants: Callable[[], Sequence[GpuGrant]], every_seconds: float
) -> Iterator[GpuWatch | None]:
    """Over the GPUs of which `grants` tells whose they are; None where there are none, or no pynvml."""
    if not gpus:
        yield None
        return
    try:
        with collecting(Options()) as collector:

            async def look() -> list[GpuUse]:
                granted = grants()
                return uses_of_jobs(await asyncio.to_thread(collector.look), granted)

            yield GpuWatch(look, every_seconds)
    except ExporterError as error:
        log.warning("nobody sees whether jobs use their GPUs", error=str(error))
        yield None
