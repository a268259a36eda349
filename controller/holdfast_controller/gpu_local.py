"""Looks at this machine's own GPUs for the jobs of the local engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import structlog

from .cluster import GpuGrant, GpuUse
from .exporter.job_uses import uses_of_jobs
from .exporter.readings import DeviceReading
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
            numbers = _Numbers()

            async def look() -> list[GpuUse]:
                granted = grants()
                snapshot = await asyncio.to_thread(collector.look)
                return uses_of_jobs(snapshot, granted if numbers.hold(snapshot.devices) else ())

            yield GpuWatch(look, every_seconds)
    except ExporterError as error:
        log.warning("nobody sees whether jobs use their GPUs", error=str(error))
        yield None


class _Numbers:
    """The driver's, by which grants name GPUs. Who asks NVML anew once a GPU is lost may find it gone and the
    others counted without it: then no number tells whose a GPU is, and processes alone do."""

    def __init__(self) -> None:
        self._known: dict[int, str] = {}
        self._told = False

    def hold(self, devices: Sequence[DeviceReading]) -> bool:
        """Whether each number means the GPU that it meant at first."""
        for device in devices:
            known = self._known.setdefault(device.index, device.uuid) if device.uuid else device.uuid
            if known == device.uuid:
                continue
            if not self._told:
                log.warning(
                    "the driver counts the GPUs anew, as without one that is lost: of jobs whose processes "
                    "are on none nobody sees which they have, and who starts now may get one that is held; "
                    "reboot, or start `holdfast up` anew once no job runs",
                    number=device.index,
                    was=known,
                    is_now=device.uuid,
                )
            self._told = True
            return False
        return True
