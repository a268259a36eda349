"""Facts for a diagnosis: a few real steps, one file on the disk, one exchange between the ranks.

The steps are those of the training (same model, data, precision, parallelism), compiled where
the run would be. The first one allocates, and counts as part of the start; the mean of the others is
reported, as a run's time is their sum: a median would leave out what now and then holds one up.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from . import fused_loss
from .allocator import preloaded
from .assembly import Batches
from .config import Config, ConfigError
from .contract import is_directory
from .determinism import choose_kernels
from .diagnosis import Facts, out_of_memory
from .faults import is_out_of_memory
from .footprint import Footprint, warm_up
from .interruption import RESERVE_SHARE
from .links import Link, link_between
from .loading import Crowding, Threads
from .memory import ranks_here
from .memory_need import memory_need
from .parallel import Gang, is_lost_peer, join_gang
from .place import grace_seconds, process_seconds
from .precision import Bf16, allow_tf32, bf16_of, least, precision
from .rehearsal import Rehearsal
from .run_facts import RunFacts
from .token_index import DataError
from .train_data import open_data

DISK_PROBE_BYTES = 256 << 20
REDUCE_BYTES, GPU_REDUCE_BYTES = 16 << 20, 256 << 20


class CannotMeasure(Exception):
    """The steps could not be done, or the disk not be written, and its message says what to change. The gang
    was not left: peers may be waiting for this rank, and it is to end without waiting for them in turn."""


def probe(config: Config, directory: Path, *, steps: int) -> Facts | None:
    """Measure; None on all ranks but the first. Raises ConfigError, DataError, and CannotMeasure where memory
    runs out, where another rank ended, or of the disk."""
    gang = join_gang()
    try:
        facts = _probe(config, directory, gang, steps)
    except (ConfigError, DataError):
        gang.leave()
        raise
    except RuntimeError as error:
        if is_lost_peer(error):
            raise CannotMeasure(
                f"rank {gang.rank} lost another rank before all was measured: what that one said is the cause"
            ) from error
        raise
    gang.leave()
    return facts if gang.rank == 0 else None


def _probe(config: Config, directory: Path, gang: Gang, steps: int) -> Facts:
    settings = config.train
    choose_kernels(settings.kernels, gang.device)
    compute = precision(settings.precision, gang.device, gang)
    if settings.threads:
        torch.set_num_threads(settings.threads)
    allow_tf32(gang.device, settings.tf32)
    data, held_out = open_data(config, gang.rank, gang.world_size)
    batches = Batches(data, config, gang.rank, gang.world_size, gang.device)
    warm_up(gang.device)
    memory, threads = Footprint(gang.device), Threads()
    warn_beforehand(batches, compute.name, memory.room())
    fuses = config.train.fuses_loss and fused_loss.is_for(gang.device, compute.dtype)
    with _fitting(config, compute.name, gang, memory, fuses):
        training = Rehearsal(config, gang, compute, batches, validates=held_out is not None)
        training.step(0).read()
        ready = process_seconds()
        threads.look()
        memory.look()
        began = time.perf_counter()
        clocks = [training.step(number) for number in range(1, steps + 1)]
        times = [clock.read() for clock in clocks]
        seconds = (time.perf_counter() - began) / steps
        crowding = threads.look()
        waited = statistics.mean(step.data for step in times)
        made = (data.seconds_a_token() or 0.0) * batches.share * config.model.context
        seconds, waited = paced(seconds, waited, made)
        peak, room = memory.peak(), memory.room()
        validation = None
        if held_out is not None:
            validation = training.validate(replace(batches, data=held_out))
        state = training.state_bytes()
        losses = gang.gather(training.losses)
    return Facts(
        device=torch.cuda.get_device_name(gang.device) if gang.device.type == "cuda" else "cpu",
        device_type=gang.device.type,
        precision=compute.name,
        world_size=gang.world_size,
        cores=len(os.sched_getaffinity(0)),
        memory_total=room,
        memory_peak=peak,
        samples=data.samples,
        step_seconds=seconds,
        data_seconds=waited,
        optimizer_seconds=statistics.mean(step.optimizer for step in times),
        fast_bf16=least(gang.gather(bf16_of(gang.device))) is Bf16.FAST,
        validation_seconds=validation,
        not_compiled=training.not_compiled,
        own_malloc=preloaded(os.environ),
        attention=training.attention,
        slow_attention=training.slow_attention,
        fused_loss=training.fused_loss,
        large_loss=training.large_loss,
        fused_layers=training.fused_layers,
        slow_layers=training.slow_layers,
        bad_loss=next((f"{told:g}" for told in losses if not math.isfinite(told)), ""),
        ranks_here=ranks_here(),
        **vars(surroundings(gang, directory, state, ready - seconds, crowding)),
    )


def paced(step: float, waited: float, made: float) -> tuple[float, float]:
    """Seconds of a step, and those of them that wait for data, where its data takes `made` seconds to be made
    beside the steps: of a few steps that had theirs ready, as a unit of text is enough for many."""
    waits = max(waited, made - (step - waited))
    return step - waited + waits, waits


def surroundings(
    gang: Gang, directory: Path, state: int, start_seconds: float, crowding: Crowding | None
) -> RunFacts:
    """For checkpoints of `state` bytes in `directory`, whose disk rank 0 alone measures, once nobody waits
    for it; `crowding` is that of the steps. Collective. Raises CannotMeasure of the disk."""
    reduce_speed = _reduce_speed(gang)
    return RunFacts(
        start_seconds=start_seconds,
        disk_bytes_per_second=disk_speed(directory, min(state, DISK_PROBE_BYTES)) if gang.rank == 0 else 1.0,
        state_bytes=state,
        notice_seconds=grace_seconds() * (1 - RESERVE_SHARE),
        reduce_bytes_per_second=reduce_speed,
        link=_link(gang),
        queued=crowding.queued if crowding is not None else None,
    )


def warn_beforehand(batches: Batches, precision: str, room: int) -> None:
    """Rank 0 says what the kernel may end it for."""
    if batches.rank == 0 and (killed := _foreseen(batches, precision, room)):
        print(f"warning: {killed}", file=sys.stderr, flush=True)


def _foreseen(batches: Batches, precision: str, room: int) -> str:
    """Why the kernel may kill this process, which will have no words then: a step needs, by reckoning, more
    than the `room` bytes; empty where it does not, and on a GPU, which refuses with an error."""
    config, ranks = batches.config, batches.world_size
    if batches.device.type != "cpu" or memory_need(config, precision, ranks, batches.micro).total <= room:
        return ""
    found = out_of_memory(config, precision, ranks, room)
    return f"{found.setting}: by reckoning {found.message}. If this process is killed now, it is for that"


@contextmanager
def _fitting(config: Config, precision: str, gang: Gang, memory: Footprint, fuses: bool) -> Iterator[None]:
    """Raises CannotMeasure for want of memory."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        found = out_of_memory(config, precision, gang.world_size, memory.room(), fused_loss=fuses)
        raise CannotMeasure(f"rank {gang.rank}: {found.setting}: {found.message}") from error


def disk_speed(directory: Path, size: int) -> float:
    """Bytes a second, written and synced, in `directory` or the nearest parent that is there. Raises
    CannotMeasure."""
    place = directory.absolute()
    while not is_directory(place):
        place = place.parent
    path = place / f".holdfast-disk-probe-{os.getpid()}"
    block = os.urandom(min(size, 1 << 20))
    try:
        try:
            began = time.perf_counter()
            with open(path, "wb") as file:
                file.writelines(block for _ in range(max(1, size // len(block))))
                file.flush()
                os.fsync(file.fileno())
            return max(1, size // len(block)) * len(block) / (time.perf_counter() - began)
        finally:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise CannotMeasure(f"the disk of the run directory cannot be measured: {error}") from error


def _link(gang: Gang) -> Link | None:
    if gang.world_size == 1:
        return None
    nccl, pci = gang.device.type == "cuda", ""
    if nccl:
        about: Any = torch.cuda.get_device_properties(gang.device)  # torch's stubs lack the three
        pci = f"{about.pci_domain_id:04x}:{about.pci_bus_id:02x}:{about.pci_device_id:02x}.0"
    one_machine = ranks_here() == gang.world_size
    return link_between(nccl=nccl, one_machine=one_machine, pci=pci, environ=os.environ)


def _reduce_speed(gang: Gang) -> float | None:
    """Bus bandwidth of an all-reduce: 2 (n - 1) / n of the bytes cross each link (NCCL tests' measure)."""
    if gang.world_size == 1:
        return None
    size = REDUCE_BYTES
    if gang.device.type == "cuda":  # a fast link is filled by large messages alone; all ranks take the same
        size = min(gang.gather(min(GPU_REDUCE_BYTES, torch.cuda.mem_get_info(gang.device)[0] // 4)))
    size -= size % 4
    values = torch.zeros(size // 4, device=gang.device)
    times = []
    for _ in range(4):
        began = time.perf_counter()
        dist.all_reduce(values)
        if gang.device.type == "cuda":
            torch.cuda.synchronize(gang.device)
        times.append(time.perf_counter() - began)
    return size * 2 * (gang.world_size - 1) / gang.world_size / statistics.median(times[1:])
