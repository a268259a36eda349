"""What a request needs of threads: nothing, unless its body is long, and then it alone waits."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import anyio.to_thread
import httpx
import pytest
from fakes import MemoryEngine, MemoryStore

from holdfast_controller.api import create_app
from holdfast_controller.api.lifecycle import SMALL_BODY

JOBS = "/v1/namespaces/default/jobs"
LONG = "#" * SMALL_BODY
JOB = "metadata: {name: %s}\nspec: {command: [sleep]}\n"


@pytest.mark.parametrize("long", ["", "/gpt/drill"], ids=["a job", "a drill"])
def test_requests_are_answered_while_all_threads_are_busy_and_long_bodies_wait_for_one(long: str) -> None:
    async def story() -> None:
        app = create_app(MemoryStore(), MemoryEngine(slots=4))
        yaml = {"Content-Type": "application/yaml"}
        release = threading.Event()
        with ThreadPoolExecutor(1) as threads:
            asyncio.get_running_loop().set_default_executor(threads)
            busy = asyncio.get_running_loop().run_in_executor(None, release.wait)
            others = anyio.to_thread.current_default_thread_limiter()
            others.total_tokens = 1
            transport = httpx.ASGITransport(app)
            async with (
                asyncio.timeout(60),
                httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=yaml) as client,
            ):
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
