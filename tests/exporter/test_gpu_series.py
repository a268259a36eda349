"""What the exporter shows is what NVML says, in base units; what cannot be true is not shown."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest
from processes import Processes
from tests.exporter.conftest import Look
from tests.nvml.stand_in import (
    GIB,
    GPU_IS_LOST,
    NO_PERMISSION,
    UNKNOWN,
    CannotCompile,
    Process,
    Script,
    build,
    busy_gpu,
)
from waiting import wait_until

from holdfast_controller.exporter.gpm import SHORTEST_SECONDS, Activity
from holdfast_controller.exporter.nvml import NO_INSTANCE, _Card
from holdfast_controller.exporter.series import families


def test_figures_are_the_scripts_in_base_units(script: Script, look: Look) -> None:
    seen = look()
    assert seen.by("gpu", "up") == {"0": 1, "1": 1}
    assert seen.by("gpu", "utilization_ratio") == {"0": 0.60, "1": 0.61}
    first = {name: samples[0][1] for name, samples in seen.samples.items() if samples[0][0].get("gpu") == "0"}
    expected = {
        "memory_busy_ratio": 0.3,
        "memory_total_bytes": 80 * GIB,
        "memory_used_bytes": 20 * GIB,
        "power_watts": 350.5,
        "power_limit_watts": 700,
        "energy_joules_total": 123_456,
        "temperature_celsius": 55,
        "sm_clock_hertz": 1.98e9,
        "memory_clock_hertz": 2.619e9,
        "ecc_corrected_errors_total": 3,
        "ecc_uncorrected_errors_total": 0,
        "pcie_sent_bytes_total": 5_000_000,
        "pcie_received_bytes_total": 7_000_000,
        "nvlink_sent_bytes_total": 2 << 20,
        "nvlink_received_bytes_total": 1 << 20,
    }
    assert {name: first[name] for name in expected} == pytest.approx(expected)
    assert seen.by("reason", "slowed", gpu="0")["power_cap"] == 1
    assert sum(value for _, value in seen.all("slowed", gpu="0")) == 1
    (info, _), _ = seen.all("info")
    assert info["name"], info["driver"] == ("Stand-In 80GB", "580.65.06")
    assert info["uuid"] == script.gpus[0].uuid


def test_a_counter_that_wraps_between_two_scrapes_is_not_shown(script: Script, look: Look) -> None:
    """A driver that keeps PCIe's bytes in 32 bits: their rate would be one of chance."""
    script.gpus[1].figures["field.197.type"] = script.gpus[1].figures["field.198.type"] = 1
    script.write()
    seen = look()
    for direction in ("sent", "received"):
        assert set(seen.by("gpu", f"pcie_{direction}_bytes_total")) == {"0"}
        assert set(seen.by("gpu", f"nvlink_{direction}_bytes_total")) == {"0", "1"}


COUNTED = ("sm_active_seconds_total", "tensor_active_seconds_total", "dram_active_seconds_total")


def test_what_the_hardware_counts_grows_with_time_however_often_it_is_looked_at(
    script: Script, look: Look
) -> None:
    """Half of its SMs were busy all the time, a quarter with their tensor cores."""
    del script.gpus[1].figures["gpm.2"]  # of a generation that does not count
    for figures in (gpu.figures for gpu in script.gpus):
        figures |= {"field.197.type": 1, "field.198.type": 1}
    script.write()
    began = time.monotonic()
    assert look().all(COUNTED[0]) == [], "a first sample alone says nothing"
    seen = wait_until(lambda: (found := look()).all(COUNTED[0]) and found, "a second sample to count")
    least, most = SHORTEST_SECONDS, time.monotonic() - began
    for name, share in zip(COUNTED, (0.5, 0.25, 0.4), strict=True):
        assert set(seen.by("gpu", name)) == {"0"}
        assert share * least <= seen.by("gpu", name)["0"] <= share * most, name
    for name, rate in (("pcie_sent_bytes_total", 100 << 20), ("pcie_received_bytes_total", 200 << 20)):
        assert set(seen.by("gpu", name)) == {"0"}, "its counter of 32 bits is not taken"
        assert rate * least <= seen.by("gpu", name)["0"] <= rate * most, name

    more = wait_until(
        lambda: (found := look()).by("gpu", COUNTED[0])["0"] > 2 and found, "four seconds to be counted"
    )
    assert more.by("gpu", COUNTED[0])["0"] <= 0.5 * (time.monotonic() - began)


def test_what_the_hardware_cannot_have_counted_is_left_out(script: Script, look: Look) -> None:
    script.gpus[0].figures |= {"gpm.2": 4_294_967_295, "gpm.20": -1, "gpm.21": 10**15}
    script.gpus[1].faults["gpm-sample"] = NO_PERMISSION
    script.write()
    look()
    seen = wait_until(lambda: (found := look()).all(COUNTED[1]) and found, "a second sample to count")
    assert seen.all(COUNTED[0]) == []
    assert set(seen.by("gpu", COUNTED[1])) == {"0"}
    assert seen.by("reading", "reading_missing", gpu="1", reason="permission_denied") == {"activity": 1}
    assert seen.by("gpu", "utilization_ratio").keys() == {"0", "1"}


def test_a_counter_that_cannot_be_read_this_time_is_not_replaced_by_another_that_began_elsewhere(
    script: Script, look: Look
) -> None:
    """Its rate would have a leap in it, there and back."""
    for figures in (gpu.figures for gpu in script.gpus):
        del figures["field.198"]
    script.write()
    look()
    wait_until(lambda: look().all(COUNTED[1]), "a second sample to count")
    assert look().value("pcie_sent_bytes_total", gpu="0") == 5_000_000
    assert look().value("pcie_received_bytes_total", gpu="0") not in (None, 7_000_000), "it has the one alone"
    script.gpus[0].faults["fields"] = UNKNOWN
    script.write()
    seen = look()
    for direction in ("sent", "received"):
        assert set(seen.by("gpu", f"pcie_{direction}_bytes_total")) == {"1"}
    assert seen.by("reading", "reading_missing", gpu="0") == {"links": 1}


def test_a_card_without_a_figure_has_no_series_of_it(script: Script, look: Look) -> None:
    """An absent figure is not a zero, and not a fault."""
    for name in ("power", "field.138", "field.139", "ecc.corrected"):
        del script.gpus[1].figures[name]
    script.write()
    seen = look()
    assert set(seen.by("gpu", "power_watts")) == {"0"}
    assert set(seen.by("gpu", "nvlink_sent_bytes_total")) == {"0"}
    assert set(seen.by("gpu", "ecc_corrected_errors_total")) == {"0"}
    assert seen.all("reading_missing") == []


def test_help_says_what_nvmls_utilisation_is(look: Look) -> None:
    snapshot = look().snapshot
    assert snapshot is not None
    (words,) = [one.documentation for one in families(snapshot) if one.name.endswith("_utilization_ratio")]
    assert "at least one kernel ran" in words
    assert "does not mean that all its SMs were busy" in words


def test_every_look_is_a_new_one(script: Script, look: Look) -> None:
    assert look().value("temperature_celsius", gpu="0") == 55
    script.gpus[0].figures["temperature"] = 71
    script.write()
    assert look().value("temperature_celsius", gpu="0") == 71


def test_absurd_values_are_not_shown_and_said_so(script: Script, look: Look) -> None:
    script.gpus[0].figures |= {
        "utilization": 400,
        "temperature": 4_294_967_295,
        "power": 4_294_967_295,
        "memory.used": 81 * GIB,
        "clock.sm": 0,
        "energy": 10**19,
    }
    script.gpus[0].processes = [Process(os.getpid(), 500 * GIB, 300)]
    script.write()
    seen = look()
    assert seen.value("up", gpu="0") == 1
    for name in (
        "utilization_ratio",
        "temperature_celsius",
        "power_watts",
        "memory_used_bytes",
        "sm_clock_hertz",
        "energy_joules_total",
    ):
        assert set(seen.by("gpu", name)) == {"1"}, name
    assert seen.by("reading", "reading_missing", reason="implausible", gpu="0").keys() == {
        *(
            "utilization",
            "temperature",
            "power",
            "memory_used",
            "sm_clock",
            "energy",
            "process_memory",
            "process_sm",
        )
    }
    assert seen.value("memory_total_bytes", gpu="0") == 80 * GIB
    assert seen.value("unattributed_processes", gpu="0") == 1
    assert seen.all("unattributed_memory_bytes", gpu="0") == []


def test_xids_are_counted_from_the_start_of_the_exporter(script: Script, look: Look) -> None:
    script.gpus[1].xids = [13]
    script.write()
    assert look().by("gpu", "xid_errors_total") == {"0": 0, "1": 0}
    script.gpus[1].xids += [79, 48, 79]
    script.write()
    seen = look()
    assert seen.by("gpu", "xid_errors_total") == {"0": 0, "1": 3}
    assert seen.by("xid", "xid_errors_by_code_total", gpu="1") == {"79": 2, "48": 1}
    assert look().by("gpu", "xid_errors_total") == {"0": 0, "1": 3}


def test_the_xid_of_a_gpu_that_falls_off_the_bus_is_its_own(script: Script, look: Look) -> None:
    """NVML answers nothing about it any more, not even its UUID."""
    look()
    script.gpus[1].faults["any"] = GPU_IS_LOST
    script.gpus[1].xids = [79]
    script.write()
    seen = look()
    assert seen.by("gpu", "up") == {"0": 1, "1": 0}
    assert seen.by("xid", "xid_errors_by_code_total", uuid=script.gpus[1].uuid) == {"79": 1}


def test_processes_of_a_local_job_are_told_apart_by_rank(
    script: Script, look: Look, processes: Processes
) -> None:
    """The local engine's processes carry their job's names."""
    names = {"HOLDFAST_JOB": "team-a/gpt", "HOLDFAST_ATTEMPT": "3", "HOLDFAST_REPLICA": "0"}
    started = [processes.start(["sleep", "600"], env={**names, "RANK": str(rank)}) for rank in range(2)]
    started.append(processes.start(["sleep", "600"]))
    *ranks, stranger = (process.pid for process in started)
    gone = processes.start(["true"])
    gone.wait()
    script.gpus[0].processes = [
        Process(ranks[0], 4 * GIB, 25),
        Process(ranks[1], 5 * GIB, 0),
        Process(stranger, GIB, 10),
        Process(gone.pid, GIB, 10),
    ]
    script.write()

    def executed() -> bool:
        """Between fork and exec a child still has its parent's environment."""
        return all((Path("/proc") / str(pid) / "comm").read_text() == "sleep\n" for pid in (*ranks, stranger))

    wait_until(executed, "the processes to have started")
    seen = look()
    mine = {"namespace": "team-a", "job": "gpt", "attempt": "3", "replica": "0", "pod": "", "gpu": "0"}
    assert seen.by("rank", "process_memory_bytes", **mine) == {"0": 4 * GIB, "1": 5 * GIB}
    assert seen.by("rank", "process_sm_ratio", **mine) == {"0": 0.25, "1": 0.0}
    assert seen.by("rank", "processes", **mine) == {"0": 1, "1": 1}
    assert seen.value("unattributed_processes", gpu="0") == 1
    assert seen.value("unattributed_memory_bytes", gpu="0") == GIB
    processes.end_all()
    assert [process.wait() for process in started] == [-9, -9, -9]


def test_old_samples_of_processes_are_nobodys_figure(script: Script, look: Look) -> None:
    """The GPU is busy and no process has a recent sample: whose time it was is not known, nor zero."""
    script.gpus[0].processes = [Process(os.getpid(), GIB, 50)]
    script.lines["samples.age"] = 3600
    script.write()
    snapshot = look().snapshot
    assert snapshot is not None
    assert [use.sm_ratio for use in snapshot.uses] == [None]
    script.gpus[0].figures["utilization"] = 0
    script.write()
    snapshot = look().snapshot
    assert snapshot is not None
    assert [use.sm_ratio for use in snapshot.uses] == [0.0]


def test_samples_that_are_all_of_another_moment_are_no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drivers return more entries than they have samples: a job that shares a busy GPU was said to rest."""
    zeros = [pynvml.c_nvmlProcessUtilizationSample_t() for _ in range(2)]
    monkeypatch.setattr(pynvml, "nvmlDeviceGetProcessUtilization", lambda *_: zeros)
    alone = SimpleNamespace(pid=4242, usedGpuMemory=GIB, gpuInstanceId=NO_INSTANCE)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetComputeRunningProcesses", lambda _: [alone])
    monkeypatch.setattr(pynvml, "nvmlDeviceGetGraphicsRunningProcesses", lambda _: [])
    card = _Card(None, Activity())
    card.figures["utilization"] = 0.9
    assert card._processes() == [(4242, GIB, None, None)]
    card.figures["utilization"] = 0.0
    assert card._processes() == [(4242, GIB, 0.0, None)]


def test_mig_devices_and_their_processes(script: Script, look: Look, processes: Processes) -> None:
    script.gpus[1].figures |= {
        "mig.0.uuid": "MIG-a", "mig.0.instance": 7, "mig.0.slices": 3,
        "mig.0.memory.total": 40 * GIB, "mig.0.memory.used": 2 * GIB,
        "mig.1.uuid": "MIG-b", "mig.1.instance": 9, "mig.1.slices": 2,
        "mig.1.memory.total": 20 * GIB, "mig.1.memory.used": 30 * GIB,
    }  # fmt: skip
    script.gpus[1].processes = [Process(os.getpid(), GIB, 0, instance=7)]
    script.write()
    seen = look()
    assert seen.by("mig", "mig_slices", gpu="1") == {"MIG-a": 3, "MIG-b": 2}
    assert seen.by("mig", "mig_memory_total_bytes") == {"MIG-a": 40 * GIB, "MIG-b": 20 * GIB}
    assert seen.by("mig", "mig_memory_used_bytes") == {"MIG-a": 2 * GIB}, "30 of 20 GiB cannot be"
    assert seen.by("reading", "reading_missing", gpu="1") == {"mig_memory": 1}
    assert seen.by("mig", "unattributed_processes", gpu="1") == {"MIG-a": 1}


def test_a_mig_device_of_untold_attributes_has_no_number_of_slices(script: Script, look: Look) -> None:
    """It was said to have none."""
    script.gpus[1].figures |= {"mig.0.uuid": "MIG-a", "mig.0.instance": 7, "mig.0.memory.total": 40 * GIB}
    script.gpus[1].figures |= {"mig.0.memory.used": 2 * GIB}
    script.write()
    seen = look()
    assert seen.all("mig_slices") == []
    assert seen.by("mig", "mig_memory_used_bytes") == {"MIG-a": 2 * GIB}


def test_a_curve_moves_between_its_points(script: Script, look: Look) -> None:
    script.gpus[0].figures["utilization"] = "0:0 3600:0"
    script.gpus[1].figures["utilization"] = "-100:0 -50:70"
    script.write()
    assert look().by("gpu", "utilization_ratio") == {"0": 0.0, "1": 0.7}


def test_without_a_compiler_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CannotCompile, match=r"needs a C compiler: gcc.*: apt-get install gcc"):
        build(tmp_path)


def test_the_stand_in_exports_nothing_but_nvml(library: Path) -> None:
    listed = subprocess.run(
        ["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True
    )
    names = [line.split()[-1] for line in listed.stdout.splitlines()]
    assert len(names) > 40
    assert all(name.startswith("nvml") for name in names)


def test_sixteen_gpus_with_many_processes_keep_their_order(script: Script, look: Look) -> None:
    script.gpus = [busy_gpu(number) for number in range(16)]
    for gpu in script.gpus:
        gpu.processes = [Process(os.getpid(), GIB, 1)] + [Process(900_000_000 + n, GIB, 1) for n in range(63)]
    script.write()
    seen = look()
    assert list(seen.by("gpu", "utilization_ratio")) == [str(number) for number in range(16)]
    assert all(value == 1 for _, value in seen.all("unattributed_processes")), "only one of 64 is alive"
