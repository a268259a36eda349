"""The table of `holdfast gpus`: a row a GPU, and below it a row for each who uses it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from . import formats
from .tables import Column

if TYPE_CHECKING:
    from ..exporter.attribution import Holder
    from ..exporter.collector import Snapshot
    from ..exporter.readings import DeviceReading

GIB = 2.0**30
STRANGERS = "no job"


def gpu_columns(snapshot: Snapshot) -> list[Column]:
    """BUSY is NVML's share of time with a kernel running; of a user its share of the SMs' time."""
    columns = [Column("GPU", 0, True), Column("NAME", 3), Column("BUSY", 0, True), Column("MEMORY", 0, True)]
    columns += [Column("POWER", 2, True), Column("TEMPERATURE", 4, True), Column("USED BY", 0, wraps=True)]
    for device in snapshot.devices:
        uses = [use for use in snapshot.uses if use.uuid == device.uuid]
        _row(columns, [*_device_cells(device), "" if uses else _used_by(device)])
        for use in uses:
            who = f"{_who(use.holder)}, {use.processes} process{'' if use.processes == 1 else 'es'}"
            who += f" on {use.mig}" if use.mig else ""
            memory = formats.UNKNOWN if use.memory_bytes is None else f"{use.memory_bytes / GIB:.1f} GiB"
            _row(columns, ["", "", formats.percent(use.sm_ratio), memory, "", "", who])
    return columns


def _device_cells(device: DeviceReading) -> list[str | Text]:
    figures = device.figures
    number, name = str(device.index), device.name or formats.UNKNOWN
    if device.fault is not None:
        return [number, name, *[formats.UNKNOWN] * 4]
    temperature = figures.get("temperature")
    return [
        number,
        name,
        formats.percent(figures.get("utilization")),
        _of(figures.get("memory_used"), figures.get("memory_total"), GIB, "GiB", ".1f"),
        _of(figures.get("power"), figures.get("power_limit"), 1, "W", ".0f"),
        formats.UNKNOWN if temperature is None else f"{temperature:.0f} °C",
    ]


def _used_by(device: DeviceReading) -> str | Text:
    """Where no process of it is seen. Those of other containers NVML does not list, or by numbers that are
    nobody's here; what it says of the GPU itself is true all the same."""
    if device.fault is not None:
        return Text(f"cannot be read: {device.fault.value.replace('_', ' ')}", "bold red")
    if device.processes is None:
        return formats.UNKNOWN
    busy = device.processes or device.figures.get("utilization")
    return "processes that are not seen here" if busy else "nobody"


def _of(part: float | None, whole: float | None, unit: float, name: str, digits: str) -> str:
    words = [formats.UNKNOWN if value is None else format(value / unit, digits) for value in (part, whole)]
    return formats.UNKNOWN if part is None and whole is None else f"{'/'.join(words)} {name}"


def _who(holder: Holder | None) -> str:
    if holder is None:
        return STRANGERS
    name = f"{holder.namespace}/{holder.job or holder.pod}"
    attempt = f" attempt {holder.attempt}" if holder.attempt else ""
    return name + attempt + (f" rank {holder.rank}" if holder.rank else "")


def _row(columns: list[Column], cells: list[str | Text]) -> None:
    for column, cell in zip(columns, cells, strict=True):
        column.cells.append(cell if isinstance(cell, Text) else Text(cell))
