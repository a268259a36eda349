"""What is told about a job as Events of Kubernetes: once each, counted, and read in the order of its time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from small_apiserver import connected

from holdfast_controller.cluster import Conflict, Event
from holdfast_controller.kube.errors import NotPermitted
from holdfast_controller.kube.events import KEPT, TRIES, EventLog

NOON = datetime(2026, 5, 1, 12, tzinfo=UTC)
LATER = timedelta(hours=1)


def about(uid: str) -> dict[str, str]:
    return {"namespace": "team", "name": "gpt", "uid": uid}


class Told:
    """The Events of a namespace; the first writes of one that is there meet somebody else's."""

    def __init__(self, met: int = 0, refusal: tuple[int, str] | None = None) -> None:
        self.events: dict[str, dict[str, Any]] = {}
        self.met, self.refusal = met, refusal

    async def post(self, request: web.Request) -> web.Response:
        body = await request.json()
        if self.refusal is not None:
            code, message = self.refusal
            return web.json_response({"code": code, "message": message}, status=code)
        name = body["metadata"]["name"]
        if name in self.events:
            return web.json_response({"reason": "AlreadyExists", "message": "there is one"}, status=409)
        body["metadata"] |= {"resourceVersion": "1", "creationTimestamp": body["firstTimestamp"]}
        self.events[name] = body
        return web.json_response(body, status=201)

    async def one(self, request: web.Request) -> web.Response:
        found = self.events[request.match_info["name"]]
        if request.method == "GET":
            return web.json_response(found)
        change, version = await request.json(), found["metadata"]["resourceVersion"]
        if self.met:
            self.met -= 1
            found["count"] += 1
            found["metadata"]["resourceVersion"] = str(int(version) + 1)
        if change.pop("metadata")["resourceVersion"] != found["metadata"]["resourceVersion"]:
            return web.json_response({"reason": "Conflict", "message": "it changed"}, status=409)
        found |= change
        return web.json_response(found)

    async def listed(self, request: web.Request) -> web.Response:
        asked, uid = request.query["fieldSelector"].split("=", 1)
        items = list(self.events.values())
        if asked == "involvedObject.uid":
            items = [one for one in items if one["involvedObject"]["uid"] == uid]
        return web.json_response({"metadata": {"resourceVersion": "9"}, "items": items})

    @asynccontextmanager
    async def log(self, directory: Path) -> AsyncIterator[EventLog]:
        path = "/api/v1/namespaces/team/events"
        routes = [web.post(path, self.post), web.get(path, self.listed)]
        routes += [web.route(way, f"{path}/{{name}}", self.one) for way in ("GET", "PATCH")]
        async with connected(routes, directory) as connection:
            yield EventLog(connection)


@pytest.mark.parametrize("met", [0, 1, TRIES - 2])
def test_what_is_told_again_is_counted_whoever_else_counts_it(met: int, tmp_path: Path) -> None:
    """What an earlier job of the name was told is not this one's."""
    told = Told(met)

    async def story() -> list[Event]:
        async with told.log(tmp_path) as log:
            await log.record(about("earlier"), Event(NOON, "Warning", "Failed", "it ended", 9))
            await log.record(about("job"), Event(NOON, "Warning", "Failed", "it ended"))
            await log.record(about("job"), Event(NOON + LATER, "Normal", "Resumed", "it goes on"))
            await log.record(about("job"), Event(NOON + 2 * LATER, "Warning", "Failed", "it ended", 4))
            return await log.of("team", "job")

    one, again = asyncio.run(story())
    assert (one.reason, one.count) == ("Resumed", 1)
    assert (again.time, again.count) == (NOON + 2 * LATER, 1 + 4 + met)


def test_an_event_that_others_write_all_the_time_is_not_told_for_ever(tmp_path: Path) -> None:
    async def story() -> None:
        async with Told(met=1000).log(tmp_path) as log:
            event = Event(NOON, "Warning", "Failed", "it ended")
            await log.record(about("job"), event)
            with pytest.raises(Conflict, match=f"was written by others {TRIES} times in a row"):
                await log.record(about("job"), event)

    asyncio.run(story())


@pytest.mark.parametrize(
    ("code", "refusal", "raised"),
    [
        (403, "unable to create new content in namespace team because it is being terminated", False),
        (404, 'namespaces "team" not found', False),
        (403, 'User "holdfast" cannot create resource "events"', True),
    ],
    ids=["it is going", "it is gone", "no right"],
)
def test_where_a_namespace_goes_nothing_is_told_any_more(
    code: int, refusal: str, raised: bool, tmp_path: Path
) -> None:
    """Its jobs are to be removed, and what cannot be told must not keep them."""

    async def story() -> bool:
        async with Told(refusal=(code, refusal)).log(tmp_path) as log:
            try:
                await log.record(about("job"), Event(NOON, "Normal", "Deleted", "it goes"))
            except NotPermitted:
                return True
        return False

    assert asyncio.run(story()) == raised


def test_events_are_read_whoever_wrote_them_and_however_many(tmp_path: Path) -> None:
    """The newest, in order. By the newer API only `series` has a repeat's time, and a few have no time at
    all; whoever may write Events could have them do something to a terminal."""
    told = Told()

    def event(name: str, **more: Any) -> None:
        meta = {"name": name, "creationTimestamp": "2026-05-01T12:00:00Z"}
        told.events[name] = {"metadata": meta, "involvedObject": {"uid": "job"}, "reason": name, **more}

    for number in range(KEPT):
        event(f"old-{number}", lastTimestamp="2026-05-01T11:00:00Z")
    event("third", eventTime="2026-05-01T13:00:00.000000Z", lastTimestamp=None)
    repeat = {"count": 3, "lastObservedTime": "2026-05-01T14:00:00.000000Z"}
    event("last", eventTime="2026-05-01T09:00:00.000000Z", series=repeat, count=3)
    event("first", reason="fi\x1b[2Jrst")
    event("second", lastTimestamp="2026-05-01T12:30:00Z")
    told.events["before"] = {
        **told.events["third"],
        "metadata": {"creationTimestamp": "2026-05-01T11:59:59Z"},
    }

    async def story() -> tuple[list[Event], list[Event]]:
        async with told.log(tmp_path) as log:
            found = await log.of("team", "job")
            told.events = {name: one for name, one in told.events.items() if not name.startswith("old")}
            return found, await log.of_named("team", "PyTorchJob", "gpt-1", since="2026-05-01T12:00:00Z")

    found, named = asyncio.run(story())
    assert len(found) == KEPT
    assert [one.reason for one in found[-3:]] == ["third", "third", "last"]
    assert [one.count for one in named] == [1, 1, 1, 3]
    first, *others = (one.reason for one in named)
    assert others == ["second", "third", "last"]
    assert "\x1b" not in first
