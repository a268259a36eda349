"""The steps of a job that runs in pods: asked of rank 0's real endpoint, at an address of this machine."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from holdfast_controller.cluster import NotReady
from holdfast_controller.jobs import Metadata, Spec, Status, Storage, TrainingJob
from holdfast_controller.kube import steps as kube_steps
from holdfast_controller.kube.steps import read_steps, run_directory
from holdfast_controller.pytorchjobs import PYTORCH_JOB
from holdfast_trainer.contract import DEFAULT_PORT, Progress, RunDir
from holdfast_trainer.endpoint import Endpoint

ADDRESS = "127.89.0.1"
WHERE = "they are on claim runs, in team/gpt-0123abcd/attempts/\\*/steps.jsonl"


def job(attempt: int) -> TrainingJob:
    return TrainingJob(
        metadata=Metadata(name="gpt", namespace="team", uid="0123abcd-rest"),
        spec=Spec(command=["x"], storage=Storage(claim="runs")),
        status=Status(attempt=attempt),
    )


def test_where_a_run_directory_is_as_people_find_it() -> None:
    assert run_directory(job(1)) == "team/gpt-0123abcd on claim runs"


def pod(state: str = "running", index: int = 0) -> dict[str, Any]:
    return {
        "metadata": {"name": "gpt-2-worker-0", "labels": {PYTORCH_JOB.index_label: str(index)}},
        "status": {
            "podIP": ADDRESS,
            "containerStatuses": [{"name": PYTORCH_JOB.container, "state": {state: {}}}],
        },
    }


@contextmanager
def rank_0(run: RunDir | None) -> Iterator[None]:
    progress = Progress(2, 0, None, 0, "training")
    endpoint = Endpoint(ADDRESS, DEFAULT_PORT, CollectorRegistry, lambda: progress, run)
    try:
        if endpoint.address != f"{ADDRESS}:{DEFAULT_PORT}":
            pytest.skip(f"port {DEFAULT_PORT} of this machine, where pods are asked, is taken")
        yield
    finally:
        endpoint.close()


def read(attempt: int, *pods: dict[str, Any]) -> list[dict[str, Any]]:
    return asyncio.run(read_steps(job(attempt), list(pods), asyncio.Lock()))


def test_all_attempts_are_read_page_by_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDir(tmp_path)
    for attempt, count in ((1, 4000), (3, 2)):
        run.attempt(attempt).mkdir(parents=True)
        lines = [json.dumps({"step": step, "pad": "x" * 400}) for step in range(1, count + 1)]
        run.steps(attempt).write_text("\n".join(lines) + "\n")
    with rank_0(run):
        found = read(3, pod(index=1), pod())
        assert [(line["attempt"], line["step"]) for line in found] == [
            *((1, step) for step in range(1, 4001)),
            (3, 1),
            (3, 2),
        ]
        monkeypatch.setattr(kube_steps, "LIMIT", 1 << 20)
        with pytest.raises(NotReady, match=f"team/gpt has more than 1 MiB of steps; {WHERE}"):
            read(3, pod())


def test_a_program_that_answers_with_many_empty_lines_does_not_fill_the_controllers_memory(
    tmp_path: Path,
) -> None:
    """Each of `{}` took sixty times as much as it has: 8 MiB of them all that the controller may have."""
    run = RunDir(tmp_path)
    for attempt in (1, 2):
        run.attempt(attempt).mkdir(parents=True)
        run.steps(attempt).write_text("{}\n" * 150_000)
    with rank_0(run):
        assert len(read(1, pod())) == 150_000
        with pytest.raises(NotReady, match=f"team/gpt has more than 262144 lines of steps; {WHERE}"):
            read(2, pod())
        run.steps(1).write_text("{}\r" * 300_000 + "\n")
        with pytest.raises(NotReady, match=f"rank 0 of team/gpt serves no steps; {WHERE}"):
            read(1, pod())


def test_of_many_who_ask_at_once_one_has_the_memory_that_parsed_lines_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten times that of the text, for each of them: five who asked at once took half of what the controller
    may have."""
    run = RunDir(tmp_path)
    run.attempt(1).mkdir(parents=True)
    run.steps(1).write_text('{"step": 1}\n')
    at_once, most, parse_lines = 0, 0, kube_steps.parse_lines

    def parse(text: str) -> list[dict[str, Any]]:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        time.sleep(0.05)
        at_once -= 1
        return parse_lines(text)

    monkeypatch.setattr(kube_steps, "parse_lines", parse)

    async def story() -> None:
        parsing = asyncio.Lock()
        answers = await asyncio.gather(*(read_steps(job(1), [pod()], parsing) for _ in range(5)))
        assert answers == [[{"step": 1, "attempt": 1}]] * 5

    with rank_0(run):
        asyncio.run(story())
    assert most == 1


def test_what_cannot_be_read_is_said_with_the_place_where_it_lies(tmp_path: Path) -> None:
    for pods in ([], [pod("terminated")], [pod(index=1)]):
        with pytest.raises(NotReady, match=f"no rank 0 of team/gpt runs that could tell its steps; {WHERE}"):
            read(1, *pods)
    with pytest.raises(NotReady, match=f"rank 0 of team/gpt does not tell its steps .*; {WHERE}"):
        read(1, pod())  # nobody listens
    with rank_0(None), pytest.raises(NotReady, match=f"rank 0 of team/gpt serves no steps; {WHERE}"):
        read(1, pod())


def test_a_pod_that_is_taken_without_grace_does_not_hold_up_the_next_attempt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its node may be gone with it: then a connection to it is neither taken nor refused."""
    for name in ("TIMEOUT_SECONDS", "WHOLE_SECONDS"):
        monkeypatch.setattr(kube_steps, name, 3600.0)
    going = pod()
    going["metadata"] |= {"deletionTimestamp": "2026-01-01T00:00:00Z", "deletionGracePeriodSeconds": 0}
    with socket.socket() as silent:
        silent.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            silent.bind((ADDRESS, DEFAULT_PORT))
        except OSError:
            pytest.skip(f"port {DEFAULT_PORT} of this machine, where pods are asked, is taken")
        silent.listen()
        with pytest.raises(NotReady, match=f"rank 0 of team/gpt does not tell its steps .*; {WHERE}"):
            read(1, going)
