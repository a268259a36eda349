"""A real Prometheus beside a real controller, a real training job and the exporter over GPUs of a script."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
from one_machine import of_attempt
from processes import Processes
from scripts.monitoring import RULES
from scripts.monitoring.live import Prometheus
from tests.nvml.stand_in import GIB, Process, Script
from waiting import wait_until

from holdfast_controller.data_directory import DataDirectory
from holdfast_trainer.contract import ENV_ATTEMPT

ROOT = Path(__file__).parents[2]
VARIABLES = {
    "namespace": "default",
    "job": "gpt",
    "price": "2",
    "__rate_interval": "20s",
    "__range": "120s",
}
PACKAGES = {"prometheus": "prometheus", "promtool": "prometheus"}


@contextmanager
def prometheus(
    directory: Path, processes: Processes, data: DataDirectory, exporter: str, *, honor_labels: bool
) -> Iterator[Prometheus]:
    """Scrapes the controller, every trainer it starts and the exporter each second; has the alerts."""
    directory.mkdir()
    server = data.read_server_file()
    assert server is not None
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(ROOT / RULES)],
        "scrape_configs": [
            {
                "job_name": "holdfast",
                "honor_labels": honor_labels,
                "authorization": {"credentials_file": str(data.token)},
                "static_configs": [{"targets": [server.url.removeprefix("http://")]}],
            },
            {
                "job_name": "trainers",
                "honor_labels": honor_labels,
                "file_sd_configs": [{"files": [str(data.path / "prometheus-targets.json")]}],
            },
            {
                "job_name": "gpus",
                "honor_labels": honor_labels,
                "static_configs": [{"targets": [exporter], "labels": {"namespace": "monitoring"}}],
            },
        ],
    }
    # JSON is YAML too.
    (directory / "prometheus.json").write_text(json.dumps(config))
    log = directory / "log"
    command = [
        "prometheus",
        f"--config.file={directory / 'prometheus.json'}",
        f"--storage.tsdb.path={directory / 'data'}",
        "--web.listen-address=127.0.0.1:0",
    ]
    with log.open("w") as out:
        process = processes.start(command, stdout=out, stderr=out)
    try:
        address = _address(process, log, r'msg="Listening on" address=(\S+)')
        with httpx.Client(base_url=f"http://{address}", timeout=300, trust_env=False) as client:
            yield Prometheus(client, VARIABLES)
    finally:
        process.kill()
        process.wait()


def _address(process: subprocess.Popen[str], log: Path, pattern: str) -> str:
    def said() -> str | None:
        text = log.read_text()
        assert process.poll() is None, text[-3000:]
        found = re.search(pattern, text)
        return found[1] if found else None

    address = wait_until(said, f"{log} to say the address")
    assert address is not None
    return address


@contextmanager
def exporter(directory: Path, processes: Processes, environment: Mapping[str, str]) -> Iterator[str]:
    """`holdfast exporter` in an environment that has NVML; yields where it answers."""
    directory.mkdir()
    log = directory / "exporter.log"
    command = [Path(sys.executable).with_name("holdfast"), "exporter", "--port=0", "--deadline=60"]
    with log.open("w") as out:
        process = processes.start(command, env=environment, stdout=out, stderr=out)
    try:
        yield _address(process, log, r"metrics at http://([^/]+)/metrics")
    finally:
        process.kill()
        process.wait()


def use_gpu(script: Script, processes: Processes, attempt: int) -> None:
    """Let NVML tell of the attempt's rank 0 on the first GPU; the second is nobody's."""

    def rank() -> int | None:
        for process in of_attempt(processes)["rank"]:
            try:
                environment = process.environ()
            except psutil.Error:
                continue  # it ended meanwhile
            if environment.get(ENV_ATTEMPT) == str(attempt) and environment.get("RANK") == "0":
                return process.pid
        return None

    pid = wait_until(rank, f"rank 0 of attempt {attempt}")
    assert pid is not None
    script.gpus[0].processes = [Process(pid, 4 * GIB, 55)]
    script.write()
