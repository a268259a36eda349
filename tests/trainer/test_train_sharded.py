"""A model cut over the ranks (FSDP2) trains as the whole one does, and either resumes the other's work."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from gangs import KILL, History, Workshop
from gpt_runs import compiler_cache, start, write_config
from native_bf16 import HAS_BF16, WITHOUT_BF16, needs_bf16
from tests.trainer.sharded_memory_script import REST, SHAPE

from holdfast_trainer.assembly import check_sharding
from holdfast_trainer.checkpoint.inspection import Opened, differences
from holdfast_trainer.config import ConfigError, load
from holdfast_trainer.contract import EXIT_CONFIG_ERROR
from holdfast_trainer.hf_weights import save_weights
from holdfast_trainer.model import build_model

SHARDED = "train.parallel=fsdp"
MEMORY = Path(__file__).parent / "sharded_memory_script.py"
COMPILED = Path(__file__).parent / "compiled_blocks_script.py"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_config(tmp_path)


def losses(history: History, attempt: int) -> dict[int, float]:
    return {line["step"]: float.fromhex(line["loss_hex"]) for line in history.steps(attempt)}


FP32, BF16 = 1e-4, 5e-3
"""Relative: sums are made in another order, and the steps that follow amplify that; in bf16 (8 bits) what is
added up between blocks is rounded where autocast leaves it fp32."""


def assert_close(left: dict[int, float], right: dict[int, float], tolerance: float = FP32) -> None:
    assert left.keys() == right.keys()
    for step, loss in left.items():
        assert loss == pytest.approx(right[step], rel=tolerance), step


@pytest.mark.slow
def test_sharded_equals_replicated_and_resumes_bit_for_bit(workshop: Workshop, config: Path) -> None:
    whole = start(workshop, config, name="whole", ranks=2)
    assert whole.wait() == [0, 0], whole.texts()
    untouched = start(workshop, config, SHARDED, name="untouched", ranks=2)
    assert untouched.wait() == [0, 0], untouched.texts()
    truth = losses(untouched.history, 1)
    assert_close(truth, losses(whole.history, 1))

    gang = start(workshop, config, SHARDED, ranks=2)
    gang.wait_for_step(10)
    gang.wait_for_checkpoint()
    gang.signal(KILL)
    gang.wait()
    last = start(workshop, config, SHARDED, ranks=2)
    assert last.wait() == [0, 0], last.texts()
    assert last.history.losses() == untouched.history.losses()
    assert last.history.validations() == untouched.history.validations()
    assert last.history.stop()["digest"] == untouched.history.stop()["digest"] != ""

    # What was saved in shards goes on in one piece, what was whole in shards.
    late = {step: loss for step, loss in truth.items() if step > 30}
    for run, parallel in ((untouched, "train.parallel=ddp"), (whole, SHARDED)):
        for step in (36, 40):
            shutil.rmtree(run.history.run.checkpoint(step))
        gang = start(workshop, config, parallel, name=run.history.run.path.name, ranks=2)
        assert gang.wait() == [0, 0], gang.texts()
        assert "resumed from step 30" in gang.texts()
        assert_close(losses(gang.history, 2), late)
    with Opened(untouched.history.run, 40) as alone, Opened(whole.history.run, 40) as sharded:
        left, right = sharded.shared()["parts"]["model"], alone.shared()["parts"]["model"]
        assert left.keys() == right.keys()
        for name, value in right.items():
            torch.testing.assert_close(left[name], value, rtol=1e-3, atol=1e-4)
        parted = [one for one in differences(alone, sharded) if one.what.startswith("only in")]
        assert not parted, "however many pieces a tensor is in, it is the same tensor"
    # One rank draws other dropout masks, so it is only near; a wrong weight would be far away.
    for step in (36, 40):
        shutil.rmtree(last.history.run.checkpoint(step))
    single = start(workshop, config)
    assert single.wait() == [0], single.texts()
    assert losses(single.history, single.attempt)[31] == pytest.approx(truth[31], rel=0.1)


@pytest.mark.slow
@needs_bf16
def test_gathered_in_bf16_it_trains_as_in_bf16_in_one_piece_and_saves_fp32(
    workshop: Workshop, config: Path
) -> None:
    bf16 = "train.precision=bf16"
    whole = start(workshop, config, bf16, name="whole", ranks=2)
    assert whole.wait() == [0, 0], whole.texts()
    cut = start(workshop, config, bf16, SHARDED, ranks=2)
    assert cut.wait() == [0, 0], cut.texts()
    truth, ours = (losses(gang.history, 1) for gang in (whole, cut))
    assert_close(ours, truth, BF16)
    with Opened(cut.history.run, 40) as saved:
        assert {value.dtype for value in saved.shared()["parts"]["model"].values()} == {torch.float32}
    for step in (36, 40):
        shutil.rmtree(cut.history.run.checkpoint(step))
    again = start(workshop, config, bf16, ranks=2)
    assert again.wait() == [0, 0], again.texts()
    assert "resumed from step 30" in again.texts()
    assert_close(losses(again.history, 2), {step: loss for step, loss in ours.items() if step > 30}, BF16)


@pytest.mark.slow
def test_what_is_cut_and_compiled_trains_as_the_whole_as_written_and_resumes(
    workshop: Workshop, config: Path
) -> None:
    """Blocks are compiled one by one; what gathers and cuts their parameters stays around that."""
    if not any(map(shutil.which, ("c++", "g++", "clang++"))):
        pytest.skip("torch.compile needs a C++ compiler here, and there is none")
    # A compiled dropout draws other numbers.
    settings = ("model.dropout=0", "train.steps=36", "validation.every=0", "checkpoint.every=4")
    compiled = (SHARDED, "train.compile=true")
    cache = compiler_cache()
    whole = start(workshop, config, *settings, name="whole", ranks=2)
    assert whole.wait() == [0, 0], whole.texts()
    untouched = start(workshop, config, *settings, *compiled, name="untouched", ranks=2, env=cache)
    assert untouched.wait() == [0, 0], untouched.texts()
    assert "compiled in " in untouched.texts()
    ours, written = (losses(one.history, 1) for one in (untouched, whole))
    early = range(1, 13)  # what rounds in another way grows apart
    assert_close({step: ours[step] for step in early}, {step: written[step] for step in early})

    gang = start(workshop, config, *settings, *compiled, ranks=2, env=cache)
    gang.wait_for_step(10)
    gang.wait_for_checkpoint()
    gang.signal(KILL)
    assert -KILL in gang.wait(), "it was not over yet"
    last = start(workshop, config, *settings, *compiled, ranks=2, env=cache)
    assert last.wait() == [0, 0], last.texts()
    assert "resumed from step " in last.texts()
    assert last.history.losses() == untouched.history.losses()
    assert last.history.stop()["digest"] == untouched.history.stop()["digest"] != ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (1, ("train.precision=fp32", "train.compile=true")),
        (2, ("train.precision=fp32", "train.compile=true")),
        (2, ("train.precision=bf16", "train.compile=reduce-overhead", "train.activation_checkpointing=true")),
        (2, ("train.precision=fp32", "train.compile=max-autotune-no-cudagraphs", "model.family=llama")),
    ],
    ids=["whole", "fp32", "bf16, recomputing, a mode", "llama, a mode"],
)
def test_all_that_steps_and_validation_run_was_compiled_before_the_first(
    workshop: Workshop, ranks: int, words: tuple[str, ...]
) -> None:
    """What did not compile there would end the run, and perhaps on one rank alone."""
    if not any(map(shutil.which, ("c++", "g++", "clang++"))):
        pytest.skip("torch.compile needs a C++ compiler here, and there is none")
    if "train.precision=bf16" in words and not HAS_BF16:
        pytest.skip(WITHOUT_BF16)
    gang = workshop.start(ranks=ranks, script=COMPILED, arguments=[SHARDED, *words], env=compiler_cache())
    assert gang.wait() == [0] * ranks, gang.texts()
    assert all("nothing was compiled anew" in rank.text() for rank in gang.ranks), gang.texts()


@pytest.mark.slow
def test_no_rank_holds_the_model_or_its_state_in_one_piece(workshop: Workshop, tmp_path: Path) -> None:
    """It holds its share and a little more: with random weights, published ones, where it resumes, be it with
    another number of ranks, and of the gradients that several passes add up."""
    config = load(None, [*SHAPE, *REST], environ={}).model
    save_weights(build_model(config).state_dict(), config, tmp_path / "weights")
    small = ("model.width=256", "train.steps=2")
    for name, ranks, words in (
        ("random", 2, ()),
        *([("bf16", 2, (*small, "train.precision=bf16"))] if HAS_BF16 else ()),
        ("published", 2, (f"train.init_from={tmp_path / 'weights'}",)),
        ("resumed", 2, small),
        ("resumed", 2, small),
        ("resumed", 3, (*small, "train.steps=3", "train.global_batch=3")),
    ):
        gang = workshop.start(name, script=MEMORY, ranks=ranks, arguments=[SHARDED, *words])
        assert gang.wait() == [0] * ranks, gang.texts()
        told = "resumed" if gang.attempt > 1 else "built"
        for rank in gang.ranks:
            (line,) = (line for line in rank.text().splitlines() if line.startswith(f"{told} peak "))
            peak, whole = int(line.split()[2]), int(line.split()[4])
            if "train.steps=2" not in words or gang.attempt > 1:
                assert 0.6 / ranks < peak / whole < 1 / ranks + 0.25, (name, line)
            for line in (line for line in rank.text().splitlines() if line.startswith("accumulated peak ")):
                peak, whole = int(line.split()[2]), int(line.split()[4])
                # With what two blocks take. bf16 takes no more: gathered so, it needs no copy of each weight.
                assert peak / whole < 1 / ranks + 0.5, (name, line)


def test_fp16_is_refused_with_shards() -> None:
    with pytest.raises(ConfigError, match="fsdp does not go with fp16"):
        check_sharding("fp16")
    check_sharding("bf16")


def test_shards_of_two_models_are_refused(workshop: Workshop, config: Path, tmp_path: Path) -> None:
    """Nothing is sent around when a model is cut: each rank would keep its part of its own file."""
    model = load(config).model
    for rank in range(2):
        torch.manual_seed(rank)
        save_weights(build_model(model).state_dict(), model, tmp_path / f"weights-{rank}")
    script = tmp_path / "of_two_models.py"
    script.write_text(
        "import os, sys\n"
        "from holdfast_trainer.train_command import main\n"
        f"weights = '{tmp_path}/weights-' + os.environ['RANK']\n"
        "sys.exit(main([*sys.argv[1:], f'train.init_from={weights}']))\n"
    )
    gang = workshop.start(script=script, ranks=2, arguments=["--config", str(config), SHARDED])
    assert gang.wait() == [EXIT_CONFIG_ERROR, EXIT_CONFIG_ERROR], gang.texts()
    assert "train.init_from, its weights differs among the ranks: '" in gang.termination().error
    plain = workshop.start(
        "plain", script=script, ranks=2, arguments=["--config", str(config), "train.steps=5"]
    )
    assert plain.wait() == [0, 0], f"DDP begins with rank 0's\n{plain.texts()}"
