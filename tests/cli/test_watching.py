"""Staying with jobs while they change: what is seen, and what a wait survives."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from served import TOKEN, Served, job_yaml, served

from holdfast_controller.client import Client


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path) as running:
        yield running


def submit(client: Client, name: str = "gpt-small", **spec: Any) -> None:
    document = yaml.safe_load(job_yaml(name))
    document["spec"] |= spec
    client.submit(document, "default")


def test_a_watch_survives_any_character(server: Served) -> None:
    """JSON leaves these as they are, and to Python each of them ends a line."""
    odd = "a\u0085b\u2028c\u2029d\x1ce"
    with Client(server.url, TOKEN) as client:
        submit(client, config={"odd": odd})
        assert next(client.watch("default")).job.spec.config == {"odd": odd}
