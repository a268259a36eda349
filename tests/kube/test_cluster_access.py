"""Which right of the cluster each route needs."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from small_apiserver import connected
from waiting import wait_until_async

from holdfast_controller.api.access import OPEN_PATHS
from holdfast_controller.cluster import HoldfastError, Unavailable
from holdfast_controller.kube.access import UNDER_WAY, ClusterAccess, right_for
from holdfast_controller.kube.connection import connect
from holdfast_controller.problem import Forbidden, Unauthorized

ALICE = {"authenticated": True, "user": {"username": "alice"}}
NO_ANSWER = (
    'Post "https://authn.internal/review?timeout=30s": dial tcp 10.0.0.9:443: connect: connection refused'
)
OPENAPI = Path(__file__).parents[2] / "docs" / "openapi.json"


@pytest.mark.parametrize(
    ("method", "path", "words"),
    [
        ("GET", "/v1/jobs", "list trainingjobs in all namespaces"),
        ("GET", "/v1/namespaces/a/jobs", "list trainingjobs in namespace a"),
        ("POST", "/v1/namespaces/a/jobs", "create trainingjobs in namespace a"),
        ("GET", "/v1/namespaces/a/jobs/", "list trainingjobs in namespace a"),
        ("GET", "/v1/namespaces/a/jobs/b", "get trainingjobs in namespace a"),
        ("HEAD", "/v1/namespaces/a/jobs/b", "get trainingjobs in namespace a"),
        ("DELETE", "/v1/namespaces/a/jobs/b", "delete trainingjobs in namespace a"),
        ("POST", "/v1/namespaces/a/jobs/b/suspend", "update trainingjobs in namespace a"),
        ("POST", "/v1/namespaces/a/jobs/b/drill", "update trainingjobs in namespace a"),
        ("GET", "/v1/namespaces/a/jobs/b/logs", "get trainingjobs in namespace a"),
        ("GET", "/metrics", "get /metrics"),
    ],
)
def test_a_route_needs_what_kubectl_would(method: str, path: str, words: str) -> None:
    right = right_for(method, path)
    assert right is not None
    assert right.words == words


@pytest.mark.parametrize(
    ("query", "verb"),
    [
        ("", "list"),
        ("watch=true", "watch"),
        ("watch=1&watch=false", "watch"),
        ("watch", "watch"),
        ("limit=5&watch=YES", "watch"),
        ("watch=false", "list"),
        ("watched=true", "list"),
    ],
)
def test_a_list_that_goes_on_needs_another_right(query: str, verb: str) -> None:
    right = right_for("GET", "/v1/namespaces/a/jobs", query)
    assert right is not None
    assert right.words == f"{verb} trainingjobs in namespace a"


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("PUT", "/v1/namespaces/a/jobs/b"),
        ("GET", "/v1/namespaces/a/jobs/b/secrets"),
        ("GET", "/v1/namespaces/a/jobs/b/logs/../../../../../jobs"),
        ("GET", "/v1/namespaces//jobs"),
        ("GET", "//v1/jobs"),
        ("GET", "/v1/namespaces/a/jobs\n"),
        ("OPTIONS", "/v1/jobs"),
        ("GET", "/"),
    ],
)
def test_what_nobody_has_decided_about_is_closed(method: str, path: str) -> None:
    with pytest.raises(Forbidden, match="there is no such route, or no rule says who may use it"):
        right_for(method, path)


def test_every_route_that_there_is_has_a_rule() -> None:
    for path, methods in json.loads(OPENAPI.read_text())["paths"].items():
        for method in methods:
            if path in OPEN_PATHS:
                continue
            where = path.replace("{namespace}", "team").replace("{name}", "gpt")
            right = right_for(method.upper(), where)
            assert right is not None, (method, path)
            if "{namespace}" in path:
                assert ("namespace", "team") in right.attributes


@pytest.mark.parametrize(
    ("token", "right", "refusal"),
    [
        ({}, {}, Unauthorized),
        ({"error": "[invalid bearer token, service account token has expired]"}, {}, Unauthorized),
        (
            {"error": "oidc: verify token: oidc: token is expired (Token Expiry: 2026-01-01)"},
            {},
            Unauthorized,
        ),
        ({"error": "oidc: authenticator not initialized"}, {}, Unavailable),
        ({"error": f"[invalid bearer token, {NO_ANSWER}]"}, {}, Unavailable),
        (ALICE, {"allowed": False, "reason": "no"}, Forbidden),
        (ALICE, {"allowed": False, "evaluationError": 'role.rbac "x" not found'}, Forbidden),
        (ALICE, {"allowed": False, "evaluationError": NO_ANSWER}, Unavailable),
        (ALICE, {"allowed": True, "evaluationError": NO_ANSWER}, None),
    ],
)
def test_a_webhook_that_does_not_answer_makes_no_token_a_bad_one(
    token: dict[str, Any], right: dict[str, Any], refusal: type[HoldfastError] | None, tmp_path: Path
) -> None:
    """Whoever was told 401 looked for a fault in his token, and the streams of all ended with their right."""
    answers = {"tokenreviews": token, "subjectaccessreviews": right}

    async def review(request: web.Request) -> web.Response:
        return web.json_response({"status": answers[request.match_info["kind"]]}, status=201)

    async def story() -> None:
        async with connected([web.post("/apis/{group}/v1/{kind}", review)], tmp_path) as connection:
            access = ClusterAccess(connection)
            headers = {"authorization": "Bearer a-token"}
            told = await access.refuse("GET", "/v1/jobs", "", headers)
            assert (None if told is None else type(told)) is refusal
            assert "authn.internal" not in str(told), "that is not for strangers"
            if refusal is Unavailable:
                answers.update(tokenreviews=ALICE, subjectaccessreviews={"allowed": True})
                assert await access.refuse("GET", "/v1/jobs", "", headers) is None, "it answers again"

    asyncio.run(story())


def test_a_flood_of_tokens_waits_for_nothing_and_blocks_nobody_for_ever(tmp_path: Path) -> None:
    """Strangers send tokens that nobody knows while the apiserver is slow: the rest is told to come again."""
    asked = 0

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        await reader.readuntil(b"\r\n\r\n")
        asked += 1
        await reader.read()
        writer.close()

    async def story() -> None:
        server = await asyncio.start_server(silent, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "slow",
            "contexts": [{"name": "slow", "context": {"cluster": "slow", "user": "slow"}}],
            "clusters": [{"name": "slow", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
            "users": [{"name": "slow", "user": {}}],
        }
        (tmp_path / "config").write_text(json.dumps(config))
        connection = await connect(tmp_path / "config")
        access = ClusterAccess(connection)

        def ask(number: int) -> asyncio.Task[HoldfastError | None]:
            headers = {"authorization": f"Bearer token-{number}"}
            return asyncio.create_task(access.refuse("GET", "/v1/jobs", "", headers))

        waiting = [ask(number) for number in range(UNDER_WAY)]
        try:
            await wait_until_async(lambda: asked == UNDER_WAY, "all of them to be asked about")
            told = await ask(UNDER_WAY)
            assert isinstance(told, Unavailable)
            assert str(told) == "too many tokens are being reviewed at the moment; try again in a second"
            assert asked == UNDER_WAY

            # Who gives up makes room.
            waiting[0].cancel()
            await asyncio.gather(waiting[0], return_exceptions=True)
            waiting.append(ask(UNDER_WAY + 1))
            await wait_until_async(lambda: asked == UNDER_WAY + 1, "the next one to be asked about")
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            await connection.close()
            server.close()

    asyncio.run(story())


def test_a_flood_of_tokens_keeps_nobody_out_whose_own_was_known(tmp_path: Path) -> None:
    """Who had no token at all kept REST from everybody, ten seconds after they had last been asked about."""
    asked = 0

    async def review(request: web.Request) -> web.Response:
        nonlocal asked
        told = await request.json()
        if told["spec"].get("token", "hers") != "hers":
            asked += 1
            await asyncio.Event().wait()
        known = request.match_info["kind"] == "tokenreviews"
        return web.json_response({"status": ALICE if known else {"allowed": True}}, status=201)

    async def story() -> None:
        async with connected([web.post("/apis/{group}/v1/{kind}", review)], tmp_path) as connection:
            access = ClusterAccess(connection, kept_seconds=0)

            async def ask(token: str) -> HoldfastError | None:
                return await access.refuse("GET", "/v1/jobs", "", {"authorization": f"Bearer {token}"})

            assert await ask("hers") is None
            flood = [asyncio.create_task(ask(f"token-{number}")) for number in range(UNDER_WAY)]
            try:
                await wait_until_async(lambda: asked == UNDER_WAY, "all of them to be asked about")
                assert isinstance(await ask("another"), Unavailable)
                assert await ask("hers") is None
            finally:
                for task in flood:
                    task.cancel()
                await asyncio.gather(*flood, return_exceptions=True)

    asyncio.run(story())
