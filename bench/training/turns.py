"""Starts trainings that wait at their gates, and lets one of them run at a time."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from holdfast_controller.local.ports import free_port

from ..report import ROOT, ReportError
from .words import ENV

LONGEST_SECONDS = 300.0
"""For a start or a window: the machine may be busy, and a compile takes its time."""


@dataclass
class Rank:
    process: subprocess.Popen[bytes]
    words: IO[str]
    answers: IO[str]
    said: IO[bytes]
    """Its output, for a fault's message."""


@dataclass
class Training:
    """One subject: as many processes as it has ranks."""

    name: str
    ranks: list[Rank] = field(default_factory=list)
    began_at: float = 0.0

    @classmethod
    def start(
        cls,
        name: str,
        words: Sequence[str],
        *,
        ranks: int,
        threads: int,
        path: Sequence[Path],
        environment: Mapping[str, str],
        module: str = "bench.training",
    ) -> Training:
        """`python -m MODULE WORDS` for each rank; trainings pass their first step by themselves."""
        training = cls(name, began_at=time.time())
        port = free_port()
        here = [
            str(ROOT / "trainer"),
            str(ROOT),
            *filter(None, [os.environ.get("PYTHONPATH")]),
            *map(str, path),
        ]
        for rank in range(ranks):
            env = {
                **os.environ,
                "OMP_NUM_THREADS": str(threads),
                "PYTHONPATH": os.pathsep.join(here),
                "TOKENIZERS_PARALLELISM": "false",
                "HF_HUB_OFFLINE": "1",
                **environment,
            }
            if ranks > 1:
                env |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
                env |= {"LOCAL_WORLD_SIZE": str(ranks), "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "bench"}
                env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            training.ranks.append(_spawn([sys.executable, "-m", module, *words], env))
        return training

    def window(self, steps: int) -> float:
        """Seconds of so many steps; of the slowest rank. Raises ReportError where a rank ends."""
        self._tell(steps)
        return max(float(self._hear(rank)["seconds"]) for rank in self.ranks)

    def answer(self, amount: int) -> dict[str, Any]:
        """What the first rank has to say about so much work. Raises ReportError where it ends."""
        self._tell(amount)
        return self.figure()

    def first_step(self) -> float:
        """Seconds from the start of the processes to the end of their first step; waits for it."""
        return max(float(self._hear(rank)["first_step_at"]) for rank in self.ranks) - self.began_at

    def figure(self) -> dict[str, Any]:
        """What the first rank says next."""
        return self._hear(self.ranks[0])

    def _tell(self, amount: int) -> None:
        for rank in self.ranks:
            with contextlib.suppress(BrokenPipeError):  # what it said is told by `_hear`
                rank.words.write(f"{amount}\n")
                rank.words.flush()

    def _hear(self, rank: Rank) -> dict[str, Any]:
        ready, _, _ = select.select([rank.answers], [], [], LONGEST_SECONDS)
        line = rank.answers.readline() if ready else ""
        if not line:
            rank.said.seek(0)
            last = rank.said.read()[-1200:].decode(errors="replace")
            told = "ended" if ready else f"was silent for {LONGEST_SECONDS:.0f} s"
            raise ReportError(f"{self.name} {told}: {last}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def end(self) -> None:
        for rank in self.ranks:
            rank.process.kill()
        for rank in self.ranks:
            rank.process.wait()
            for pipe in (rank.words, rank.answers, rank.said):
                with contextlib.suppress(OSError):
                    pipe.close()
        self.ranks = []


@contextlib.contextmanager
def ending(trainings: Sequence[Training]) -> Iterator[None]:
    """Ends them all, whatever happens."""
    try:
        yield
    finally:
        for training in trainings:
            training.end()


@contextlib.contextmanager
def busy(count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """So many processes that never wait for anything, beside what is within."""
    neighbours = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield neighbours
    finally:
        for neighbour in neighbours:
            neighbour.kill()
            neighbour.wait()


def _spawn(command: Sequence[str], env: dict[str, str]) -> Rank:
    words_in, words_out = os.pipe()
    answers_in, answers_out = os.pipe()
    said = tempfile.TemporaryFile()  # noqa: SIM115
    try:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**env, ENV: f"{words_in},{answers_out}"},
            pass_fds=(words_in, answers_out),
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
        )
    finally:
        os.close(words_in)
        os.close(answers_out)
    return Rank(process, os.fdopen(words_out, "w"), os.fdopen(answers_in), said)
