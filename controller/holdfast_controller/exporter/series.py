"""A snapshot as Prometheus series. Pure.

| series | labels besides gpu, uuid | what |
| --- | --- | --- |
| holdfast_gpu_info | name, bus, driver, cuda | 1 |
| holdfast_gpu_up | | 1 while the GPU can be read |
| holdfast_gpu_fault | reason | 1 for why it cannot |
| holdfast_gpu_reading_missing | reading, reason | 1 for a figure that is refused, or that cannot be true |
| those of figures.py | | figures of the device |
| holdfast_gpu_slowed | reason | 1 where the clocks are held down for this reason |
| holdfast_gpu_xid_errors_total | | Xid events since the exporter started |
| holdfast_gpu_xid_errors_by_code_total | xid | the same by Xid code |
| holdfast_gpu_mig_slices, _memory_total_bytes, _memory_used_bytes | mig | of each MIG device |
| holdfast_gpu_shares | mig, resource | shares that the device plugin offers |
| holdfast_gpu_shares_allocated | mig, resource, namespace, pod, container, job, attempt, replica | held |
| holdfast_gpu_processes | mig, namespace, pod, container, job, attempt, replica, rank | processes by holder |
| holdfast_gpu_process_memory_bytes, holdfast_gpu_process_sm_ratio | the same | their sum |
| holdfast_gpu_unattributed_processes, _memory_bytes | mig | of processes without a pod or job that is known |
| holdfast_gpu_exporter_up | source | 1 while a source answers: nvml, pod-resources, pods |
| holdfast_gpu_exporter_fault | source, reason | 1 for why it does not |
| holdfast_gpu_exporter_failures_total | source, reason | scrapes that lacked a source |
| holdfast_gpu_exporter_read_seconds | | time that NVML took |

What is not known has no sample. A container of no training job has `job` and `attempt` empty; where a
Prometheus fills an empty `job` with its own, `attempt!=""` still tells training jobs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from .attribution import Holder, Use
from .collector import Snapshot
from .figures import FIGURES, SLOWED
from .readings import DeviceReading

DEVICE = ("gpu", "uuid")
HOLDER = ("namespace", "pod", "container", "job", "attempt", "replica")
USE = (*DEVICE, "mig", *HOLDER, "rank")


def families(snapshot: Snapshot) -> Iterator[Metric]:
    """All series of one scrape."""
    yield from _exporter(snapshot)
    yield from _states(snapshot)
    yield from _figures(snapshot.devices)
    yield from _xids(snapshot)
    yield from _mig(snapshot.devices)
    yield from _shares(snapshot)
    yield from _uses(snapshot)


def _device(device: DeviceReading) -> tuple[str, str]:
    return str(device.index), device.uuid


def _exporter(snapshot: Snapshot) -> Iterator[Metric]:
    up = GaugeMetricFamily(
        "holdfast_gpu_exporter_up", "1 while this source of figures answers.", labels=("source",)
    )
    fault = GaugeMetricFamily(
        "holdfast_gpu_exporter_fault", "1 for why a source does not answer.", labels=("source", "reason")
    )
    failures = CounterMetricFamily(
        "holdfast_gpu_exporter_failures", "Scrapes that lacked a source.", labels=("source", "reason")
    )
    for source, wrong in snapshot.sources.items():
        up.add_metric((source,), float(wrong is None))
        if wrong is not None:
            fault.add_metric((source, wrong.reason.value), 1)
    for (source, reason), times in snapshot.failures.items():
        failures.add_metric((source, reason.value), times)
    yield from (up, fault, failures)
    yield GaugeMetricFamily(
        "holdfast_gpu_exporter_read_seconds", "Time that NVML took to answer.", value=snapshot.read_seconds
    )


def _states(snapshot: Snapshot) -> Iterator[Metric]:
    info = GaugeMetricFamily(
        "holdfast_gpu_info", "What the GPU is; always 1.", labels=(*DEVICE, "name", "bus", "driver", "cuda")
    )
    up = GaugeMetricFamily("holdfast_gpu_up", "1 while the GPU can be read.", labels=DEVICE)
    fault = GaugeMetricFamily(
        "holdfast_gpu_fault", "1 for why the GPU cannot be read.", labels=(*DEVICE, "reason")
    )
    missing = GaugeMetricFamily(
        "holdfast_gpu_reading_missing",
        "1 for a figure that NVML has and does not give, or that cannot be true and is not shown.",
        labels=(*DEVICE, "reading", "reason"),
    )
    slowed = GaugeMetricFamily(
        "holdfast_gpu_slowed",
        "1 where the GPU's clocks are held down for this reason.",
        labels=(*DEVICE, "reason"),
    )
    for device in snapshot.devices:
        labels = _device(device)
        up.add_metric(labels, float(device.fault is None))
        if device.fault is not None:
            fault.add_metric((*labels, device.fault.value), 1)
            continue
        info.add_metric((*labels, device.name, device.bus, snapshot.driver, snapshot.cuda), 1)
        for reading, reason in device.missing.items():
            missing.add_metric((*labels, reading, reason.value), 1)
        if device.slowed is not None:
            for reason_name in SLOWED.values():
                slowed.add_metric((*labels, reason_name), float(reason_name in device.slowed))
    yield from (info, up, fault, missing, slowed)


def _figures(devices: tuple[DeviceReading, ...]) -> Iterator[Metric]:
    for figure in FIGURES:
        family = (CounterMetricFamily if figure.counter else GaugeMetricFamily)(
            figure.series, figure.help, labels=DEVICE
        )
        for device in devices:
            if figure.name in device.figures:
                family.add_metric(_device(device), device.figures[figure.name])
        yield family


def _xids(snapshot: Snapshot) -> Iterator[Metric]:
    total = CounterMetricFamily(
        "holdfast_gpu_xid_errors",
        "Xid events (errors that the driver reports of a GPU) since the exporter started.",
        labels=DEVICE,
    )
    by_code = CounterMetricFamily(
        "holdfast_gpu_xid_errors_by_code", "Xid events by NVIDIA's Xid code.", labels=(*DEVICE, "xid")
    )
    sums: Mapping[str, int] = _sums(snapshot.xids)
    for device in snapshot.devices:
        total.add_metric(_device(device), sums.get(device.uuid, 0))
        for (uuid, code), times in snapshot.xids.items():
            if uuid == device.uuid:
                by_code.add_metric((*_device(device), str(code)), times)
    yield from (total, by_code)


def _sums(xids: Mapping[tuple[str, int], int]) -> dict[str, int]:
    sums: dict[str, int] = defaultdict(int)
    for (uuid, _), times in xids.items():
        sums[uuid] += times
    return sums


def _mig(devices: tuple[DeviceReading, ...]) -> Iterator[Metric]:
    labels = (*DEVICE, "mig")
    slices = GaugeMetricFamily("holdfast_gpu_mig_slices", "Slices of the GPU in a MIG device.", labels=labels)
    total = GaugeMetricFamily("holdfast_gpu_mig_memory_total_bytes", "Memory of a MIG device.", labels=labels)
    used = GaugeMetricFamily(
        "holdfast_gpu_mig_memory_used_bytes", "Memory in use of a MIG device.", labels=labels
    )
    for device in devices:
        for mig in device.mig:
            named = (*_device(device), mig.uuid)
            for family, value in (
                (slices, mig.slices),
                (total, mig.memory_total),
                (used, mig.memory_used),
            ):
                if value is not None:
                    family.add_metric(named, value)
    yield from (slices, total, used)


def _shares(snapshot: Snapshot) -> Iterator[Metric]:
    indexes = snapshot.gpu_indexes
    offered = GaugeMetricFamily(
        "holdfast_gpu_shares",
        "Shares of the GPU that the device plugin offers: 1, or as many as it is time-sliced into.",
        labels=(*DEVICE, "mig", "resource"),
    )
    for (uuid, mig, resource), n in snapshot.shares.items():
        offered.add_metric((_index(indexes, uuid), uuid, mig, resource), n)
    yield offered
    allocated = GaugeMetricFamily(
        "holdfast_gpu_shares_allocated",
        "Shares of the GPU that a container was given, whether it uses them or not.",
        labels=(*DEVICE, "mig", "resource", *HOLDER),
    )
    for held in snapshot.held:
        labels = (_index(indexes, held.uuid), held.uuid, held.mig, held.resource, *_holder(held.holder))
        allocated.add_metric(labels, held.shares)
    yield allocated


def _uses(snapshot: Snapshot) -> Iterator[Metric]:
    indexes = snapshot.gpu_indexes
    count = GaugeMetricFamily(
        "holdfast_gpu_processes", "Processes of a container, or of a rank, on the GPU.", labels=USE
    )
    memory = GaugeMetricFamily(
        "holdfast_gpu_process_memory_bytes",
        "GPU memory of these processes, as NVML gives it for each of them.",
        labels=USE,
    )
    busy = GaugeMetricFamily(
        "holdfast_gpu_process_sm_ratio",
        "Share of the GPU's SM time that these processes had, as NVML samples it for each of them.",
        labels=USE,
    )
    labels = (*DEVICE, "mig")
    strangers = GaugeMetricFamily(
        "holdfast_gpu_unattributed_processes",
        "Processes on the GPU that have no pod and no job, or none that is known.",
        labels=labels,
    )
    strangers_memory = GaugeMetricFamily(
        "holdfast_gpu_unattributed_memory_bytes",
        "GPU memory of processes that have no pod and no job, or none that is known.",
        labels=labels,
    )
    for use in snapshot.uses:
        named = _use(use, indexes)
        (strangers if use.holder is None else count).add_metric(named, use.processes)
        if use.memory_bytes is not None:
            (strangers_memory if use.holder is None else memory).add_metric(named, use.memory_bytes)
        if use.sm_ratio is not None and use.holder is not None:
            busy.add_metric(named, use.sm_ratio)
    yield from (count, memory, busy, strangers, strangers_memory)


def _use(use: Use, indexes: Mapping[str, int]) -> tuple[str, ...]:
    device = (_index(indexes, use.uuid), use.uuid, use.mig)
    return device if use.holder is None else (*device, *_holder(use.holder), use.holder.rank)


def _holder(holder: Holder) -> tuple[str, ...]:
    return (
        holder.namespace,
        holder.pod,
        holder.container,
        holder.job,
        holder.attempt,
        holder.replica,
    )


def _index(indexes: Mapping[str, int], uuid: str) -> str:
    return str(indexes[uuid]) if uuid in indexes else ""
