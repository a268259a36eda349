"""What a run was computed with, as its checkpoints keep it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gangs import Workshop
from gpt_runs import start, write_config

from holdfast_trainer.alike import together
from holdfast_trainer.config import TrainConfig
from holdfast_trainer.contract import EXIT_CONFIG_ERROR
from holdfast_trainer.cpuinfo import first, name
from holdfast_trainer.environment import (
    describe_environment,
    differences,
    execution,
    gpu_libraries,
    require_plain,
)
from holdfast_trainer.given import given
from holdfast_trainer.schema import ConfigError

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("processor\t: 0\nmodel name\t: One\n\nprocessor\t: 1\nmodel name\t: Two\n", "One"),
        ("processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd40\n", "0x41 0xd40"),
        ("", ""),
    ],
)
def test_the_processors_name(text: str, expected: str) -> None:
    assert name(first(text)) == expected


def test_this_process_says_its_processor_and_precision() -> None:
    told = describe_environment(torch.device("cpu"), torch.bfloat16)
    assert told["precision"] == "bf16"
    assert told["torch"] == torch.__version__
    assert told["threads"] == torch.get_num_threads()
    assert told["device"].startswith(f"cpu, {torch.backends.cpu.get_cpu_capability()}")


def test_what_is_not_as_it_was_is_named_and_nothing_else() -> None:
    then = {"torch": "2.14", "device": "cpu, AVX512, One", "threads": 2, "of old": 1}
    assert differences(then, then) == []
    assert differences(
        then, {"torch": "2.15", "device": "cpu, AVX2, Two", "threads": 2, "precision": "fp32"}
    ) == [
        "torch: 2.14 -> 2.15",
        "device: cpu, AVX512, One -> cpu, AVX2, Two",
    ]


SETS_ITS_THREADS = """
import sys
import torch
from holdfast_trainer.run import Run

run = Run()
torch.set_num_threads(int(sys.argv[1]))
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
run.track(model=model, optimizer=optimizer)
for step in run.steps(2 * int(sys.argv[1])):
    model(torch.ones(3, 2)).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (Path("augment.yaml"), "PosixPath('augment.yaml')"),
        (("flip", "crop"), "('flip', 'crop')"),
        (float("nan"), "nan"),
        ({1: "one"}, "{1: 'one'}"),
    ],
)
def test_what_a_checkpoint_cannot_keep_is_refused_before_the_first_step(value: Any, shown: str) -> None:
    """A path had every save fail, the last one too; a tuple was another value at each resume."""
    with pytest.raises(ConfigError) as refused:
        require_plain({"torch": torch.__version__, "of the script": value})
    expected = f"run.environment['of the script'] is {shown}: give words, numbers, true or false"
    assert str(refused.value).startswith(expected)
    require_plain({**describe_environment(CPU, torch.float32), "a": 0.1, "b": None, "c": ["d"], "e": True})


def test_a_script_that_names_a_path_for_its_environment_does_no_step(
    workshop: Workshop, tmp_path: Path
) -> None:
    script = tmp_path / "names_a_path.py"
    script.write_text(
        """
import pathlib
import torch
from holdfast_trainer.run import Run

run = Run()
run.environment["data"] = pathlib.Path("data")
run.track(model=torch.nn.Linear(2, 1))
"""
    )
    gang = workshop.start(script=script)
    assert gang.wait() == [EXIT_CONFIG_ERROR]
    assert "error: run.environment['data'] is PosixPath('data'): give words, numbers" in gang.texts()


MAKES_ITS_RATE = """
import sys
import torch
from torch.optim import lr_scheduler
from holdfast_trainer.run import Run

run = Run()
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), float(sys.argv[1]))
steps = int(sys.argv[2])
falls = [lr_scheduler.ConstantLR(optimizer), lr_scheduler.CosineAnnealingLR(optimizer, steps)]
scheduler = lr_scheduler.SequentialLR(optimizer, falls, [2])
run.track(model=model, optimizer=optimizer, scheduler=scheduler)
for step in run.steps(steps):
    model(torch.ones(3, 2)).sum().backward()
    optimizer.step()
    scheduler.step()
print("lr", optimizer.param_groups[0]["initial_lr"])
"""


def test_a_learning_rate_that_a_script_changes_is_said_to_give_way_to_the_checkpoints(
    workshop: Workshop, tmp_path: Path
) -> None:
    """It is lowered after a loss that was no number, or more steps are asked for: torch loads the rate of
    before with the optimizer's state, and training went on with it without a word."""
    script = tmp_path / "makes_its_rate.py"
    script.write_text(MAKES_ITS_RATE)

    def differences_of(attempt: int, rate: float, steps: int) -> list[str]:
        gang = workshop.start(script=script, arguments=[str(rate), str(steps)])
        assert gang.wait() == [0], gang.texts()
        assert "lr 0.5" in gang.texts()
        told: list[str] = gang.history.events("attempt_start", attempt)[0]["differences"]
        return told

    assert differences_of(1, 0.5, 3) == []
    assert differences_of(2, 0.5, 3) == []
    assert differences_of(3, 0.25, 6) == [
        "lr given to optimizer (a checkpoint's counts): 0.16666666666666666 -> 0.08333333333333333",
        "base_lrs given to scheduler, its number 0 (a checkpoint's counts): [0.5] -> [0.25]",
        "T_max given to scheduler, its number 1 (a checkpoint's counts): 3 -> 6",
        "base_lrs given to scheduler, its number 1 (a checkpoint's counts): [0.5] -> [0.25]",
    ]


def test_what_optimizers_and_schedulers_are_given_is_told_as_far_as_it_is_plain() -> None:
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    groups = [{"params": weights[:1], "weight_decay": 0.5}, {"params": weights[1:]}]
    optimizer = torch.optim.Adam(groups, torch.tensor(0.1), betas=(0.5, 0.75))
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=3)
    falls = torch.optim.lr_scheduler.MultiStepLR(optimizer, [8, 4, 4])
    parts = {"model": torch.nn.Linear(2, 1), "adam": optimizer, "plateau": scheduler, "falls": falls}
    told = given(parts)
    require_plain(told)
    assert told["weight_decay given to adam (a checkpoint's counts)"] == [0.5, 0]
    assert told["betas given to adam (a checkpoint's counts)"] == [0.5, 0.75]
    assert told["patience given to plateau (a checkpoint's counts)"] == 3
    assert told["milestones given to falls (a checkpoint's counts)"] == [4, 4, 8]
    assert "lr given to adam (a checkpoint's counts)" not in told, "it is a tensor"


def test_a_model_of_other_numbers_than_the_checkpoints_is_told(workshop: Workshop, tmp_path: Path) -> None:
    """Each weight was rounded as it was loaded, and nothing said so; back in float32 they stayed rounded."""
    script = tmp_path / "rounds.py"
    script.write_text(
        """
import sys
import torch
from holdfast_trainer.run import Run

run = Run()
model = torch.nn.Linear(2, 1).to(getattr(torch, sys.argv[1]))
run.track(model=model)
for step in run.steps(int(sys.argv[2])):
    model.weight.data += 1
"""
    )
    workshop.finish(script=script, arguments=["float32", "2"])
    history = workshop.finish(script=script, arguments=["bfloat16", "4"])
    assert history.events("attempt_start", 2)[0]["differences"] == ["numbers of model: float32 -> bfloat16"]


def test_threads_that_a_script_sets_after_its_run_are_those_that_count(
    workshop: Workshop, tmp_path: Path
) -> None:
    """As many as the machine has cores, say: a resume on another machine said nothing of it."""
    script = tmp_path / "threads.py"
    script.write_text(SETS_ITS_THREADS)
    workshop.finish(script=script, arguments=["1"])
    history = workshop.finish(script=script, arguments=["2"])
    assert history.events("attempt_start", 2)[0]["differences"] == ["threads: 1 -> 2"]


WHOLE_OR_CUT = """
import sys
import torch
from holdfast_trainer.run import Run

run = Run()
net = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Linear(4, 1))
model = run.wrap(net) if sys.argv[1] == "whole" else run.shard(net, [])
optimizer = torch.optim.AdamW(model.parameters(), 0.1)
run.track(model=model, optimizer=optimizer)
for step in run.steps(int(sys.argv[2])):
    model(torch.ones(3, 2)).sum().backward()
    optimizer.step()
"""


def test_a_loop_that_cuts_its_model_from_now_on_is_told_that_bits_differ(
    workshop: Workshop, tmp_path: Path
) -> None:
    """What DDP adds up over three ranks and what FSDP2 does is rounded otherwise, and nothing was said."""
    script = tmp_path / "whole_or_cut.py"
    script.write_text(WHOLE_OR_CUT)
    workshop.finish(ranks=2, script=script, arguments=["whole", "2"])
    history = workshop.finish(ranks=2, script=script, arguments=["cut", "4"])
    assert history.events("attempt_start", 2)[0]["differences"] == ["parameters: whole -> in shards"]


COMPUTES_OTHERWISE = """
import sys
import torch
from holdfast_trainer.run import Run

run = Run()
run.environment["layers"] = sys.argv[1 + run.rank]
model = run.wrap(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
run.track(model=model, optimizer=optimizer)
for step in run.steps(int(sys.argv[3])):
    model(torch.ones(3, 2)).sum().backward()
    optimizer.step()
"""


def test_a_resume_where_another_rank_than_the_first_computes_otherwise_is_told(
    workshop: Workshop, tmp_path: Path
) -> None:
    """As on a node with another GPU, or another compiler: what rank 0 had was compared alone."""
    script = tmp_path / "computes_otherwise.py"
    script.write_text(COMPUTES_OTHERWISE)
    for layers, steps in (("one", "one"), 2), (("one", "two"), 4), (("one", "two"), 6):
        gang = workshop.start(ranks=2, script=script, arguments=[*layers, str(steps)])
        assert gang.wait() == [0, 0], gang.texts()
    told = [line["differences"] for line in gang.history.events("attempt_start")]
    assert told == [[], ["layers: one -> one on rank 0, two on rank 1"], []]


def test_what_ranks_have_is_told_together_and_bounded() -> None:
    ranks: list[dict[str, Any]] = [{"a": 1, "b": "x", "only the first's": 2}, {"a": 1, "b": "y", "c": 3}]
    assert together(ranks[:1]) == ranks[0]
    assert together(ranks) == {"a": 1, "b": "x on rank 0, y on rank 1", "only the first's": 2}
    many: list[dict[str, Any]] = [{"b": number} for number in range(1000)]
    told, others = together(many)["b"], together([*many[:-1], {"b": 7}])["b"]
    assert told != others
    assert len(told) == len(others) < 420


def test_a_gpu_has_its_libraries_too() -> None:
    told = gpu_libraries()
    assert told["CUDA"] == torch.version.cuda
    assert {"CUDA", "cuDNN"} <= told.keys() <= {"CUDA", "cuDNN", "NCCL"}


def test_what_could_not_be_repeated_is_told_unless_it_is_told_now() -> None:
    assert differences({"not deterministic": "put_"}, {}) == ["not deterministic: put_"]
    assert differences({"not deterministic": "put_"}, {"not deterministic": "put_"}) == []


@pytest.mark.parametrize(
    ("changed", "here", "expected"),
    [
        ({}, {}, []),
        ({"micro_batch": 2}, {"micro_batch": 2}, ["train.micro_batch: 4 -> 2"]),
        ({"fused_optimizer": False}, {}, ["train.fused_optimizer: True -> False"]),
        ({}, {"attention": "math"}, ["attention: flash -> math"]),
        ({"compile": True}, {"compiled": True}, ["train.compile: False -> True"]),
        ({"compile": True}, {}, []),  # it did not compile
        ({"activation_checkpointing": True}, {}, []),  # the same, computed twice
        ({"tf32": False}, {}, []),
        ({"tf32": False}, {"device_type": "cuda"}, ["train.tf32: True -> False"]),
        ({}, {"device_type": "cuda", "fused_loss": True}, ["loss: torch -> fused"]),
        ({"fused_layers": False}, {}, []),  # what came of it counts
        ({}, {"layers": "fused (0a1b2c3d)"}, ["layers: torch -> fused (0a1b2c3d)"]),
        ({}, {"device_type": "cuda", "layers": "fused (0a1b2c3d)"}, []),
    ],
)
def test_which_settings_change_bits(changed: Any, here: dict[str, Any], expected: list[str]) -> None:
    as_it_was: dict[str, Any] = {
        "micro_batch": 4,
        "compiled": False,
        "attention": "flash",
        "fused_loss": False,
        "layers": "torch",
        "device_type": here.get("device_type", "cpu"),
    }
    then = execution(TrainConfig(steps=9, global_batch=4), **as_it_was)
    now = execution(TrainConfig(steps=9, global_batch=4, **changed), **{**as_it_was, **here})
    assert differences(then, now) == expected
    assert differences({"torch": "2.15"}, now) == [], "a checkpoint of before they were kept"


def test_who_makes_a_step_fit_by_a_smaller_micro_batch_is_told_that_bits_differ(
    workshop: Workshop, tmp_path: Path
) -> None:
    config = write_config(tmp_path)
    assert start(workshop, config, "train.steps=6", "train.micro_batch=12").wait() == [0]
    for attempt, micro, expected in ((2, 4, ["train.micro_batch: 12 -> 4"]), (3, 12, [])):
        gang = start(workshop, config, "train.steps=6", f"train.micro_batch={micro}")
        assert gang.wait() == [0], gang.texts()
        assert gang.history.events("attempt_start", attempt)[0]["differences"] == expected
