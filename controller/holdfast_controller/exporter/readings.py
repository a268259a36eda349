"""What was read from NVML: plain values in base units, and the words for what could not be read.

A figure that NVML does not have on a card is absent. One that it should have and did not give is in
`missing` with a reason. Both are different from zero.

Readings cross from the reader's process as JSON, so they are made of what JSON has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Reason(StrEnum):
    """Why something is not known. A closed list: these are label values."""

    NO_LIBRARY = "no_library"
    NO_DRIVER = "no_driver"
    DRIVER_MISMATCH = "driver_mismatch"
    PERMISSION_DENIED = "permission_denied"
    LOST = "lost"
    RESET_REQUIRED = "reset_required"
    GONE = "gone"
    HUNG = "hung"
    CRASHED = "crashed"
    IMPLAUSIBLE = "implausible"
    UNREACHABLE = "unreachable"
    ERROR = "error"


@dataclass(frozen=True)
class Fault:
    """Why a source of figures gives none now; `message` is for people and names the remedy."""

    reason: Reason
    message: str


@dataclass(frozen=True)
class ProcessReading:
    """One process on one GPU, by the pid that the driver's host gives it.

    `memory_bytes` and `sm_ratio` (of the GPU's SM time, 0 to 1) are None where NVML does not tell them.
    """

    pid: int
    memory_bytes: float | None = None
    sm_ratio: float | None = None
    instance: int | None = None
    """GPU instance, where MIG cuts the GPU."""


@dataclass(frozen=True)
class MigReading:
    """One MIG device: a part of a GPU with memory of its own."""

    uuid: str
    instance: int
    slices: int | None = None
    memory_total: float | None = None
    memory_used: float | None = None


@dataclass(frozen=True)
class DeviceReading:
    """One GPU. `figures` are by the names of figures.py. With a `fault` there are none."""

    index: int
    uuid: str
    name: str = ""
    bus: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)
    missing: Mapping[str, Reason] = field(default_factory=dict)
    slowed: tuple[str, ...] | None = None
    """Why the clocks are below what they could be (figures.SLOWED); None: not told."""
    processes: tuple[ProcessReading, ...] | None = None
    """None: not told."""
    mig: tuple[MigReading, ...] = ()
    fault: Reason | None = None
    minor: int | None = None
    """N of its device file /dev/nvidiaN; None: not told."""


@dataclass(frozen=True)
class Reading:
    """All GPUs of this machine at one moment."""

    driver: str = ""
    cuda: str = ""
    devices: tuple[DeviceReading, ...] = ()


@dataclass(frozen=True)
class XidEvent:
    """An error that the driver reported of a GPU; codes as in NVIDIA's Xid catalogue."""

    uuid: str
    code: int


def reading_from(document: Mapping[str, Any]) -> Reading:
    """From the reader's JSON. Raises KeyError, TypeError, ValueError for what is none."""
    return Reading(document["driver"], document["cuda"], tuple(_device(each) for each in document["devices"]))


def _device(document: Mapping[str, Any]) -> DeviceReading:
    plain = dict(document)
    processes = plain.pop("processes", None)
    mig = plain.pop("mig", ())
    slowed = plain.pop("slowed", None)
    fault = plain.pop("fault", None)
    missing = {name: Reason(why) for name, why in plain.pop("missing", {}).items()}
    return DeviceReading(
        **plain,
        missing=missing,
        slowed=None if slowed is None else tuple(slowed),
        processes=None if processes is None else tuple(ProcessReading(*each) for each in processes),
        mig=tuple(MigReading(*each) for each in mig),
        fault=None if fault is None else Reason(fault),
    )
