"""The gang: ranks that start together, agree, and end together.

Two process groups. The default one (NCCL on GPUs, gloo on CPU) carries gradients. The control group
is always gloo, so that agreeing on a stop or on a checkpoint never touches the GPU's stream.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from .checkpoint import rng
from .checkpoint.tree import Piece, side_by_side
from .faults import NoGpu

RENDEZVOUS_TIMEOUT = timedelta(minutes=10)
"""For ranks to wait for each other while nobody watches them."""
WATCHED_TIMEOUT = timedelta(days=30)
"""While a watchdog does, which knows how long a step may take and says who holds up the others."""
CPU = torch.device("cpu")
COMPILED = "_orig_mod"
"""What torch.compile calls, within the module that it makes, the one that it was given."""
_settled: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
"""Those that have regrouped their gradients already (see wrap)."""


@dataclass
class Gang:
    """This rank's place among all ranks, and how they talk outside the training step."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    control: dist.ProcessGroup | None = None
    """gloo; None where there is one rank."""
    local_world_size: int = 1
    joined_here: bool = False
    """Whether the default group is of our making, and not of the script's."""

    @property
    def of_this_replica(self) -> range:
        """The ranks that the same torchrun has started, on one machine: it numbers them in a row."""
        first = self.rank - self.local_rank
        return range(first, first + self.local_world_size)

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value (picklable), on every rank."""
        if self.control is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, group_src=0, group=self.control)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value (picklable), by rank."""
        if self.control is None:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def sum_async(self, vector: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begin to add up a CPU vector over all ranks, in place; the returned call waits for the sum."""
        if self.control is None:
            return lambda: vector
        work = dist.all_reduce(vector, op=dist.ReduceOp.SUM, group=self.control, async_op=True)

        def finish() -> torch.Tensor:
            assert work is not None
            work.wait()
            return vector

        return finish

    def wait_for_peers(self, *, watched: bool) -> None:
        """How long ranks do so from now on, in either group, until an exchange fails."""
        limit = WATCHED_TIMEOUT if watched else RENDEZVOUS_TIMEOUT
        default = dist.group.WORLD if self.joined_here else None
        for group, device in ((self.control, CPU), (default, self.device)):
            if group is not None:
                backend: Any = group._get_backend(device)
                backend._set_default_timeout(limit)  # torch.distributed.set_timeout, which not all have yet

    def leave(self) -> None:
        """Tear the groups down; after this only local work is possible.

        The control group's threads must have ended before the interpreter does: one that still has to
        let go of a tensor then finds no interpreter and aborts the process. They end with the group's
        last reference, which is this one.
        """
        if self.control is not None:
            self.control = None
            if dist.is_initialized():
                dist.destroy_process_group()


def first_fault(told: Sequence[str]) -> str:
    """Of what each rank said, the first that is not empty, with its rank; empty where all are."""
    return next((f"rank {rank}: {said}" for rank, said in enumerate(told) if said), "")


def is_lost_peer(error: BaseException) -> bool:
    """Whether an exception says that another rank can no longer be reached."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(name in str(error) for name in ("gloo", "NCCL"))


def device_for(rank: int, local_rank: int, gpus: int) -> torch.device:
    """The GPU of a rank where `gpus` of them are visible, the CPU where none is. Raises NoGpu."""
    if gpus == 0:
        return CPU
    if local_rank < gpus:
        return torch.device("cuda", local_rank)
    raise NoGpu(
        f"rank {rank} (LOCAL_RANK={local_rank}) has no GPU: {gpus} of them are visible here, and each rank "
        "needs one of its own. Start no more ranks on a machine than it has GPUs (the job's `gpus`), and let "
        "all be seen (CUDA_VISIBLE_DEVICES); where there should be more, `nvidia-smi` tells whether one was "
        "lost",
        mendable=True,  # on another machine
    )


def join_gang() -> Gang:
    """Meet the other ranks as torchrun's environment says; one rank where there is no torchrun."""
    rank, world_size, local_rank, local_world_size = (
        int(os.environ.get(name, default))
        for name, default in (
            ("RANK", "0"),
            ("WORLD_SIZE", "1"),
            ("LOCAL_RANK", "0"),
            ("LOCAL_WORLD_SIZE", "1"),
        )
    )
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = device_for(rank, local_rank, gpus)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    control, joined_here = None, False
    if world_size > 1:
        joined_here = not dist.is_initialized()
        if joined_here:
            dist.init_process_group(
                "nccl" if device.type == "cuda" else "gloo",
                timeout=RENDEZVOUS_TIMEOUT,
                device_id=device if device.type == "cuda" else None,
            )
        group = dist.new_group(backend="gloo", timeout=RENDEZVOUS_TIMEOUT)
        assert isinstance(group, dist.ProcessGroup)
        control = group
    return Gang(rank, world_size, local_rank, device, control, local_world_size, joined_here)


def wrap(
    model: nn.Module,
    gang: Gang,
    *,
    static_graph: bool = False,
    find_unused_parameters: bool = False,
    settle: Callable[[nn.Module], torch.Tensor] | None = None,
) -> nn.Module:
    """`model` on the gang's device, as DDP where there are several ranks. `find_unused_parameters` is for one
    that does not use each of them in each pass.

    DDP regroups its gradient buckets after the first backward pass of a process. With three ranks or
    more the order in which an all-reduce adds depends on where a gradient lies in its bucket, so the
    first step after a resume would round otherwise than the same step of an uninterrupted run.
    `settle` (a function from the wrapped model to a loss) is run once here, so that the regrouping is
    over before the first real step. Without it, DDP is told to search for unused parameters, which
    keeps the first grouping for good and costs a walk over the graph each step.
    """
    model = model.to(gang.device)
    if gang.world_size == 1:
        return model
    order_matters = gang.world_size > 2
    ddp = DistributedDataParallel(
        model,
        device_ids=[gang.device.index] if gang.device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        static_graph=static_graph and not (order_matters and settle is None),
        find_unused_parameters=find_unused_parameters or (order_matters and settle is None),
    )
    if order_matters and settle is not None:
        _settle(ddp, settle)
        _settled.add(ddp)
    return ddp


def not_repeated(model: DistributedDataParallel, tracked: Iterable[object]) -> str:
    """Why sums of gradients after a resume are not those of a run that goes on, empty where they are: `model`
    regroups them after its first pass (see wrap), or its hook keeps something from pass to pass, such as
    PowerSGD's what it has left out so far, that is none of the parts `tracked`."""
    kept = [state for _, state in model._comm_hooks if not isinstance(state, dist.ProcessGroup | None)]
    if untracked := [type(state).__name__ for state in kept if not any(state is part for part in tracked)]:
        return f"what its communication hook keeps ({', '.join(untracked)}) is not saved"
    regroups = model.static_graph or not model.find_unused_parameters
    if regroups and dist.get_world_size(model.process_group) > 2 and model not in _settled:
        return (
            "they are grouped otherwise in the first pass of a process; have Run.wrap make the "
            "DistributedDataParallel, or give it find_unused_parameters=True"
        )
    return ""


def hear_waiting(model: nn.Module, heard: Callable[[], None]) -> None:
    """Have `heard` called in each backward pass in which DDP exchanges gradients, once all of them are
    computed: what that pass takes from there on, it waits for the exchange, and for ranks that are slower.

    A model that is not DDP's is left as it is. `heard` is called as DDP's own end of the pass is, before it:
    on a GPU the stream of the caller is the current one.
    """
    if not isinstance(model, DistributedDataParallel):
        return

    def after_forward(_: nn.Module, __: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or not model.require_backward_grad_sync:
            return
        told = False

        def backward_begins(_: torch.Tensor) -> None:
            nonlocal told
            if not told:
                told = True
                # Such calls are made when the pass has come to its end, in their order: this one is first.
                torch.autograd.Variable._execution_engine.queue_callback(heard)

        for part in tree_leaves(output):
            if isinstance(part, torch.Tensor) and part.requires_grad:
                part.register_hook(backward_begins)  # type: ignore[no-untyped-call]

    model.register_forward_hook(after_forward)


def divide_alike(model: DistributedDataParallel) -> None:
    """Have gradients divided by the number of ranks in one way, before the first backward pass.

    By itself DDP divides a gradient that lies in its bucket from the pass before, and multiplies one that it
    copies there by the reciprocal. Where gradients are kept from step to step (`set_to_none=False`, say) the
    first pass of a process copies and others do not: but for a power of two the two round otherwise, and a
    resume is not exact. The hook that is built in divides all of a bucket. A hook of the user's is left.
    """
    ranks = dist.get_world_size(model.process_group)
    if ranks & (ranks - 1):
        whole_buckets: Any = dist.BuiltinCommHookType.ALLREDUCE  # type: ignore[attr-defined]
        with suppress(RuntimeError):  # there can be one hook alone
            model._register_builtin_comm_hook(whole_buckets)  # type: ignore[no-untyped-call]


def shard(
    model: nn.Module,
    gang: Gang,
    regions: Sequence[nn.Module],
    dtype: torch.dtype = torch.float32,
    *,
    alone: bool = False,
) -> nn.Module:
    """`model` with its parameters, gradients and optimizer state cut over the ranks (FSDP2), in place.

    Each of `regions` (the blocks) is gathered when its turn comes and let go again, so a rank holds its
    share of everything and one region whole. Parameters may be on the CPU before: a region at a time goes
    to the device; or on the meta device, see `fill`. Build the optimizer afterwards. One rank is left as it
    is.

    With bfloat16 as `dtype` shards stay float32, and what is gathered of them is bfloat16, as are floating
    inputs of the model and of regions: half as much is sent, and autocast, which goes around it as ever for
    operations that want float32, finds no float32 weights of which to keep copies until backward has ended.
    Gradients are reduced and added up in float32.

    Collective, with `alone` too: then each rank has it whole, in the form that it has where it is cut, and
    waits for no other when it is run.
    """
    if gang.world_size == 1:
        return model.to(gang.device)
    from torch.distributed.device_mesh import init_device_mesh  # seconds to import, and few need it
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if alone:
        mesh = init_device_mesh(gang.device.type, (gang.world_size, 1), mesh_dim_names=("all", "one"))["one"]
    else:
        mesh = init_device_mesh(gang.device.type, (gang.world_size,))
    policy = MixedPrecisionPolicy()
    if dtype is not torch.float32:
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for region in (*regions, model):
        fully_shard(region, mesh=mesh, mp_policy=policy)
    return model


def fill(model: nn.Module, device: torch.device, values: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Give a model that was built without memory (on the meta device), and cut, its parameters on `device`.

    `values` are whole, by name, the same on every rank, and made one after the other: so a rank holds its
    shards, and one parameter whole. Those that have none are zero.
    """
    # As `to_empty` does, but what is there already, such as tables that are no parameters, stays what it is.
    placed = lambda one: torch.zeros_like(one, device=device) if one.is_meta else one.to(device)  # noqa: E731
    model._apply(placed)  # type: ignore[no-untyped-call]
    live = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in values:
            live[name].copy_(shard_like(value, live[name]))


def shard_like(value: Any, like: Any) -> Any:
    """This rank's shard of `value`, a whole tensor or the Piece that is the shard, on the ranks of `like`; a
    Piece is of the shape that was saved, whatever that of `like` is. Anything else as it is."""
    if not hasattr(like, "placements"):
        return value
    from torch.distributed.tensor import distribute_tensor

    if isinstance(value, Piece):
        return _put_together(value, like.device_mesh, like.device)
    if getattr(value, "shape", None) != like.shape:
        return value
    whole = value.to(like.device)
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


def place_like(state: Any, live: Any, mesh: Any) -> Any:
    """A part's saved `state` in shards, on the ranks of `mesh`: where it was saved so, and where `live`, what
    the part has now, is."""

    def placed(value: Any, like: Any) -> Any:
        if isinstance(value, Piece) and not hasattr(like, "placements"):
            return _put_together(value, mesh, mesh.device_type)
        return shard_like(value, like) if isinstance(value, Piece | torch.Tensor) else value

    return side_by_side(state, live, placed)


def _put_together(piece: Piece, mesh: Any, device: torch.device | str) -> Any:
    """The tensor in shards of which each rank has a piece."""
    from torch.distributed.tensor import DTensor, Shard

    whole = torch.empty(piece.rows, *piece.tensor.shape[1:], device="meta")
    return DTensor.from_local(
        piece.tensor.to(device), mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
    )


def _settle(ddp: nn.Module, settle: Callable[[nn.Module], torch.Tensor]) -> None:
    """Make DDP regroup now."""
    with unharmed(ddp):
        for _ in range(2):  # the regrouping happens when the second forward pass begins
            settle(ddp).backward()  # type: ignore[no-untyped-call]


@contextmanager
def unharmed(model: nn.Module) -> Iterator[None]:
    """Leave no trace of what is run inside: no gradients, the same buffers, random state and mode."""
    state, training = rng.capture(), model.training
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        yield
    finally:
        model.train(training)
        model.zero_grad(set_to_none=True)
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[name])
        rng.restore(state)


def unwrap(model: nn.Module) -> nn.Module:
    """The module that DDP and torch.compile wrap, in either order, so that checkpoints depend on neither."""
    while True:
        inner = model.module if isinstance(model, DistributedDataParallel) else compiled_from(model)
        if inner is None:
            return model
        model = inner


def compiled_from(model: nn.Module) -> nn.Module | None:
    """The module that `torch.compile(module)` made this one of; None where it is none such."""
    return dict(model._modules.items()).get(COMPILED)  # torch.jit's is a mapping without `get`


def accumulate(model: nn.Module, *, last: bool) -> AbstractContextManager[None]:
    """Around one micro-batch of a step.

    DDP reduces gradients over the ranks with the last one only. What is cut (FSDP2) reduces them with each:
    those that wait are whole on every rank, 4 bytes a parameter, and it is cut because that does not fit.
    It costs a reduce-scatter more for each micro-batch.
    """
    if isinstance(model, DistributedDataParallel) and not last:
        no_sync: AbstractContextManager[None] = model.no_sync()
        return no_sync
    return nullcontext()
