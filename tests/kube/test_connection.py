"""How the apiserver is reached."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

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


CLUSTER = {
    "apiVersion": "v1",
    "kind": "Config",
    "current-context": "x",
    "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}],
    "users": [{"name": "u", "user": {"token": "t"}}],
    "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
}
