"""A bucket on a real server for tests, and what may go wrong with that server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import Processes
from waiting import wait_until

from holdfast_controller.local.ports import free_port
from holdfast_trainer.checkpoint import s3

SCRIPT = Path(__file__).parent / "object_server.py"


class ObjectServer:
    """One server process; everything in it is lost when it is killed."""

    def __init__(self, processes: Processes, place: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._processes, self._place = processes, place
        self._faults = place / "faults.json"
        self.start()

    @property
    def environment(self) -> dict[str, str]:
        """What a client needs, with short patience."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "tester",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_MAX_ATTEMPTS": "3",
            "HOLDFAST_LOCAL_DIR": str(self._place / "local"),
        }

    def start(self) -> None:
        with (self._place / "server.log").open("a") as log:
            self.process: subprocess.Popen[str] = self._processes.start(
                [sys.executable, SCRIPT, str(self.port), self._faults], stdout=log, stderr=log
            )
        wait_until(self._answers, "the object server to answer")

    def _answers(self) -> bool:
        assert self.process.poll() is None, (self._place / "server.log").read_text()
        try:
            with urllib.request.urlopen(f"{self.url}/moto-api/", timeout=5):
                return True
        except urllib.error.HTTPError:
            return True
        except OSError:
            return False

    def bucket(self) -> str:
        """A new bucket's name. Ask with `environment` set."""
        name = f"test-{uuid.uuid4().hex[:12]}"
        s3.client().call_s3("create_bucket", Bucket=name)
        return name

    def fail(self, *rules: dict[str, Any]) -> None:
        """Until it is called again."""
        fresh = self._faults.with_suffix(".new")
        fresh.write_text(json.dumps([*rules, {"path": f"^never {uuid.uuid4().hex}$", "answer": ""}]))
        os.replace(fresh, self._faults)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def freeze(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectServer]:
    """One for a file of tests; each makes its own buckets."""
    started = Processes()
    try:
        there = ObjectServer(started, tmp_path_factory.mktemp("objects"))
        yield there
        there.kill()
    finally:
        started.end_all()
