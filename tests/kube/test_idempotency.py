"""A key makes one job, wherever a request with it was cut short; one that another request gives back in the
middle of this one is taken; no request tries for ever."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from small_apiserver import connected

from holdfast_controller.cluster import (
    AlreadyExists,
    Conflict,
    HoldfastError,
    Idempotency,
    Invalid,
    NotFound,
    Unavailable,
)
from holdfast_controller.jobs import Metadata, Spec, TrainingJob
from holdfast_controller.kube.connection import Document
from holdfast_controller.kube.idempotency import (
    FINGERPRINT,
    KEY_DIGEST,
    MADE,
    TRIES,
    KeyRecords,
    digest_of,
)
from holdfast_controller.kube.resource import path_of

JOB = TrainingJob(metadata=Metadata(name="gpt", namespace="team"), spec=Spec(command=["true"]))
EVENTS = "/api/v1/namespaces/team/events"


def submitted(taken: int, path: Path) -> tuple[Document, list[str]]:
    """The job that is made, and what was asked of the apiserver. The key is taken so many times, and each
    time free again when its record is asked for."""
    asked: list[str] = []

    async def post(request: web.Request) -> web.Response:
        asked.append("POST")
        if asked.count("POST") <= taken:
            return web.json_response({"reason": "AlreadyExists", "message": "there is one"}, status=409)
        return web.json_response(await request.json(), status=201)

    async def get(_: web.Request) -> web.Response:
        asked.append("GET")
        return web.json_response({"reason": "NotFound", "message": "no such event"}, status=404)

    async def patch(_: web.Request) -> web.Response:
        asked.append("PATCH")
        return web.json_response({})

    async def create() -> Document:
        made: dict[str, Any] = {"metadata": {"uid": "1"}}
        return made

    async def story() -> Document:
        record = f"{EVENTS}/{{name}}"
        routes = [web.post(EVENTS, post), web.get(record, get), web.patch(record, patch)]
        async with connected(routes, path) as connection:
            return await KeyRecords(connection).create_once(JOB, Idempotency("k", "f"), create)

    return asyncio.run(story()), asked


def test_a_key_that_a_refused_request_gives_back_is_taken(tmp_path: Path) -> None:
    made, asked = submitted(1, tmp_path)
    assert made["metadata"]["uid"] == "1"
    assert asked == ["POST", "GET", "POST", "PATCH"]


def test_a_key_that_is_always_in_use_is_told_and_can_be_tried_again(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="idempotency key 'k' is in use by other requests; try again"):
        submitted(TRIES, tmp_path)


def test_where_the_namespace_is_gone_that_is_what_is_told(tmp_path: Path) -> None:
    async def story() -> None:
        async with connected([], tmp_path) as connection:  # 404 for all
            with pytest.raises(NotFound):
                await KeyRecords(connection).create_once(JOB, Idempotency("k", "f"), never)

    async def never() -> Document:
        raise AssertionError("no job is made without its key")

    asyncio.run(story())


class Namespace:
    """Has the job or not, and the record of the key."""

    path = path_of(JOB)

    def __init__(self, made_by: str = "", notes: dict[str, str] | None = None) -> None:
        self.records: dict[str, Any] = {}
        self.job: Document | None = None
        self.made = 0
        if made_by:
            self.make(made_by)
        if notes is not None:
            self.records[digest_of("k")] = {"metadata": {"annotations": dict(notes)}}
        self.refusal: HoldfastError | None = None
        """What the apiserver says to who would make the job."""
        self.dies = False
        """Whether a request ends before it has noted what it has made."""

    def make(self, key: str) -> Document:
        self.made += 1
        self.job = {"metadata": {"uid": f"uid-{self.made}", "annotations": {KEY_DIGEST: digest_of(key)}}}
        return self.job

    def notes(self) -> dict[str, str] | None:
        """Of the key; None where it is free."""
        record = self.records.get(digest_of("k"))
        return None if record is None else record["metadata"]["annotations"]

    async def post(self, request: web.Request) -> web.Response:
        body = await request.json()
        digest = body["metadata"]["name"].removeprefix("holdfast-key.")
        if digest in self.records:
            return web.json_response({"reason": "AlreadyExists", "message": "there is one"}, status=409)
        self.records[digest] = body
        return web.json_response(body, status=201)

    async def record(self, request: web.Request) -> web.Response:
        digest = request.match_info["name"].removeprefix("holdfast-key.")
        if request.method == "DELETE":
            return web.json_response(self.records.pop(digest))
        if request.method == "PATCH":
            if self.dies:
                return web.json_response({"message": "etcdserver: leader changed"}, status=500)
            self.records[digest]["metadata"]["annotations"] |= (await request.json())["metadata"][
                "annotations"
            ]
        return web.json_response(self.records[digest])

    async def there(self, _: web.Request) -> web.Response:
        return web.json_response(self.job or {}, status=200 if self.job else 404)

    async def create(self) -> Document:
        if self.refusal is not None:
            raise self.refusal
        return self.make("k")

    async def submit(self, directory: Path) -> Document:
        routes = [web.post(EVENTS, self.post), web.get(self.path, self.there)]
        routes += [web.route(way, f"{EVENTS}/{{name}}", self.record) for way in ("GET", "PATCH", "DELETE")]
        async with connected(routes, directory) as connection:
            return await KeyRecords(connection).create_once(JOB, Idempotency("k", "f"), self.create)


BEGUN, NOTED = {FINGERPRINT: "f"}, {FINGERPRINT: "f", MADE: "uid-1"}
EXISTS, REFUSED = AlreadyExists("gpt exists"), Invalid("no such image")


@pytest.mark.parametrize(
    ("before", "refusal", "then"),
    [
        pytest.param(Namespace(), None, "uid-1", id="it is new"),
        pytest.param(Namespace(notes=BEGUN), None, "uid-1", id="its request died before it made the job"),
        pytest.param(Namespace("k", BEGUN), None, "uid-1", id="its request died when it had made the job"),
        pytest.param(Namespace("k", NOTED), None, "uid-1", id="it has made the job"),
        pytest.param(Namespace("k"), EXISTS, "uid-1", id="it has made the job, and is forgotten"),
        pytest.param(Namespace("", NOTED), None, "made a job that was deleted since", id="that is deleted"),
        pytest.param(
            Namespace("other", NOTED), None, "made a job that was deleted since", id="that is another's now"
        ),
        pytest.param(Namespace("k", {FINGERPRINT: "g"}), None, "for another request", id="it is another's"),
        pytest.param(Namespace(), REFUSED, "no such image", id="the job is refused"),
        pytest.param(Namespace("other"), EXISTS, "gpt exists", id="another job has the name"),
        pytest.param(Namespace(notes=BEGUN), REFUSED, "no such image", id="as to who has it still"),
        pytest.param(Namespace(), Unavailable("no answer"), "no answer", id="nobody knows"),
    ],
)
def test_what_a_key_has_made_and_what_becomes_of_it(
    before: Namespace, refusal: HoldfastError | None, then: str, tmp_path: Path
) -> None:
    """A refused request gives back the key that it took; one whose job may have been made keeps it."""
    taken, made = before.notes(), before.made
    before.refusal = refusal
    told, error = "", None
    try:
        told = asyncio.run(before.submit(tmp_path))["metadata"]["uid"]
    except HoldfastError as refused:
        told, error = str(refused), refused
    assert then in told
    if error is None:
        assert (before.notes(), before.made) == (NOTED, 1)
    elif isinstance(error, Unavailable):
        assert (before.notes(), before.made) == (BEGUN, made)
    else:
        assert (before.notes(), before.made) == (taken, made)


def test_a_job_that_is_deleted_is_not_made_again_though_its_request_died_before_it_noted_it(
    tmp_path: Path,
) -> None:
    """The repeat was told of the job; somebody deleted it; and whatever sends the request sent it again."""

    async def story() -> None:
        there = Namespace()
        there.dies = True
        with pytest.raises(Unavailable, match="leader changed"):
            await there.submit(tmp_path)
        there.dies = False
        assert (await there.submit(tmp_path))["metadata"]["uid"] == "uid-1"
        there.job = None
        with pytest.raises(Conflict, match="made a job that was deleted since; take a new key"):
            await there.submit(tmp_path)
        assert there.made == 1

    asyncio.run(story())
