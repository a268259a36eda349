"""The figures of a GPU: what each is called, what it means, and between which bounds it can be true.

The bounds are physical, wide enough for cards to come, narrow enough for a driver's "not known" (all bits
set) and other nonsense. What lies outside is not shown, and counted as implausible.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .readings import DeviceReading, MigReading, ProcessReading, Reason

_COUNTER = 2.0**63
"""No counter of bytes or errors gets there in the life of a card."""


@dataclass(frozen=True)
class Figure:
    """One figure of every GPU, in the series' base unit."""

    name: str
    series: str
    help: str
    highest: float
    lowest: float = 0.0
    counter: bool = False


FIGURES = (
    Figure(
        "utilization",
        "holdfast_gpu_utilization_ratio",
        "Share of NVML's last sample period (1/6 s to 1 s) in which at least one kernel ran on the GPU: "
        "1 does not mean that all its SMs were busy.",
        1,
    ),
    Figure(
        "memory_busy",
        "holdfast_gpu_memory_busy_ratio",
        "Share of NVML's last sample period in which the GPU's memory was read or written.",
        1,
    ),
    *(
        Figure(
            name,
            f"holdfast_gpu_{name}_seconds",
            f"{words} Counted by the hardware, from Hopper on.",
            1e10,
            counter=True,
        )
        for name, words in (
            (
                "sm_active",
                "Seconds in which an SM had work, mean of all SMs: grows by 1 a second when all are busy.",
            ),
            ("tensor_active", "Seconds in which an SM's tensor cores computed, mean of all SMs."),
            ("dram_active", "Seconds that its traffic would take at the full bandwidth of the GPU's memory."),
        )
    ),
    Figure("memory_total", "holdfast_gpu_memory_total_bytes", "Memory of the GPU.", 2.0**46),
    Figure("memory_used", "holdfast_gpu_memory_used_bytes", "Memory in use, the driver's own too.", 2.0**46),
    Figure("power", "holdfast_gpu_power_watts", "Power draw of the board.", 20_000),
    Figure("power_limit", "holdfast_gpu_power_limit_watts", "Power limit in force.", 20_000),
    Figure(
        "energy",
        "holdfast_gpu_energy_joules",
        "Energy since the driver was loaded.",
        1e14,  # 20 kW for 150 years
        counter=True,
    ),
    Figure("temperature", "holdfast_gpu_temperature_celsius", "Temperature of the chip.", 150),
    Figure("sm_clock", "holdfast_gpu_sm_clock_hertz", "Clock of the SMs.", 1e10),
    Figure("memory_clock", "holdfast_gpu_memory_clock_hertz", "Clock of the memory.", 1e11),
    Figure(
        "ecc_corrected",
        "holdfast_gpu_ecc_corrected_errors",
        "Memory errors that ECC corrected, since the driver was loaded.",
        _COUNTER,
        counter=True,
    ),
    Figure(
        "ecc_uncorrected",
        "holdfast_gpu_ecc_uncorrected_errors",
        "Memory errors that ECC could not correct, since the driver was loaded.",
        _COUNTER,
        counter=True,
    ),
    *(
        Figure(
            f"{link}_{direction}",
            f"holdfast_gpu_{link}_{direction}_bytes",
            f"Bytes {direction} by the GPU over {name}{note}.",
            _COUNTER,
            counter=True,
        )
        for link, name, note in (
            ("pcie", "PCIe", ", headers included"),
            ("nvlink", "NVLink", ", payload of all links"),
        )
        for direction in ("sent", "received")
    ),
)

BY_NAME = {figure.name: figure for figure in FIGURES}

SLOWED = {
    0x1: "idle",
    0x2: "application_clocks",
    0x4: "power_cap",
    0x8: "hardware",
    0x10: "sync_boost",
    0x20: "thermal_software",
    0x40: "thermal_hardware",
    0x80: "power_brake",
    0x100: "display_clock",
    0x200: "board_limit",
    0x400: "reliability",
}
"""NVML's bits (nvmlClocksEventReasons, nvmlClocksThrottleReasons) to label values."""


def plausible(device: DeviceReading) -> DeviceReading:
    """The device without what cannot be true, which is named in `missing`, and what has no name here."""
    figures = dict(device.figures)
    missing = dict(device.missing)
    total = figures.get("memory_total")
    for name, value in device.figures.items():
        if (figure := BY_NAME.get(name)) is None:
            del figures[name]  # of a reader that was installed anew meanwhile: there is no series for it here
            continue
        fits = figure.lowest <= value <= figure.highest
        if name == "memory_used" and total is not None:
            fits = fits and value <= total
        if name in ("memory_total", "sm_clock", "memory_clock", "power_limit"):
            fits = fits and value > 0
        if not fits:
            del figures[name]
            missing[name] = Reason.IMPLAUSIBLE
    processes, dropped = _plausible_processes(device, figures.get("memory_total"))
    missing |= dropped
    mig = tuple(_plausible_mig(each) for each in device.mig)
    if mig != device.mig:
        missing["mig_memory"] = Reason.IMPLAUSIBLE
    return replace(device, figures=figures, missing=missing, processes=processes, mig=mig)


def _plausible_processes(
    device: DeviceReading, total: float | None
) -> tuple[tuple[ProcessReading, ...] | None, dict[str, Reason]]:
    """A process keeps its place where its figure goes: that it holds the GPU is still true."""
    if device.processes is None:
        return None, {}
    kept, missing = [], {}
    most = BY_NAME["memory_total"].highest if total is None else total
    for process in device.processes:
        memory, sm = process.memory_bytes, process.sm_ratio
        if memory is not None and not 0 <= memory <= most:
            memory, missing["process_memory"] = None, Reason.IMPLAUSIBLE
        if sm is not None and not 0 <= sm <= 1:
            sm, missing["process_sm"] = None, Reason.IMPLAUSIBLE
        kept.append(replace(process, memory_bytes=memory, sm_ratio=sm))
    return tuple(kept), missing


def _plausible_mig(mig: MigReading) -> MigReading:
    total, used = mig.memory_total, mig.memory_used
    if total is not None and not 0 < total <= BY_NAME["memory_total"].highest:
        total = None
    if used is not None and (used < 0 or (total is not None and used > total)):
        used = None
    return replace(mig, memory_total=total, memory_used=used)
