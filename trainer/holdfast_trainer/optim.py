"""What turns gradients into steps: AdamW, its schedule, clipping, and the precision of a device."""

from __future__ import annotations

import math
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from .config import OptimConfig
from .schema import ConfigError

FUSED_DEVICES = frozenset({"cpu", "cuda", "mps", "xpu"})
"""Where AdamW has one kernel for all parameters."""


def build_optimizer(
    model: nn.Module, config: OptimConfig, device: torch.device, *, fused: bool = True
) -> torch.optim.AdamW:
    """AdamW over the trainable parameters: group 0 decays (matrices), group 1 does not (vectors).

    Decoupled decay as in Loshchilov and Hutter 2019. The groups' `lr` starts at the peak; set it from
    `learning_rate` before every step. `fused`: with one kernel for all, where the device has it.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups,
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        fused=fused and device.type in FUSED_DEVICES,
    )


def learning_rate(config: OptimConfig, step: int, total_steps: int) -> float:
    """The rate of step `step` (0-based) of `total_steps`.

    Linear warm-up which ends at the peak with step `warmup_steps - 1`, a cosine from there to
    `final_learning_rate` at the last step (Loshchilov and Hutter 2017), and that rate ever after.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    span = max(1, total_steps - 1 - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / span)
    low, high = config.final_learning_rate, config.learning_rate
    return low + (high - low) * 0.5 * (1.0 + math.cos(math.pi * progress))


def clip_gradients(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """Scale the gradients down to the 2-norm `max_norm` (0: leave them) and return the norm before.

    A float32 scalar on the parameters' device, not synchronised with the host. A norm which is not
    finite is returned as it is; with a gradient scaler, unscale first. Sharded parameters (DTensor)
    give the norm over all ranks.
    """
    parameters = [p for p in parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if max_norm > 0:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    full_tensor = getattr(norm, "full_tensor", None)
    return norm if full_tensor is None else full_tensor()


# ------------------------------------------------------------------- precision

_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


@dataclass(frozen=True)
class Precision:
    """How the matrix products are computed; weights and optimizer state are float32 throughout.

    The scaler is always there and does nothing unless the precision is fp16, so that a loop needs no
    branches: `scaler.scale(loss).backward()`, `scaler.unscale_(optimizer)`, `scaler.step(optimizer)`,
    `scaler.update()`.
    """

    dtype: torch.dtype
    device_type: str
    scaler: torch.amp.GradScaler

    @property
    def name(self) -> str:
        """fp32, bf16 or fp16."""
        return _NAMES[self.dtype]

    def autocast(self) -> torch.amp.autocast:
        """A new context for forward and loss; without effect for fp32."""
        return torch.amp.autocast(
            self.device_type, dtype=self.dtype, enabled=self.dtype is not torch.float32, cache_enabled=True
        )


def precision(name: str, device: torch.device) -> Precision:
    """Resolve `auto`, `fp32`, `bf16` or `fp16` for a device.

    Raises ConfigError where the device does not have what is asked for by name: a fallback would
    train something other than what the configuration says, and emulation is slower than fp32.
    """
    chosen = choose_precision(name, device.type, native_bf16(device))
    scaler = torch.amp.GradScaler(device.type, enabled=chosen == "fp16")
    return Precision(_DTYPES[chosen], device.type, scaler)


def choose_precision(name: str, device_type: str, has_bf16: bool) -> str:
    """The decision alone: fp32, bf16 or fp16. Raises ConfigError."""
    able = ["fp32"]
    if device_type == "cuda":
        able.insert(0, "fp16")
    if has_bf16:
        able.insert(0, "bf16")
    if name == "auto":
        return able[0]
    if name not in able:
        raise ConfigError(
            f"train.precision: {name!r} is not native to this {device_type} device, which has "
            f"{', '.join(able)}; use one of these, or auto, which takes {able[0]} here"
        )
    return name


def allow_tf32(device: torch.device, allowed: bool) -> None:
    """TensorFloat-32 in fp32 matrix products of a CUDA device; nothing changes on another one."""
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high" if allowed else "highest")
        torch.backends.cudnn.allow_tf32 = allowed


def native_bf16(device: torch.device) -> bool:
    """Whether the device multiplies bfloat16 matrices in hardware.

    CUDA: compute capability 8.0 (Ampere) or later. CPU: AVX512-BF16 or AMX on x86, BF16 on Arm, read
    from the flags which Linux shows; elsewhere unknown, which counts as no.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    if device.type == "cpu":
        return cpu_has_bf16(_cpuinfo(), platform.machine())
    return False


def cpu_has_bf16(cpuinfo: str, machine: str) -> bool:
    """Read the flags in the text of /proc/cpuinfo for an architecture such as x86_64 or aarch64."""
    label, wanted = (
        ("Features", {"bf16"})
        if machine in {"aarch64", "arm64"}
        else (
            "flags",
            {"avx512_bf16", "amx_bf16"},
        )
    )
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == label:
            return bool(wanted & set(value.split()))
    return False


def _cpuinfo() -> str:
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
