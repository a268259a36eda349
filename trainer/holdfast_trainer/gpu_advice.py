"""`diagnose --gpu-memory GB`: settings for GPUs that are not here, in words.

Nothing is run, so no data and no device are needed; all figures are estimates, and are called so.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import contract
from .config import Config, ConfigError, check_world, load
from .diagnosis import Facts
from .gpu_words import TENSOR_CORES_FOR_BF16
from .memory_need import Need
from .recommend import Recommended, larger_step, recommend, recommend_for, room_of

LARGEST_GB = 1e9


def advise(target: str, overrides: Sequence[str], arguments: argparse.Namespace) -> int:
    """Prints it; returns the exit status: 0, 1 where a GPU is too small, 78 where a word cannot be used."""
    try:
        config = load(Path(target), overrides)
        wrong = [f"--gpu-memory {size:g}" for size in arguments.gpu_memory if not _can_be(size)]
        if arguments.gpus < 1:
            wrong.append(f"--gpus {arguments.gpus}")
        if wrong:
            raise ConfigError(f"{', '.join(wrong)}: no such GPUs")
        check_world(config, arguments.gpus)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return contract.EXIT_CONFIG_ERROR
    found = {
        size: recommend_for(config, arguments.gpus, size, arguments.gpu_capability)
        for size in arguments.gpu_memory
    }
    if arguments.output == "json":
        print(json.dumps([_body(size, arguments.gpus, one) for size, one in found.items()], indent=2))
    else:
        print("nothing was run: all sizes are estimates; diagnose on such a GPU measures them")
        for size, one in found.items():
            print("\n" + _text(size, arguments.gpus, arguments.gpu_capability, one))
    return int(any(not isinstance(one, Recommended) for one in found.values()))


def _can_be(gigabytes: float) -> bool:
    """Whether a GPU of this size has room for a tensor, and the size is a number of bytes."""
    return abs(gigabytes) < LARGEST_GB and room_of(gigabytes) > 0


def settings_line(config: Config, facts: Facts, need: Need) -> str:
    """For the GPU that the steps were measured on, corrected by them; empty on a CPU, whose memory a larger
    batch fills without making it faster."""
    if facts.device_type != "cuda":
        return ""
    correction = facts.memory_peak / need.total
    found = recommend(
        config,
        facts.precision,
        facts.world_size,
        facts.memory_total,
        correction,
        fused_loss=facts.fused_loss,
    )
    if found is None:
        return ""
    return f"settings    {' '.join(found.settings)}, which should take {found.bytes / 1e9:.2f} GB"


def _text(gigabytes: float, gpus: int, capability: float, found: Recommended | int | None) -> str:
    title = f"{gpus} GPU(s) of {gigabytes:g} GB"
    if found is None:
        return f"{title}: it does not fit, however many there are: make the model or its context smaller"
    if isinstance(found, int):
        fp32 = "" if capability >= TENSOR_CORES_FOR_BF16 else " and train.precision=fp32"  # else it is fp16
        return f"{title}: it does not fit; {found} of them would do, with train.parallel=fsdp{fp32}"
    need = found.need
    lines = [
        f"{title}: about {found.bytes / 1e9:.1f} GB of {found.room / 1e9:.1f} that tensors may have "
        f"({found.bytes / found.room:.0%}): state {(need.state + need.copies + need.gathered) / 1e9:.1f}, "
        f"activations {need.activations / 1e9:.1f}, logits {need.logits / 1e9:.1f}",
        f"  {' '.join(found.settings)}",
    ]
    if (fits := larger_step(found, gpus)) is not None:
        lines.append(
            f"  a pass holds a GPU's whole share of a step, and there is room for about {fits} sequences: "
            "tune --grow tries a larger train.global_batch"
        )
    return "\n".join(lines)


def _body(gigabytes: float, gpus: int, found: Recommended | int | None) -> dict[str, Any]:
    body: dict[str, Any] = {"gpu_memory": gigabytes, "gpus": gpus, "measured": False}
    if not isinstance(found, Recommended):
        return {**body, "settings": None, "gpus_needed": found}
    return {
        **body,
        "settings": dict(setting.split("=", 1) for setting in found.settings),
        "room_bytes": found.room,
        "need_bytes": found.bytes,
        "memory_need": dataclasses.asdict(found.need),
        "sequences_that_fit": larger_step(found, gpus),
    }
