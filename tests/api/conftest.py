"""A server with nothing on it, and a client with its token."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from served import Served, served


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("served")) as running:
        yield running


@pytest.fixture
def http(server: Served) -> Iterator[httpx.Client]:
    server.engine.said = ()
    for job in server.run(server.store.list_jobs()):
        server.run(server.store.remove(job))
    with server.http() as client:
        yield client
