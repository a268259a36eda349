"""A server with nothing on it, and the command that speaks to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from served import TOKEN, Served, job_yaml, served
from typed import Holdfast, command


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("served")) as server:
        yield server


@pytest.fixture
def server(running: Served) -> Served:
    for job in running.run(running.store.list_jobs()):
        running.run(running.store.remove(job))
    return running


@pytest.fixture
def holdfast(server: Served, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Holdfast:
    """The command, with the server and token in the environment; the second line of a test's story."""
    monkeypatch.setenv("HOLDFAST_SERVER", server.url)
    monkeypatch.setenv("HOLDFAST_TOKEN", TOKEN)
    monkeypatch.setenv("HOLDFAST_DATA_DIR", str(tmp_path / "nothing-here"))
    return command


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(job_yaml())
    return path
