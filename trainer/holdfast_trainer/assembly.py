"""What the loop works with: the batches of this rank, and the model made ready to train."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from . import fused_layers, fused_loss
from .alike import require_alike
from .attention import Attend, attention_kernels
from .compilation import compile_or_eager, mode_that_holds
from .config import Config, ConfigError
from .data import Tokens
from .decoder import Decoder
from .hf_weights import Digest, load_weights, published_values
from .model import build_model, joins
from .native import library
from .optim import build_optimizer
from .parallel import Gang, fill, first_fault, shard, unharmed, wrap
from .pointwise import Pointwise
from .precision import Precision

log = logging.getLogger("holdfast")

T = TypeVar("T")


@dataclass(frozen=True)
class Batches:
    """One split as this rank sees it: `share` rows a step, in `chunks` of `micro`."""

    data: Tokens
    config: Config
    rank: int
    world_size: int
    device: torch.device

    @property
    def share(self) -> int:
        return self.config.train.global_batch // self.world_size

    @property
    def micro(self) -> int:
        return self.config.train.micro_batch or self.share

    @property
    def chunks(self) -> int:
        return self.share // self.micro

    def batch(self, step: int, *, seed: int | None = None) -> list[tuple[Tensor, Tensor]]:
        """Tokens and targets of a step by micro-batch, on the device: [micro, context] each.

        From page-locked memory the copies to a GPU do not wait for what it is doing.
        """
        tokens, targets = self.data.batch(
            seed=self.config.train.seed if seed is None else seed,
            step=step,
            rank=self.rank,
            world_size=self.world_size,
            global_batch=self.config.train.global_batch,
        )
        if self.device.type == "cuda":
            tokens, targets = tokens.pin_memory(), targets.pin_memory()
        tokens, targets = (part.to(self.device, non_blocking=True) for part in (tokens, targets))
        return list(zip(torch.split(tokens, self.micro), torch.split(targets, self.micro), strict=True))

    def describe(self, step: int) -> str:
        """Which part of the data this rank has in a step, in words."""
        first = step * self.config.train.global_batch + self.rank * self.share
        return self.data.describe(self.config.train.seed, first, self.share)

    def shaped(self) -> Tensor:
        """Tokens of a micro-batch as `batch` has them, for a pass whose values do not matter: a stream gives
        each batch once."""
        return torch.zeros((self.micro, self.config.model.context), dtype=torch.int64, device=self.device)


class Undrawn(TorchFunctionMode):
    """Linear layers and embeddings that are made within have zeros where they would have drawn values."""

    _draws = (nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if func in self._draws:
            return nn.init.zeros_(args[0] if args else named["tensor"])
        return func(*args, **named)


@dataclass(frozen=True)
class Assembled:
    """The parts of a training, ready to be tracked."""

    raw_model: Decoder
    """The model itself: what is saved and validated."""
    model: nn.Module
    """What a training step calls."""
    optimizer: torch.optim.Optimizer
    not_compiled: str
    """Why it runs as it is written although it was to be compiled; else empty."""
    attention: str
    """The kernel that attention takes (see attention_kernels)."""
    slow_attention: str
    """Why it is not the fastest of those that repeat their bits here; else empty."""
    fused_loss: bool
    """Whether its kernels are those of fused_loss.py."""
    large_loss: str
    """Why they are not, though this device could have them; else empty."""
    layers: str
    """What computes between their products: fused, and by which library, or torch."""
    slow_layers: str
    """Why they are not fused, though this device could have them so; else empty."""


def assemble(
    gang: Gang,
    config: Config,
    compute: Precision,
    batches: Batches,
    *,
    weights: Path | None,
    resumes: bool = False,
    validates: bool,
    cache: Path | None,
    noticed: Callable[[], bool] = lambda: False,
) -> Assembled:
    """Build the model as configured, the same on every rank. Collective.

    It begins with `weights` where they are given, else with random ones; where it `resumes`, with zeros, as a
    checkpoint that is loaded later has all of it, and to draw them takes longer than all else here. What is
    compiled stays in `cache`; `noticed`: this rank was told to end (see compile_or_eager). Raises ConfigError
    on weights that cannot be used.
    """
    settings = config.train
    sharded = settings.parallel == "fsdp" and gang.world_size > 1
    if sharded:
        check_sharding(compute.name)
    torch.manual_seed(settings.seed)  # the same initial weights on every rank
    drawn = weights is None and not resumes
    pointwise, slow_layers = _pointwise(gang, compute, config)
    fused = pointwise is not None
    attend, slow = _attend(gang, compute, batches, fused=fused)
    loss_kernel, large_loss = _loss(gang, compute, config)
    # What is to be sharded may fit neither the device nor, once for each rank, this machine in one piece.
    # Where it is in one piece the meta device is no help: it imports nine hundred modules.
    with torch.device("meta") if sharded else nullcontext() if drawn else Undrawn():
        raw = build_model(
            config.model,
            recompute=settings.activation_checkpointing,
            attend=attend,
            pointwise=pointwise or Pointwise,
        )
    if loss_kernel is not None:
        raw.cross_entropy = loss_kernel
    if sharded:
        block = copy.deepcopy(raw.blocks[0]).to_empty(device=gang.device)
    else:
        if weights is not None:
            load_weights(raw, weights)
        block = raw.to(gang.device).blocks[0]

    def loss(model: nn.Module) -> Tensor:
        # Not the same tensor twice: what the compiler makes for that is of no use to a step.
        with compute.autocast():
            found: Tensor = model(batches.shaped(), batches.shaped())[1]
        return found

    attention = _attention(block, _through_block(batches, compute))
    not_compiled = ""
    if settings.compile:
        asked = None if settings.compile is True else settings.compile
        mode = mode_that_holds(asked, gang, batches.chunks)
        parts: list[nn.Module] = [raw] if batches.world_size == 1 else list(raw.blocks)
        if sharded:
            # As the blocks will be: a class of its own that gathers, and weights in another type. Were it cut
            # over the ranks, those that can compile it would wait for one that cannot.
            shard(block, gang, [], compute.dtype, alone=True)
            parts.append(block)
            probe = _probe(block, _through_block(batches, compute), validates=validates)
        else:
            probe = _probe(raw, loss, validates=validates)
        not_compiled = compile_or_eager(parts, mode, probe, gang, cache, noticed)
    if sharded:
        digest = Digest()
        values: Iterable[tuple[str, Tensor]] = raw.initial_values() if drawn else ()
        if weights is not None:
            values = digest.of(published_values(raw, weights))
        model = shard(raw, gang, list(raw.blocks), compute.dtype)
        fill(raw, gang.device, values)
        # DDP hands out rank 0's weights; here each rank cuts its shards from its own.
        require_alike(gang, {"train.init_from, its weights": digest.hexdigest})
    else:
        model = wrap(raw, gang, static_graph=batches.chunks == 1, settle=loss)
    optimizer = build_optimizer(raw, config.optim, gang.device, fused=settings.fused_optimizer)
    return Assembled(
        raw,
        model,
        optimizer,
        not_compiled,
        attention,
        slow,
        fused_loss=loss_kernel is not None,
        large_loss=large_loss,
        layers=f"fused ({library().digest})" if fused else "torch",
        slow_layers=slow_layers,
    )


def check_sharding(precision: str) -> None:
    """Raises ConfigError where what the device computes in does not go with FSDP2."""
    if precision == "fp16":
        raise ConfigError(
            "train.parallel: fsdp does not go with fp16, whose scaler must see the gradients of all ranks; "
            "use train.precision=fp32, a device with bf16, or train.parallel=ddp"
        )


def _pointwise(gang: Gang, compute: Precision, config: Config) -> tuple[type[Pointwise] | None, str]:
    """By what all ranks compute between products, None for torch's, and why it is the slower. Collective."""
    if gang.device.type != "cpu" or not config.train.fuses_layers:
        return None, ""
    lacking = fused_layers.choose(gang.device, compute.dtype)
    worth = fused_layers.is_for(gang.device, compute.dtype)
    without = "layers without kernels of their own, which are faster (%s)"
    return _agreed(gang, fused_layers.Fused, lacking, without if worth else "")


def _attend(gang: Gang, compute: Precision, batches: Batches, *, fused: bool) -> tuple[Attend | None, str]:
    """The one kernel of all ranks, None for torch's, and why it is the slower one; `fused`: layers.cpp is to
    compute what it can of it. Collective."""
    model, device, dtype = batches.config.model, gang.device, compute.dtype
    without = ""
    queries = (batches.micro, model.heads, model.context, model.width // model.heads)
    if model.dropout:
        return None, ""
    joined = joins(model)
    choose: Callable[..., str]
    # Each is of no use elsewhere.
    if device.type == "cpu" and dtype == torch.bfloat16:
        from . import product_attention as product

        if not product.why_unfit(device, dtype, queries, model.key_value_heads):
            without = "attention without a gradient by matrix products, which is faster (%s)"
        own = product.kernel(joined=joined, fused=fused)
        choose = partial(product.choose, fused=fused)
    elif device.type == "cuda" and batches.config.train.deterministic:
        from . import exact_attention as exact

        if exact.is_for(device, dtype):
            without = "attention without cuDNN's deterministic kernel, which is faster (%s)"
        own, choose = exact.kernel(joined=joined), exact.choose
    else:
        return None, ""
    lacking = choose(device, dtype, queries, model.key_value_heads, joined=joined)
    return _agreed(gang, own, lacking, without)


def _loss(
    gang: Gang, compute: Precision, config: Config
) -> tuple[Callable[[Tensor, Tensor], Tensor] | None, str]:
    """The one kernel of all ranks, None for torch's, and why it is the larger one. Collective."""
    if gang.device.type != "cuda" or not config.train.fuses_loss:
        return None, ""
    lacking = fused_loss.choose(gang.device, compute.dtype, config.model.vocab_size)
    worth = fused_loss.is_for(gang.device, compute.dtype)
    without = "the loss is computed by PyTorch's kernels, in more time and memory (%s)"
    return _agreed(gang, fused_loss.fused_cross_entropy, lacking, without if worth else "")


def _agreed(gang: Gang, kernel: T, lacking: str, without: str) -> tuple[T | None, str]:
    """`kernel` where no rank lacks anything for it; else None, and what one lacks, unless it would be of no
    use here and `without`, what to say then, is empty. Collective."""
    fault = first_fault(gang.gather(lacking))
    if not fault:
        return kernel, ""
    if not without:
        return None, ""
    if gang.rank == 0:
        log.info(without, fault)
    return None, fault


def _through_block(batches: Batches, compute: Precision) -> Callable[[nn.Module], Tensor]:
    shape = (batches.micro, batches.config.model.context, batches.config.model.width)

    def through(block: nn.Module) -> Tensor:
        with compute.autocast():
            x = torch.zeros(shape, device=batches.device, requires_grad=torch.is_grad_enabled())
            out: Tensor = block(x)
        return out.float().sum()

    return through


def _attention(block: nn.Module, through: Callable[[nn.Module], Tensor]) -> str:
    """Of one block, as all are alike; a part of a step's forward pass in time and memory."""
    with unharmed(block):
        return attention_kernels(lambda: through(block))


def _probe(model: nn.Module, loss: Callable[[nn.Module], Tensor], *, validates: bool) -> Callable[[], None]:
    def probe() -> None:
        with unharmed(model):
            loss(model).backward()  # type: ignore[no-untyped-call]
            if validates:
                model.eval()
                with torch.no_grad():
                    loss(model)
                model.train()

    return probe
