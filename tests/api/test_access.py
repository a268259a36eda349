"""Who was let in once is not let in for ever; and what stands in front of us sees the header that we see."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path

import httpx
import pytest
from served import TOKEN, served
from waiting import wait_until

from holdfast_controller.cluster import HoldfastError, Unavailable
from holdfast_controller.problem import Forbidden

JOBS = "/v1/namespaces/default/jobs"


class Guard:
    """A gate that says what it was told to say."""

    def __init__(self) -> None:
        self.answer: HoldfastError | None = None
        self.asked = 0

    async def refuse(
        self, method: str, path: str, query: str, headers: Mapping[str, str]
    ) -> HoldfastError | None:
        self.asked += 1
        return self.answer


@pytest.mark.parametrize("path", [f"{JOBS}?watch=true", f"{JOBS}/gpt-small/logs?follow=true"])
def test_a_stream_ends_with_its_readers_right(tmp_path: Path, path: str) -> None:
    guard = Guard()
    with served(tmp_path, token=None, gate=guard, recheck_seconds=0.05) as server:
        with server.http() as http:
            body = {"metadata": {"name": "gpt-small"}, "spec": {"command": ["true"]}}
            assert http.post(JOBS, json=body).status_code == 201
        server.set_status("gpt-small", phase="Running", attempt=1)
        output = server.engine.output[("default/gpt-small", 1, 0)] = ["first line"]
        server.engine.open_attempts.add(("default/gpt-small", 1))
        read: list[str] = []
        ended = threading.Event()

        def follow() -> None:
            with server.http() as reader, reader.stream("GET", path) as answer:
                read.extend(line for line in answer.iter_lines())
            ended.set()

        def something_happens() -> None:
            server.set_status("gpt-small", message=f"asked {guard.asked} times")
            output.append("another line")

        def asked_again(times: int) -> bool:
            something_happens()
            return guard.asked >= times

        following = threading.Thread(target=follow, daemon=True)
        following.start()
        wait_until(lambda: asked_again(4), "the stream to run, and its right to be asked for again")

        # A gate that cannot be asked takes nothing back ...
        guard.answer = Unavailable("the apiserver cannot be reached")
        more = guard.asked + 3
        wait_until(lambda: asked_again(more), "the stream to outlive that")
        assert not ended.is_set()

        # ... and one that says no ends it, whatever there is to tell.
        guard.answer = Forbidden("somebody took the right back")
        wait_until(lambda: something_happens() or ended.wait(0.05), "the stream to end")
        following.join(300)
        assert read
        assert not any("took the right back" in line for line in read)


@pytest.mark.parametrize("second", [TOKEN, "wrong"])
def test_two_tokens_are_none(tmp_path: Path, second: str) -> None:
    with served(tmp_path) as server:
        headers = [("Authorization", f"Bearer {TOKEN}"), ("Authorization", f"Bearer {second}")]
        answer = httpx.get(f"{server.url}/v1/jobs", headers=headers, trust_env=False)
        assert answer.status_code == 401
        assert "the header Authorization is given 2 times: send it once" in answer.json()["detail"]


def test_asking_whether_we_are_ready_costs_one_read_a_second(tmp_path: Path) -> None:
    """Anybody may ask, so nobody's asking may be work."""
    with served(tmp_path) as server:
        reads = 0
        get = server.store.get

        async def counted(namespace: str, name: str) -> object:
            nonlocal reads
            reads += 1
            return await get(namespace, name)

        server.store.get = counted  # type: ignore[method-assign]
        with server.http(token=None) as http:
            answers = [http.get("/readyz").json() for _ in range(50)]
        assert answers == [{"ready": True, "checks": {"store": "ok", "reconciler": "ok"}, "missing": []}] * 50
        assert reads < 50
