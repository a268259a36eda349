"""What is imported is not looked at for garbage, and afterwards garbage is collected as ever."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import pytest
from gpt_runs import write_config

from holdfast_trainer.importing import without_collector

COUNTED = """
import gc, sys
from holdfast_trainer.__main__ import main

PASSES = []

def noted(phase, told):
    training = sys.modules.get("holdfast_trainer.train")
    if phase == "start" and training is not None and training.__spec__._initializing:
        PASSES.append(told)

gc.callbacks.append(noted)
code = main(sys.argv[1:])
print("ended with", code, "torch" in sys.modules, "after", len(PASSES), "passes")
print("collects again:", gc.isenabled())
print("looks at less than a tenth:", len(gc.get_objects()) < gc.get_freeze_count() / 10)
"""

ASKED = """
import sys
from holdfast_trainer.__main__ import main
try:
    main(sys.argv[1:])
finally:
    print("PyTorch:", "torch" in sys.modules)
"""


def test_nothing_is_collected_within_and_everything_after() -> None:
    def fails() -> None:
        with without_collector():
            assert not gc.isenabled()
            raise ImportError

    with pytest.raises(ImportError):
        fails()
    assert gc.isenabled(), "also where the import fails"


def test_amid_a_program_garbage_stays_garbage_and_a_collector_that_is_off_stays_off() -> None:
    """As where a script compiles its first function."""
    frozen = gc.get_freeze_count()
    gc.disable()
    try:
        with without_collector(at_start=False):
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
    with without_collector(at_start=False):
        pass
    assert (gc.isenabled(), gc.get_freeze_count()) == (True, frozen)


def test_a_command_is_imported_without_a_pass_of_the_collector(tmp_path: Path) -> None:
    """In a process of its own: what is imported stays so."""
    words = [sys.executable, "-c", COUNTED, "train", write_config(tmp_path), "data.path=there-is-none"]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=300)
    assert "ended with 78 True after 0 passes" in done.stdout, done.stdout + done.stderr
    assert "collects again: True" in done.stdout
    assert "looks at less than a tenth: True" in done.stdout


@pytest.mark.parametrize("command", ["train", "diagnose", "tune", "export-hf"])
@pytest.mark.parametrize("words", [["--help"], ["--steps=0", "gpt.yaml"], ["there-is-none.yaml"]])
def test_what_needs_no_pytorch_does_not_wait_for_it(command: str, words: list[str]) -> None:
    """It takes seconds to import."""
    asked = [sys.executable, "-c", ASKED, command, *words]
    done = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=300)
    assert "PyTorch: False" in done.stdout, done.stdout + done.stderr
