"""docs/faults.md, from what the fault suite has seen: `make test-faults` writes build/faults.json, and with
JOBS_KIND=TrainJob build/faults-TrainJob.json.

python -m scripts.faults [NOTE]    take its results over into docs/ and README.md, with a word on how they
                                   were taken, and what was captured into tests/kube/captured; faults that
                                   were not tried this time keep their rows
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
AS_TRAIN_JOBS = ROOT / "build" / "faults-TrainJob.json"
KEPT = ROOT / "docs" / "faults.json"
README = ROOT / "README.md"
CAPTURED = ROOT / "build" / "captured"
FIXTURES = ROOT / "tests" / "kube" / "captured"
"""What the tests of the policy judge again, and must judge as the cluster's controller did."""

HEAD = """# Every way a job was hit, and what it cost

`make test-faults` trains jobs of two replicas under DDP, on a cluster of three real nodes (kubelet and
containerd each, in network namespaces of one machine), and hits them by one fault after another, in the order
of the [table](../tests/cluster/faults/table.py). This page is made of its results, on a machine with {cores}
cores ({cpu}) and {memory_gib:.0f} GiB of memory for all of it.
{note}
The columns:

- *Steps lost* were done again; a save is made every {every} steps.
- *Resume* compares the job's end with that of an untouched twin, to the last bit: the state of both ranks and
  the loss of every step, those done twice included.
- *Left behind* are pods, PyTorchJobs and ConfigMaps of earlier attempts.
- *Seconds* are from the hit until the next attempt has done a step, with what the fault itself takes.

What to know of some faults:

- A rank that somebody kills inside its pod is a failure: nothing took the pod from the job.
- The full disk is that of the claim. It has no room until a save has failed; training goes on meanwhile.
  Where it is full when an attempt begins, it has no inodes either, until the verdict is there.
- The volume that is mounted no more is taken from all nodes once the evicted ranks have saved: what pods get
  in its place is an empty directory that is not theirs.
- The disk that fails is the claim's, too. As the kernel has it, it can be read alone from then on: training
  goes on and its saves fail, those on notice too, so these steps are lost. It is checked and mounted anew
  once the next attempt has said that it cannot begin.
- A clock that is wrong is that of all containers of one node, not of its kubelet; the figures in the status
  are compared with the right one.
- An attempt of which a part finds no node, or which has its nodes and cannot start on them, is given up after
  300 s, which are among its seconds. It spends no budget; the eviction before it is counted apart.
- Kueue's quota has room for one job: another of higher priority takes it, and the job waits, and says for
  what, until it is given back. A job whose Workload is made inactive is suspended; it was resumed at once.
- The Node of the machine without power is deleted, as a cloud's controller does.
- Pods of a node that says nothing are taken after 5 s here; Kubernetes by default waits for 300 s, which then
  come on top.

| fault | verdict | budget spent | steps lost | resume | left behind | seconds | reason in the job's status |
| --- | --- | --- | --- | --- | --- | --- | --- |
"""
BRIEF = """
| fault | verdict | budget spent | steps lost | resume | left behind |
| --- | --- | --- | --- | --- | --- |
"""
BEGIN, END = "<!-- faults: made by scripts/faults.py -->", "<!-- faults end here -->"
WRONG = """
## Not as it should be

These faults were tried, and something went otherwise than the table asks:

"""
TRAIN_JOBS = """
## As TrainJobs

The same faults where attempts are TrainJobs (`jobs.kind`), under Kubeflow Trainer on JobSet:
`JOBS_KIND=TrainJob make test-faults`. *Left behind* are also Jobs, JobSets and TrainingRuntimes.
{note}
| fault | verdict | budget spent | steps lost | resume | left behind | seconds | reason in the job's status |
| --- | --- | --- | --- | --- | --- | --- | --- |
"""
UNTRIED = """
## Not tried

"""


def page(results: Mapping[str, Any]) -> str:
    """The page's whole text."""
    head = HEAD.format(every=results["every"], note=_note(results), **results["machine"])
    text = head + _table(results)
    if (others := results.get("as_train_jobs")) is not None:
        text += TRAIN_JOBS.format(note=_note(others)) + _table(others)
    return text


def _note(results: Mapping[str, Any]) -> str:
    return f"{results['note']}\n" if results.get("note") else ""


def _table(results: Mapping[str, Any]) -> str:
    """The rows of those that passed, and below them the others."""
    rows, passed = results["rows"], _passed(results)
    wrong = [row for row in rows if row not in passed and len(row) > 1]
    untried = [row for row in rows if len(row) == 1]
    text = "".join(_row(row) for row in passed)
    if wrong:
        text += WRONG + "".join(f"- {row['fault']}: {_cell(_fault_of(row))}\n" for row in wrong)
    if untried:
        text += UNTRIED + "".join(f"- {row['fault']}\n" for row in untried)
    return text


def in_readme(text: str, results: Mapping[str, Any]) -> str:
    """README with the rows of the faults that passed between its marks. Raises ValueError without these."""
    before, found, rest = text.partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not found or not ended:
        raise ValueError(f"README.md has not got {BEGIN} and, after it, {END}: the table goes between them")
    table = BRIEF + "".join(_line(_outcome(row)) for row in _passed(results))
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def renewed(kept: Mapping[str, Any], results: Mapping[str, Any], note: str) -> dict[str, Any]:
    """The results, with the kept rows of those faults that were not tried this time, and the kept note
    where there is none."""
    known = {row["fault"]: row for row in kept.get("rows", [])}
    rows = [known.get(row["fault"], row) if len(row) == 1 else row for row in results["rows"]]
    return {**results, "rows": rows, "note": note or kept.get("note", "")}


def _fault_of(row: Mapping[str, Any]) -> str:
    return str(row.get("wrong") or row.get("resume") or "the job did not come to its end")


def _passed(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [row for row in results["rows"] if row.get("resume") == "exact" and "wrong" not in row]


def _outcome(row: Mapping[str, Any]) -> list[str]:
    """The columns that both tables have."""
    names = ("fault", "verdict", "budget", "lost_steps", "resume", "left_behind")
    return [str(row[name]) for name in names]


def _row(row: Mapping[str, Any]) -> str:
    seconds = row["recovery_seconds"]
    return _line([*_outcome(row), "" if seconds is None else f"{seconds:.0f}", _cell(row["reason"])])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def kept() -> dict[str, Any]:
    """The results in docs/."""
    return dict(json.loads(KEPT.read_text(encoding="utf-8")))


def main() -> int:
    found = {path: json.loads(path.read_text("utf-8")) for path in (RESULTS, AS_TRAIN_JOBS) if path.exists()}
    if not found:
        print(f"{RESULTS} is not there: `make test-faults` writes it", file=sys.stderr)
        return 1
    note, after = " ".join(sys.argv[1:]), kept() if KEPT.exists() else {}
    train_jobs = after.pop("as_train_jobs", {})
    if RESULTS in found:
        after = renewed(after, found[RESULTS], note)
    if AS_TRAIN_JOBS in found:
        train_jobs = renewed(train_jobs, found[AS_TRAIN_JOBS], note)
    after |= {"as_train_jobs": train_jobs} if train_jobs else {}
    KEPT.write_text(json.dumps(after, indent=1) + "\n", encoding="utf-8")
    KEPT.with_suffix(".md").write_text(page(after), encoding="utf-8")
    README.write_text(in_readme(README.read_text(encoding="utf-8"), after), encoding="utf-8")
    shutil.copytree(CAPTURED, FIXTURES, dirs_exist_ok=True)
    print(f"wrote {KEPT.with_suffix('.md')} and {FIXTURES}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
