"""Holdfast on one machine, as a user runs it: `holdfast up`, jobs, their processes, and the proof.

A platform whose controller can be killed and started again; jobs of the reference GPT on small data; and
the comparison of two runs bit by bit.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from processes import Processes
from waiting import wait_until

from holdfast_controller.client import Client
from holdfast_controller.data_directory import DataDirectory, read_token
from holdfast_controller.jobs import Phase, TrainingJob
from holdfast_trainer.contract import ENV_ATTEMPT_UID
from holdfast_trainer.token_index import FORMAT, Shard, TokenIndex

MODEL = {"vocab_size": 128, "layers": 2, "heads": 2, "width": 64, "context": 32}


def write_tokens(directory: Path) -> Path:
    """Tokens with some structure, so that the loss moves."""
    directory.mkdir()
    shards = []
    for split, count in (("train", 200_000), ("validation", 20_000)):
        tokens = np.cumsum(np.random.default_rng(7).integers(0, 3, count)) % 128
        raw = tokens.astype("<u2").tobytes()
        (directory / f"{split}.bin").write_bytes(raw)
        digest = hashlib.sha256(raw).hexdigest()
        shards.append(Shard(f"{split}.bin", split, count, len(raw), digest))  # type: ignore[arg-type]
    index = TokenIndex(FORMAT, "uint16", 128, 0, tuple(shards))
    (directory / "index.json").write_text(index.to_json())
    return directory


class Platform:
    """A controller that can be killed and started again, and a client of it."""

    def __init__(self, directory: Path, processes: Processes) -> None:
        self._directory = DataDirectory(directory)
        self._processes = processes
        self._process: subprocess.Popen[str] | None = None
        self._log = directory.with_suffix(".log")
        self._client: Client | None = None

    def up(self) -> None:
        """Start the controller and wait until it answers."""
        self.leave()
        command = [Path(sys.executable).with_name("holdfast"), "up", "--port", "0"]
        options = ["--data-dir", self._directory.path, "--cpu-slots", "2"]
        with self._log.open("a") as log:
            process = self._processes.start([*command, *options], stdout=log, stderr=log)
        self._process = process

        def answers() -> bool:
            assert process.poll() is None, self._log.read_text()[-3000:]
            server = self._directory.read_server_file()
            return server is not None and server.pid == process.pid

        wait_until(answers, "the controller to be up")
        server = self._directory.read_server_file()
        assert server is not None
        self._client = Client(server.url, read_token(self._directory.token))

    def leave(self) -> None:
        """Close the connection to the controller that was."""
        if self._client is not None:
            self._client.__exit__(None, None, None)
            self._client = None

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def ask(self, question: Callable[[Client], Any]) -> Any:
        """Ask the controller, whichever it is now."""
        assert self._client is not None
        return question(self._client)

    def job(self, name: str) -> TrainingJob:
        found: TrainingJob = self.ask(lambda client: client.get("default", name))
        return found

    def steps(self, name: str, attempt: int = 1) -> int:
        """The last step that this attempt or a later one has done, by the run directory: status lags."""
        lines = self.ask(lambda client: client.steps("default", name))
        return max((line["step"] for line in lines if line["attempt"] >= attempt), default=0)

    def until_done(self, name: str, seconds: float) -> TrainingJob:
        def done() -> TrainingJob | None:
            job = self.job(name)
            assert job.status.phase is not Phase.FAILED, job.status.model_dump_json(indent=1)
            return job if job.status.phase is Phase.SUCCEEDED else None

        job = wait_until(done, f"{name} to succeed", seconds)
        assert job is not None
        return job


@contextmanager
def platform(directory: Path, processes: Processes) -> Iterator[Platform]:
    running = Platform(directory, processes)
    try:
        running.up()
        yield running
    finally:
        running.leave()
        running.kill()


def document(
    name: str, data: Path, *, steps: int, layout: tuple[int, int] = (2, 1), **train: Any
) -> dict[str, Any]:
    """A job of the reference GPT: `layout` is (replicas, ranks a replica)."""
    dropout = train.pop("dropout", 0.0)
    return {
        "apiVersion": "holdfast.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": name},
        "spec": {
            "command": ["python", "-m", "holdfast_trainer", "train"],
            "replicas": layout[0],
            "processes": layout[1],
            "checkpoint": {"every": "20", "keep": 3},
            "config": {
                "model": {**MODEL, "dropout": dropout},
                "data": {"path": str(data)},
                "train": {"steps": steps, "global_batch": 8, "log_every": 100, **train},
                "optim": {"learning_rate": 1e-3, "warmup_steps": 10},
                "validation": {"every": 50, "batches": 3},
            },
        },
    }  # fmt: skip


def of_attempt(processes: Processes) -> dict[str, list[psutil.Process]]:
    """What runs of any attempt, by the part it plays."""
    parts: dict[str, list[psutil.Process]] = {"rank": [], "agent": [], "supervisor": [], "all": []}
    for process in processes.running():
        try:
            if ENV_ATTEMPT_UID not in process.environ():
                continue
            words = process.cmdline()
        except psutil.Error:
            continue
        module = words[words.index("-m") + 1] if "-m" in words else ""
        played = {"holdfast_trainer.supervise": "supervisor", "holdfast_trainer.torchrun": "agent"}
        part = played.get(module, "rank")
        parts[part].append(process)
        parts["all"].append(process)
    return parts


def losses(steps: list[dict[str, Any]]) -> dict[tuple[int, str], set[str]]:
    """Every value ever computed, by step and kind."""
    found: dict[tuple[int, str], set[str]] = {}
    for line in steps:
        for kind in ("loss_hex", "val_loss_hex"):
            if kind in line:
                found.setdefault((line["step"], kind), set()).add(line[kind])
    return found


def assert_same_run(here: Platform, victim: str, twin: str) -> None:
    ledgers = {name: here.ask(lambda c, n=name: c.ledger("default", n)) for name in (victim, twin)}
    curves = {name: losses(here.ask(lambda c, n=name: c.steps("default", n))) for name in (victim, twin)}
    assert ledgers[twin]["totals"]["attempts"] == 1
    assert curves[victim].keys() == curves[twin].keys(), "a step is missing, or there is one too many"
    different = {key: values for key, values in curves[victim].items() if values != curves[twin][key]}
    assert not different, f"losses that differ in their bits: {different}"
    digests = {name: ledger["attempts"][-1]["digest"] for name, ledger in ledgers.items()}
    assert digests[victim]
    assert digests[victim] == digests[twin]
