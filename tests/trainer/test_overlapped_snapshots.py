"""A state that is copied while the next step computes is the state of the save, or no checkpoint at all."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gangs import KILL, NOTICE, Workshop
from gpt_runs import start, write_config
from gpu_queue import OnGpu, StandInCopies
from torch import nn
from waiting import wait_until

from holdfast_trainer.checkpoint import CheckpointError, Saved, Saver, load_newest
from holdfast_trainer.checkpoint import snapshot as snapshots
from holdfast_trainer.checkpoint import stage as stages
from holdfast_trainer.checkpoint.snapshot import SMALL
from holdfast_trainer.checkpoint.stage import Stage
from holdfast_trainer.contract import RunDir, raise_fence
from holdfast_trainer.parallel import Gang
from holdfast_trainer.training_state import TrainingState

WIDTH = 300
"""Of a layer whose weights are more than what is copied at once."""


class HeldStage(Stage):
    """Late copies wait until `go` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "places":
            value = HeldPlaces(value)
            value.stage = self
        super().__setattr__(name, value)


class HeldPlaces(dict[str, torch.Tensor]):
    stage: HeldStage

    def __getitem__(self, name: str) -> torch.Tensor:
        if threading.current_thread().name == "checkpoint-copy":
            assert self.stage.go.wait(300)
        return super().__getitem__(name)


class Training:
    """A model with batch norm, its optimizer, and a saver that is told before each of its steps."""

    def __init__(self, path: Path, **optimizer: Any) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(8, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-2, **optimizer)
        self.state = TrainingState({"model": self.model, "optimizer": self.optimizer}, 0)
        self.run, self.stage = RunDir(path / "run"), HeldStage()
        raise_fence(self.run, 1)
        self.saved, self.failed = list[Saved](), list[str]()
        self.saver = Saver(
            self.run,
            attempt=1,
            rank=0,
            world_size=1,
            stage=self.stage,
            on_saved=self.saved.append,
            on_failed=lambda step, error: self.failed.append(str(error)),
        )
        self.optimizer.register_step_pre_hook(self.before_step)
        self.compute()
        self.optimizer.step()

    def before_step(self, *_: object) -> None:
        self.saver.settle()

    @property
    def weight(self) -> torch.Tensor:
        """The one parameter that is large."""
        return self.model[2].weight

    def compute(self) -> None:
        self.model(torch.randn(16, 8)).square().mean().backward()

    def save(self, step: int) -> dict[str, Any]:
        """Begins to save; returns what the checkpoint must hold."""
        shared, own, rank_0_only = self.state.capture(step)
        expected = {name: value.clone() for name, value in self.model.state_dict().items()}
        moments = self.optimizer.state[self.weight]["exp_avg"].clone()
        self.saver.save(step, shared, own, rank_0_only=rank_0_only, lasting=self.state.lasting())
        return {"model": expected, "moments": moments}

    def check(self, step: int, expected: dict[str, Any]) -> None:
        loaded, skipped = load_newest(self.run, 1, Gang(0, 1, 0, torch.device("cpu")))
        assert loaded is not None
        assert (loaded.manifest.step, skipped) == (step, [])
        parts = loaded.shared["parts"]
        for name, value in expected["model"].items():
            assert torch.equal(parts["model"][name], value), name
        number = [p is self.weight for p in self.model.parameters()].index(True)
        assert torch.equal(parts["optimizer"]["state"][number]["exp_avg"], expected["moments"])


@pytest.mark.parametrize("kind", ["foreach", "fused"])
def test_the_next_step_computes_while_the_state_is_copied(tmp_path: Path, kind: str) -> None:
    """Forward and backward are over, and batch norm has moved on, before a large tensor was copied."""
    training = Training(tmp_path, **{kind: True})
    expected = training.save(1)
    training.compute()
    assert training.saver.busy
    assert training.saver.durable_step == 0
    training.stage.go.set()
    training.optimizer.step()
    training.saver.wait()
    training.check(1, expected)
    assert not torch.equal(training.weight, expected["model"]["2.weight"])
    assert training.saved[0].stall_seconds < training.saved[0].seconds


def test_what_a_gradient_scaler_passes_over_is_settled_by_the_next_save(tmp_path: Path) -> None:
    training = Training(tmp_path)
    scaler = torch.amp.GradScaler("cpu")
    expected = training.save(1)
    training.optimizer.zero_grad()
    scaler.scale(training.model(torch.randn(16, 8)).mean()).backward()
    assert training.weight.grad is not None
    training.weight.grad.fill_(float("inf"))
    scaler.step(training.optimizer)
    scaler.update()
    training.stage.go.set()
    again = training.save(2)
    training.check(1, expected)
    training.saver.wait()
    training.check(2, again)


def test_a_state_that_no_optimizer_of_ours_owns_is_copied_at_once(tmp_path: Path) -> None:
    training = Training(tmp_path)
    training.state = TrainingState({"model": training.model}, 0)
    assert training.state.lasting() == {}
    shared, own, rank_0_only = training.state.capture(1)
    before = training.weight.detach().clone()
    training.saver.save(1, shared, own, rank_0_only=rank_0_only, lasting={})
    training.weight.data.zero_()
    training.saver.wait()
    loaded, _ = load_newest(training.run, 1, Gang(0, 1, 0, torch.device("cpu")))
    assert loaded is not None
    assert torch.equal(loaded.shared["parts"]["model"]["2.weight"], before)


def test_from_a_gpu_a_file_that_ends_with_small_tensors_has_its_large_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those were copied earlier, on another stream: that they are there says nothing of the rest."""
    StandInCopies(monkeypatch)
    monkeypatch.setattr(snapshots, "_side_streams", {})
    monkeypatch.setattr(stages, "PART", SMALL)
    run = RunDir(tmp_path / "run")
    raise_fence(run, 1)
    weight, flags = torch.rand(SMALL), torch.arange(9, dtype=torch.uint8)
    state = {"weight": weight.as_subclass(OnGpu), "flags": flags.as_subclass(OnGpu)}
    saver = Saver(run, attempt=1, rank=0, world_size=1)
    saver.save(1, {"parts": state}, {}, lasting={weight.data_ptr(): weight})
    saver.wait()
    loaded, skipped = load_newest(run, 1, Gang(0, 1, 0, torch.device("cpu")))
    assert loaded is not None
    assert skipped == []
    assert torch.equal(loaded.shared["parts"]["flags"], flags)
    assert torch.equal(loaded.shared["parts"]["weight"], weight)


# ------------------------------------------------------- others write to it too


def clamp(training: Training) -> None:
    with torch.no_grad():
        training.weight.clamp_(-1e-3, 1e-3)


def load_state(training: Training) -> None:
    training.model.load_state_dict({k: v + 1 for k, v in training.model.state_dict().items()})


def clear_moments(training: Training) -> None:
    training.optimizer.state[training.weight]["exp_avg"].zero_()


def uncounted(training: Training) -> None:
    training.weight.data.mul_(0.5)


def through_numpy(training: Training) -> None:
    training.weight.detach().numpy()[:20] += 1


def another_fused_optimizer(training: Training) -> None:
    torch.optim.AdamW([training.weight], 1e-2, fused=True).step()


@pytest.mark.parametrize(
    "write", [clamp, load_state, clear_moments, uncounted, through_numpy, another_fused_optimizer]
)
def test_a_state_that_was_written_to_meanwhile_is_dropped_and_saved_again(
    tmp_path: Path, write: Callable[[Training], None]
) -> None:
    training = Training(tmp_path)
    training.save(1)
    training.compute()
    write(training)
    training.stage.go.set()
    training.optimizer.step()
    with pytest.raises(CheckpointError) as raised:
        training.saver.wait()
    of = "optimizer.state.4.exp_avg" if write is clear_moments else "model.2.weight"
    assert str(raised.value) == (
        f"step 1 could not be saved: 'shared.parts.{of}' was written to while it was copied, and not by a "
        "tracked optimizer's step. The end of the step that is under way is saved instead, and from now on "
        "saves hold the training up until all is copied, as checkpoint.snapshot=synchronous has it from the "
        "start"
    )
    assert training.failed == [str(raised.value)]
    assert training.saver.dropped
    assert training.saver.durable_step == 0
    expected = training.save(2)
    assert not training.saver.dropped
    write(training)  # harms no more: all was copied at once
    training.optimizer.step()
    training.saver.wait()
    training.check(2, expected)


def test_other_weights_for_a_validation_are_found_though_they_are_put_back(tmp_path: Path) -> None:
    """As averaged weights are swapped in and out: through `.data`, which counts nothing."""
    training = Training(tmp_path)
    training.save(1)
    own = training.weight.detach().clone()
    training.weight.data.copy_(own * 0.9)
    training.stage.go.set()
    with training.saver._settling:  # the copies are made while the other weights are in
        assert training.saver._snapshot is not None
        training.saver._snapshot.settle()
    training.weight.data.copy_(own)
    with pytest.raises(CheckpointError, match=r"'shared.parts.model.2.weight' was written to while"):
        training.saver.wait()


def test_parameters_that_are_replaced_do_not_matter(tmp_path: Path) -> None:
    training = Training(tmp_path)
    expected = training.save(1)
    training.model.to(torch.float64)
    training.optimizer.load_state_dict(training.optimizer.state_dict())
    training.optimizer.zero_grad()
    training.stage.go.set()
    training.saver.wait()
    training.check(1, expected)


# ----------------------------------------------------------------------- stories


@pytest.mark.slow
def test_a_loop_that_clamps_its_weights_is_found_out_and_stays_exact(workshop: Workshop) -> None:
    """Before its optimizer steps: the first save that meets it is dropped, and later ones are synchronous."""
    options = {"steps": 40, "save_every": 6, "size": 4200, "clamp_from": 9, "norm": True}
    untouched = workshop.finish("untouched", ranks=2, **options, snapshot="synchronous")
    assert untouched.events("checkpoint_failed") == []

    killed = workshop.start(ranks=2, **options, pause=0.05, hold_at=33)
    killed.wait_for_step(25)  # the save of step 24 has waited for that of 18
    wait_until(lambda: len(killed.history.events("checkpoint", 1)) >= 3, "the save of step 18 to be told")
    killed.signal(KILL)
    killed.wait()
    (failed,) = killed.history.events("checkpoint_failed", 1)
    assert failed["step"] == 12
    assert "was written to while it was copied, and not by a tracked optimizer's step" in failed["error"]
    saved = [line["step"] for line in killed.history.events("checkpoint", 1)]
    assert saved[:3] == [6, 14, 18], "what was dropped is saved once all have heard of it, a step later"

    noticed = workshop.start(ranks=2, **options, pause=0.02, hold_at=33)
    noticed.wait_for_step(28)
    noticed.signal(NOTICE, [1])
    assert noticed.wait() == [0, 0], noticed.texts()
    finished = workshop.finish(ranks=2, **options)
    assert finished.losses() == untouched.losses()
    assert finished.stop()["digest"] == untouched.stop()["digest"] != ""


@pytest.mark.slow
def test_shards_are_copied_late_too(workshop: Workshop, tmp_path: Path) -> None:
    """FSDP2 gathers and lets go of parameters meanwhile; nothing of that is taken for a write to a shard."""
    config = write_config(tmp_path)
    sizes = ("train.parallel=fsdp", "model.width=192", "train.steps=15", "validation.every=4")
    late = start(workshop, config, *sizes, name="late", ranks=2)
    at_once = start(workshop, config, *sizes, "checkpoint.snapshot=synchronous", name="at once", ranks=2)
    for gang in (late, at_once):
        assert gang.wait(300) == [0, 0], gang.texts()
        assert gang.history.events("checkpoint_failed") == []
    assert [line["digest"] for line in late.history.events("checkpoint")] == [
        line["digest"] for line in at_once.history.events("checkpoint")
    ]
    assert late.history.losses() == at_once.history.losses()


def test_a_snapshot_of_no_known_kind_is_refused(workshop: Workshop) -> None:
    gang = workshop.start(snapshot="late")
    assert gang.wait() != [0]
    assert "error: snapshot 'late' is none of: overlapped, synchronous" in gang.texts()
