"""What bits depend on besides configuration and state: kept in every manifest, compared at every resume."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from . import cpuinfo
from .config import TrainConfig
from .precision import NAMES
from .schema import ConfigError

NOT_DETERMINISTIC = "not deterministic"
"""What it is kept as that operations were computed which cannot repeat their bits: their names."""

VALIDATED_BY = "validated by"
"""What it is kept as how validation losses are measured, on which no bits depend, where the best stay."""


def describe_environment(device: torch.device, compute_dtype: torch.dtype) -> dict[str, Any]:
    """Of this process. On a CPU, kernels and the sizes of their blocks go by instructions and by caches."""
    gpu = device.type == "cuda"
    return {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if gpu else _processor(),
        "precision": NAMES.get(compute_dtype, str(compute_dtype)),
        "threads": torch.get_num_threads(),
        **(gpu_libraries() if gpu else {}),
    }


def gpu_libraries() -> dict[str, Any]:
    """Versions of what has kernels for GPUs besides torch, and of what adds up over them."""
    cudnn: Any = torch.backends.cudnn
    versions = {"CUDA": torch.version.cuda, "cuDNN": cudnn.version()}
    if torch.distributed.is_nccl_available():
        nccl: Any = torch.cuda.nccl
        versions["NCCL"] = ".".join(map(str, nccl.version()))
    return versions


def execution(
    settings: TrainConfig,
    *,
    micro_batch: int,
    compiled: bool,
    attention: str,
    fused_loss: bool,
    layers: str,
    device_type: str,
) -> dict[str, Any]:
    """How a step is computed, as far as it changes bits here, by the configuration's keys. Pure.

    `micro_batch` to `layers`: what came of the settings. They are not in the configuration's hash: a run
    may go on with others, and then says so.
    """
    told: dict[str, Any] = {
        "train.micro_batch": micro_batch,
        "train.compile": settings.compile if compiled else False,
        "train.fused_optimizer": settings.fused_optimizer,
        "attention": attention,
    }
    if compiled:  # else what is computed again has the bits that it had
        told["train.activation_checkpointing"] = settings.activation_checkpointing
    if device_type == "cuda":
        told["train.tf32"] = settings.tf32
        told["loss"] = "fused" if fused_loss else "torch"
    if device_type == "cpu":
        told["layers"] = layers
    return told


def require_plain(environment: Mapping[str, Any]) -> None:
    """Raises ConfigError naming a value that a checkpoint cannot keep as it is, and compare."""
    for name, value in environment.items():
        try:
            kept = json.loads(json.dumps({name: value}))
        except (TypeError, ValueError):
            kept = None
        if kept != {name: value}:
            raise ConfigError(f"run.environment[{name!r}] is {value!r}: give words, numbers, true or false")


def _processor() -> str:
    model = cpuinfo.name(cpuinfo.first(cpuinfo.read()))
    return ", ".join(filter(None, ("cpu", torch.backends.cpu.get_cpu_capability(), model)))


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What is not as it was, as `name: then -> now`, and what could not be repeated even if all were; of what
    was not kept then, nothing is known. Pure."""
    known = [name for name in now if name in then and name != VALIDATED_BY]
    told = [f"{name}: {then[name]} -> {now[name]}" for name in known if then[name] != now[name]]
    if NOT_DETERMINISTIC in then and NOT_DETERMINISTIC not in now:
        told.append(f"{NOT_DETERMINISTIC}: {then[NOT_DETERMINISTIC]}")
    return told
