"""A file that cannot be looked at is not one that is missing: whoever takes it for that begins anew.

From Python 3.14 on `Path.exists()` and its like say no where a disk fails or access is denied. Those of
contract.py raise on every Python, and `os.path` stands where the difference does not matter.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from holdfast_trainer.contract import RunDir, checkpoint_steps, exists, is_directory, is_file

ROOT = Path(__file__).parents[1]
ASKED_OF_A_PATH = ("exists", "is_dir", "is_file")


def test_what_cannot_be_looked_at_is_an_error_and_what_is_missing_none(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    asked = {"file": (True, False, True), ".": (True, True, False), "none": (False, False, False)}
    asked["file/below"] = asked["with\0in it"] = asked["none"]
    for name, answers in asked.items():
        path = tmp_path / name
        assert (exists(path), is_directory(path), is_file(path)) == answers, name
    unheard_of = tmp_path / ("x" * 300)  # no file system here has such names: looking is an error
    for ask in (exists, is_directory, is_file):
        with pytest.raises(OSError, match="File name too long"):
            ask(unheard_of)


def test_a_run_directory_that_cannot_be_looked_at_is_not_an_empty_one(tmp_path: Path) -> None:
    """Else a run would begin at step 0 beside its checkpoints."""
    run = RunDir(tmp_path / ("x" * 300))
    with pytest.raises(OSError, match="File name too long"):
        checkpoint_steps(run)
    with pytest.raises(OSError, match="File name too long"):
        run.attempt_numbers()
    empty = RunDir(tmp_path / "empty")
    assert (checkpoint_steps(empty), empty.attempt_numbers()) == ([], [])


def test_nothing_asks_a_path_by_itself() -> None:
    asked = [
        f"{file.relative_to(ROOT)}:{node.lineno} .{node.func.attr}()"
        for package in ("trainer", "controller")
        for file in (ROOT / package).rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and not node.args  # os.path's are given the path
        if isinstance(node.func, ast.Attribute) and node.func.attr in ASKED_OF_A_PATH
    ]
    assert asked == [], "ask contract.exists, is_directory or is_file"
