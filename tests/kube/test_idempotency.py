"""A key that another request gives back in the middle of this one is taken; no request tries for ever."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from small_apiserver import connected

from holdfast_controller.cluster import Idempotency, NotFound, Unavailable
from holdfast_controller.jobs import Metadata, Spec, TrainingJob
from holdfast_controller.kube.connection import Document
from holdfast_controller.kube.idempotency import TRIES, KeyRecords

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
