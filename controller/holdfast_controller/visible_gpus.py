"""Which GPUs of this machine jobs may have: those its driver lists, less what CUDA_VISIBLE_DEVICES hides.

They are told by NVML's numbers, which follow the PCI bus, as `nvidia-smi` shows them. A number in
CUDA_VISIBLE_DEVICES is taken for one of those; CUDA itself counts so with CUDA_DEVICE_ORDER=PCI_BUS_ID.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

VARIABLE = "CUDA_VISIBLE_DEVICES"
NONE = ("", "-1", "NoDevFiles")
"""Words that hide all that follows, and stand for no GPU."""


def gpus_present(proc: Path = Path("/proc/driver/nvidia/gpus"), dev: Path = Path("/dev")) -> list[str]:
    """The UUID of each NVIDIA GPU, by its number; "" where the driver does not tell it. One that the driver
    was told to leave alone (NVreg_ExcludedGpus) has no number."""
    if os.path.isdir(proc):
        told = [_told(directory / "information") for directory in sorted(proc.iterdir())]
        return [_uuid(one) for one in told if one.get("GPU Excluded") != "Yes"]
    return ["" for path in dev.glob("nvidia[0-9]*") if path.name[6:].isdigit()]


def _told(information: Path) -> dict[str, str]:
    try:
        lines = information.read_text(errors="replace").splitlines()
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _uuid(told: Mapping[str, str]) -> str:
    """Of many GPUs it is question marks until somebody has used them since the driver was loaded."""
    uuid = told.get("GPU UUID", "")
    return "" if "?" in uuid else uuid


def gpus_shown(present: Sequence[str], visible: str | None) -> tuple[int, ...]:
    """The numbers of those that `visible`, the variable's value, shows; all where it is not set.

    Raises ValueError for a word that is none of them: CUDA would hide it and all behind it, and say nothing.
    """
    if visible is None or not present:
        return tuple(range(len(present)))
    shown: list[int] = []
    for word in (word.strip() for word in visible.split(",")):
        if word in NONE:
            break
        number = _number(word, present)
        if number is None and "" in present and word.lower().startswith("gpu-") and not _named(word, present):
            raise ValueError(
                f"{VARIABLE} is {visible!r}: the driver does not tell yet which GPU {word} is; name whole "
                "ones by their number, as nvidia-smi -L lists them, or unset it"
            )
        if number is None:
            raise ValueError(
                f"{VARIABLE} is {visible!r}: {word} is none of the {len(present)} GPUs of this machine; name "
                "whole ones by their number or UUID, as nvidia-smi -L lists them, or unset it"
            )
        if number in shown:
            raise ValueError(f"{VARIABLE} is {visible!r}: {word} is there twice; name each GPU once")
        shown.append(number)
    return tuple(shown)


def _number(word: str, present: Sequence[str]) -> int | None:
    """Of a number, a UUID, or the beginning of one that is no other's."""
    if word.isascii() and word.isdigit():
        return int(word) if int(word) < len(present) else None
    found = _named(word, present)
    return found[0] if len(found) == 1 else None


def _named(word: str, present: Sequence[str]) -> list[int]:
    return [number for number, uuid in enumerate(present) if uuid.lower().startswith(word.lower())]
