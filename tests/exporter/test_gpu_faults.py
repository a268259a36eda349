"""What the exporter shows while NVML is in trouble: it stays up, says so, and shows no old figure."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import ExitStack, closing
from pathlib import Path

import psutil
import pytest
from processes import Processes
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics
from tests.exporter.conftest import Look
from tests.exporter.kubelet import kubelet, pod
from tests.exporter.seen import Seen
from tests.nvml.stand_in import DRIVER_NOT_LOADED, GIB, GPU_IS_LOST, LIBRARY, NO_PERMISSION, Process, Script
from waiting import wait_until

from holdfast_controller.exporter import sampling
from holdfast_controller.exporter.pod_resources import PodResources
from holdfast_controller.exporter.sampling import Sampler

SECONDS = 120
FIGURES = ("utilization_ratio", "memory_used_bytes", "power_watts", "processes", "unattributed_processes")


@pytest.fixture(autouse=True)
def quick_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "RESTART_SECONDS", 0.2)


def assert_blind(seen: Seen, reason: str) -> None:
    """The source is down for this reason, and nothing that NVML would have to say is shown."""
    assert seen.value("exporter_up", source="nvml") == 0
    assert seen.by("reason", "exporter_fault", source="nvml") == {reason: 1}
    for name in FIGURES:
        assert seen.all(name) == [], name


def readers() -> list[int]:
    """Reader processes of this test process."""
    found = []
    for child in psutil.Process().children(recursive=True):
        try:
            if "holdfast_controller.exporter.reader" in child.cmdline():
                found.append(child.pid)
        except psutil.Error:
            continue  # ended meanwhile
    return found


def test_no_library(look: Look, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / LIBRARY).touch()  # found first, also on a machine that has the real one, and of no use
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    seen = look()
    assert_blind(seen, "no_library")
    assert "libnvidia-ml.so.1 is not found: install NVIDIA's driver" in seen.message("nvml")
    assert seen.all("up") == [], "of GPUs that were never seen nothing is known"


def test_init_fails_until_the_driver_is_there(script: Script, look: Look) -> None:
    script.lines["fault.init"] = DRIVER_NOT_LOADED
    script.write()
    seen = look()
    assert_blind(seen, "no_driver")
    assert "kernel driver is not loaded: see `dmesg`" in seen.message("nvml")
    assert look().value("exporter_failures_total", source="nvml", reason="no_driver") == 2
    del script.lines["fault.init"]
    script.write()
    seen = look()
    assert seen.value("exporter_up", source="nvml") == 1
    assert seen.by("gpu", "utilization_ratio") == {"0": 0.60, "1": 0.61}
    assert seen.value("exporter_failures_total", source="nvml", reason="no_driver") == 2


def test_a_driver_that_disappears_takes_its_figures_along(script: Script, look: Look) -> None:
    assert look().by("gpu", "up") == {"0": 1, "1": 1}
    script.remove()
    seen = look()
    assert_blind(seen, "no_driver")
    assert seen.by("gpu", "up") == {"0": 0, "1": 0}, "the GPUs that were there are missed"
    assert seen.by("gpu", "fault", reason="no_driver") == {"0": 1, "1": 1}
    script.write()
    assert look().by("gpu", "up") == {"0": 1, "1": 1}


def test_another_driver_needs_another_process(script: Script, look: Look) -> None:
    assert look().value("exporter_up", source="nvml") == 1
    (old,) = readers()
    script.lines |= {"fault.count": 999, "fault.init": 18}
    script.write()
    assert_blind(look(), "driver_mismatch")
    script.lines.clear()
    script.write()
    seen = wait_until(lambda: healthy(look()), "figures from a fresh process", seconds=SECONDS)
    assert seen.by("gpu", "up") == {"0": 1, "1": 1}
    assert old not in readers()


def healthy(seen: Seen) -> Seen | None:
    return seen if seen.value("exporter_up", source="nvml") == 1 else None


def test_a_gpu_falls_off_the_bus(script: Script, look: Look) -> None:
    """The other one goes on; the lost one is missed until it is back, also when it is not listed any more."""
    assert look().by("gpu", "up") == {"0": 1, "1": 1}
    script.gpus[1].faults["any"] = GPU_IS_LOST
    script.write()
    seen = look()
    assert seen.value("exporter_up", source="nvml") == 1
    assert seen.by("gpu", "up") == {"0": 1, "1": 0}
    assert seen.by("uuid", "fault", reason="lost") == {script.gpus[1].uuid: 1}
    assert seen.by("gpu", "utilization_ratio") == {"0": 0.60}
    lost = script.gpus.pop()
    script.write()
    seen = look()
    assert seen.by("gpu", "up") == {"0": 1, "1": 0}
    assert seen.by("uuid", "fault", reason="gone") == {lost.uuid: 1}
    lost.faults.clear()
    script.gpus.append(lost)
    script.write()
    assert look().by("gpu", "up") == {"0": 1, "1": 1}


def test_a_gpu_that_is_lost_in_the_middle_of_a_look(script: Script, look: Look) -> None:
    script.gpus[0].faults["temperature"] = GPU_IS_LOST
    script.gpus[1].faults["handle"] = GPU_IS_LOST
    script.write()
    seen = look()
    assert seen.by("gpu", "up") == {"0": 0, "1": 0}
    assert seen.all("utilization_ratio") == [], "what was read before it was lost is of a GPU that is lost"
    assert seen.by("gpu", "fault", reason="lost") == {"0": 1, "1": 1}
    assert seen.value("up", gpu="1", uuid="") == 0, "it never said its name"
    script.gpus[1].faults.clear()
    script.write()
    assert look().by("uuid", "up") == {script.gpus[0].uuid: 0, script.gpus[1].uuid: 1}


def test_a_lost_gpu_is_missed_once_also_by_a_reader_that_never_heard_its_name(
    script: Script, look: Look
) -> None:
    """As after a hang: NVML does not tell a new reader the UUID of what is lost already."""
    names = {gpu.uuid for gpu in script.gpus}
    assert look().by("uuid", "up") == dict.fromkeys(names, 1)
    for gpu in script.gpus:
        gpu.faults["any"] = GPU_IS_LOST
    script.write()
    assert look().by("uuid", "up") == dict.fromkeys(names, 0)
    (reader,) = readers()
    os.kill(reader, signal.SIGKILL)
    seen = wait_until(lambda: healthy(look()), "figures from another reader", seconds=SECONDS)
    assert seen.by("uuid", "up") == dict.fromkeys(names, 0)
    assert seen.by("uuid", "fault", reason="lost") == dict.fromkeys(names, 1)
    assert {name: len(seen.all(name)) for name in ("up", "fault", "xid_errors_total")} == {
        "up": 2, "fault": 2, "xid_errors_total": 2,
    }  # fmt: skip
    script.gpus = [script.gpus[1]]
    script.gpus[0].faults.clear()
    script.write()
    seen = look()
    assert seen.by("uuid", "up") == {script.gpus[0].uuid: 1, (names - {script.gpus[0].uuid}).pop(): 0}
    assert [own["gpu"] for own, _ in seen.all("up")] == ["0", "0"], "NVML counts those that are there"


def test_a_share_of_a_mig_device_stays_its_gpu_s_while_that_cannot_be_read(
    script: Script, tmp_path: Path
) -> None:
    """Two parts of one GPU are held: no fault of NVML makes them two GPUs."""
    gpu = script.gpus[1]
    for number, name in enumerate(("MIG-a", "MIG-b")):
        gpu.figures |= {f"mig.{number}.uuid": name, f"mig.{number}.instance": number}
    script.write()
    pods = [pod("gpt-1-worker-0", "MIG-a"), pod("gpt-1-worker-1", "MIG-b")]
    socket = tmp_path / "kubelet.sock"
    with (
        kubelet(socket, lambda: pods, ["MIG-a", "MIG-b"]),
        closing(PodResources(socket, timeout=60)) as client,
        closing(Sampler(deadline=60)) as sampler,
    ):
        look = Look(sampler, client)

        def said() -> list[tuple[str, str, str]]:
            seen = look()
            shares = [(own["gpu"], own["uuid"], own["mig"]) for own, _ in seen.all("shares")]
            assert shares == [
                (own["gpu"], own["uuid"], own["mig"]) for own, _ in seen.all("shares_allocated")
            ]
            return sorted(shares)

        held = [("1", gpu.uuid, "MIG-a"), ("1", gpu.uuid, "MIG-b")]
        assert said() == held
        gpu.faults["any"] = GPU_IS_LOST
        script.write()
        assert said() == held
        script.remove()
        assert said() == held


def test_shares_that_gkes_device_plugin_names_are_of_the_gpus_that_nvml_reads(
    script: Script, tmp_path: Path
) -> None:
    socket = tmp_path / "kubelet.sock"
    with (
        kubelet(socket, lambda: [pod("gpt-1-worker-0", "nvidia1/vgpu1")], ["nvidia1/vgpu0", "nvidia1/vgpu1"]),
        closing(PodResources(socket, timeout=60)) as client,
        closing(Sampler(deadline=60)) as sampler,
    ):
        seen = Look(sampler, client)()
    of_the_second = {"gpu": "1", "uuid": script.gpus[1].uuid}
    assert seen.value("shares", **of_the_second) == 2
    assert seen.value("shares_allocated", **of_the_second) == 1
    assert len(seen.all("shares")) == 1


def test_a_permission_that_is_denied_is_told_for_the_figure(script: Script, look: Look) -> None:
    script.gpus[0].processes = [Process(os.getpid(), GIB, 10)]
    script.gpus[0].faults |= {"processes": NO_PERMISSION, "power": NO_PERMISSION}
    script.gpus[1].processes = [Process(os.getpid(), GIB, 10)]
    script.gpus[1].faults["process-utilization"] = NO_PERMISSION
    script.write()
    seen = look()
    assert seen.by("gpu", "utilization_ratio") == {"0": 0.60, "1": 0.61}
    assert set(seen.by("gpu", "power_watts")) == {"1"}
    denied = {"reason": "permission_denied"}
    assert seen.by("reading", "reading_missing", gpu="0", **denied) == {"processes": 1, "power": 1}
    assert seen.by("reading", "reading_missing", gpu="1", **denied) == {"process_sm": 1}
    assert seen.by("gpu", "unattributed_processes") == {"1": 1}, (
        "of GPU 0 it is not known whether there are any"
    )
    script.lines["fault.init"] = NO_PERMISSION
    script.lines["fault.count"] = NO_PERMISSION
    script.write()
    seen = look()
    assert_blind(seen, "permission_denied")
    assert "NVML refuses this user: run as root" in seen.message("nvml")


def test_a_call_that_hangs_holds_up_nobody(script: Script, look: Look) -> None:
    """A hang of ten minutes: that the looks return at all is the proof."""
    assert healthy(look())
    look.sampler.deadline = 1
    script.gpus[1].faults["power"] = "hang 600"
    script.write()
    seen = wait_until(lambda: hung(look()), "the hang to be noticed", seconds=SECONDS)
    assert_blind(seen, "hung")
    assert "NVML, asked about GPU 1, has not answered" in seen.message("nvml")
    assert seen.by("gpu", "up") == {"0": 0, "1": 0}
    assert_blind(look(), "hung")
    assert len(readers()) == 1, "nothing was started beside the reader that hangs"


def hung(seen: Seen) -> Seen | None:
    return seen if seen.value("exporter_fault", source="nvml", reason="hung") else None


def test_an_answer_that_comes_too_late_is_never_shown(script: Script, look: Look) -> None:
    """GPU 1 hangs after GPU 0 was read at 10 %. When it goes on, GPU 0 is at 90 %: nobody may see 10 %."""
    assert healthy(look())
    look.sampler.deadline = 1
    script.gpus[0].figures["utilization"] = 10
    script.gpus[1].faults["power"] = "hang 3"
    script.gpus[1].xids = [79]
    script.write()
    seen = wait_until(lambda: hung(look()), "the hang to be noticed", seconds=SECONDS)
    assert_blind(seen, "hung")
    script.gpus[0].figures["utilization"] = 90
    script.gpus[1].faults.clear()
    script.write()
    look.sampler.deadline = 60
    shown = wait_until(lambda: healthy(look()), "figures after the hang", seconds=SECONDS)
    assert shown.value("utilization_ratio", gpu="0") == 0.9
    assert shown.value("xid_errors_total", gpu="1") == 1, "what happened meanwhile happened"


def test_a_reader_that_stays_silent_is_replaced(script: Script, look: Look) -> None:
    assert healthy(look())
    look.sampler.deadline, look.sampler.patience = 0.5, 0.1
    (old,) = readers()
    script.gpus[0].faults["utilization"] = "hang 600"
    script.write()
    wait_until(lambda: hung(look()), "the hang to be noticed", seconds=SECONDS)
    script.gpus[0].faults.clear()
    script.write()
    look.sampler.deadline = 60
    seen = wait_until(lambda: healthy(look()), "figures from another reader", seconds=SECONDS)
    assert seen.by("gpu", "up") == {"0": 1, "1": 1}
    assert not psutil.pid_exists(old)


def test_a_library_that_crashes_takes_only_its_process_along(script: Script, look: Look) -> None:
    assert healthy(look())
    script.gpus[1].faults["memory"] = "crash"
    script.write()
    seen = look()
    assert_blind(seen, "crashed")
    assert f"NVML, asked about GPU 1, ended its process by signal {signal.SIGABRT:d}" in seen.message("nvml")
    script.gpus[1].faults.clear()
    script.write()
    seen = wait_until(lambda: healthy(look()), "figures from a fresh process", seconds=SECONDS)
    assert seen.by("gpu", "up") == {"0": 1, "1": 1}


def newer_reader(monkeypatch: pytest.MonkeyPatch, directory: Path, device: dict[str, object]) -> None:
    """As where Holdfast was installed anew while this process ran, and its reader began once more since."""
    newer = directory / "newer"
    answer = {"id": 1, "reading": {"driver": "", "cuda": "", "devices": [device]}, "xids": []}
    newer.write_text(f"#!/bin/sh\nread asked\ncat <<'END'\n{json.dumps(answer)}\nEND\ncat\n")
    newer.chmod(0o755)
    monkeypatch.setattr(sampling.sys, "executable", str(newer))


def test_a_reader_of_another_version_is_told_of(
    look: Look, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    newer_reader(monkeypatch, tmp_path, {"index": 0, "uuid": "GPU-0", "of_a_later_version": 1})
    seen = look()
    assert_blind(seen, "error")
    assert "is of another version" in seen.message("nvml")
    assert "of_a_later_version" in seen.message("nvml")
    assert seen.message("nvml").endswith("start this process again")


def test_a_figure_that_only_a_newer_reader_knows_takes_no_other_along(
    look: Look, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    figures = {"utilization": 0.5, "of_a_later_version": 1.0}
    newer_reader(monkeypatch, tmp_path, {"index": 0, "uuid": "GPU-0", "figures": figures})
    seen = look()
    assert seen.value("exporter_up", source="nvml") == 1
    assert seen.value("utilization_ratio", gpu="0") == 0.5
    assert seen.all("reading_missing") == []


def test_a_process_that_has_many_files_open_reads_its_gpus(script: Script, look: Look) -> None:
    """Beyond the number up to which select() looks at them."""
    with ExitStack() as stack:
        while (number := os.open(os.devnull, os.O_RDONLY)) <= 1030:
            stack.callback(os.close, number)
        stack.callback(os.close, number)
        assert healthy(look())


def started(processes: Processes, *options: str) -> tuple[subprocess.Popen[str], str]:
    """`holdfast exporter`, and where it answers."""
    command = [sys.executable, "-m", "holdfast_controller", "exporter", "--port", "0", *options]
    exporter = processes.start(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert exporter.stdout is not None
    line = exporter.stdout.readline()
    assert line.startswith("metrics at http://127.0.0.1:"), (line, exporter.stderr and exporter.stderr.read())
    return exporter, line.split()[-1].removesuffix("/metrics")


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=300) as answer:
        return str(answer.read().decode())


def test_the_exporter_answers_ends_when_asked_and_tells_faults_once(
    script: Script, processes: Processes
) -> None:
    exporter, url = started(processes, "--log-format", "json", "--deadline", "60")
    assert Seen.of_text(get(f"{url}/metrics")).by("gpu", "utilization_ratio") == {"0": 0.60, "1": 0.61}
    asked = urllib.request.Request(
        f"{url}/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"}
    )
    with urllib.request.urlopen(asked, timeout=300) as answer:
        assert answer.headers["Content-Type"].startswith("application/openmetrics-text; version=1.0.0")
        names = {family.name for family in open_metrics(answer.read().decode())}
    assert {"holdfast_gpu_info", "holdfast_gpu_energy_joules", "holdfast_gpu_xid_errors"} < names
    script.remove()
    for _ in range(3):
        assert_blind(Seen.of_text(get(f"{url}/metrics")), "no_driver")
    assert get(f"{url}/healthz") == "ok\n"
    with pytest.raises(urllib.error.HTTPError, match="404") as refused:
        get(f"{url}/other")
    refused.value.close()
    exporter.send_signal(signal.SIGTERM)
    _, told = exporter.communicate(timeout=300)
    assert exporter.returncode == 0
    assert told.count('"figures are missing"') == 1
    wait_until(lambda: not processes.running(), "nothing of it to be left")


def test_the_reader_ends_with_its_exporter_even_while_it_hangs(script: Script, processes: Processes) -> None:
    script.gpus[0].faults["power"] = "hang 600"
    script.write()
    exporter, url = started(processes, "--deadline", "0.2")
    wait_until(
        lambda: Seen.of_text(get(f"{url}/metrics")).value("exporter_fault", reason="hung"),
        "the hang to be noticed",
        seconds=SECONDS,
    )
    wait_until(lambda: len(processes.running()) == 2, "the exporter and its reader")
    exporter.kill()
    exporter.communicate(timeout=300)
    wait_until(lambda: not processes.running(), "the reader to follow", seconds=SECONDS)


def test_a_port_that_is_taken(script: Script, processes: Processes, tmp_path: Path) -> None:
    first, url = started(processes)
    port = url.rpartition(":")[2]
    command = [sys.executable, "-m", "holdfast_controller", "exporter", "--port", port]
    second = processes.start(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    _, told = second.communicate(timeout=300)
    assert second.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use; choose another --port" in told
    first.terminate()
    first.communicate(timeout=300)
