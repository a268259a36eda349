"""What bits depend on besides configuration and state: kept in every manifest, compared at every resume."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from . import cpuinfo
from .precision import NAMES

NOT_DETERMINISTIC = "not deterministic"
"""What it is kept as that operations were computed which cannot repeat their bits: their names."""


def describe_environment(device: torch.device, compute_dtype: torch.dtype) -> dict[str, Any]:
    """Of this process. On a CPU, kernels and the sizes of their blocks go by instructions and by caches."""
    return {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        "precision": NAMES.get(compute_dtype, str(compute_dtype)),
        "threads": torch.get_num_threads(),
    }


def _processor() -> str:
    model = cpuinfo.name(cpuinfo.first(cpuinfo.read()))
    return ", ".join(filter(None, ("cpu", torch.backends.cpu.get_cpu_capability(), model)))


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What is not as it was, as `name: then -> now`, and what could not be repeated even if all were; of what
    was not kept then, nothing is known. Pure."""
    told = [f"{name}: {then[name]} -> {now[name]}" for name in now if then.get(name, now[name]) != now[name]]
    if NOT_DETERMINISTIC in then and NOT_DETERMINISTIC not in now:
        told.append(f"{NOT_DETERMINISTIC}: {then[NOT_DETERMINISTIC]}")
    return told
