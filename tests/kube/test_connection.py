"""How the apiserver is reached."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import ssl
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from kept_alive import kept_alive
from small_apiserver import connected
from tests.cluster.certificates import Authority
from waiting import wait_until_async

from holdfast_controller.cluster import Unavailable
from holdfast_controller.kube import credentials
from holdfast_controller.kube.connection import MERGE_PATCH, KubeconfigError, connect
from holdfast_controller.kube.errors import NotLeader, Throttled


@pytest.mark.parametrize(
    ("no_proxy", "asked"),
    [("", "http://127.0.0.1:1/api/v1/nodes"), ("127.0.0.1", "")],
)
def test_a_proxy_of_the_environment_is_used_unless_it_is_told_not_to(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, no_proxy: str, asked: str
) -> None:
    heard: list[str] = []

    async def proxy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append((await reader.readuntil(b"\r\n\r\n")).decode().split()[1])
        writer.write(b'HTTP/1.1 200 OK\r\nContent-Length: 17\r\n\r\n{"kind": "Nodes"}')
        writer.close()

    async def story() -> None:
        server = await asyncio.start_server(proxy, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("no_proxy", no_proxy)
        kubeconfig = tmp_path / "config"
        kubeconfig.write_text(json.dumps(CLUSTER))
        connection = await connect(kubeconfig)
        try:
            if asked:
                assert await connection.get("/api/v1/nodes") == {"kind": "Nodes"}
            else:
                with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1 cannot be reached"):
                    await connection.get("/api/v1/nodes")
        finally:
            await connection.close()
            server.close()

    asyncio.run(story())
    assert heard == ([asked] if asked else [])


def test_who_has_to_answer_himself_passes_on_how_long_a_busy_apiserver_wants_to_be_left_alone(
    tmp_path: Path,
) -> None:
    """Under load one asks for half a minute: whoever asked the controller was told that it was lost."""
    asked, wait = 0, "32"

    async def busy(_: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        return web.json_response({"message": "try later"}, status=429, headers={"Retry-After": wait})

    async def story() -> None:
        nonlocal asked, wait
        async with connected([web.get("/api/v1/nodes", busy)], tmp_path) as connection:
            for one in (connection.impatient(), connection.impatient().apart(100, 100)):
                with pytest.raises(Throttled, match="the apiserver is busy: try later") as told:
                    await one.get("/api/v1/nodes")
                assert told.value.retry_after == 32
            assert asked == 2
            asked, wait = 0, "0"
            with pytest.raises(Throttled):
                await connection.impatient().get("/api/v1/nodes")
            assert asked == 3, "what is over at once is waited for"

    asyncio.run(story())


def test_who_gives_up_on_an_answer_leaves_no_connection_behind(tmp_path: Path) -> None:
    """The server says nothing more, not even a TLS farewell; Python tells of what the loop leaves open."""
    authority = Authority(tmp_path / "pki")
    certificate, key = authority.issue("server", "server", hosts=["127.0.0.1"])
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate, key)

    def hear(listening: socket.socket) -> ssl.SSLSocket:
        accepted = tls.wrap_socket(listening.accept()[0], server_side=True)
        assert accepted.recv(4096).startswith(b"GET /api/v1/nodes ")
        return accepted

    async def story(listening: socket.socket) -> ssl.SSLSocket:
        cluster = {
            "server": f"https://127.0.0.1:{listening.getsockname()[1]}",
            "certificate-authority": str(authority.certificate),
        }
        kubeconfig = tmp_path / "config"
        kubeconfig.write_text(json.dumps({**CLUSTER, "clusters": [{"name": "c", "cluster": cluster}]}))
        connection = await connect(kubeconfig)
        request = asyncio.create_task(connection.get("/api/v1/nodes"))
        accepted = await asyncio.to_thread(hear, listening)
        request.cancel()
        await asyncio.wait((request,))
        await connection.close()
        return accepted

    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(60)
        with asyncio.run(story(listening)):
            gc.collect()


def test_the_kernel_looks_after_the_connection_of_a_log_that_is_silent(tmp_path: Path) -> None:
    """Whoever followed one over an apiserver whose machine was lost did so for ever."""
    ports: list[int] = []

    async def log(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        ports.append(request.transport.get_extra_info("sockname")[1])
        answer = web.StreamResponse()
        await answer.prepare(request)
        await answer.write(b"step 1\n")
        await asyncio.Event().wait()
        return answer

    async def story() -> None:
        async with (
            connected([web.get("/log", log)], tmp_path) as connection,
            aclosing(connection.log("/log", {"follow": True})) as chunks,
        ):
            assert await anext(chunks) == b"step 1\n"
            await wait_until_async(lambda: kept_alive(ports[0]) == [True], "what was sent to be answered")

    asyncio.run(story())


def test_a_write_that_waits_its_turn_is_not_sent_once_the_lead_is_lost(tmp_path: Path) -> None:
    """As at a hand-over of thousands of jobs, or where the process is paused while it waits."""
    heard: list[str] = []

    async def hear(request: web.Request) -> web.Response:
        heard.append(request.method)
        return web.json_response({})

    async def story() -> None:
        async with connected([web.route("*", "/api/v1/nodes/a", hear)], tmp_path) as connection:
            lead = ["until then"]
            guarded = connection.guarded(lambda: bool(lead)).apart(per_second=10, burst=1)
            await guarded.get("/api/v1/nodes/a")
            write = asyncio.create_task(guarded.patch("/api/v1/nodes/a", {}, MERGE_PATCH))
            asyncio.get_running_loop().call_soon(lead.clear)  # it stands in line by then
            with pytest.raises(NotLeader, match="not sent, this controller does not lead any more"):
                await write

    asyncio.run(story())
    assert heard == ["GET"]


def config_of(port: int, user: dict[str, Any]) -> str:
    """A kubeconfig of the server on this port, for this user of it."""
    clusters = [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{port}"}}]
    return json.dumps({**CLUSTER, "clusters": clusters, "users": [{"name": "u", "user": user}]})


# The vendor's client asks for the time as Python 3.12 would not have it, and takes a warning for a fault.
@pytest.mark.filterwarnings("ignore:datetime.datetime.utcnow:DeprecationWarning")
@pytest.mark.parametrize("kind", ["a program", "a file"])
def test_a_token_that_ends_is_had_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str) -> None:
    """On EKS that of a kubeconfig's program ends after a quarter of an hour; a controller runs for weeks."""
    token = tmp_path / "token"
    token.write_text("first")
    program = tmp_path / "aws"
    program.write_text(
        f"""#!/bin/sh
printf '{{"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": {{'
printf '"token": "%s", "expirationTimestamp": "2026-01-01T00:00:00Z"}}}}' "$(cat {token})"
"""
    )
    program.chmod(0o755)
    plugin = {"apiVersion": "client.authentication.k8s.io/v1", "command": str(program)}
    user: dict[str, Any] = {"exec": plugin} if kind == "a program" else {"tokenFile": str(token)}
    heard: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        heard.append(request.headers["Authorization"])
        return web.json_response({})

    async def story() -> None:
        app = web.Application()
        app.add_routes([web.get("/api/v1/nodes", answer)])
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        kubeconfig = tmp_path / "config"
        kubeconfig.write_text(config_of(runner.addresses[0][1], user))
        connection = await connect(kubeconfig)
        try:
            await connection.get("/api/v1/nodes")
            token.write_text("second")

            async def is_new() -> bool:
                await connection.get("/api/v1/nodes")
                return heard[-1] == "Bearer second"

            await wait_until_async(is_new, "the new token to be used")
        finally:
            await connection.close()
            await runner.cleanup()

    monkeypatch.setattr(credentials, "RENEW_SECONDS", 0.01)
    asyncio.run(story())
    assert heard[0] == "Bearer first"


def test_a_program_that_gives_no_credentials_is_told_at_once(tmp_path: Path) -> None:
    """And nobody asks the apiserver as system:anonymous, which it then says has no rights."""
    plugin = {"apiVersion": "client.authentication.k8s.io/v1", "command": "/nowhere/aws"}
    kubeconfig = tmp_path / "config"
    kubeconfig.write_text(config_of(1, {"exec": plugin}))
    with pytest.raises(KubeconfigError, match="its program '/nowhere/aws' gives no credentials"):
        asyncio.run(connect(kubeconfig))


CLUSTER = {
    "apiVersion": "v1",
    "kind": "Config",
    "current-context": "x",
    "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}],
    "users": [{"name": "u", "user": {"token": "t"}}],
    "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
}
