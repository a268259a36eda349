"""What is said of a job's use of a GPU: of its own processes, of a GPU it has alone, or nothing."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
import urllib.request
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
from waiting import wait_until

from holdfast_controller import gpu_local
from holdfast_controller.cluster import GpuGrant, GpuUse
from holdfast_controller.exporter.attribution import Held, Holder, Use
from holdfast_controller.exporter.collector import Snapshot
from holdfast_controller.exporter.endpoint import served
from holdfast_controller.exporter.job_uses import uses_of_jobs
from holdfast_controller.exporter.readings import DeviceReading, Reason
from holdfast_controller.gpu_exporters import USES

GPU = "GPU-0"
SHARED = "nvidia.com/gpu.shared"


def holder(job: str, rank: str = "", replica: str = "0") -> Holder:
    return Holder("team", f"{job}-1-worker-{replica}", "pytorch", job, "1", replica, rank)


def held(job: str) -> Held:
    return Held(GPU, "", SHARED, holder(job), 1)


def used(job: str, ratio: float | None, rank: str = "0") -> Use:
    return Use(GPU, "", holder(job, rank), 1, None, ratio)


STRANGER = Use(GPU, "", None, 1, None, None)
NOBODY = Held(GPU, "", SHARED, Holder("team", "notebook-0", "main"), 1)
CASES = [
    # the GPU's own figure, who holds it, whose processes are on it -> how busy for job a
    ("alone: the GPU's figure", 0.7, [held("a")], [used("a", 0.4)], 0.7),
    ("alone, not told by process", 0.7, [held("a")], [used("a", None)], 0.7),
    ("alone and without a process", 0.0, [held("a")], [], 0.0),
    ("shared: its own processes'", 0.7, [held("a"), held("b")], [used("a", 0.02), used("b", 0.68)], 0.02),
    ("shared: the sum of its ranks", 0.7, [held("a"), held("b")], [used("a", 0.2), used("a", 0.1, "1")], 0.3),
    ("shared, and no process of its own", 0.7, [held("a"), held("b")], [used("b", 0.7)], 0.0),
    ("shared, processes not told, the GPU rests", 0.01, [held("a"), held("b")], [], 0.01),
    ("shared, processes not told, the GPU works", 0.7, [held("a"), held("b")], [], None),
    ("shared, one of its processes not told", 0.7, [held("a"), held("b")], [used("a", None)], None),
    ("a stranger's process may be its own", 0.7, [held("a")], [STRANGER], None),
    ("a stranger's process on a GPU that rests", 0.0, [held("a")], [STRANGER], 0.0),
    ("shared with who is no job", 0.7, [held("a"), NOBODY], [used("a", 0.3)], 0.3),
    ("the GPU tells nothing", None, [held("a")], [], None),
    ("the GPU tells nothing, its process does", None, [held("a")], [used("a", 0.3)], 0.3),
    ("on one machine: no holder, a process", 0.7, [], [used("a", 0.3)], 0.7),
]


def snapshot(figure: float | None, held: list[Held], uses: list[Use], **device: object) -> Snapshot:
    figures = {} if figure is None else {"utilization": figure}
    gpu = DeviceReading(0, GPU, figures=figures, **device)  # type: ignore[arg-type]
    return Snapshot("", "", (gpu,), tuple(uses), tuple(held), {}, {}, {}, {}, 0.0)


@pytest.mark.parametrize(
    ("figure", "held", "uses", "busy"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_how_busy_a_gpu_is_for_a_job(
    figure: float | None, held: list[Held], uses: list[Use], busy: float | None
) -> None:
    found = [use for use in uses_of_jobs(snapshot(figure, held, uses)) if use.key == "team/a"]
    (one,) = found
    assert (one.attempt, one.replica, one.gpu) == (1, "0", GPU)
    assert one.busy == pytest.approx(busy)
    assert one.ranks == ",".join(
        sorted({use.holder.rank for use in uses if use.holder and use.holder.job == "a"})
    )


def test_a_gpu_that_cannot_be_read_has_no_figure() -> None:
    (one,) = uses_of_jobs(snapshot(None, [held("a")], [], fault=Reason.LOST))
    assert one.busy is None


def test_the_local_engine_says_who_has_a_gpu_that_nobody_uses() -> None:
    grants = [GpuGrant("default/a", 3, 1, 0), GpuGrant("default/b", 1, 0, 7)]
    (one,) = uses_of_jobs(snapshot(0.0, [], []), grants)
    assert one == GpuUse("default/a", 3, "1", GPU, 0.0), "there is no GPU 7"


def test_a_grant_says_nothing_once_the_driver_counts_without_a_lost_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next GPU, with its number by then, was taken for that of a job: which was idle, and stopped."""

    def seen(*devices: DeviceReading) -> Snapshot:
        working = Use("GPU-1", "", holder("b"), 1, None, 0.9)
        return Snapshot("", "", devices, (working,), (), {}, {}, {}, {}, 0.0)

    def gpu(index: int, number: int, busy: float) -> DeviceReading:
        return DeviceReading(index, f"GPU-{number}", figures={"utilization": busy})

    lost = DeviceReading(0, "GPU-0", fault=Reason.LOST)
    looks = [
        seen(gpu(0, 0, 0.5), gpu(1, 1, 0.9), gpu(2, 2, 0.0)),
        seen(lost, gpu(1, 1, 0.9), gpu(2, 2, 0.0)),
        seen(replace(lost, fault=Reason.GONE), gpu(0, 1, 0.9), gpu(1, 2, 0.0)),
    ]
    collector = SimpleNamespace(look=lambda: looks.pop(0))
    monkeypatch.setattr(gpu_local, "collecting", lambda _: nullcontext(collector))
    grants = [GpuGrant("team/a", 1, 0, 0), GpuGrant("team/b", 1, 0, 1)]
    with gpu_local.watching(True, lambda: grants, 1.0) as watch:
        assert watch is not None
        found = [[(use.key, use.gpu, use.busy) for use in asyncio.run(watch._look())] for _ in range(3)]
    assert found == [
        [("team/a", "GPU-0", 0.5), ("team/b", "GPU-1", 0.9)],
        [("team/a", "GPU-0", None), ("team/b", "GPU-1", 0.9)],
        [("team/b", "GPU-1", 0.9)],
    ]


def test_an_exporter_is_asked_as_it_answers() -> None:
    seen = snapshot(0.7, [held("a"), held("b")], [used("a", 0.02), used("b", None)])
    with served(lambda: seen, "127.0.0.1", 0) as port:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/jobs") as answer:
            text = answer.read()
        assert answer.headers["Content-Type"] == "application/json"
    assert USES.validate_json(text) == uses_of_jobs(seen)
    assert [one["busy"] for one in json.loads(text)] == [0.02, None]


def test_who_does_not_wait_for_the_answer_costs_no_output_and_a_fault_of_ours_is_told(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """As a Prometheus whose scrape takes too long, while NVML hangs: its log had a traceback each time."""
    asked, gone = threading.Semaphore(0), threading.Event()

    def look() -> Snapshot:
        asked.release()
        assert gone.wait(60)
        return snapshot(0.7, [], [])

    with served(look, "127.0.0.1", 0) as port:
        before = threading.active_count()
        for _ in range(5):
            with socket.create_connection(("127.0.0.1", port)) as client:
                client.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
                asked.acquire()
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        gone.set()
        wait_until(lambda: threading.active_count() == before, "all of them to be answered")
    assert capfd.readouterr().err == ""

    def broken() -> Snapshot:
        raise ValueError("a fault of ours")

    with (
        served(broken, "127.0.0.1", 0) as port,
        pytest.raises(http.client.RemoteDisconnected),
    ):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics")
    assert "ValueError: a fault of ours" in capfd.readouterr().err


@pytest.mark.parametrize("ipv6", [True, False])
def test_an_exporter_answers_at_an_address_of_either_family(
    monkeypatch: pytest.MonkeyPatch, ipv6: bool
) -> None:
    """As in the chart: there are clusters without IPv4, and nodes whose kernel has no IPv6."""
    if ipv6 and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: ipv6)
    with served(lambda: snapshot(0.7, [], []), "::", 0) as port:
        for host in ("127.0.0.1", "[::1]") if ipv6 else ("127.0.0.1",):
            with urllib.request.urlopen(f"http://{host}:{port}/healthz") as answer:
                assert answer.read() == b"ok\n"
