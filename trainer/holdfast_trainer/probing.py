"""Facts for a diagnosis: a few real steps, one file on the disk, one exchange between the ranks.

The steps are those of the training (same model, data, precision, parallelism), without compilation. The
first one allocates and is not timed; the fastest of the others is what an idle machine would do, their
median what this one does: the median is reported.
"""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from .assembly import Batches, check_sharding
from .checkpoint.memory import free_memory, ranks_here
from .checkpoint.tree import pack
from .config import Config
from .diagnosis import Facts
from .interruption import RESERVE_SHARE
from .model import build_model
from .optim import Precision, allow_tf32, build_optimizer, clip_gradients, precision
from .parallel import Gang, accumulate, join_gang, shard, wrap
from .place import grace_seconds
from .train_command import open_data

DISK_PROBE_BYTES = 256 << 20
REDUCE_BYTES = 16 << 20


def probe(config: Config, directory: Path, *, steps: int) -> Facts | None:
    """Measure; None on all ranks but the first. Raises ConfigError, DataError, OSError of the disk."""
    gang = join_gang()
    try:
        facts = _probe(config, directory, gang, steps)
        return facts if gang.rank == 0 else None
    finally:
        gang.leave()


def _probe(config: Config, directory: Path, gang: Gang, steps: int) -> Facts:
    settings = config.train
    compute = precision(settings.precision, gang.device)
    if settings.threads:
        torch.set_num_threads(settings.threads)
    allow_tf32(gang.device, settings.tf32)
    data, held_out = open_data(config)
    batches = Batches(data, config, gang.rank, gang.world_size, gang.device)
    before = _memory_used(gang.device)
    training = _Training(config, gang, compute, batches)
    times = [training.step(number) for number in range(steps + 1)][1:]
    peak = _memory_peak(gang.device) - before
    validation = None
    if held_out is not None:
        validation = training.validate(replace(batches, data=held_out))
    state = training.state_bytes()
    return Facts(
        device=torch.cuda.get_device_name(gang.device) if gang.device.type == "cuda" else "cpu",
        device_type=gang.device.type,
        precision=compute.name,
        world_size=gang.world_size,
        cores=len(os.sched_getaffinity(0)),
        memory_total=_memory_total(gang.device, peak),
        memory_peak=peak,
        samples=data.samples,
        step_seconds=statistics.median(total for total, _ in times),
        data_seconds=statistics.median(waited for _, waited in times),
        validation_seconds=validation,
        disk_bytes_per_second=disk_speed(directory, min(state, DISK_PROBE_BYTES)) if gang.rank == 0 else 1.0,
        state_bytes=state,
        notice_seconds=grace_seconds() * (1 - RESERVE_SHARE),
        reduce_bytes_per_second=_reduce_speed(gang),
    )


class _Training:
    """The reference loop's step, without what resumes and reports."""

    def __init__(self, config: Config, gang: Gang, compute: Precision, batches: Batches) -> None:
        self._config, self._gang, self._compute, self._batches = config, gang, compute, batches
        torch.manual_seed(config.train.seed)
        self._raw = build_model(config.model, recompute=config.train.activation_checkpointing)
        if config.train.parallel == "fsdp":
            check_sharding(compute.name)
            self._model = shard(self._raw, gang, list(self._raw.blocks))
        else:
            self._model = wrap(self._raw, gang, static_graph=batches.chunks == 1)
        self._optimizer = build_optimizer(self._raw, config.optim, gang.device)
        self._warm_rate = 0.0  # nothing is learned here: the weights stay finite whatever the rate

    def step(self, number: int) -> tuple[float, float]:
        """Seconds of a step, and those in which it waited for data."""
        for group in self._optimizer.param_groups:
            group["lr"] = self._warm_rate
        began = time.perf_counter()
        chunks = self._batches.batch(number)
        waited = time.perf_counter() - began
        for index, (tokens, targets) in enumerate(chunks):
            with accumulate(self._model, last=index == len(chunks) - 1):
                with self._compute.autocast():
                    loss = self._model(tokens, targets)[1] / len(chunks)
                self._compute.scaler.scale(loss).backward()
        self._compute.scaler.unscale_(self._optimizer)
        clip_gradients(self._raw.parameters(), self._config.optim.clip)
        self._compute.scaler.step(self._optimizer)
        self._compute.scaler.update()
        self._optimizer.zero_grad(set_to_none=True)
        self._settle()
        return time.perf_counter() - began, waited

    @torch.no_grad()
    def validate(self, batches: Batches) -> float:
        """Seconds of a whole validation, from one of its batches."""
        self._raw.eval()
        began = time.perf_counter()
        for tokens, targets in batches.batch(0, seed=0):
            with self._compute.autocast():
                self._raw(tokens, targets)
        self._settle()
        self._raw.train()
        return (time.perf_counter() - began) * self._config.validation.batches

    def state_bytes(self) -> int:
        """Of a checkpoint: what all ranks write together."""
        _, tensors = pack({"model": self._raw.state_dict(), "optimizer": self._optimizer.state_dict()})
        mine = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        sharded = self._config.train.parallel == "fsdp"
        return sum(self._gang.gather(mine)) if sharded else mine

    def _settle(self) -> None:
        if self._gang.device.type == "cuda":
            torch.cuda.synchronize(self._gang.device)


def disk_speed(directory: Path, size: int) -> float:
    """Bytes a second, written and synced, in `directory` or the nearest parent that is there."""
    place = directory.absolute()
    while not place.is_dir():
        place = place.parent
    path = place / f".holdfast-disk-probe-{os.getpid()}"
    block = os.urandom(min(size, 1 << 20))
    try:
        began = time.perf_counter()
        with open(path, "wb") as file:
            file.writelines(block for _ in range(max(1, size // len(block))))
            file.flush()
            os.fsync(file.fileno())
        return max(1, size // len(block)) * len(block) / (time.perf_counter() - began)
    finally:
        path.unlink(missing_ok=True)


def _reduce_speed(gang: Gang) -> float | None:
    """Bus bandwidth of an all-reduce: 2 (n - 1) / n of the bytes cross each link (NCCL tests' measure)."""
    if gang.world_size == 1:
        return None
    values = torch.zeros(REDUCE_BYTES // 4, device=gang.device)
    times = []
    for _ in range(4):
        began = time.perf_counter()
        dist.all_reduce(values)
        if gang.device.type == "cuda":
            torch.cuda.synchronize(gang.device)
        times.append(time.perf_counter() - began)
    return REDUCE_BYTES * 2 * (gang.world_size - 1) / gang.world_size / statistics.median(times[1:])


def _memory_total(device: torch.device, peak: int) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    free = free_memory()
    return peak if free is None else peak + free // ranks_here()


def _memory_used(device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return 0
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew (proc_pid_clear_refs(5))
    return _status("VmRSS")


def _memory_peak(device: torch.device) -> int:
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else _status("VmHWM")


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0
