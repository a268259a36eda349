"""The controller of one machine dies at any of its acts, again and again, while jobs live their lives."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest
from processes import Processes
from waiting import wait_until

from holdfast_controller.client import Client
from holdfast_controller.cluster import AlreadyExists, NotFound, Unavailable
from holdfast_controller.data_directory import DataDirectory, read_token
from holdfast_controller.jobs import Phase, TrainingJob, Verdict
from holdfast_controller.local.ports import free_port
from holdfast_trainer.contract import ENV_ATTEMPT_UID

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
SCRIPT = Path(__file__).parents[1] / "mortal_controller.py"
SEED = int(os.environ.get("DEATH_SEED", "20261126"))
"""Printed with a failure; set DEATH_SEED to see the same choices again."""
MOST_ACTS = 16
T = TypeVar("T")

BEGIN = 'cd "$HOLDFAST_RUN_DIR"; echo "$HOLDFAST_ATTEMPT $RANK" >> started; '
FOR_EVER = "while true; do sleep 0.1; done"
JOBS: dict[str, dict[str, Any]] = {
    "plain": {"command": "sleep 0.3"},
    "pair": {"command": "sleep 0.3", "replicas": 2},
    "broken": {"command": "exit 3", "retries": {"failures": 0}},
    "retry": {"command": "test -e tried || { touch tried; exit 3; }", "retries": {"failures": 1}},
    "taken": {"command": "test -e tried || { touch tried; kill -9 $$; }", "retries": {"failures": 0}},
    "pause": {"command": f"test -e resumed || {FOR_EVER}", "graceSeconds": 5},
    "gone": {"command": FOR_EVER, "graceSeconds": 5},
}
FAILURES = {"broken": (1,), "retry": (0, 1)}
"""That may be counted, where not none: one of a start that was cut short is no failure of the job."""


class User:
    """Asks whichever controller there is."""

    def __init__(self, data: Path, port: int) -> None:
        self._data, self._url = DataDirectory(data), f"http://127.0.0.1:{port}"

    def ask(self, question: Callable[[Client], T]) -> T:
        def answered() -> list[T] | None:
            try:
                with Client(self._url, read_token(self._data.token)) as client:
                    return [question(client)]
            except Unavailable:
                return None

        return wait_until(answered, "a controller to answer", 600)[0]

    def job(self, name: str) -> TrainingJob:
        return self.ask(lambda client: client.get("default", name))

    def started(self, name: str) -> Path | None:
        """The run directory, once a rank of it ran."""
        found = [file.parent for file in self._data.path.glob(f"runs/default/{name}-*/started")]
        return found[0] if found else None

    def use(self, name: str) -> None:
        """What the user of this job does; a request that was carried out is not always heard to be."""
        spec = JOBS[name] | {"command": ["sh", "-c", BEGIN + JOBS[name]["command"]]}
        document = {
            "apiVersion": "holdfast.dev/v1alpha1",
            "kind": "TrainingJob",
            "metadata": {"name": name},
            "spec": spec,
        }
        with suppress(AlreadyExists):
            self.ask(lambda client: client.submit(document, "default"))
        if name in ("pause", "gone"):
            run = wait_until(lambda: self.started(name), f"{name} to run", 600)
        if name == "gone":
            with suppress(NotFound):
                self.ask(lambda client: client.delete("default", name))
        if name == "pause":
            self.ask(lambda client: client.suspend("default", name))
            wait_until(lambda: self.job(name).status.phase is Phase.SUSPENDED, "pause to be suspended", 600)
            (run / "resumed").touch()
            self.ask(lambda client: client.resume("default", name))


def test_at_whichever_act_the_controller_dies_no_job_is_lost_doubled_or_blamed(
    processes: Processes, tmp_path: Path
) -> None:
    """What its deaths cost is disruptions alone: starts that were cut short."""
    print(f"DEATH_SEED={SEED}")
    data, port, log = tmp_path / "data", free_port(), tmp_path / "controllers.log"
    user = User(data, port)
    with (tmp_path / "deaths").open("w") as deaths:
        words = [str(port), str(SEED), str(MOST_ACTS), str(log)]
        mortal = processes.start([sys.executable, SCRIPT, data, *words], stdout=deaths)
        wait_until(DataDirectory(data).token.exists, "the first controller")
        with ThreadPoolExecutor(len(JOBS)) as users:
            for used in [users.submit(user.use, name) for name in JOBS]:
                used.result()

        def over() -> dict[str, TrainingJob] | None:
            assert mortal.poll() is None, log.read_text()[-3000:]
            there = {job.metadata.name: job for job in user.ask(lambda client: client.list_jobs("default"))}
            ends = all(job.status.phase.final for job in there.values())
            return there if ends and "gone" not in there else None

        jobs = wait_until(over, "all jobs to end", 900)
    assert len((tmp_path / "deaths").read_text().split()) > 5, "controllers died meanwhile"
    told = {name: job.status.model_dump_json(indent=1) for name, job in jobs.items()}
    assert jobs.keys() == JOBS.keys() - {"gone"}
    for name, job in jobs.items():
        assert job.status.phase is (Phase.FAILED if name == "broken" else Phase.SUCCEEDED), told[name]
        assert job.status.failures in FAILURES.get(name, (0,)), told[name]
        disrupted = [one.reason for one in job.status.attempts if one.verdict is Verdict.DISRUPTED]
        assert name == "taken" or all("CutShort" in reason for reason in disrupted), told[name]
        run = user.started(name)
        assert run is not None
        ranks = (run / "started").read_text().splitlines()
        assert len(ranks) == len(set(ranks)), f"{name}: a rank of an attempt ran twice: {ranks}"

    def nothing_runs() -> bool:
        with suppress(psutil.NoSuchProcess):
            return not any(ENV_ATTEMPT_UID in one.environ() for one in processes.running())
        return False

    wait_until(nothing_runs, "no process of an attempt to be left")
    assert user.started("gone") is None, "its run directory went with it"
    mortal.kill()
    mortal.wait()
