"""How busy a rank's GPU or cores are: what was measured, and nothing where nothing was."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import Processes
from tests.nvml.stand_in import GIB, NO_PERMISSION, CannotCompile, Process, Script, build, busy_gpu
from waiting import Deadline

from holdfast_trainer.steplog import figures_of
from holdfast_trainer.telemetry import Telemetry
from holdfast_trainer.utilization import CpuUse, Meter, Reading, cores_allowed


class Scripted:
    """A use that answers what it is given."""

    of = "gpu"

    def __init__(self, *readings: tuple[float, float]) -> None:
        self._readings = iter(readings)

    def read(self) -> Reading:
        return Reading(*next(self._readings))

    def close(self) -> None: ...


def test_a_share_is_of_the_time_since_it_was_asked_last() -> None:
    meter = Meter(Scripted((1.0, 10.0), (3.0, 14.0), (3.0, 14.0), (3.5, 15.0)))
    assert meter.share() == 0.5
    assert meter.share() is None, "nothing was heard since"
    assert meter.share() == 0.5


def test_on_a_cpu_it_is_the_processor_time_of_this_process() -> None:
    meter = Meter(CpuUse(2.0))
    began = time.process_time(), time.perf_counter()
    while time.process_time() - began[0] < 0.1:
        pass
    share = meter.share()
    ended = time.process_time(), time.perf_counter()
    assert share == pytest.approx((ended[0] - began[0]) / (ended[1] - began[1]) / 2, rel=0.05)


@pytest.mark.parametrize(
    ("files", "allowed"),
    [
        pytest.param({"cpu.max": "150000 100000\n"}, 1.5, id="a quota"),
        pytest.param({"cpu.max": "max 100000\n"}, math.inf, id="none"),
        pytest.param({"cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 0.5, id="v1"),
        pytest.param(
            {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, math.inf, id="v1 none"
        ),
        pytest.param({}, math.inf, id="no control groups"),
        # As of a service with CPUQuota=, or of a replica whose group the controller made below its own.
        pytest.param(
            {"a.slice/b.service/cpu.max": "50000 100000\n", "a.slice/cpu.max": "max 100000\n"},
            0.5,
            id="a quota of its own group, which is not the topmost",
        ),
        pytest.param({"a.slice/cpu.max": "75000 100000\n"}, 0.75, id="of one above it"),
        pytest.param(
            {"cpu/b/cpu.cfs_quota_us": "50000\n", "cpu/b/cpu.cfs_period_us": "100000\n"}, 0.5, id="v1 own"
        ),
    ],
)
def test_the_cores_are_those_that_it_may_compute_on(
    files: dict[str, str], allowed: float, tmp_path: Path
) -> None:
    for name, text in files.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("3:cpu,cpuacct:/b\n0::/a.slice/b.service\n")
    assert cores_allowed(tmp_path) == min(allowed, len(os.sched_getaffinity(0)))


def test_what_is_known_no_more_is_told_no_more() -> None:
    telemetry = Telemetry(1, 1)
    series = "holdfast_utilization_ratio", {"of": "gpu"}
    assert telemetry.registry.get_sample_value(*series) is None
    telemetry.utilization("gpu", 0.93)
    assert telemetry.registry.get_sample_value(*series) == 0.93
    assert telemetry.progress.gpu_utilization == 0.93
    assert telemetry.progress.cpu_utilization is None
    assert telemetry.summary() == "GPU 93% busy"
    assert figures_of(telemetry.progress) == {"GPU utilisation": 0.93}
    telemetry.utilization("gpu", None)
    assert telemetry.registry.get_sample_value(*series) is None
    assert telemetry.progress.gpu_utilization is None
    telemetry.utilization("cpu", 0.5)
    assert telemetry.summary() == "CPU 50% busy"


# ------------------------------------------------------------------------ NVML


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return build(tmp_path_factory.mktemp("nvml"))
    except CannotCompile as error:
        pytest.skip(str(error))


ASKED = """
import logging, sys
from holdfast_trainer.utilization import GpuUse, Meter
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
use = GpuUse(sys.argv[1], every=0.01)
meter = Meter(use)
for _ in sys.stdin:
    logging.info("%s\\t%s", *meter.shares())  # as a line, whatever the other thread says meanwhile
use.close()
"""


class Rank:
    """A process that looks at a GPU, and says what it saw since it was asked last."""

    def __init__(self, processes: Processes, script: Script, library: Path, uuid: str) -> None:
        self._process = processes.start(
            [sys.executable, "-c", ASKED, uuid],
            env=script.environment(library),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def said(self) -> str:
        """The share, or a word of its log."""
        return self.both().partition("\t")[0]

    def both(self) -> str:
        """The share of the time that the GPU was busy, and of that in which others used it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self._process.stdout.readline().strip()

    def end(self) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        code = self._process.wait(60)
        self._process.stdout.close()
        return code


@pytest.fixture
def script(library: Path, tmp_path: Path) -> Iterator[Script]:
    """Two GPUs, of which CUDA may show a rank the second as its first: the UUID says which it is."""
    made = Script(tmp_path / "gpus.txt", [busy_gpu(0), busy_gpu(1, utilization=61)])
    made.write()
    return made


def test_a_gpus_figure_is_nvmls_own_of_that_gpu(
    script: Script, library: Path, processes: Processes, deadline: Deadline
) -> None:
    mine = script.gpus[1]
    rank = Rank(processes, script, library, mine.uuid)
    deadline.wait_until(lambda: said_is(rank, 0.61), "the second GPU's figure")
    mine.faults["utilization"] = NO_PERMISSION
    script.write()
    deadline.wait_until(lambda: rank.said() == "None", "the old figure to go")
    mine.faults.clear()
    mine.figures["utilization"] = 400
    script.write()
    assert rank.said() == "None", "no GPU is busy for four times its time"
    mine.figures["utilization"] = 25
    script.write()
    deadline.wait_until(lambda: said_is(rank, 0.25), "what it says now")
    assert rank.end() == 0


def said_is(rank: Rank, share: float) -> bool:
    said = rank.said()
    return said != "None" and float(said) == pytest.approx(share)


def test_that_others_compute_on_the_gpu_too_is_known(
    script: Script, library: Path, processes: Processes, deadline: Deadline
) -> None:
    """One process is this one, whatever its number is where NVML counts; one that rests is none of them."""
    mine = script.gpus[1]
    mine.processes = [Process(4242, GIB, 60), Process(4243, GIB, 0)]
    script.write()
    rank = Rank(processes, script, library, mine.uuid)
    deadline.wait_until(lambda: rank.both().endswith("\t0.0"), "one that computes")
    mine.processes[1] = Process(4243, GIB, 35)
    script.write()
    deadline.wait_until(lambda: "0.9" < rank.both().split()[1] < "2", "two that do")
    mine.faults["process-utilization"] = NO_PERMISSION
    script.write()
    deadline.wait_until(lambda: rank.both().endswith("\t0.0"), "what is not told to be not counted")
    assert rank.end() == 0


def test_a_driver_that_hangs_costs_the_figure_and_nothing_else(
    script: Script, library: Path, processes: Processes, deadline: Deadline
) -> None:
    rank = Rank(processes, script, library, script.gpus[0].uuid)
    deadline.wait_until(lambda: said_is(rank, 0.6), "a figure")
    script.gpus[0].faults["utilization"] = "hang 600"
    script.write()
    deadline.wait_until(lambda: rank.said() == "None", "the figure to go")
    assert rank.end() == 0, "and its end waits for nobody"


@pytest.mark.parametrize("fault", ["no such GPU", "no driver", "not told"])
def test_what_nvml_does_not_tell_is_no_figure_and_said_once(
    fault: str, script: Script, library: Path, processes: Processes, deadline: Deadline
) -> None:
    uuid = script.gpus[0].uuid
    if fault == "no such GPU":
        uuid = "GPU-ffffffff-0000-0000-0000-000000000000"  # as CUDA names a MIG device
    elif fault == "no driver":
        script.lines["fault.init"] = 9
    else:
        script.gpus[0].faults["utilization"] = 3
    script.write()
    rank = Rank(processes, script, library, uuid)
    said: set[str] = set()

    def told() -> bool:
        said.add(rank.said())
        return said > {"None"}

    deadline.wait_until(told, "what NVML says")
    (line,) = said - {"None"}
    assert line.startswith("no figure of the GPU's utilisation: NVML says "), line
    assert line.endswith(f" of {uuid}")
    assert rank.end() == 0
