"""In which type matrix products are computed, and which is the fastest of a device."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

import torch

from . import cpuinfo
from .schema import ConfigError

NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_DTYPES = {name: dtype for dtype, name in NAMES.items()}


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

    @classmethod
    def of(cls, dtype: torch.dtype, device_type: str) -> Precision:
        return cls(dtype, device_type, torch.amp.GradScaler(device_type, enabled=dtype is torch.float16))

    @property
    def name(self) -> str:
        """fp32, bf16 or fp16."""
        return NAMES[self.dtype]

    def autocast(self) -> torch.amp.autocast:
        """A new context for forward and loss; without effect for fp32."""
        return torch.amp.autocast(
            self.device_type, dtype=self.dtype, enabled=self.dtype is not torch.float32, cache_enabled=True
        )


class Bf16(StrEnum):
    """What a device makes of products of bfloat16 matrices."""

    NONE = "none"
    """It has no instructions for them: emulated, they take longer than fp32."""
    SLOW = "slow"
    """It has, and they take as long as fp32, or longer."""
    FAST = "fast"


class Ranks(Protocol):
    """What agreeing needs of a gang."""

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, by rank."""


def precision(name: str, device: torch.device, gang: Ranks | None = None) -> Precision:
    """Resolve `auto`, `fp32`, `bf16` or `fp16` for a device, or for those of all ranks of a gang; collective.

    Machines of a gang may differ: `auto` is then what suits the least of them. Raises ConfigError where the
    device does not have what is asked for by name: a fallback would train something other than what the
    configuration says, and emulation is slower than fp32.
    """
    here = bf16_of(device)
    chosen = choose_precision(name, device.type, here if gang is None else least(gang.gather(here)))
    return Precision.of(_DTYPES[chosen], device.type)


def least(found: Iterable[Bf16]) -> Bf16:
    return min(found, key=list(Bf16).index)


def choose_precision(name: str, device_type: str, bf16: Bf16) -> str:
    """The decision alone: fp32, bf16 or fp16; `auto` takes the fastest. Raises ConfigError."""
    able = ["fp32"]
    if device_type == "cuda":
        able.insert(0, "fp16")
    if bf16 is not Bf16.NONE:
        able.insert(0 if bf16 is Bf16.FAST else len(able), "bf16")
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


@contextmanager
def with_tf32(device: torch.device, allowed: bool | None) -> Iterator[None]:
    """As `allow_tf32` has it, until the block ends; with None, or without `has_tf32`, nothing is touched."""
    if allowed is None or not has_tf32(device):
        yield
        return
    products, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    try:
        allow_tf32(device, allowed)
        yield
    finally:
        torch.set_float32_matmul_precision(products)
        torch.backends.cudnn.allow_tf32 = convolutions


def has_tf32(device: torch.device) -> bool:
    """Whether it can be switched here: from compute capability 8.0 (Ampere) on, and not where a program has
    set torch's newer `fp32_precision`, after which the names that `allow_tf32` sets cannot be read."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    try:
        torch.get_float32_matmul_precision()
    except RuntimeError:
        return False
    return True


def bf16_of(device: torch.device) -> Bf16:
    """CUDA: fast from compute capability 8.0 (Ampere) on. CPU: see `bf16_of_cpu`, by what Linux shows."""
    if device.type == "cuda":
        return Bf16.FAST if torch.cuda.get_device_capability(device) >= (8, 0) else Bf16.NONE
    if device.type == "cpu":
        return bf16_of_cpu(cpuinfo.read(), platform.machine())
    return Bf16.NONE


def bf16_of_cpu(text: str, machine: str) -> Bf16:
    """By the text of /proc/cpuinfo, for an architecture such as x86_64 or aarch64. Pure.

    Fast: AMX on x86, AVX512-BF16 where it does twice the work of AVX512 (AMD, and Intel's before AMX), BF16
    on Arm. Intel's with AMX, known by AVX512-FP16, have AVX512-BF16 for compatibility: where a hypervisor
    hides AMX, as many do, a product of 1024 x 1024 matrices takes 1.8 times as long as in fp32 (measured
    with PyTorch 2.15 on an Emerald Rapids).
    """
    facts = cpuinfo.first(text)
    if machine in {"aarch64", "arm64"}:
        return Bf16.FAST if "bf16" in facts.get("Features", "").split() else Bf16.NONE
    flags = set(facts.get("flags", "").split())
    if "amx_bf16" in flags:
        return Bf16.FAST
    if "avx512_bf16" not in flags:
        return Bf16.NONE
    made_for_amx = facts.get("vendor_id") == "GenuineIntel" and "avx512_fp16" in flags
    return Bf16.SLOW if made_for_amx else Bf16.FAST
