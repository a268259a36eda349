"""`python -m holdfast_trainer train`, by itself: as one process, in a gang, killed, and wrongly asked."""

from __future__ import annotations

import errno
import io
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gangs import KILL, NOTICE, Workshop
from gpt_runs import COMMAND, start, write_config

from holdfast_trainer.config import check_world, load
from holdfast_trainer.contract import EXIT_CONFIG_ERROR, RunDir, Termination
from holdfast_trainer.train import memory_remedy
from holdfast_trainer.train_command import main


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_config(tmp_path)


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_killed_run_ends_as_an_untouched_one(workshop: Workshop, config: Path, ranks: int) -> None:
    shared = "train.micro_batch=2"  # by one rank and by three
    twin = start(workshop, config, shared, name="twin", ranks=ranks)
    assert twin.wait() == [0] * ranks, twin.texts()
    assert "step 40: loss " in twin.texts()
    assert set(twin.history.validations()) == {9, 18, 27, 36, 40}

    for at, signal in ((10, KILL), (22, NOTICE)):
        gang = start(workshop, config, shared, ranks=ranks)
        gang.wait_for_step(at)
        gang.wait_for_checkpoint()
        gang.signal(signal)
        gang.wait()
    last = start(workshop, config, shared, ranks=ranks)
    assert last.wait() == [0] * ranks, last.texts()
    assert last.history.losses() == twin.history.losses()
    assert last.history.validations() == twin.history.validations()
    assert last.history.stop()["digest"] == twin.history.stop()["digest"] != ""
    losses = [float.fromhex(bits) for _, bits in sorted(last.history.losses().items())]
    assert losses[-1] < losses[0] * 0.9, "it learned something"


RESUMES = """
import sys
from torch import nn
from holdfast_trainer import run
from holdfast_trainer.train_command import main

def drawn(tensor, *_):
    assert tensor.is_meta, "random weights were drawn"

if sys.argv[1] == "draws nothing":
    nn.init._no_grad_normal_ = nn.init._no_grad_uniform_ = drawn
else:
    run.has_checkpoint = lambda *_: True
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize("words", [(), ("train.parallel=fsdp",)], ids=["whole", "in shards"])
def test_a_resume_draws_no_weights_that_its_checkpoint_has(
    workshop: Workshop, config: Path, tmp_path: Path, words: tuple[str, ...]
) -> None:
    """That takes seconds for a model of 100 million parameters, of each attempt's start."""
    script = tmp_path / "resumes.py"
    script.write_text(RESUMES)
    settings = [*words, "model.family=llama", "train.steps=9"]
    first = start(workshop, config, *settings, ranks=2)
    assert first.wait() == [0, 0], first.texts()
    arguments = ["draws nothing", "--config", str(config), *settings]
    again = workshop.start(script=script, ranks=2, arguments=arguments)
    assert again.wait() == [0, 0], again.texts()
    assert "resumed from step 9" in again.texts()


def test_checkpoints_that_go_as_an_attempt_begins_are_not_taken_for_zeros(
    workshop: Workshop, config: Path, tmp_path: Path
) -> None:
    script = tmp_path / "resumes.py"
    script.write_text(RESUMES)
    gang = workshop.start(script=script, arguments=["loses them", "--config", str(config)])
    assert gang.wait() != [0]
    assert "were removed while this attempt began" in gang.texts()
    assert gang.history.steps() == []


def test_without_any_engine(workshop: Workshop, config: Path, tmp_path: Path) -> None:
    """The run directory comes from the command line, and attempts number themselves."""
    env = {"HOLDFAST_RUN_DIR": "", "HOLDFAST_ATTEMPT": ""}
    place = tmp_path / "mine"
    arguments = ["train", "--config", str(config), "--run-dir", str(place), "train.steps=8"]
    for number in (1, 2):
        gang = workshop.start(f"alone-{number}", script=COMMAND, arguments=arguments, env=env)
        assert gang.wait() == [0], gang.texts()
    run = RunDir(place)
    assert run.attempt_numbers() == [1, 2]
    assert run.checkpoint(8).is_dir()
    assert "resumed from step 8" in gang.texts()


def test_a_shard_that_is_damaged_ends_all_ranks_and_is_not_tried_again(
    workshop: Workshop, config: Path, tmp_path: Path
) -> None:
    """Rank 1 meets the damage in the middle of the training, while rank 0 waits for its gradients."""
    shard = tmp_path / "data" / "train.bin"
    tokens = np.fromfile(shard, dtype="<u2")
    tokens[len(tokens) // 2 :] = 999
    tokens.tofile(shard)
    gang = start(workshop, config, ranks=2)
    codes = gang.wait()
    assert EXIT_CONFIG_ERROR in codes, gang.texts()
    assert 0 not in codes
    told = gang.termination(codes.index(EXIT_CONFIG_ERROR))
    assert (told.outcome, told.config_error) == ("failed", True)
    assert "holds token 999, and its vocabulary ends at 63; data.verify=true names the file" in told.error
    assert gang.history.stop()["outcome"] == "failed"


@pytest.mark.parametrize(
    ("overrides", "ranks", "message"),
    [
        (["train.stps=5"], 1, "train.stps"),
        (
            ["train.global_batch=7", "train.micro_batch=1"],
            2,
            "train.global_batch: 7 sequences can not be shared",
        ),
        (["data.path=/nowhere"], 1, "/nowhere"),
        (["model.vocab_size=32"], 1, "set model.vocab_size to at least 64"),
        (["train.precision=fp16"], 1, "train.precision: 'fp16' is not native to this cpu device"),
    ],
)
def test_what_can_never_run_is_said_and_not_tried_again(
    workshop: Workshop, config: Path, overrides: list[str], ranks: int, message: str
) -> None:
    gang = start(workshop, config, *overrides, ranks=ranks)
    assert gang.wait() == [EXIT_CONFIG_ERROR] * ranks, gang.texts()
    for rank in range(ranks):
        told = gang.termination(rank)
        assert told == Termination("failed", 0, 0, told.error, config_error=True)
        assert message in told.error
        assert f"error: {told.error}" in gang.ranks[rank].text()
        assert "Traceback" not in gang.ranks[rank].text()


def test_another_configuration_on_the_same_run_directory(workshop: Workshop, config: Path) -> None:
    assert start(workshop, config, "train.steps=6", "optim.warmup_steps=2").wait() == [0]
    gang = start(workshop, config, "train.steps=6", "optim.warmup_steps=3")
    assert gang.wait() == [EXIT_CONFIG_ERROR]
    told = "was written under another configuration (optim.warmup_steps: 2 -> 3): its numbers"
    assert told in gang.termination().error


def test_a_missing_shard(workshop: Workshop, config: Path, tmp_path: Path) -> None:
    shutil.move(tmp_path / "data" / "train.bin", tmp_path / "elsewhere")
    gang = start(workshop, config)
    assert gang.wait() == [EXIT_CONFIG_ERROR]
    assert "train.bin is missing; the index names it" in gang.termination().error


@pytest.mark.parametrize(("share", "told"), [(8, 4), (9, 3), (7, 1)])
def test_what_a_step_that_does_not_fit_is_told_to_set_can_be_set(config: Path, share: int, told: int) -> None:
    """Of a share of 9 it was 4, which does not divide it."""
    words = [f"train.global_batch={2 * share}", "train.micro_batch=null"]
    assert f"set train.micro_batch to {told} (it is {share};" in memory_remedy(load(config, words), share)
    check_world(load(config, [*words, f"train.micro_batch={told}"]), 2)


@pytest.mark.parametrize("code", [errno.ESTALE, errno.ECONNABORTED])
@pytest.mark.parametrize("stream", [False, True])
def test_data_that_a_file_server_does_not_give_now_is_tried_again(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stream: bool, code: int
) -> None:
    """Such as one that was started anew, which left stale handles, or a mount whose FUSE program ended while
    it was asked: the job was over, as one whose configuration no retry can mend."""
    unreadable = config.parent / ("tokenizer.json" if stream else "data/index.json")
    opened, reason = io.open, os.strerror(code)

    def stale(file: object, *words: Any, **options: Any) -> Any:
        if str(file) == str(unreadable):
            raise OSError(code, reason)
        return opened(file, *words, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(io, "open", stale)
    monkeypatch.setattr("builtins.open", stale)
    monkeypatch.setenv("HOLDFAST_TERMINATION_LOG", str(config.parent / "end"))
    words = ["data.path=null", f"data.stream={{sources: [text], tokenizer: {unreadable}}}"] if stream else []
    assert main([str(config), *words, "validation.every=0"]) == 1
    told = Termination.from_json((config.parent / "end").read_text())
    assert told is not None
    assert (told.outcome, told.config_error) == ("failed", False)
    assert f"{unreadable} cannot be read: " in told.error
    assert told.error.endswith(reason), "and not that what was prepared is to be removed"
    assert f"error: {told.error}" in capsys.readouterr().err


def test_asked_for_nothing_it_says_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main([])
    assert raised.value.code == 2
    assert "name a configuration, such as gpt.yaml (or set HOLDFAST_CONFIG)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gpt.yaml", "train.stepz=6"], "train.stepz: unknown key"),
        (["train.stepz=6", "gpt.yaml", "--run-dir", "a", "train.steps=3"], "train.stepz: unknown key"),
        (["--config", "gpt.yaml", "train.stepz=6"], "train.stepz: unknown key"),
        (["none.yaml"], "none.yaml"),
        (["gpt.yaml", "train.steps"], "override 'train.steps': expected section.key=value"),
    ],
)
def test_the_configuration_may_stand_anywhere(
    config: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(config.parent)
    monkeypatch.setenv("HOLDFAST_TERMINATION_LOG", str(config.parent / "end"))
    assert main(words) == EXIT_CONFIG_ERROR
    assert message in capsys.readouterr().err


def test_two_configurations_are_one_too_many(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([str(config), "--config", "other.yaml"])
    assert f"one configuration at a time, not other.yaml, {config}" in capsys.readouterr().err
