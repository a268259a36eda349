"""`holdfast gpus`: what a person sees of this machine's GPUs, and which words when there are none to see."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.nvml.stand_in import DRIVER_NOT_LOADED, GIB, GPU_IS_LOST, LIBRARY, Process, Script, busy_gpu
from typer.testing import CliRunner, Result

from holdfast_controller.cli import create_cli


def holdfast(*words: str, code: int = 0) -> Result:
    def never(*_: Any) -> None:
        raise AssertionError("gpus starts no controller")

    result = CliRunner().invoke(create_cli(never, never), list(words))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result


def test_a_table_of_gpus_and_who_uses_them(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    script.gpus[0].processes = [Process(os.getpid(), 3 * GIB, 25)]
    script.gpus[1].faults["any"] = GPU_IS_LOST
    script.write()
    lines = holdfast("gpus").stdout.splitlines()
    assert lines[0].split() == ["GPU", "NAME", "BUSY", "MEMORY", "POWER", "TEMPERATURE", "USED", "BY"]
    assert lines[1].split() == [
        "0",
        "Stand-In",
        "80GB",
        "60.0%",
        "20.0/80.0",
        "GiB",
        "350/700",
        "W",
        "55",
        "°C",
    ]
    assert " ".join(lines[2].split()) == "25.0% 3.0 GiB no job, 1 process"
    assert lines[3].split()[0] == "1"
    assert "cannot be read: lost" in lines[3]


def test_nobody_uses_a_gpu_only_where_it_rests(script: Script) -> None:
    """In a container NVML lists no process of another one, or one by a number that is nobody's here."""
    script.gpus[0].figures["utilization"] = 0
    script.gpus[1].processes = [Process(2**22 + 1, GIB, 10)]
    script.gpus.append(busy_gpu(2))
    script.write()
    said = [line.split("°C")[1].strip() for line in holdfast("gpus").stdout.splitlines()[1:]]
    assert said == ["nobody", *["processes that are not seen here"] * 2]


def test_of_a_gpu_in_parts_it_says_who_uses_which(script: Script) -> None:
    script.gpus[0].figures |= {"mig.0.uuid": "MIG-a", "mig.0.instance": 7, "mig.0.slices": 3}
    script.gpus[0].processes = [Process(os.getpid(), 3 * GIB, 0, instance=7)]
    script.write()
    lines = [" ".join(line.split()) for line in holdfast("gpus").stdout.splitlines()]
    assert lines[2].endswith("3.0 GiB no job, 1 process on MIG-a")
    document = json.loads(holdfast("gpus", "-o", "json").stdout)
    assert [each["mig"] for each in document["gpus"][0]["holders"]] == ["MIG-a"]
    assert [each["uuid"] for each in document["gpus"][0]["mig"]] == ["MIG-a"]


def test_as_a_document_for_programs(script: Script) -> None:
    script.gpus[0].processes = [Process(os.getpid(), None, 25)]
    script.write()
    document = json.loads(holdfast("gpus", "-o", "json").stdout)
    assert document == yaml.safe_load(holdfast("gpus", "-o", "yaml").stdout)
    assert (document["driver"], document["cuda"]) == ("580.65.06", "13.0")
    first = document["gpus"][0]
    assert first["uuid"] == script.gpus[0].uuid
    assert first["figures"]["memoryUsedBytes"] == 20 * GIB
    assert first["figures"]["utilizationRatio"] == 0.6
    assert first["holders"] == [{"processes": 1, "memoryBytes": None, "smRatio": 0.25}]
    assert first["fault"] is None
    assert document["gpus"][1]["holders"] == []


def test_without_a_driver_it_says_what_is_missing(
    script: Script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script.lines["fault.init"] = DRIVER_NOT_LOADED
    script.write()
    told = holdfast("gpus", code=1).stderr
    assert told.startswith("error: no GPU can be read: initialising NVML: ")
    assert "NVIDIA's kernel driver is not loaded: see `dmesg`, load the module nvidia" in told
    (tmp_path / LIBRARY).touch()
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    told = holdfast("gpus", "-o", "json", code=1).stderr
    assert "libnvidia-ml.so.1 is not found: install NVIDIA's driver" in told


def test_a_driver_without_gpus(script: Script) -> None:
    script.gpus.clear()
    script.write()
    result = holdfast("gpus")
    assert result.stdout == ""
    assert result.stderr == "the driver (580.65.06) knows no GPU\n"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--node", "n1"), "--node n1 is given, but no apiserver: KUBERNETES_SERVICE_HOST is not set"),
        (("--log-level", "loud"), "--log-level 'loud': it is one of debug, info, warning, error"),
        (("--log-level", "INFO", "--node", "n1"), "--node n1 is given, but no apiserver"),  # as `holdfast up`
    ],
)
def test_options_of_the_exporter_that_do_not_fit(
    words: tuple[str, ...], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert told in holdfast("exporter", *words, code=1).stderr
