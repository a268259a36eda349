"""Somebody asks what can be set, and is told of all of it and of nothing else."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys

import pytest

from holdfast_trainer.config import load
from holdfast_trainer.explain_command import main
from holdfast_trainer.reference import Setting, sections

REQUIRED = [
    "model.vocab_size=64",
    "model.layers=1",
    "model.heads=2",
    "model.width=8",
    "model.context=8",
    "data.path=shards",
    "train.steps=10",
    "train.global_batch=2",
]
STREAMED = [
    *(word for word in REQUIRED if not word.startswith("data.")),
    "data.stream.sources=[texts]",
    "data.stream.tokenizer=tokenizer.json",
]
SETTINGS = [setting for section in sections() for setting in section.settings]


def keys(mapping: dict[str, object], path: str = "") -> set[str]:
    found = set()
    for name, value in mapping.items():
        key = f"{path}{name}"
        found |= keys(value, f"{key}.") if isinstance(value, dict) else {key}
    return found


def test_all_that_can_be_set_is_told_and_nothing_else() -> None:
    streamed = keys(dataclasses.asdict(load(None, STREAMED, environ={})))
    assert {setting.key for setting in SETTINGS} == streamed
    assert [setting.key for setting in SETTINGS if not setting.meaning] == []


@pytest.mark.parametrize("setting", [s for s in SETTINGS if s.default is not None], ids=lambda s: s.key)
def test_a_default_can_be_written_as_it_is_told_and_changes_nothing(setting: Setting) -> None:
    if setting.key == "data.path":  # null, but where there is a stream
        words = STREAMED
    else:
        words = STREAMED if setting.key.startswith("data.stream") else REQUIRED
    written = f"{setting.key}={setting.default}"
    assert load(None, [*words, written], environ={}) == load(None, words, environ={})


@pytest.mark.parametrize("key", [s.key for s in SETTINGS if s.default is None])
def test_what_is_told_to_be_required_is(key: str) -> None:
    words = STREAMED if key.startswith("data.") else REQUIRED
    with pytest.raises(ValueError, match=f"{key}: required, but missing"):
        load(None, [word for word in words if not word.startswith(f"{key}=")], environ={})


def test_a_section_or_one_setting_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data"]) == 0
    shown = capsys.readouterr().out
    assert "data.path" in shown
    assert "data.stream.sources" in shown
    assert "train." not in shown

    assert main(["train.seed", "-o", "json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)
    assert told == {
        "key": "train.seed",
        "takes": "an integer, at least 0",
        "default": "1337",
        "meaning": "Seed of the initial weights, of dropout and of the order of samples; "
        "another one is another training.",
    }


@pytest.mark.parametrize(
    ("asked", "meant"), [("precision", "train.precision"), ("train.sed", "train.seed"), ("optimm", "optim")]
)
def test_what_is_no_setting_is_answered_with_the_one_that_was_meant(
    asked: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([asked]) == 2
    assert capsys.readouterr().err == f"error: '{asked}' is no setting; did you mean {meant}?\n"


def test_the_command_says_that_it_is_there() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "holdfast_trainer", "explain", "nonsense"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert shown.returncode == 2
    assert shown.stderr == "error: 'nonsense' is no setting; without a name all of them are shown\n"


@pytest.mark.parametrize("words", [["explain"], ["-h"]], ids=str)
def test_an_output_that_takes_no_more_ends_the_command_without_a_traceback(words: list[str]) -> None:
    """As `| head` and `> FILE` on a full disk: each was a traceback."""
    command = [sys.executable, "-m", "holdfast_trainer", *words]
    reader, pipe = os.pipe()
    os.close(reader)
    unread = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, text=True, check=False)
    os.close(pipe)
    assert (unread.returncode, unread.stderr) == (141, "")

    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    said = "error: the output could not be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, said)
