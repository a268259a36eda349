"""What a run finds as it begins: it goes on from that and says how, or refuses to."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from gangs import Workshop
from waiting import wait_until

from holdfast_controller.cluster import AttemptObservation, ReplicaObservation, ReplicaState
from holdfast_controller.policy.superseded import superseded_by
from holdfast_trainer.contract import EXIT_CONFIG_ERROR, Termination


def test_an_old_attempt_that_starts_late_is_refused(workshop: Workshop) -> None:
    workshop.start("other", attempt=7, steps=3).wait()
    late = workshop.start("late", attempt=2, steps=3, run_dir=workshop.path / "other")
    assert late.wait() == [1]
    assert "attempt 2 was superseded by attempt 7: it may no longer write to" in late.termination().error
    assert "Traceback" not in late.texts()
    told = ReplicaObservation(0, ReplicaState.FAILED, termination=late.termination())
    seen = AttemptObservation(2, True, True, (told,))
    assert superseded_by(seen, []) == (0, 7), "the controller takes it so"


def test_a_run_directory_that_cannot_be_written(workshop: Workshop) -> None:
    (workshop.path / "file").write_text("not a directory")
    for path in (workshop.path / "file", workshop.path / "file" / "below", Path("/proc/holdfast")):
        gang = workshop.start(path.name + path.parent.name, ranks=2, run_dir=path)
        assert gang.wait() == [1, 1], gang.texts()
        for rank in (0, 1):
            message = gang.termination(rank)
            assert (message.outcome, message.step) == ("failed", 0)
            assert message.error.startswith(f"run directory {path} cannot be used: ")
            assert message.error.endswith("Name another one, or mend it")
            assert "Traceback" not in gang.ranks[rank].text()


@pytest.mark.parametrize(
    ("env", "error"),
    [
        ({"HOLDFAST_PORT": "http"}, "environment HOLDFAST_PORT='http' is not a number"),
        ({"HOLDFAST_PORT": "99999"}, "environment HOLDFAST_PORT='99999' is not between 0 and 65535"),
        (
            {"HOLDFAST_CHECKPOINT_KEEP": "0"},
            "environment HOLDFAST_CHECKPOINT_KEEP='0' is not between 1 and inf",
        ),
        ({"HOLDFAST_GRACE_SECONDS": "30s"}, "environment HOLDFAST_GRACE_SECONDS='30s' is not a number"),
        (
            {"HOLDFAST_CHECKPOINT_EVERY": "5m"},
            "checkpoint.every '5m' is none of: auto, a number of steps (500), seconds (90s)",
        ),
    ],
)
def test_a_setting_that_cannot_be_used_is_not_tried_again(
    workshop: Workshop, env: dict[str, str], error: str
) -> None:
    gang = workshop.start(steps=3, env=env)
    assert gang.wait() == [EXIT_CONFIG_ERROR]
    assert f"error: {error}" in gang.texts()
    assert gang.termination() == Termination("failed", 0, 0, error, config_error=True)


def test_another_configuration_is_refused_for_good(workshop: Workshop) -> None:
    workshop.finish(steps=6, config="a" * 64)
    gang = workshop.start(steps=6, config="b" * 64)
    assert gang.wait() == [EXIT_CONFIG_ERROR]
    message = gang.termination()
    assert (message.outcome, message.config_error) == ("failed", True)
    assert "was written under another configuration (aaaaaaaaaaaa, this is bbbbbbbbbbbb)" in message.error


def test_a_number_for_the_configuration_is_refused_at_once(workshop: Workshop) -> None:
    """As Python's hash() gives one, another in each process: the next attempt ended in a traceback."""
    gang = workshop.start(steps=6, config=5)
    assert gang.wait() == [EXIT_CONFIG_ERROR]
    error = "config_hash=5 is no text: give one, such as a hexdigest()"
    assert gang.termination() == Termination("failed", 0, 0, error, config_error=True)


def test_another_model_is_refused(workshop: Workshop) -> None:
    workshop.finish(steps=6)
    gang = workshop.start(steps=6, size=48)
    assert gang.wait() == [EXIT_CONFIG_ERROR]
    message = gang.termination()
    assert message.config_error
    assert message.error.startswith("'model' is not what it was when the checkpoint of step 6 was written: ")
    assert "size mismatch for 0.weight" in message.error
    assert message.error.endswith(f"or use a new run directory; this one is {gang.history.run.path}")


def test_checkpoints_that_are_all_damaged_are_refused(workshop: Workshop) -> None:
    history = workshop.finish(ranks=2, steps=12)
    for part in history.run.checkpoints.glob("*/rank-1.safetensors"):
        part.write_bytes(part.read_bytes()[:-1])
    gang = workshop.start(ranks=2, steps=20)
    assert gang.wait() == [1, 1]
    for rank in (0, 1):
        message = gang.termination(rank)
        assert message.error.startswith("none of the 3 checkpoints in")
        assert "rank-1.safetensors has" in message.error


def test_checkpoints_that_somebody_removed_are_missed(workshop: Workshop) -> None:
    """Somebody tidies up, or a rule of the bucket does: the run goes on from what is left, and says so."""
    history = workshop.finish(steps=10)
    for removed, step in ((history.run.checkpoint(10), 5), (history.run.checkpoints, 0)):
        shutil.rmtree(removed)
        gang = workshop.start(steps=10)
        assert gang.wait() == [0], gang.texts()
        start = gang.history.events("attempt_start", gang.attempt)[0]
        assert start["resumed_step"] == step
        (told,) = start["skipped"]
        assert told["checkpoint"] == "step-00000010"
        assert told["reason"].startswith(f"it is gone, though attempt {gang.attempt - 1} had it")
        assert "checkpoint of step 10 was passed over: it is gone" in gang.texts()
    assert workshop.finish(steps=10).events("attempt_start", 4)[0]["skipped"] == []


def test_another_world_size_goes_on_and_says_that_bits_may_differ(workshop: Workshop) -> None:
    first = workshop.start(ranks=2, steps=20, hold_at=12)
    first.wait_for_step(7)
    wait_until(lambda: first.history.run.checkpoint(5).exists(), "step 5 to be durable")
    workshop.end()
    history = workshop.finish(ranks=1, steps=20)
    assert history.events("attempt_start", 2)[0]["resumed_step"] in (5, 10)  # it ran on while it was killed
    assert history.stop()["step"] == 20
    log = (workshop.path / "run-2" / "rank-0.log").read_text()
    assert "the resume may not be bit-exact: ranks: 2 -> 1" in log
    assert history.events("attempt_start", 2)[0]["differences"] == ["ranks: 2 -> 1"]


def test_another_precision_goes_on_and_says_that_bits_may_differ(workshop: Workshop) -> None:
    """As `auto` gives it, where the next attempt gets another kind of machine."""
    assert workshop.finish(steps=12, bf16=True).events("attempt_start", 1)[0]["differences"] == []
    history = workshop.finish(steps=20)
    assert history.events("attempt_start", 2)[0]["differences"] == ["precision: bf16 -> fp32"]
    log = (workshop.path / "run-2" / "rank-0.log").read_text()
    assert "the resume may not be bit-exact: precision: bf16 -> fp32" in log


def test_ranks_that_torchrun_starts_again_do_not_mix_two_saves(workshop: Workshop) -> None:
    """The same attempt number twice: what the first left half-written is not counted as the second's."""
    first = workshop.start(ranks=2, steps=20, hold_at=9)
    first.wait_for_step(7)
    workshop.end()
    half = first.history.run.checkpoints / ".step-00000010.attempt-1.save-1"
    half.mkdir()
    (half / "rank-1.json").write_text('{"size": 1, "sha256": "00"}')
    again = workshop.start("again", ranks=2, attempt=1, steps=12, run_dir=first.history.run.path)
    assert again.wait() == [0, 0], again.texts()
    assert not half.exists()
    assert workshop.finish(ranks=2, steps=14, attempt=2).events("attempt_start", 2)[0]["skipped"] == []


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ("deterministic='Strict'", "deterministic='Strict' is none of: True, 'strict', False"),
        ("profile=(3, 5)", "profile=(3, 5) is no range of steps: give one, such as range(20, 25)"),
        ("keep=0", "keep=0: at least 1 checkpoint must be kept, or nothing is durable"),
        ("keep_every=-1", "keep_every=-1: a number of steps, or 0 to keep no others"),
        ("keep_every=2.5", "keep_every=2.5 is no whole number"),
        ("keep_best='two'", "keep_best='two' is no whole number"),
        ("seed='a'", "seed='a' is no whole number"),
        ("compute_dtype='bf16'", "compute_dtype='bf16' is none: give one, such as torch.bfloat16"),
        (
            "flops_per_token='many'",
            "flops_per_token='many' is no number of operations: give about 6 for each parameter",
        ),
        (
            "flops_per_token=-6",
            "flops_per_token=-6 is no number of operations: give about 6 for each parameter",
        ),
    ],
)
def test_what_a_loop_gives_that_cannot_be_used_is_not_tried_again(
    workshop: Workshop, tmp_path: Path, given: str, error: str
) -> None:
    """Another word than "strict" was taken as True, a pair as a range, and a share of steps as steps; of less
    than no operations an MFU was told; the others ended in a traceback."""
    script = tmp_path / "mine.py"
    script.write_text(f"from holdfast_trainer.run import Run\nrun = Run({given})\n")
    gang = workshop.start(script=script, arguments=[])
    assert gang.wait() == [EXIT_CONFIG_ERROR], gang.texts()
    assert "Traceback" not in gang.texts()
    assert gang.termination() == Termination("failed", 0, 0, error, config_error=True)


NO_STEPS = """
import torch
from holdfast_trainer.run import Run

run = Run()
run.track(model=torch.nn.Linear(2, 1))
for step in run.steps(5 - 6):
    pass
"""


def test_less_than_no_steps_are_not_taken_for_a_run_that_has_finished(
    workshop: Workshop, tmp_path: Path
) -> None:
    """As a loop asks for that has counted wrong: the job was done, and had trained nothing."""
    script = tmp_path / "mine.py"
    script.write_text(NO_STEPS)
    gang = workshop.start(script=script, arguments=[])
    assert gang.wait() == [EXIT_CONFIG_ERROR], gang.texts()
    assert gang.termination().error.startswith("run.steps(-1) has no steps, and a run without any would be ")
