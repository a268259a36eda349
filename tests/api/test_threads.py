"""What a request needs of threads: nothing, unless its body or answer is long, and then it alone waits."""

from __future__ import annotations

import asyncio
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anyio.to_thread
import httpx
import pytest
from fakes import MemoryEngine, MemoryStore
from pydantic_core import to_json

from holdfast_controller.api import create_app, records
from holdfast_controller.api.ledger import LedgerDocument, account
from holdfast_controller.api.lifecycle import SMALL_BODY
from holdfast_controller.jobs import TrainingJob

JOBS = "/v1/namespaces/default/jobs"
LONG = "#" * SMALL_BODY
JOB = "metadata: {name: %s}\nspec: {command: [sleep]}\n"


def client_of(engine: MemoryEngine) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(create_app(MemoryStore(), engine))
    yaml = {"Content-Type": "application/yaml"}
    return httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=yaml)


@pytest.mark.parametrize("long", ["", "/gpt/drill"], ids=["a job", "a drill"])
def test_requests_are_answered_while_all_threads_are_busy_and_long_bodies_wait_for_one(long: str) -> None:
    async def story() -> None:
        release = threading.Event()
        with ThreadPoolExecutor(1) as threads:
            asyncio.get_running_loop().set_default_executor(threads)
            busy = asyncio.get_running_loop().run_in_executor(None, release.wait)
            others = anyio.to_thread.current_default_thread_limiter()
            others.total_tokens = 1
            async with asyncio.timeout(60), client_of(MemoryEngine(slots=4)) as client:
                others.acquire_on_behalf_of_nowait(busy)
                try:
                    made = await client.post(JOBS, content=JOB % "gpt")
                    assert made.status_code == 201, made.text
                    waits = asyncio.create_task(
                        client.post(f"{JOBS}{long}", content=f"{LONG}\n{JOB % 'A name'}")
                    )
                    listed = await client.get("/v1/jobs", params={"limit": 10})
                    assert [job["metadata"]["name"] for job in listed.json()["items"]] == ["gpt"]
                    refused = await client.get(f"{JOBS}/gpt", params={"watch": "true"})
                    assert "unknown parameter 'watch'" in refused.json()["detail"]
                    assert not waits.done()
                finally:
                    others.release_on_behalf_of(busy)
                    release.set()
                await busy
                assert (await waits).status_code == 422

    asyncio.run(story())


def test_the_steps_of_a_long_run_are_told_in_a_thread_a_part_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """800,000 of them took seconds, in which no other request was answered and no attempt looked after."""
    here, count = threading.get_ident(), 3 * records.LINES_AT_ONCE - 1
    parts: list[tuple[int, bool]] = []

    def noted(lines: list[dict[str, Any]], **more: Any) -> bytes:
        parts.append((len(lines), threading.get_ident() == here))
        return to_json(lines, **more)

    async def many(_: TrainingJob) -> list[dict[str, Any]]:
        losses = [math.nan, *(float(step) for step in range(1, count))]
        return [{"attempt": 1, "step": step, "loss": loss} for step, loss in enumerate(losses)]

    monkeypatch.setattr(records, "to_json", noted)

    async def story() -> None:
        engine = MemoryEngine(slots=4)
        monkeypatch.setattr(engine, "steps", many)
        async with client_of(engine) as client:
            await client.post(JOBS, content=JOB % "gpt")
            told = (await client.get(f"{JOBS}/gpt/steps")).json()["items"]
            assert [line["step"] for line in told] == list(range(count))
            assert [line["loss"] for line in told[:2]] == [None, 1.0]
            assert (await client.get(f"{JOBS}/gpt/steps", params={"attempt": 2})).json() == {"items": []}

    asyncio.run(story())
    most = records.LINES_AT_ONCE
    assert parts == [(most, False), (most, False), (most - 1, False)]


def test_the_ledger_of_thousands_of_attempts_is_worked_out_in_a_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 10,000 it took more than two seconds, in which no other request was answered."""
    here, threads = threading.get_ident(), list[int]()

    def noted(*given: Any) -> LedgerDocument:
        threads.append(threading.get_ident())
        return account(*given)

    async def one(_: TrainingJob) -> list[dict[str, Any]]:
        return [{"attempt": 1, "event": "attempt_start", "time": 1.0, "loss": math.nan}]

    monkeypatch.setattr(records, "account", noted)

    async def story() -> None:
        engine = MemoryEngine(slots=4)
        monkeypatch.setattr(engine, "ledger", one)
        async with client_of(engine) as client:
            await client.post(JOBS, content=JOB % "gpt")
            told = (await client.get(f"{JOBS}/gpt/ledger")).json()
            assert [attempt["attempt"] for attempt in told["attempts"]] == [1]
            assert told["attempts"][0]["startedAt"] == "1970-01-01T00:00:01Z"
            assert told["lines"][0]["loss"] is None

    asyncio.run(story())
    assert threads
    assert here not in threads
