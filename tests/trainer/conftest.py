"""Ranks for the tests of the trainer: one server of forks for all of a test process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from disks import small_disk
from gangs import RankServer, Workshop
from processes import Processes

from holdfast_trainer.contract import RunDir, raise_fence

torch.set_num_threads(1)  # of a process that has half a core: see tests/workers.py


@pytest.fixture(scope="session")
def rank_server() -> Iterator[RankServer]:
    started = Processes()
    try:
        server = RankServer(started)
        yield server
        server.close()
    finally:
        started.end_all()


@pytest.fixture
def workshop(rank_server: RankServer, tmp_path: Path) -> Iterator[Workshop]:
    """Attempts of this test; whatever still runs at its end is killed."""
    made = Workshop(rank_server, tmp_path)
    yield made
    made.end()


@pytest.fixture(autouse=True)
def _any_kernels() -> Iterator[None]:
    """What a test asked torch for is not asked of the tests that follow in this process."""
    yield
    if torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True
        os.environ.pop("TORCHINDUCTOR_DETERMINISTIC", None)


@pytest.fixture(name="small_disk")
def _small_disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk") as path:
        yield path


@pytest.fixture(name="run")
def _run(tmp_path: Path) -> RunDir:
    """One that its first attempt has taken."""
    made = RunDir(tmp_path / "run")
    raise_fence(made, 1)
    return made
