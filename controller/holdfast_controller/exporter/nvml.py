"""All of NVML but what gpm.py asks it, through `pynvml` (the package is nvidia-ml-py).

Nothing here waits by design: what NVML answers only after a pause (PCIe throughput over 20 ms) is read as
a running counter instead. Everything may hang or crash nevertheless: reader.py runs it apart.

Reference: NVIDIA's NVML API reference; field numbers and scopes as in its nvml.h.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any

import pynvml

from .figures import SLOWED
from .gpm import Activity
from .readings import Reason

ALL_LINKS = 0xFFFFFFFF
LINK_FIELDS = {
    "pcie_sent": (197, 0, 1),
    "pcie_received": (198, 0, 1),
    "nvlink_sent": (138, ALL_LINKS, 1024),
    "nvlink_received": (139, ALL_LINKS, 1024),
}
"""NVML's field number, its scope, and its unit in bytes."""
RECENT_SECONDS = 2.0
"""Samples of processes' utilisation older than this are of another moment. NVML takes one a second."""
NO_INSTANCE = 0xFFFFFFFF
_SMALL = (pynvml.NVML_VALUE_TYPE_UNSIGNED_INT, pynvml.NVML_VALUE_TYPE_SIGNED_INT)
"""In 32 bits a counter of bytes (nvml.h: "Value can be wrapped") begins anew every 4 GiB: what a link carries
in a second. Between two scrapes nobody knows how often. An H200's are such; gpm.py counts its bytes."""

Document = dict[str, Any]

_NOT_THERE = {
    pynvml.NVML_ERROR_NOT_SUPPORTED,
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
    pynvml.NVML_ERROR_VGPU_ECC_NOT_SUPPORTED,
    pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
}
_REASONS = {
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: Reason.NO_LIBRARY,
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: Reason.NO_DRIVER,
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: Reason.DRIVER_MISMATCH,
    pynvml.NVML_ERROR_NO_PERMISSION: Reason.PERMISSION_DENIED,
    pynvml.NVML_ERROR_GPU_IS_LOST: Reason.LOST,
    pynvml.NVML_ERROR_RESET_REQUIRED: Reason.RESET_REQUIRED,
}
_REMEDIES = {
    Reason.NO_LIBRARY: "libnvidia-ml.so.1 is not found: install NVIDIA's driver, or run where it is",
    Reason.NO_DRIVER: "NVIDIA's kernel driver is not loaded: see `dmesg`, load the module nvidia",
    Reason.DRIVER_MISMATCH: "the library and the kernel's driver are of two releases: reboot, or reload it",
    Reason.PERMISSION_DENIED: "NVML refuses this user: run as root or give it /dev/nvidiactl",
}


class NvmlFault(Exception):
    """NVML as a whole gives nothing now."""

    def __init__(self, error: Exception, doing: str):
        self.reason = reason_of(error)
        words = _REMEDIES.get(self.reason, "see `dmesg` and `nvidia-smi`")
        super().__init__(f"{doing}: {error}; {words}")


class _Unusable(Exception):
    """The device itself is gone."""

    def __init__(self, reason: Reason):
        self.reason = reason


def reason_of(error: Exception) -> Reason:
    return _REASONS.get(getattr(error, "value", None), Reason.ERROR)


class Nvml:
    """The library, once it has been initialised."""

    def __init__(self) -> None:
        """Raises NvmlFault."""
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise NvmlFault(error, "initialising NVML") from error
        self._known: dict[int, Document] = {}
        self._activities: dict[str, Activity] = {}
        self._events: Any = None
        self._watched: dict[int | None, str] = {}
        """UUID by the address that NVML knows a device by; it holds as long as the initialisation."""

    def close(self) -> None:
        for activity in self._activities.values():
            activity.close()
        try:
            pynvml.nvmlShutdown()
        except pynvml.NVMLError:
            pass  # it was lost before: the next initialisation says what is wrong

    def read(self, heard: Callable[[int], None] = lambda _: None) -> Document:
        """All GPUs as a document for readings.reading_from; `heard` is told which comes next.

        Raises NvmlFault where not even their number is to be had.
        """
        try:
            driver = pynvml.nvmlSystemGetDriverVersion()
            count = pynvml.nvmlDeviceGetCount()
        except pynvml.NVMLError as error:
            raise NvmlFault(error, "counting GPUs") from error
        cuda = _attempt(pynvml.nvmlSystemGetCudaDriverVersion)
        devices = []
        for index in range(count):
            heard(index)
            devices.append(self._device(index))
        version = f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else ""
        return {"driver": driver, "cuda": version, "devices": devices}

    def xids(self) -> list[tuple[str, int]]:
        """(UUID, code) of every Xid since the last call; [] where the driver has no events."""
        found = []
        while self._events is not None:
            try:
                event = pynvml.nvmlEventSetWait(self._events, 0)
            except pynvml.NVMLError:
                break  # NVML_ERROR_TIMEOUT: nothing happened
            # Of a device that has just fallen off the bus NVML would not tell the UUID any more.
            found.append((self._watched.get(_address(event.device), ""), int(event.eventData)))
        return found

    def _device(self, index: int) -> Document:
        """One GPU; what is known of it from before stays true where it is lost."""
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            document = {
                "index": index,
                "uuid": pynvml.nvmlDeviceGetUUID(handle),
                "name": pynvml.nvmlDeviceGetName(handle),
                "bus": _text(pynvml.nvmlDeviceGetPciInfo(handle).busId),
                "minor": _attempt(pynvml.nvmlDeviceGetMinorNumber, handle),
            }
        except pynvml.NVMLError as error:
            known = self._known.get(index, {"index": index, "uuid": ""})
            return {**known, "fault": reason_of(error)}
        self._known[index] = document
        self._watch(document["uuid"], handle)
        try:
            activity = self._activities.setdefault(document["uuid"], Activity())
            return {**document, **_Card(handle, activity).document()}
        except _Unusable as error:
            return {**document, "fault": error.reason}

    def _watch(self, uuid: str, handle: Any) -> None:
        """Xids are told of devices that were registered, from then on."""
        if _address(handle) in self._watched:
            return
        self._watched[_address(handle)] = uuid
        try:
            if self._events is None:
                self._events = pynvml.nvmlEventSetCreate()
            pynvml.nvmlDeviceRegisterEvents(handle, pynvml.nvmlEventTypeXidCriticalError, self._events)
        except pynvml.NVMLError:
            pass  # not supported on this card, or in this virtual machine


class _Card:
    """One pass over one GPU. A figure that is refused is noted; a GPU that is lost ends the pass."""

    def __init__(self, handle: Any, activity: Activity):
        self.handle = handle
        self.activity = activity
        self.figures: dict[str, float] = {}
        self.missing: dict[str, str] = {}

    def document(self) -> Document:
        n = pynvml
        rates = self._ask("utilization", n.nvmlDeviceGetUtilizationRates)
        if rates is not None:
            self.figures |= {"utilization": rates.gpu / 100, "memory_busy": rates.memory / 100}
        memory = self._ask("memory_used", n.nvmlDeviceGetMemoryInfo)
        if memory is not None:
            self.figures |= {"memory_total": float(memory.total), "memory_used": float(memory.used)}
        self._figure("power", 1e-3, n.nvmlDeviceGetPowerUsage)
        self._figure("power_limit", 1e-3, n.nvmlDeviceGetEnforcedPowerLimit)
        self._figure("energy", 1e-3, n.nvmlDeviceGetTotalEnergyConsumption)
        self._figure("temperature", 1, n.nvmlDeviceGetTemperature, n.NVML_TEMPERATURE_GPU)
        self._figure("sm_clock", 1e6, n.nvmlDeviceGetClockInfo, n.NVML_CLOCK_SM)
        self._figure("memory_clock", 1e6, n.nvmlDeviceGetClockInfo, n.NVML_CLOCK_MEM)
        since_load = n.NVML_VOLATILE_ECC
        for name, kind in (("corrected", 0), ("uncorrected", 1)):
            self._figure(f"ecc_{name}", 1, n.nvmlDeviceGetTotalEccErrors, kind, since_load)
        self.figures |= self._ask("activity", self.activity.read) or {}
        self._links()
        bits = self._ask("slowed", n.nvmlDeviceGetCurrentClocksEventReasons)
        mig = self._mig()
        return {
            "slowed": None if bits is None else [name for bit, name in SLOWED.items() if bits & bit],
            "processes": self._processes(),
            "mig": mig,
            "figures": self.figures,
            "missing": self.missing,
        }

    def _ask(self, name: str, call: Callable[..., Any], *arguments: Any) -> Any:
        """What the call returns, or None. Raises _Unusable where the GPU is lost."""
        try:
            return call(self.handle, *arguments)
        except pynvml.NVMLError as error:
            reason = reason_of(error)
            if reason in (Reason.LOST, Reason.RESET_REQUIRED):
                raise _Unusable(reason) from error
            if error.value not in _NOT_THERE:
                self.missing[name] = reason
            return None

    def _figure(self, name: str, unit: float, call: Callable[..., Any], *arguments: Any) -> None:
        value = self._ask(name, call, *arguments)
        if value is not None:
            self.figures[name] = value * unit

    def _links(self) -> None:
        """One that could not be read this time is not replaced by that of gpm.py, which began elsewhere."""
        asked = [(number, scope) for number, scope, _ in LINK_FIELDS.values()]
        values = self._ask("links", pynvml.nvmlDeviceGetFieldValues, asked)
        if "links" in self.missing:
            self.figures = {name: value for name, value in self.figures.items() if name not in LINK_FIELDS}
        for value, (name, (_, _, unit)) in zip(values or (), LINK_FIELDS.items(), strict=False):
            if value.nvmlReturn == pynvml.NVML_SUCCESS and value.valueType not in _SMALL:
                self.figures[name] = value.value.ullVal * unit
            elif value.nvmlReturn not in {pynvml.NVML_SUCCESS, *_NOT_THERE}:
                self.figures.pop(name, None)

    def _processes(self) -> list[tuple[int, float | None, float | None, int | None]] | None:
        """(pid, bytes, SM share, MIG instance) of each process with a context; None where not told."""
        running = self._ask("processes", pynvml.nvmlDeviceGetComputeRunningProcesses)
        if running is None:
            return None
        drawing = self._ask("graphics", pynvml.nvmlDeviceGetGraphicsRunningProcesses) or []
        memory = {each.pid: each for each in (*drawing, *running)}
        busy = self._busy() if memory else {}
        return [
            (
                pid,
                None if each.usedGpuMemory is None else float(each.usedGpuMemory),
                None if busy is None else busy.get(pid, 0.0),
                None if each.gpuInstanceId == NO_INSTANCE else int(each.gpuInstanceId),
            )
            for pid, each in sorted(memory.items())
        ]

    def _busy(self) -> dict[int, float] | None:
        """SM share by pid from the newest recent sample; None: not told.

        NVML gives a sample to a process that used the GPU, none to one that did not. No sample at all is
        rest only where the GPU as a whole was at rest: else the samples are merely not there yet.
        """
        since = int((time.time() - RECENT_SECONDS) * 1e6)
        try:
            samples = pynvml.nvmlDeviceGetProcessUtilization(self.handle, since)
        except pynvml.NVMLError as error:
            reason = reason_of(error)
            if reason in (Reason.LOST, Reason.RESET_REQUIRED):
                raise _Unusable(reason) from error
            if error.value not in (pynvml.NVML_ERROR_NOT_FOUND, pynvml.NVML_SUCCESS):  # no sample, either way
                if error.value not in _NOT_THERE:
                    self.missing["process_sm"] = reason
                return None
            samples = []
        newest = sorted((each for each in samples if each.timeStamp > since), key=lambda each: each.timeStamp)
        if not newest and self.figures.get("utilization") != 0:
            return None
        return {each.pid: each.smUtil / 100 for each in newest}

    def _mig(self) -> list[tuple[str, int, int | None, float | None, float | None]]:
        """(UUID, instance, slices, bytes, bytes used) of each MIG device; None: not told."""
        mode = self._ask("mig", pynvml.nvmlDeviceGetMigMode)
        if mode is None or mode[0] != pynvml.NVML_DEVICE_MIG_ENABLE:
            return []
        found = []
        for number in range(self._ask("mig", pynvml.nvmlDeviceGetMaxMigDeviceCount) or 0):
            try:
                mig = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(self.handle, number)
            except pynvml.NVMLError:
                continue  # no device in this place
            memory = _attempt(pynvml.nvmlDeviceGetMemoryInfo, mig)
            attributes = _attempt(pynvml.nvmlDeviceGetAttributes, mig)
            uuid, instance = (
                _attempt(pynvml.nvmlDeviceGetUUID, mig),
                _attempt(pynvml.nvmlDeviceGetGpuInstanceId, mig),
            )
            if uuid is None or instance is None:
                continue
            slices = int(attributes.gpuInstanceSliceCount) if attributes else None
            sizes = (float(memory.total), float(memory.used)) if memory else (None, None)
            found.append((uuid, int(instance), slices, *sizes))
        return found


def _attempt(call: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return call(*arguments)
    except pynvml.NVMLError:
        return None


def _address(handle: Any) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
