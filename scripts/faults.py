"""docs/faults.md, from what the fault suite has seen: `make test-faults` writes build/faults.json.

python -m scripts.faults    take the results of a whole run over into docs/
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "build" / "faults.json"
KEPT = ROOT / "docs" / "faults.json"

HEAD = """# Every way a job was hit, and what it cost

`make test-faults` trains jobs of two replicas under DDP, on a cluster of three real nodes (kubelet and
containerd each, in network namespaces of one machine), and hits them by one fault after another, in the order
of the [table](../tests/cluster/faults/table.py). This page is made of its last whole run.

*Steps lost* were done again; a save is made every {every} steps. *Resume* compares the job's end with that
of an untouched twin: the state of both ranks and the loss of every step, those done twice included, to the
last bit. *Seconds* are from the hit until the next attempt has done a step, with what the fault itself takes.

| fault | verdict | budget spent | steps lost | resume | seconds | reason in the job's status |
| --- | --- | --- | --- | --- | --- | --- |
"""


def page(results: Mapping[str, Any]) -> str:
    """The page's whole text."""
    return HEAD.format(every=results["every"]) + "".join(_row(row) for row in results["rows"])


def _row(row: Mapping[str, Any]) -> str:
    seconds = row["recovery_seconds"]
    cells: Sequence[object] = (
        row["fault"],
        row["verdict"],
        row["budget"],
        row["lost_steps"],
        row["resume"],
        "" if seconds is None else f"{seconds:.0f}",
        row["reason"].replace("|", "\\|").replace("\n", " "),
    )
    return f"| {' | '.join(str(cell) for cell in cells)} |\n"


def kept() -> str:
    """The page as the results in docs/ make it."""
    return page(json.loads(KEPT.read_text(encoding="utf-8")))


def main() -> int:
    if not RESULTS.exists():
        print(f"{RESULTS} is not there: `make test-faults` writes it", file=sys.stderr)
        return 1
    shutil.copyfile(RESULTS, KEPT)
    (KEPT.with_suffix(".md")).write_text(kept(), encoding="utf-8")
    print(f"wrote {KEPT.with_suffix('.md')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
