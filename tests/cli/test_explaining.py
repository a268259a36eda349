"""Somebody without a cluster asks what `kubectl explain` would tell."""

from __future__ import annotations

import json

import pytest
from typed import Holdfast

from holdfast_controller.cli.explaining import keys
from holdfast_controller.jobs import TrainingJob


def paths(value: object, key: str) -> set[str]:
    if not isinstance(value, dict):
        return {key}
    return {key}.union(*(paths(inner, f"{key}.{name}") for name, inner in value.items()))


def test_every_key_that_a_job_has_is_told_with_its_meaning() -> None:
    spec = {
        "command": ["python", "train.py"],
        "storage": {"claim": "runs", "data": "texts"},
        "resources": {"cpu": "1", "memory": "1Gi"},
    }
    job = TrainingJob.model_validate({"metadata": {"name": "a"}, "spec": spec})
    written = job.model_dump(mode="json", by_alias=True)
    told = {one.key: one for one in keys()}
    assert paths(written["spec"], "spec") == {key for key in told if key.startswith("spec")}
    assert paths(written["status"], "status") <= set(told)
    assert [one.key for one in told.values() if not one.meaning] == []
    assert {key for key, one in told.items() if one.required} >= {
        "spec",
        "spec.command",
        "spec.storage.claim",
    }


def test_what_a_key_takes_its_default_and_its_meaning(
    holdfast: Holdfast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = holdfast("explain", "spec.retries").stdout
    assert shown.splitlines()[:4] == [
        "  spec.retries",
        "      How often the job may start again; failures and disruptions are counted",
        "      apart.",
        "    spec.retries.failures  (an integer, at least 0, at most 1000; default 3)",
    ]
    assert "spec.gpus" not in shown
    assert "spec.gpus" in holdfast("explain").stdout

    (told,) = json.loads(holdfast("explain", "spec.capacity", "-o", "json").stdout)
    assert told["takes"] == "Spot, SpotFirst, OnDemandFirst, OnDemand, Any"
    assert (told["default"], told["required"]) == ("Any", False)


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ("retries", "did you mean spec.retries?"),
        ("spec.replica", "did you mean spec.replicas?"),
        ("zzz", "spec and status are"),
    ],
)
def test_what_is_no_key_is_answered_with_the_one_that_was_meant(
    holdfast: Holdfast, asked: str, meant: str
) -> None:
    said = holdfast("explain", asked, code=2).stderr
    assert f"'{asked}' is no key of a job; {meant}" in " ".join(said.split())
