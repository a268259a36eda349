"""What a real cluster said when a job was hit is judged here as it was judged there.

`make test-faults` keeps the documents of each fault of tests/cluster/faults/table.py as they were at the
moment of the verdict, without what names the machine; `python -m scripts.faults` takes them over.
"""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.faults.table import FAULTS

from holdfast_controller.jobs import Verdict
from holdfast_controller.kube.observation import KILLED, STOPPED, attempt_observation
from holdfast_controller.policy.classify import Incident, classify
from holdfast_controller.policy.queue_waits import why_put_aside

CAPTURED = Path(__file__).with_name("captured")
"""Where attempts were PyTorchJobs; those of TrainJobs are in a directory of their own."""
DOCUMENTS = sorted(CAPTURED.rglob("*.json"))
EACH = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(CAPTURED))[:-5])


def judged(captured: dict[str, Any]) -> tuple[str, str]:
    """Verdict and reason of the documents alone, and of what Holdfast had put on record before."""
    record, pods = captured["record"], captured["pods"]
    seen = attempt_observation(1, len(pods), captured["attemptObject"], pods)
    assert seen.gone
    if why_put_aside(record["reason"]):  # what Kueue's Workload said is in no document of the job's
        seen = replace(seen, put_aside=record["reason"])
    ending = Incident(Verdict(record["ending"]), record["reason"]) if "ending" in record else None
    incident = classify(seen, ending)
    return incident.verdict, incident.reason


@EACH
def test_what_a_cluster_said_is_judged_as_it_was_there(path: Path) -> None:
    captured = json.loads(path.read_text(encoding="utf-8"))
    assert judged(captured) == (captured["record"]["verdict"], captured["record"]["reason"])


HANG = "no step for 20 s: rank 1 says nothing"


@pytest.mark.parametrize("seen_by", ["its peer", "Holdfast"])
@pytest.mark.parametrize("told", ["not Ready", "Ready"])
def test_a_hang_that_a_silent_node_explains_is_a_lost_node(seen_by: str, told: str) -> None:
    """As a real node without kubelet left them, had the ranks' watchdogs come before its taint.

    Where the node is not known to be silent the same documents tell of a hang.
    """
    captured = json.loads((CAPTURED / "kubelet-stopped.json").read_text(encoding="utf-8"))
    known = [{one["type"]: one for one in pod["status"]["conditions"]} for pod in captured["pods"]]
    [gone] = [number for number, conditions in enumerate(known) if "DisruptionTarget" in conditions]
    lost, peer, conditions = captured["pods"][gone], captured["pods"][1 - gone], known[gone]
    lost["metadata"]["annotations"] = {}
    del conditions["DisruptionTarget"]
    conditions["Ready"]["status"] = "True" if told == "Ready" else "False"
    lost["status"]["conditions"] = list(conditions.values())
    [end] = [one["state"]["terminated"] for one in peer["status"]["containerStatuses"]]
    if seen_by == "its peer":
        end |= {
            "exitCode": 1,
            "message": json.dumps({"outcome": "hung", "step": 313, "durable_step": 313, "error": HANG}),
        }
    else:
        end.pop("message")
        captured["record"] = {"ending": "Hung", "reason": f"replica {1 - gone}: {HANG}"}
    if told == "Ready":
        assert judged(captured)[0] == "Hung"
    else:
        assert judged(captured) == (
            "LostNode", f"replica {gone}: its node fell silent (replica {1 - gone}: {HANG})"
        )  # fmt: skip


CLOCKS = pytest.mark.parametrize("seconds", [-90, 90], ids=["behind", "ahead"])


@CLOCKS
@EACH
def test_a_node_whose_clock_is_wrong_changes_no_verdict(path: Path, seconds: int) -> None:
    """Of the kubelet's times, those of one pod after the other; the apiserver's stay as they are."""
    captured = json.loads(path.read_text(encoding="utf-8"))
    for number, pod in enumerate(captured["pods"]):
        moved = copy.deepcopy(captured)
        for container in moved["pods"][number]["status"]["containerStatuses"]:
            for state in container["state"].values():
                move(state, ("startedAt", "finishedAt"), seconds)
        assert judged(moved)[0] == captured["record"]["verdict"], pod["metadata"]["name"]


@CLOCKS
@EACH
def test_a_controller_whose_clock_is_wrong_changes_no_verdict(path: Path, seconds: int) -> None:
    """It has put on record when it asked for the end of the attempt."""
    captured = json.loads(path.read_text(encoding="utf-8"))
    marks = (captured["attemptObject"] or {"metadata": {}})["metadata"].get("annotations", {})
    move(marks, (STOPPED, KILLED), seconds)
    assert judged(captured)[0] == captured["record"]["verdict"]


def move(times: dict[str, str | None], names: tuple[str, str], seconds: int) -> None:
    """In place, those that are there: of a container that never was the kubelet knows none."""
    for name in names:
        if told := times.get(name):
            times[name] = (datetime.fromisoformat(told) + timedelta(seconds=seconds)).isoformat()


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault.verdict], ids=lambda fault: fault.name)
def test_every_fault_of_the_suite_has_its_documents(fault: Any) -> None:
    documents = [json.loads(path.read_text()) for path in CAPTURED.glob("*.json")]
    [captured] = [one for one in documents if one["fault"] == fault.name]
    assert judged(captured)[0] == fault.verdict
