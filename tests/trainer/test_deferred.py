"""A training that compiles nothing does not import the compiler, and loses nothing by that."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from gangs import History, Workshop
from gpt_runs import start, write_config

from holdfast_trainer.contract import RunDir

TRAINING = """
import sys
from holdfast_trainer.__main__ import main
code = main(sys.argv[1:])
print("the compiler:", "imported" if "torch._dynamo.convert_frame" in sys.modules else "absent")
print("imported for nothing:", *sorted({"numpy.ma", "sympy"} & set(sys.modules)), "or not")
sys.exit(code)
"""
SINCE_THEN = """
import gc, sys, torch, torch.distributed as dist
from holdfast_trainer.deferred import defer_compiler
from holdfast_trainer.determinism import make_deterministic

def absent():
    return "torch._dynamo.convert_frame" not in sys.modules

defer_compiler()
make_deterministic()
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.AdamW(model.parameters())

def step():
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()

step()
optimizer.load_state_dict(optimizer.state_dict())
assert absent(), "PyTorch asks for something that the stand-in does not answer"
assert torch.are_deterministic_algorithms_enabled()
held = sys.modules["torch._dynamo"]

def passes():
    return sum(generation["collections"] for generation in gc.get_stats())

before = passes()
"""
ASKED = {
    "a submodule": "import torch._dynamo.config",
    "a part of it": "torch._dynamo.utils.counters",
    "the stand-in, which somebody keeps": "held.reset()",
    "to leave a function alone": "torch.compiler.disable(step)",
}
OF_ONES_OWN = """
import sys, torch
from holdfast_trainer.run import Run
run = Run(run_dir=sys.argv[1])
model = run.wrap(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
run.track(model=model, optimizer=optimizer)
for step in run.steps(3):
    optimizer.zero_grad()
    loss = model(torch.ones(2, 4)).sum()
    loss.backward()
    optimizer.step()
    run.log(loss=loss)
print("imported" if "torch._dynamo.convert_frame" in sys.modules else "absent")
broken = []
@torch.compiler.disable
def left_alone(x):
    broken.append(type(x))
    return x + 1
compiled = torch.compile(lambda x: left_alone(x) + 1, backend="eager")
print(compiled(torch.ones(2)).tolist(), broken.count(torch.Tensor))
"""
THEN = """
assert not absent()
assert passes() - before < 20, "what is imported is no garbage"
import torch._dynamo.config, torch._dynamo.utils, torch._dynamo.trace_rules, torch._inductor.config
real = sys.modules["torch._dynamo"]
assert real is torch._dynamo is not held
assert all(getattr(real, part) is sys.modules[f"torch._dynamo.{part}"] for part in ("config", "utils"))
assert held.utils is real.utils and held.disable is real.disable
assert torch._inductor.config.deterministic, "what is compiled is deterministic, too"
step()
marked = torch.optim.Optimizer.zero_grad.__wrapped__.__dynamo_disable
assert marked is not torch.optim.Optimizer.zero_grad.__wrapped__, "it is kept from being compiled again"
assert torch.equal(torch.compile(lambda x: x * 2, backend="eager")(torch.ones(2)), torch.full((2,), 2.0))
dist.destroy_process_group()
"""


FORKED = """
import os, sys, traceback, torch, torch.distributed
from holdfast_trainer import deferred, determinism
codes = {}
for name, code in %r.items():
    if (pid := os.fork()) == 0:
        try:
            sys.argv[1:] = [f"{sys.argv[1]}-{name}"]
            exec(code, {"__name__": "__main__"})
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    codes[name] = os.waitpid(pid, 0)[1]
assert not any(codes.values()), codes
"""
"""PyTorch is imported once for all of them, before the fork: they but import the compiler."""


def python(script: str, *arguments: object) -> str:
    command = [sys.executable, "-c", script, *map(str, arguments)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}  # as ranks have: more threads add up in another order
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_training_that_compiles_nothing_does_without_it_and_computes_the_same(
    workshop: Workshop, tmp_path: Path
) -> None:
    config = write_config(tmp_path)
    twin = start(workshop, config, "train.steps=12", name="twin")  # forked from where it is imported
    assert twin.wait() == [0], twin.texts()
    place = tmp_path / "mine"
    said = python(TRAINING, "train", "--config", config, "--run-dir", place, "train.steps=12")
    assert "the compiler: absent" in said
    assert "imported for nothing: or not" in said, "what takes as long as several steps"
    mine = History(RunDir(place))
    assert mine.losses() == twin.history.losses()
    assert mine.stop()["digest"] == twin.history.stop()["digest"] != ""


@pytest.mark.slow
def test_whatever_else_is_asked_of_it_imports_the_compiler_once(tmp_path: Path) -> None:
    python(FORKED % {name: SINCE_THEN + asked + THEN for name, asked in ASKED.items()}, tmp_path / "store")


def test_a_script_of_ones_own_does_without_it_too_and_may_compile_later(tmp_path: Path) -> None:
    said = python(OF_ONES_OWN, tmp_path)
    assert said.splitlines()[-2:] == ["absent", "[3.0, 3.0] 1"]


def test_where_it_is_imported_already_nothing_changes() -> None:
    python(
        "import sys, torch, torch._dynamo as real\n"
        "from holdfast_trainer.deferred import defer_compiler\n"
        "defer_compiler()\n"
        "assert sys.modules['torch._dynamo'] is real"
    )
