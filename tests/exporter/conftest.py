"""GPUs of a script, and the exporter's own parts over them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from tests.exporter.seen import Seen
from tests.nvml.stand_in import CannotCompile, Script, build, busy_gpu

from holdfast_controller.exporter.collector import AllocationSource, Collector
from holdfast_controller.exporter.running import LABELS
from holdfast_controller.exporter.sampling import Sampler


class Look:
    """The exporter's sources; each call looks once, as a scrape does."""

    def __init__(self, sampler: Sampler, kubelet: AllocationSource | None = None):
        self.sampler = sampler
        self._collector = Collector(sampler.sample, LABELS, kubelet=kubelet)

    def __call__(self) -> Seen:
        return Seen.of(self._collector.look())


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return build(tmp_path_factory.mktemp("nvml"))
    except CannotCompile as error:
        pytest.skip(str(error))


@pytest.fixture
def script(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Script:
    """Two busy GPUs, in the environment of all that the test starts."""
    made = Script(tmp_path / "gpus.txt", [busy_gpu(0), busy_gpu(1)])
    made.write()
    for name, value in made.environment(library).items():
        monkeypatch.setenv(name, value)
    return made


@pytest.fixture
def look(script: Script) -> Iterator[Look]:
    """With a minute for every answer: a slow machine is no fault."""
    with closing(Sampler(deadline=60)) as sampler:
        yield Look(sampler)
