"""What a GPU's hardware counted, from Hopper on (NVML's "GPU performance monitoring").

NVML's utilisation only tells that some kernel ran. Here the SMs, the tensor cores, the memory and PCIe tell
how much they did: NVML gives the mean between two samples, which are summed up to counters, so that two
scrapers take nothing from one another and a rate is right over any time.

SMs count in cycles of their clock, so the mean of an interval in which it changes is one of cycles: on an
H200 that clocked down between bursts of work, a minute as a whole gave 4.4 % and its intervals of 5 s 3.5 %.
PCIe and the memory count in time, and gave the same. PCIe's bytes are the link's: with headers they are 6 to
10 % more than the data.

Reference: NVIDIA's NVML API reference, "GPM functions"; numbers and units as in its nvml.h.
"""

from __future__ import annotations

import time
from typing import Any

import pynvml

SHARES = {"sm_active": 2, "tensor_active": 5, "dram_active": 10}
"""In percent of what the hardware can do: summed up, seconds."""
RATES = {"pcie_sent": 20, "pcie_received": 21}
"""In MiB/s: summed up, bytes."""
METRICS = SHARES | RATES
SHORTEST_SECONDS = 0.5
"""The hardware's counts arrive some ten times a second (H200): samples within a tenth would show rest."""
HIGHEST_PERCENT = 101.0
HIGHEST_RATE = 1e6
"""In MiB/s. What is more than these, or not a number, is not believed."""


class Activity:
    """Of one GPU since it was first read."""

    def __init__(self) -> None:
        self._supported: bool | None = None
        self._sample: Any = None
        self._taken = 0.0
        self._totals: dict[str, float] = {}

    def read(self, device: Any) -> dict[str, float]:
        """Totals by the names of figures.py; none where the GPU does not count, or was not read before.

        Raises pynvml.NVMLError.
        """
        if self._supported is None:
            self._supported = bool(pynvml.nvmlGpmQueryDeviceSupport(device).isSupportedDevice)
        if self._supported and (self._sample is None or time.monotonic() - self._taken >= SHORTEST_SECONDS):
            self._go_on(device)
        return dict(self._totals)

    def close(self) -> None:
        """Give the sample back; NVML must still be initialised."""
        _free(self._sample)
        self._sample = None

    def _go_on(self, device: Any) -> None:
        before, since = self._sample, self._taken
        sample = pynvml.nvmlGpmSampleAlloc()
        try:
            self._taken = time.monotonic()
            pynvml.nvmlGpmSampleGet(device, sample)
            if before is not None:
                self._add(before, sample, self._taken - since)
        except pynvml.NVMLError:
            self._sample = None  # what lies between is not known: the next sample begins anew
            _free(sample)
            raise
        else:
            self._sample = sample
        finally:
            _free(before)

    def _add(self, before: Any, after: Any, seconds: float) -> None:
        asked = pynvml.c_nvmlGpmMetricsGet_t()
        asked.version = pynvml.NVML_GPM_METRICS_GET_VERSION
        asked.numMetrics = len(METRICS)
        asked.sample1, asked.sample2 = before, after
        for place, number in enumerate(METRICS.values()):
            asked.metrics[place].metricId = number
        pynvml.nvmlGpmMetricsGet(asked)
        for place, name in enumerate(METRICS):
            metric = asked.metrics[place]
            highest = HIGHEST_RATE if name in RATES else HIGHEST_PERCENT
            if metric.nvmlReturn == pynvml.NVML_SUCCESS and 0 <= metric.value <= highest:  # false of NaN
                unit = float(1 << 20) if name in RATES else 0.01
                self._totals[name] = self._totals.get(name, 0.0) + metric.value * unit * seconds


def _free(sample: Any) -> None:
    if sample is not None:
        try:
            pynvml.nvmlGpmSampleFree(sample)
        except pynvml.NVMLError:
            pass  # the driver is gone, and the sample with it
