"""A resume is told where the code is not that which wrote the checkpoint."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from gangs import Workshop

from holdfast_trainer import environment
from holdfast_trainer.code_digests import own_code, programs_code
from holdfast_trainer.contract import MANIFEST
from holdfast_trainer.environment import differences


def test_a_resume_under_another_holdfast_is_told(workshop: Workshop, tmp_path: Path) -> None:
    """An image was built anew between two attempts: its version said nothing, as it changes with releases."""
    history = workshop.finish(steps=10)
    kept = json.loads((history.run.checkpoint(10) / MANIFEST).read_text())["environment"]
    assert kept["Holdfast's code"] == own_code()
    other = tmp_path / "other"
    shutil.copytree(Path(environment.__file__).parent, other, ignore=shutil.ignore_patterns("__pycache__"))
    assert own_code(other) == own_code()
    with (other / "optim.py").open("a") as file:
        file.write("# another one\n")
    assert own_code(other) != own_code()
    told = differences(kept, {"Holdfast's code": own_code(other)})
    assert told == [f"Holdfast's code: {own_code()} -> {own_code(other)}"]


TAKES_ITS_LOSS_FROM_BESIDE = """
import sys
import torch
from holdfast_trainer.run import Run
from losses_of_mine import loss_of

run = Run()
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
run.track(model=model, optimizer=optimizer)
for step in run.steps(int(sys.argv[1])):
    optimizer.zero_grad()
    loss_of(model(torch.ones(3, 2))).backward()
    optimizer.step()
"""


def test_a_resume_with_a_script_that_was_edited_is_told(workshop: Workshop, tmp_path: Path) -> None:
    """It was edited while its job waited, and went on without a word as another training."""
    (place := tmp_path / "here").mkdir()
    script, beside = place / "mine.py", place / "losses_of_mine.py"
    script.write_text(TAKES_ITS_LOSS_FROM_BESIDE)
    beside.write_text("def loss_of(values): return values.pow(2).sum()\n")
    (place / "of_another_program.py").write_text("")

    def differences_of(attempt: int) -> list[str]:
        history = workshop.finish(script=script, arguments=[str(attempt)])
        return history.events("attempt_start", attempt)[0]["differences"]

    differences_of(1)
    (place / "of_another_program.py").write_text("# edited\n")
    place = place.rename(tmp_path / "there")
    script, beside = place / "mine.py", place / "losses_of_mine.py"
    assert differences_of(2) == [], "what it does not import, and where it lies, change nothing"
    beside.write_text("def loss_of(values): return values.abs().sum()\n")
    (told,) = differences_of(3)
    assert re.fullmatch(r"the program's code: [0-9a-f]{12} -> [0-9a-f]{12}", told)
    assert differences_of(4) == []


@pytest.mark.parametrize(
    ("command", "known"),
    [
        pytest.param(["program.py"], True, id="a script"),
        pytest.param(["-m", "mine.program"], True, id="a module of a package"),
        pytest.param(["-m", "mine"], True, id="a package"),
        pytest.param(["-c", "from mine import program"], False, id="a line"),
    ],
)
def test_what_a_program_is_made_of(tmp_path: Path, command: list[str], known: bool) -> None:
    """Its own files that it has imported: nothing that is installed, not even within its directory."""
    installed = tmp_path / "mine" / ".venv" / "site-packages"
    installed.mkdir(parents=True)
    (tmp_path / "mine" / "__init__.py").write_text("")
    (tmp_path / "mine" / "__main__.py").write_text("import mine.program\n")
    (tmp_path / "mine" / "program.py").write_text(
        "import sys, types\nsys.path.insert(0, sys.argv[1])\nimport installed\n"
        "sys.modules['made'] = made = types.ModuleType('made')\nmade.__file__ = '_made.py'\n"
        "from holdfast_trainer.code_digests import programs_code\nprint(programs_code())\n"
    )
    (installed / "installed.py").write_text("")

    def told() -> str:
        line = [sys.executable, *command, str(installed)]
        place = tmp_path / "mine" if command == ["program.py"] else tmp_path
        return subprocess.run(line, cwd=place, capture_output=True, text=True, check=True).stdout.strip()

    before = told()
    assert bool(before) is known
    (installed / "installed.py").write_text("# of another version\n")
    assert told() == before
    with (tmp_path / "mine" / "program.py").open("a") as file:
        file.write("# edited\n")
    assert (told() != before) is known


def test_of_holdfasts_own_program_its_own_code_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "__main__", importlib.import_module("holdfast_trainer.__main__"))
    assert programs_code() == ""
