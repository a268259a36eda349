"""A machine's GPUs without the GPUs: what the stand-in for libnvidia-ml.so.1 answers, and how it is built.

The library reads a script, a file of lines `key value`, and reads it again whenever it changes:

    devices 1                            how many GPUs there are; without it no driver is loaded
    0.uuid GPU-...                       and name, memory.total, memory.used (bytes), utilization (percent),
                                         power (mW), temperature (C), clock.sm (MHz), ...: nvml.c has them all
    0.utilization 0:20 10:80             a curve: seconds since `start` (epoch) and value, straight between
    0.processes 4242:1073741824:25       pid, bytes (-1: not told), percent [, MIG instance]
    0.mig.0.uuid MIG-...                 and instance, slices, memory.total, memory.used
    0.gpm.2 50                           metric 2 of what the hardware counts, gpm.c
    0.xids 1:79                          number of the event, Xid code; new numbers are new events
    0.fault.utilization 4                NVML's error 4 from this call of GPU 0; also `hang 30`, `crash`
    fault.init 9, 0.fault.any 15         of the library, of every call of a GPU
"""

from __future__ import annotations

import os
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.cluster.errors import MissingTool
from tests.cluster.system import install

HERE = Path(__file__).parent
LIBRARY = "libnvidia-ml.so.1"
SCRIPT = "NVML_SCRIPT"
BESIDE = "gpus.txt"
"""The script's name in the library's directory, where no environment names another."""
GIB = 1 << 30
COMPILER = {"cc": "gcc", "/usr/include/stdio.h": "libc6-dev"}
"""What must be there, and Debian's package that brings it."""

DRIVER_NOT_LOADED, NO_PERMISSION, GPU_IS_LOST, UNKNOWN = 9, 4, 15, 999


class CannotCompile(Exception):
    """There is no C compiler here, or it refused; the message has its words."""


def build(directory: Path) -> Path:
    """Compile the library into `directory`; root gets the compiler first. Raises CannotCompile."""
    try:
        install(COMPILER)
    except MissingTool as error:
        raise CannotCompile(f"the stand-in for {LIBRARY} needs a C compiler: {error}") from error
    target = directory / LIBRARY
    command = ["cc", "-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    command += ["-fvisibility=hidden", f"-Wl,-soname,{LIBRARY}", "-o", str(target)]
    sources = sorted(str(path) for path in HERE.glob("*.c"))
    done = subprocess.run(
        [*command, *sources, "-lpthread", "-ldl"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise CannotCompile(f"cc refuses the stand-in for {LIBRARY}:\n{done.stderr[-2000:]}")
    return target


@dataclass(frozen=True)
class Process:
    """A process on a GPU. `bytes` None: NVML does not tell."""

    pid: int
    bytes: int | None
    percent: int
    instance: int | None = None

    def __str__(self) -> str:
        words = [self.pid, -1 if self.bytes is None else self.bytes, self.percent]
        return ":".join(str(word) for word in (*words, *(() if self.instance is None else (self.instance,))))


@dataclass
class Gpu:
    """What one GPU answers; `figures` are lines of the script, by key and without the GPU's number."""

    uuid: str
    name: str = "Stand-In 80GB"
    processes: list[Process] = field(default_factory=list)
    xids: list[int] = field(default_factory=list)
    faults: dict[str, str | int] = field(default_factory=dict)
    figures: dict[str, str | int] = field(default_factory=dict)


def busy_gpu(number: int, **figures: str | int) -> Gpu:
    """A GPU with every figure that the exporter reads."""
    every: dict[str, str | int] = {
        "memory.total": 80 * GIB,
        "memory.used": 20 * GIB,
        "utilization": 60 + number,
        "memory.utilization": 30,
        "power": 350_500,
        "power.limit": 700_000,
        "energy": 123_456_000,
        "temperature": 55,
        "clock.sm": 1980,
        "clock.memory": 2619,
        "slowed": 0x4,
        "ecc.corrected": 3,
        "ecc.uncorrected": 0,
        "field.197": 5_000_000,
        "field.198": 7_000_000,
        "field.138": 2048,
        "field.139": 1024,
        "gpm.2": 50,
        "gpm.5": 25,
        "gpm.10": 40,
        "gpm.20": 100,
        "gpm.21": 200,
    }
    return Gpu(f"GPU-{number:08x}-0000-0000-0000-000000000000", figures=every | figures)


@dataclass
class Script:
    """The file that the library reads. `write` after every change."""

    path: Path
    gpus: list[Gpu] = field(default_factory=list)
    driver: str = "580.65.06"
    lines: dict[str, str | int] = field(default_factory=dict)
    """Of the library as a whole: `samples.age` (seconds), `fault.init`, ..."""

    def write(self) -> None:
        """Replace the file whole: a reader sees the old or the new one."""
        lines = [f"driver {self.driver}", "cuda 13000", f"start {time.time():.3f}"]
        lines += [f"devices {len(self.gpus)}", *(f"{key} {value}" for key, value in self.lines.items())]
        for number, gpu in enumerate(self.gpus):
            own = {"uuid": gpu.uuid, "name": gpu.name, **gpu.figures}
            own["processes"] = " ".join(map(str, gpu.processes))
            own["xids"] = " ".join(f"{event}:{code}" for event, code in enumerate(gpu.xids, start=1))
            own |= {f"fault.{call}": what for call, what in gpu.faults.items()}
            lines += [f"{number}.{key} {value}" for key, value in own.items() if value != ""]
        beside = self.path.with_suffix(".new")
        beside.write_text("\n".join(lines) + "\n")
        beside.replace(self.path)

    def remove(self) -> None:
        """The driver is gone."""
        self.path.unlink()

    def environment(self, library: Path) -> dict[str, str]:
        """What makes a program load the stand-in and read this script."""
        others = os.environ.get("LD_LIBRARY_PATH")
        found = str(library.parent) + (f":{others}" if others else "")
        return {"LD_LIBRARY_PATH": found, SCRIPT: str(self.path)}
