"""The page of faults is what the results say, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from scripts.faults import BEGIN, END, in_readme, page, renewed

ROW = {
    "fault": "eviction",
    "verdict": "Disrupted",
    "reason": "replica 1: EvictionByEvictionAPI: by | the API",
    "budget": "disruptions",
    "notice": True,
    "lost_steps": 0,
    "left_behind": 0,
    "recovery_seconds": 6.32,
    "resume": "exact",
}


MACHINE = {"cpu": "Some CPU", "cores": 2, "memory_gib": 23.5}


def page_of(*rows: dict[str, Any]) -> str:
    return page({"machine": MACHINE, "every": 20, "rows": rows})


def test_a_row_a_fault_with_what_was_seen() -> None:
    text = page_of(ROW, {**ROW, "fault": "etcd restarted", "recovery_seconds": None})
    first, second = (line for line in text.splitlines() if line.startswith(("| eviction", "| etcd")))
    assert first == (
        "| eviction | Disrupted | disruptions | 0 | exact | 0 | 6 | "
        "replica 1: EvictionByEvictionAPI: by \\| the API |"
    )
    assert "| exact | 0 |  |" in second, "what was not measured is not shown as zero"
    assert "a save is made every 20 steps" in text
    assert "2\ncores (Some CPU) and 24 GiB" in text
    assert "Not as it should be" not in text


def test_the_rows_of_train_jobs_have_a_table_of_their_own() -> None:
    row = {**ROW, "recovery_seconds": 11.4}
    others = {
        "machine": MACHINE,
        "every": 20,
        "rows": [row, {"fault": "etcd restarted"}],
        "note": "By night.",
    }
    text = page({"machine": MACHINE, "every": 20, "rows": [ROW], "as_train_jobs": others})
    first, second = text.split("## As TrainJobs")
    assert "| exact | 0 | 6 |" in first
    assert "Not tried" not in first
    assert "TrainingRuntimes.\nBy night.\n\n| fault" in second
    assert "| exact | 0 | 11 |" in second
    assert second.endswith("## Not tried\n\n- etcd restarted\n")


def test_how_the_figures_were_taken_is_told_before_them() -> None:
    text = page({"machine": MACHINE, "every": 20, "rows": [ROW], "note": "Other work ran."})
    assert "for all of it.\nOther work ran.\n\nThe columns" in text
    assert "for all of it.\n\nThe columns" in page_of(ROW)


def test_a_fault_that_went_wrong_or_was_not_tried_is_no_row() -> None:
    late = {key: value for key, value in ROW.items() if key != "resume"}
    text = page_of(
        ROW,
        {"fault": "kubelet stopped", "wrong": "waited 400 s for a verdict"},
        {**ROW, "fault": "drain of its node", "resume": "the digests of the final states differ"},
        {**late, "fault": "NoExecute taint"},
        {"fault": "etcd restarted"},
    )
    wrong, untried = text.split("## Not as it should be")[1].split("## Not tried")
    assert wrong.strip().splitlines()[2:] == [
        "- kubelet stopped: waited 400 s for a verdict",
        "- drain of its node: the digests of the final states differ",
        "- NoExecute taint: the job did not come to its end",
    ]
    assert "- etcd restarted\n" in untried
    assert text.count("\n| ") == 3, "the head and one row"


def test_all_were_tried() -> None:
    assert "Not tried" not in page_of(ROW)


def test_faults_that_were_not_tried_this_time_keep_their_rows_and_those_that_are_no_more_go() -> None:
    gone, old = {**ROW, "fault": "locusts"}, {**ROW, "fault": "etcd restarted"}
    kept = {"machine": MACHINE, "every": 20, "note": "Other work ran.", "rows": [gone, ROW, old]}
    new = {**ROW, "lost_steps": 3}
    results = {"machine": MACHINE, "every": 20, "rows": [new, {"fault": "etcd restarted"}, {"fault": "new"}]}
    after = renewed(kept, results, "")
    assert after["rows"] == [new, old, {"fault": "new"}]
    assert after["note"] == "Other work ran."
    assert renewed(kept, results, "All alone.")["note"] == "All alone."
    assert renewed({}, results, "")["note"] == ""


def test_the_readme_has_what_passed_in_brief_and_is_else_left_alone() -> None:
    results = {"machine": MACHINE, "every": 20, "rows": [ROW, {"fault": "etcd restarted"}]}
    old = f"# Holdfast\n\n{BEGIN}\n| an older table |\n{END}\n\n## More\n"
    new = in_readme(old, results)
    assert new.startswith(f"# Holdfast\n\n{BEGIN}\n")
    assert new.endswith(f"{END}\n\n## More\n")
    assert "| eviction | Disrupted | disruptions | 0 | exact | 0 |\n" in new
    assert "older" not in new
    assert "etcd" not in new
    assert in_readme(new, results) == new


@pytest.mark.parametrize("text", ["# Holdfast\n", f"{END} {BEGIN}"])
def test_a_readme_without_a_place_for_them_is_told(text: str) -> None:
    with pytest.raises(ValueError, match=r"README.md has not got <!-- faults: .* the table goes between"):
        in_readme(text, {"rows": []})
