"""An error that nobody has foreseen, which one job or pod brought: the controller of all others goes on."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from misbehaving_apiserver import Response, thing
from structlog.testing import capture_logs
from tests.kube.ended_pods import GOING, Server, pod, running
from tests.kube.test_reflector import Tell, World, script, stay, tell
from waiting import wait_until_async

from holdfast_controller.jobs import TrainingJob
from holdfast_controller.kube.endpoint import Endpoints
from holdfast_controller.kube.going_on import going_on

__all__ = ["tell"]


def test_what_breaks_off_is_told_with_its_traceback_and_begins_anew() -> None:
    begun = []

    async def work() -> None:
        begun.append(len(begun))
        if len(begun) < 3:
            raise KeyError("spec")
        await asyncio.Event().wait()

    async def story() -> None:
        task = asyncio.create_task(going_on("evidence", work, again=0.01))
        await wait_until_async(lambda: len(begun) == 3, "the third time")
        task.cancel()
        assert await asyncio.gather(task, return_exceptions=True) != [None], "it ends when it is cancelled"

    with capture_logs() as told:
        asyncio.run(story())
    assert [(line["event"], line["work"], line["exc_info"]) for line in told] == [
        ("it broke off and begins anew", "evidence", True)
    ] * 2


def test_a_listener_that_fails_at_one_object_hears_of_the_next_and_so_do_the_others(tell: Tell) -> None:
    async def tells(response: Response) -> None:
        await response.start()
        await response.event("MODIFIED", thing("odd", 11))
        await response.event("MODIFIED", thing("other", 12))
        await stay(response)

    async def story(world: World) -> None:
        seen = []

        def chokes(notice: Any) -> None:
            seen.append(notice.object["metadata"]["name"])
            if seen[-1] == "odd":
                raise RecursionError("maximum recursion depth exceeded")

        world.reflector.listen(chokes)
        await world.until(lambda: ("MODIFIED", "other", 12) in world.heard, "the object behind it")
        assert ("MODIFIED", "odd", 11) in world.heard
        assert seen[-1] == "other"
        assert world.server.lists == 1, "the copy is whole"

    tell(script(tells, stay, things=(thing("odd", 5), thing("other", 6))), story)


def test_a_ledger_that_cannot_be_kept_for_no_known_reason_costs_no_others_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    async def raises(_: Endpoints, job: TrainingJob) -> list[dict[str, Any]]:
        asked.append(job.key)
        raise OverflowError("int too large to convert to float")

    monkeypatch.setattr(Endpoints, "ledger_of", raises)

    async def story() -> None:
        server = Server(pod(0, "terminated"))
        async with running(server, tmp_path) as (engine, _, _):
            await wait_until_async(lambda: asked, "the ledger to be asked for")
            other = pod(1, deletionTimestamp=GOING, deletionGracePeriodSeconds=30)
            server.said["gpt-1-worker-1"] = ["step 7"]
            server.pods["gpt-1-worker-1"] = other
            await engine.last_words.read([other])
            assert server.tail(1) == "step 7"

    with capture_logs() as told:
        asyncio.run(story())
    assert [line["pod"] for line in told if line["event"] == "its last words cannot be read"] == [
        "gpt-1-worker-0"
    ]
