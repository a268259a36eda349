"""What the suite has seen: build/faults.json, which scripts/faults.py makes a page of, and build/captured."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.report import machine_facts
from tests.cluster.faults.kinds import JOBS_KIND
from tests.cluster.faults.table import FAULTS
from tests.cluster.faults.world import EVERY

from holdfast_controller.pod_settings import JobsKind

Row = dict[str, Any]
BUILD = Path(__file__).parents[3] / "build"
OF_KIND = "" if JOBS_KIND is JobsKind.PYTORCH_JOB else JOBS_KIND.value
RESULTS = BUILD / (f"faults-{OF_KIND}.json" if OF_KIND else "faults.json")
CAPTURED = BUILD / "captured" / OF_KIND
"""The documents of each fault's pods and attempt object, as they were when the verdict came."""


def write(rows: Sequence[Row]) -> None:
    """Add to the results, in the order of the table; a fault that was never tried has its name alone."""
    there = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
    known = {row["fault"]: row for row in [*there, *rows]}
    ordered = [known.get(fault.name, {"fault": fault.name}) for fault in FAULTS]
    facts = machine_facts()
    machine = {name: facts[name] for name in ("cpu", "cores", "memory_gib")}
    BUILD.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps({"machine": machine, "every": EVERY, "rows": ordered}, indent=1) + "\n")


def keep(fault: str, documents: dict[str, Any]) -> None:
    """Of the verdict after a fault."""
    CAPTURED.mkdir(parents=True, exist_ok=True)
    path = CAPTURED / f"{fault.replace(' ', '-')}.json"
    path.write_text(json.dumps({"fault": fault, **documents}, indent=1) + "\n")
