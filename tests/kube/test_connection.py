"""How the apiserver is reached."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import ssl
from pathlib import Path

import pytest
from tests.cluster.certificates import Authority

from holdfast_controller.cluster import Unavailable
from holdfast_controller.kube.connection import connect


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


CLUSTER = {
    "apiVersion": "v1",
    "kind": "Config",
    "current-context": "x",
    "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}],
    "users": [{"name": "u", "user": {"token": "t"}}],
    "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
}
