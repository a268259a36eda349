"""What the fault suite keeps of a verdict is what was told before it, without the machine's names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.cluster.faults.witness import FINALIZER, Witness, nameless


def told(directory: Path, kind: str, *documents: dict[str, Any], torn: str = "") -> None:
    (directory / kind).write_text("\n".join(json.dumps(one, indent=1) for one in documents) + torn)


def pod(version: int, phase: str, *, attempt: int = 1, held: bool = True) -> dict[str, Any]:
    labels = {
        "holdfast.dev/job": "gpt",
        "holdfast.dev/attempt": str(attempt),
        "holdfast.dev/job-uid": "77237950",
    }
    meta = {
        "name": f"gpt-{attempt}-worker-0",
        "resourceVersion": str(version),
        "labels": labels,
        "uid": "a68b43f6",
    }
    held_by = {"finalizers": [FINALIZER]} if held else {}
    state = {
        "terminated": {"exitCode": 1, "containerID": "containerd://f599", "message": "to 10.231.32.4 lost"}
    }
    return {
        "metadata": {**meta, **held_by},
        "spec": {"nodeName": "faults-d120c0-3", "containers": []},
        "status": {
            "phase": phase,
            "podIP": "10.231.32.4",
            "containerStatuses": [{"name": "pytorch", "image": "x", "state": state}],
        },
    }


def job(version: int, *records: dict[str, Any]) -> dict[str, Any]:
    return {"metadata": {"resourceVersion": str(version)}, "status": {"attempts": list(records)}}


def test_the_last_version_before_the_verdict_is_kept(tmp_path: Path) -> None:
    judged = {"number": 1, "verdict": "Failed", "reason": "replica 0: lost on faults-d120c0-3", "lastStep": 9}
    told(tmp_path, "trainingjobs", job(10, {"number": 1}), job(20, judged), job(30, judged, {"number": 2}))
    told(
        tmp_path, "pods", pod(9, "Pending"), pod(12, "Running"), pod(18, "Failed"),
        pod(21, "Failed", held=False), pod(25, "Pending", attempt=2), torn='\n{"metadata": {"na',
    )  # fmt: skip
    told(tmp_path, "pytorchjobs")
    witness = Witness(tmp_path, "gpt")
    documents = witness.of_verdict(1)
    assert documents is not None
    assert witness.of_verdict(2) is None, "it has none yet"
    kept = nameless(documents, {"faults-d120c0": "node-1", "faults-d120c0-3": "node-3"})
    assert kept["record"] == {"verdict": "Failed", "reason": "replica 0: lost on node-3"}
    [one] = kept["pods"]
    assert one["status"]["phase"] == "Failed"
    assert one["spec"] == {"nodeName": "node-3"}
    assert one["status"]["containerStatuses"][0]["state"]["terminated"]["message"] == "to 192.0.2.1 lost"
    for name in ("77237950", "a68b43f6", "f599", "10.231", "d120c0"):
        assert name not in json.dumps(kept)
