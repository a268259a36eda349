"""Operations that cannot repeat their bits: a loop of one's own is told, the reference training ends."""

from __future__ import annotations

import itertools
import os
import warnings
from pathlib import Path
from typing import Literal

import pytest
import torch
from gangs import Workshop
from gpt_runs import write_config

from holdfast_trainer.contract import EXIT_CONFIG_ERROR
from holdfast_trainer.determinism import (
    choose_kernels,
    hear_of_operations,
    make_deterministic,
    operation_of,
    with_kernels,
)

# As torch 2.15 has them; attention's come from its kernels for GPUs alone.
FLASH = (
    "Flash Attention defaults to a non-deterministic algorithm. To explicitly enable determinism call "
    "torch.use_deterministic_algorithms(True, warn_only=False)."
)

CPU = torch.device("cpu")
CHOICES: tuple[bool | Literal["strict"], ...] = (False, True, "strict")

TRAINS = """
import sys
import torch
from holdfast_trainer.__main__ import main
from holdfast_trainer.model import GPTBlock

transform = GPTBlock.transform

def puts(self, x):
    torch.zeros(3).put_(torch.tensor([0, 0]), torch.ones(2))
    return transform(self, x)

GPTBlock.transform = puts
sys.exit(main(sys.argv[1:]))
"""


def put(script: str) -> str:
    """The loop with an operation that has no deterministic kernel on a CPU either."""
    begins = "    total = torch.zeros((), device=run.device)\n"
    assert begins in script
    return script.replace(begins, f"{begins}    torch.zeros(3).put_(torch.tensor([0, 0]), torch.ones(2))\n")


@pytest.fixture
def loop(tmp_path: Path) -> Path:
    path = tmp_path / "loop_that_puts.py"
    path.write_text(put((Path(__file__).parent / "loop_script.py").read_text()))
    return path


def test_a_loop_that_cannot_repeat_its_bits_goes_on_and_says_so_at_the_next_resume(
    workshop: Workshop, loop: Path
) -> None:
    said = "put_ is not deterministic on this device: a resume may not be bit-exact"
    assert workshop.finish(ranks=2, script=loop, steps=12).events("attempt_start", 1)[0]["differences"] == []
    first = (workshop.path / "run-1" / "rank-0.log").read_text()
    assert first.count(said) == 1, first
    history = workshop.finish(ranks=2, script=loop, steps=20)
    assert history.events("attempt_start", 2)[0]["differences"] == ["not deterministic: put_"]
    log = (workshop.path / "run-2" / "rank-0.log").read_text()
    assert "the resume may not be bit-exact: not deterministic: put_" in log


WRAPS = 'model = run.wrap(raw, settle=(lambda net: loss_of(net, 0, 0)) if options["settle"] else None)\n'
POWER = "from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power\n"
SUMS = "sums of the gradients of model"


@pytest.mark.parametrize(
    ("ranks", "wraps", "why"),
    [
        (3, "model = nn.parallel.DistributedDataParallel(raw)\n", "they are grouped otherwise in the first"),
        (3, "model = nn.parallel.DistributedDataParallel(raw, find_unused_parameters=True)\n", ""),
        (
            2,
            f"{POWER}model = run.wrap(raw)\nkept = power.PowerSGDState(None, start_powerSGD_iter=2)\n"
            "model.register_comm_hook(kept, power.powerSGD_hook)\n",
            "what its communication hook keeps (PowerSGDState) is not saved",
        ),
    ],
    ids=["three ranks", "three ranks, searching", "PowerSGD"],
)
def test_a_loop_whose_own_ddp_adds_up_otherwise_after_a_resume_says_so(
    workshop: Workshop, tmp_path: Path, ranks: int, wraps: str, why: str
) -> None:
    """It, or accelerate, made DDP itself; a notice then loses no step, so none that is done again tells."""
    source = (Path(__file__).parent / "loop_script.py").read_text()
    assert WRAPS in source
    loop = tmp_path / "loop_with_its_own_ddp.py"
    loop.write_text(source.replace(WRAPS, wraps))
    workshop.finish(ranks=ranks, script=loop, steps=6)
    first = (workshop.path / "run-1" / "rank-0.log").read_text()
    assert first.count(f"{SUMS} cannot be repeated: {why}") == (why != ""), first
    history = workshop.finish(ranks=ranks, script=loop, steps=8)
    told = [f"not deterministic: {SUMS}"] if why else []
    assert history.events("attempt_start", 2)[0]["differences"] == told


ACCUMULATES = """
import sys
import torch
from holdfast_trainer.run import Run

run = Run(checkpoint_every=3)
model = run.shard(torch.nn.Linear(4, 4), [])
optimizer = torch.optim.SGD(model.parameters(), 0.1)
run.track(model=model, optimizer=optimizer)
for step in run.steps(int(sys.argv[2])):
    last = step % 4 == 3
    model.set_requires_gradient_sync(last or sys.argv[1] == "reduced")
    loss = model(torch.ones(2, 4) + step).square().mean()
    loss.backward()
    run.log(loss=loss)
    if last:
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize("how", ["whole", "reduced"])
def test_gradients_that_fsdp_keeps_from_being_reduced_are_told_to_be_lost(
    workshop: Workshop, tmp_path: Path, how: str
) -> None:
    """They are in no parameter's `grad` until then; those that are reduced in each pass are saved."""
    script = tmp_path / "accumulates.py"
    script.write_text(ACCUMULATES)
    workshop.finish(ranks=2, script=script, arguments=[how, "6"])
    history = workshop.finish(ranks=2, script=script, arguments=[how, "8"])
    told = ["not deterministic: gradients that model adds up whole"] if how == "whole" else []
    assert history.events("attempt_start", 2)[0]["differences"] == told


def test_strict_it_ends_with_the_operation_and_the_remedy(workshop: Workshop, loop: Path) -> None:
    loop.write_text(loop.read_text().replace("run = Run(\n", 'run = Run(\n    deterministic="strict",\n'))
    gang = workshop.start(script=loop, steps=12)
    assert gang.wait() == [EXIT_CONFIG_ERROR], gang.texts()
    told = gang.termination()
    assert told.config_error, "no retry has another kernel"
    assert told.error.startswith(
        "rank 0, step 1: torch has no deterministic kernel for put_ on this device, so a resumed run would "
        "not end with the bits of an untouched one. To train without that, set train.deterministic=false; in "
    )


@pytest.mark.parametrize(
    ("deterministic", "expected"), [("true", EXIT_CONFIG_ERROR), ("false", 0)], ids=["strict", "as it comes"]
)
def test_the_reference_training_is_strict_unless_it_is_told_otherwise(
    workshop: Workshop, tmp_path: Path, deterministic: str, expected: int
) -> None:
    """A stand-in for what attention is on a GPU: a part of the model that cannot repeat its bits."""
    script = tmp_path / "train_that_puts.py"
    script.write_text(TRAINS)
    words = ["train", str(write_config(tmp_path)), "train.steps=6", f"train.deterministic={deterministic}"]
    gang = workshop.start(script=script, arguments=words)
    assert gang.wait() == [expected], gang.texts()
    assert ("no deterministic kernel for put_ on this device" in gang.termination().error) is (expected != 0)


@pytest.mark.parametrize("strict", [False, True])
def test_torch_is_asked_so_that_attention_can_repeat_its_bits(strict: bool) -> None:
    make_deterministic(strict=strict)
    assert torch.get_deterministic_debug_mode() == (2 if strict else 1)
    assert torch.utils.deterministic.fill_uninitialized_memory is not strict


def test_cudnn_looks_for_its_fastest_kernels_where_bits_need_not_be_repeated() -> None:
    try:
        for deterministic in CHOICES:
            choose_kernels(deterministic, CPU)
            assert torch.backends.cudnn.benchmark is (deterministic is False)
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"  # a GPU may come later
    finally:
        make_deterministic()


def test_kernels_are_chosen_for_a_while_and_are_then_as_they_were() -> None:
    def asked() -> tuple[int, bool, bool]:
        fills = torch.utils.deterministic.fill_uninitialized_memory
        return torch.get_deterministic_debug_mode(), torch.backends.cudnn.benchmark, fills

    expected = {False: (0, True, True), True: (1, False, True), "strict": (2, False, False)}
    for around, then in itertools.product(CHOICES, repeat=2):
        with with_kernels(around, CPU):
            with with_kernels(then, CPU):
                assert asked() == expected[then]
            assert asked() == expected[around]
    assert asked()[0] == 0


def test_each_operation_is_told_once_and_other_warnings_are_left_alone() -> None:
    told: list[str] = []
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        warnings.simplefilter("ignore", DeprecationWarning)
        hear_of_operations(told.append)
        for number in range(3):
            warnings.warn(FLASH, stacklevel=1)
            warnings.warn_explicit(FLASH, UserWarning, "attention.py", number)
            make_deterministic()
            torch.zeros(3).put_(torch.tensor([0, 0]), torch.ones(2))
        warnings.warn("old", DeprecationWarning, stacklevel=1)
        warnings.warn_explicit("something else", UserWarning, "other.py", 1)
        assert [str(one.message) for one in shown] == ["something else"]
    assert told == ["Flash Attention", "put_"]


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (FLASH, "Flash Attention"),
        ("kthvalue CUDA does not have a deterministic implementation, but you set", "kthvalue CUDA"),
        ("Detected call of `lr_scheduler.step()` before `optimizer.step()`", None),
    ],
)
def test_which_operation_it_is(message: str, expected: str | None) -> None:
    assert operation_of(message) == expected
