"""Whether the figures of a GPU's hardware are true: what the exporter shows beside work that is known.

Each subject does one kind of work for a while, again and again, and the exporter's own reader
(`exporter/nvml.py`) looks at the GPU every second meanwhile, as scrapes do: seconds in which the SMs, the
tensor cores and the memory were busy, and bytes over PCIe. Beside them stands NVML's utilisation, which only
says that some kernel ran. What the work was is known: floating-point operations, bytes copied, or none.

It needs a GPU from Hopper on, that nobody else uses, and PyTorch with CUDA.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from rich.console import Console

from holdfast_controller.exporter.gpm import RATES, SHARES
from holdfast_controller.exporter.nvml import Nvml, NvmlFault

from .report import Measure, Report, ReportError, refuse_unwritable, run, take_turns

LOOKS_EVERY = 1.0
GIB = 2**30
Work = Callable[[], float]
"""Queues a piece of work of some milliseconds; returns how much it was: operations, or bytes."""

IDLE, PRODUCTS, SMALL, WITHIN = "idle", "bf16 products", "single small kernels", "copies within memory"
TO_HOST, TO_GPU = "copies to the host", "copies to the GPU"
UNITS = {
    "SMs active": "share",
    "tensor cores active": "share",
    "memory active": "share",
    "sent over PCIe": "GB/s",
    "received over PCIe": "GB/s",
    "NVML's utilisation": "share",
    "work": "T/s",
}
"""`work` counts operations or bytes, in 10**12 a second."""


class Gpu:
    """The GPU that PyTorch takes, as the exporter reads it."""

    def __init__(self) -> None:
        """Raises ReportError where its hardware tells no counts."""
        self._uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
        try:
            self._nvml = Nvml()
        except NvmlFault as error:
            raise ReportError(str(error)) from error
        self.figures()
        time.sleep(LOOKS_EVERY)
        missing = sorted((SHARES | RATES).keys() - self.figures().keys())
        if missing:
            raise ReportError(f"this GPU does not tell {', '.join(missing)}: those from Hopper on do")

    def figures(self) -> Mapping[str, float]:
        """Raises ReportError where the GPU is lost."""
        devices: list[Mapping[str, Any]] = self._nvml.read()["devices"]
        nowhere: Mapping[str, Any] = {"fault": "NVML does not tell of it"}
        device = next((each for each in devices if each["uuid"] == self._uuid), nowhere)
        if "fault" in device:
            raise ReportError(f"{self._uuid}: {device['fault']}")
        figures: Mapping[str, float] = device["figures"]
        return figures

    def close(self) -> None:
        self._nvml.close()


def works() -> Mapping[str, Work]:
    """What each subject does, on memory that it has already."""
    side = 8192
    left = torch.randn(side, side, dtype=torch.bfloat16, device="cuda")
    right = torch.randn(side, side, dtype=torch.bfloat16, device="cuda")
    product = torch.empty_like(left)
    tile = torch.randn(64, 64, device="cuda")
    here, there = (torch.zeros(2 * GIB, dtype=torch.uint8, device="cuda") for _ in range(2))
    host = torch.zeros(GIB, dtype=torch.uint8, pin_memory=True)

    def nothing() -> float:
        time.sleep(0.01)
        return 0.0

    def multiply() -> float:
        torch.mm(left, right, out=product)
        return 2.0 * side**3

    def little() -> float:
        for _ in range(100):
            torch.mm(tile, tile)
        return 200.0 * 64**3

    def copy() -> float:
        there.copy_(here)
        return 2.0 * here.numel()  # read and written

    def fetch() -> float:
        host.copy_(here[:GIB], non_blocking=True)
        return float(GIB)

    def bring() -> float:
        here[:GIB].copy_(host, non_blocking=True)
        return float(GIB)

    subjects = {IDLE: nothing, PRODUCTS: multiply, SMALL: little, WITHIN: copy}
    return {**subjects, TO_HOST: fetch, TO_GPU: bring}


def done(name: str, gpu: Gpu, work: Work, seconds: float) -> Measure:
    """A sample: so many seconds of this work, by shares and rates over all of them. Raises ReportError."""

    def measure() -> Mapping[str, float]:
        try:
            return sample()
        except (ReportError, RuntimeError) as error:  # PyTorch's, of a GPU that was lost, too
            raise ReportError(f"{name}: {error}") from error

    def sample() -> Mapping[str, float]:
        torch.cuda.synchronize()
        before, began = gpu.figures(), time.monotonic()
        looked, amount = began, 0.0
        utilisation = []
        while (now := time.monotonic()) - began < seconds:
            amount += work()
            torch.cuda.synchronize()
            if now - looked >= LOOKS_EVERY:
                looked = now
                utilisation.append(gpu.figures()["utilization"])
        took = time.monotonic() - began
        time.sleep(LOOKS_EVERY)  # what the hardware counted arrives up to a tenth of a second later
        after = gpu.figures()
        added = {name: after[name] - before[name] for name in SHARES | RATES}
        return {
            "SMs active": added["sm_active"] / took,
            "tensor cores active": added["tensor_active"] / took,
            "memory active": added["dram_active"] / took,
            "sent over PCIe": added["pcie_sent"] / took / 1e9,
            "received over PCIe": added["pcie_received"] / took / 1e9,
            "NVML's utilisation": statistics.mean(utilisation),
            "work": amount / took / 1e12,
        }

    return measure


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="make bench-activity", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="samples of each subject (default 3)")
    parser.add_argument("--seconds", type=float, default=6, help="of work in a sample (default 6)")
    given = parser.parse_args()
    if given.rounds < 1 or given.seconds < 3:
        parser.error(f"--rounds {given.rounds} --seconds {given.seconds:g}: at least 1 and 3 are needed")
    if not torch.cuda.is_available():
        parser.error("PyTorch finds no GPU here: this compares a GPU's own counts with work that it did")
    refuse_unwritable(parser)

    console = Console()
    report = Report("activity")
    try:
        gpu = Gpu()
    except ReportError as error:
        parser.error(str(error))
    subjects = {name: done(name, gpu, work, given.seconds) for name, work in works().items()}
    with console.status("") as status:
        take_turns(report, subjects, UNITS, rounds=given.rounds, warmup=0, heard=status.update)
    gpu.close()
    report.ratios["counted_of_sent"] = report.median(TO_HOST, "sent over PCIe") / (
        1e3 * report.median(TO_HOST, "work")
    )
    report.ratios["counted_of_received"] = report.median(TO_GPU, "received over PCIe") / (
        1e3 * report.median(TO_GPU, "work")
    )
    report.ratios["tensor_cores_in_products"] = report.median(PRODUCTS, "tensor cores active")
    report.ratios["tensor_cores_in_copies"] = report.median(WITHIN, "tensor cores active")
    report.ratios["sms_in_single_small_kernels"] = report.median(SMALL, "SMs active")
    report.finish(console)
    return 0


if __name__ == "__main__":
    sys.exit(run("activity", main))
