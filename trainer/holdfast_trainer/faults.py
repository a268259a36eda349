"""Faults of a step that a traceback does not explain, in words that say what to change.

::

    Explained               told by its message alone
      Strayed               a rank has another model than the others, and had the same before
      NonFiniteStep         a loss or a gradient is NaN or infinite: the state is worth nothing from here on
      OutOfMemory           a step does not fit the device
      DeadWorker            a process that loaded data is gone
      DataEnded             a loop asked for more batches than there are
      NotDeterministic      an operation cannot repeat its bits on this device, and was to
      NoGpu                 there are fewer GPUs than ranks

A run resumes bit for bit, so what a deterministic step did once it does again: such a fault is not
retried. A step that ran out of memory after others fitted, in this attempt or on an earlier one's device, or
while other processes had a part of its GPU, may fit another time, and is a failure like any other.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .contract import NO_MEMORY
from .determinism import operation_of
from .memory import free_memory
from .overflow import LIMIT


class Explained(Exception):
    """`mendable`: whether trying again may help."""

    def __init__(self, message: str, *, mendable: bool) -> None:
        super().__init__(message)
        self.mendable = mendable


class NonFiniteStep(Explained):
    """No step of this run may follow on its state, and none was saved with it."""


class Strayed(Explained):
    """A checkpoint that all ranks write together would be of no model at all."""


class OutOfMemory(Explained):
    """The device, or the machine, has no memory left for this step."""


class DeadWorker(Explained):
    """A worker of a DataLoader was killed, or left without a word."""


class DataEnded(Explained):
    """An iterator had no more, and nobody began a new one."""


class NotDeterministic(Explained):
    """torch has no deterministic kernel for an operation, and no other was allowed."""


class NoGpu(Explained):
    """This rank would have to share another's: NCCL refuses that."""


@dataclass(frozen=True)
class Offered:
    """What one rank told of a step; None where it told nothing."""

    loss: float | None
    grad_norm: float | None
    batch: str = ""
    """Which data it was, in words."""


def strayed(
    step: int, names: str, ranks: str, furthest: int, away: float, same_at: int, durable_step: int
) -> Strayed:
    """The error for the state after `step` steps; `away`: how far rank `furthest` is from rank 0, as a share
    of the parameters' size."""
    return Strayed(
        f"step {step}: the parameters of {names} have come apart: on {ranks} they are not rank 0's any more "
        f"(by {away:.0%} of their size on rank {furthest}), as they were at step {same_at}. This state was "
        f"not saved: {_left(durable_step, deterministic=False)} Either the loop changes parameters on one "
        "rank and not on all, or a device computes wrong: if a retry gets further, have the machines of "
        "these ranks tested",
        mendable=True,
    )


def non_finite_step(
    step: int, ranks: Sequence[Offered], durable_step: int, *, deterministic: bool
) -> NonFiniteStep:
    """The error for step number `step` (1 is the first), of which each rank told `ranks[rank]`."""
    faults = []
    for rank, told in enumerate(ranks):
        batch = f" on {told.batch}" if told.batch else ""
        if told.loss is not None and not math.isfinite(told.loss):
            faults.append(f"the loss of rank {rank} is {told.loss}{batch}")
    if not faults:
        norms = {told.grad_norm for told in ranks if told.grad_norm is not None}
        bad = next((norm for norm in norms if not math.isfinite(norm)), math.nan)
        faults = [f"the gradient norm is {bad}, and every loss is finite"]
    left = _left(durable_step, deterministic=deterministic)
    return NonFiniteStep(
        f"step {step}: {'; '.join(faults)}. Training stopped here and did not save this state: {left} "
        "Lower the learning rate, lengthen the warm-up, clip gradients, or take fp32; or leave "
        "this data out",
        mendable=not deterministic,
    )


def always_overflowing(durable_step: int, *, deterministic: bool) -> NonFiniteStep:
    """The error where a gradient scaler passed over step after step."""
    left = _left(durable_step, deterministic=deterministic)
    return NonFiniteStep(
        f"gradients in fp16 were not finite in {LIMIT} steps in a row, at a lower scale each time: none of "
        f"these steps changed a weight. Training stopped here: {left} Take fp32, or a device with "
        "bf16; lower the learning rate or lengthen the warm-up where it went well before",
        mendable=not deterministic,
    )


def _left(durable_step: int, *, deterministic: bool) -> str:
    """What there is to go on from, and whether a retry helps."""
    kept = f"the checkpoint of step {durable_step} is the newest" if durable_step else "nothing was saved yet"
    return f"{kept}. A retry would meet the same bits." if deterministic else f"{kept}."


OWN_BYTES, OWN_SHARE = 2e9, 0.1
"""What of a GPU's memory, these bytes and this share, may be this process's and not PyTorch's: its context,
the buffers of NCCL."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out, of a GPU or of the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in NO_MEMORY)


def dead_worker(error: BaseException, rank: int, step: int) -> DeadWorker | None:
    """The error for what a DataLoader raises in step `step` (1 is the first); None for any other."""
    if not (isinstance(error, RuntimeError) and str(error).startswith("DataLoader worker (pid")):
        return None
    first_line = str(error).splitlines()[0].rstrip(". ")
    return DeadWorker(
        f"rank {rank} lost a process that loads data in step {step}: {first_line}. Where the log has no "
        "error of its own for it, the machine ended it, mostly for want of memory: take fewer workers, a "
        "smaller prefetch or batch, or more memory (of /dev/shm too, where batches are handed over)",
        mendable=True,
    )


_TIMED_OUT = re.compile(r"timed out (?:after|waiting)|timeout after", re.IGNORECASE)
"""How gloo, sockets and the store of a rendezvous tell that they have waited in vain."""


def waited_in_vain(lost_peer: BaseException) -> str:
    """What to add to the error of a rank that lost a peer outside of a loop, where that was too late and may
    be well otherwise; empty for any other."""
    if not _TIMED_OUT.search(str(lost_peer)):
        return ""
    return (
        "another rank did not come here in time. If it prepares something first, such as its data, do that "
        "before the job, or give it the time: torch.distributed.init_process_group(timeout=...) before "
        "Run(), and torch.distributed.barrier() on all ranks after what takes so long"
    )


def data_ended(error: BaseException, rank: int, step: int) -> DataEnded | None:
    """The error for a StopIteration, which says nothing, in step `step` (1 is the first); else None."""
    if not isinstance(error, StopIteration):
        return None
    explained = DataEnded(
        f"rank {rank}, step {step}: an iterator has no more for it (StopIteration). Ask run.steps for as "
        "many steps as every rank has batches, or iterate the data anew where a pass through it ends",
        mendable=True,
    )
    explained.__cause__ = error
    return explained


def not_deterministic(error: BaseException, rank: int, step: int) -> NotDeterministic | None:
    """The error for what a strict torch raises in step `step` (1 is the first); None for any other."""
    operation = operation_of(str(error)) if isinstance(error, RuntimeError) else None
    if operation is None:
        return None
    explained = NotDeterministic(
        f"rank {rank}, step {step}: torch has no deterministic kernel for {operation} on this device, so a "
        "resumed run would not end with the bits of an untouched one. To train without that, set "
        'train.deterministic=false; in a loop of your own, Run(deterministic=True) instead of "strict"',
        mendable=False,
    )
    explained.__cause__ = error
    return explained


def out_of_memory(
    error: BaseException,
    rank: int,
    step: int | None,
    device: torch.device,
    remedy: str,
    *,
    fitted: bool,
    fitted_before: bool = False,
) -> OutOfMemory:
    """The error for a step (1 is the first; None: none was begun) on `rank`; `fitted`: steps of this
    attempt did fit before; `fitted_before`: those of an earlier one, maybe on another device."""
    first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
    where = "before its first step" if step is None else f"in step {step}"
    use, crowded = "", False
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        use = f" Peak {torch.cuda.max_memory_allocated(device) / 1e9:.1f} of {total / 1e9:.1f} GB."
        others = total - _free_of_gpu(device)
        if crowded := others > OWN_BYTES + OWN_SHARE * total:
            use += (
                f" About {others / 1e9:.1f} GB of it are other processes' (nvidia-smi lists them): let less "
                "run beside it, or give the job a GPU of its own (spec.gpus)."
            )
    if fitted or (crowded and not fitted_before):
        again = ""
    elif fitted_before:
        again = f" Steps of earlier attempts fitted, on this device or with more memory{_free(device)}."
    else:
        again = " No step has fitted, so none will: this is not tried again."
    explained = OutOfMemory(
        f"rank {rank} ran out of memory {where}: {first_line}.{use}{again} {remedy}",
        mendable=fitted or fitted_before or crowded,
    )
    explained.__cause__ = error
    return explained


def _free(device: torch.device) -> str:
    """What others leave of the memory, in words: on a GPU this rank holds a part of that itself."""
    free = _free_of_gpu(device) if device.type == "cuda" else free_memory()
    return "" if free is None else f"; {free / 1e9:.1f} GB were free for it here"


def _free_of_gpu(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
