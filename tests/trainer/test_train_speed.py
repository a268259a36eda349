"""What makes a step faster or smaller changes no loss, or says so: compile, recomputation, traces."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from gangs import KILL, NOTICE, Workshop
from gpt_runs import compiler_cache, start, write_config

from holdfast_trainer.compilation import CACHE, CUT_SHORT, compile_or_eager, mode_that_holds
from holdfast_trainer.config import ConfigError, ModelConfig, parse_window
from holdfast_trainer.model import GPT
from holdfast_trainer.parallel import Gang, unharmed
from holdfast_trainer.precision import allow_tf32, has_tf32, with_tf32
from holdfast_trainer.profiling import Window

SHAPE = ModelConfig(vocab_size=64, layers=2, heads=2, width=32, context=16, dropout=0.2)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_config(tmp_path)


COMPILES = """
import importlib, logging, sys, torch
from pathlib import Path
from holdfast_trainer.compilation import compile_or_eager
from holdfast_trainer.determinism import make_deterministic
from holdfast_trainer.parallel import Gang

if sys.argv[2:]:
    importlib.import_module(sys.argv[2])  # as an optimizer does
make_deterministic()
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU())
probe = lambda: model(torch.ones(4, 8)).sum().backward()
assert not compile_or_eager([model], None, probe, Gang(0, 1, 0, torch.device("cpu")), Path(sys.argv[1]))
"""


@pytest.mark.slow
def test_what_was_compiled_is_found_again_by_the_next_attempt(tmp_path: Path) -> None:
    def compiled(*imported: str) -> set[Path]:
        env = {name: value for name, value in os.environ.items() if name != CACHE}
        command = [sys.executable, "-c", COMPILES, tmp_path / "compiled", *imported]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
        assert "compiled in " in done.stdout, done.stdout + done.stderr
        return set((tmp_path / "compiled").rglob("*.so"))

    built = compiled()
    assert built
    assert compiled("torch._dynamo") == built, "nothing was compiled anew"


@pytest.mark.slow
def test_what_does_not_compile_runs_as_it_is_written(workshop: Workshop, config: Path) -> None:
    """The compiler cannot write anywhere: the run goes on without it, and loses nothing by that."""
    settings = ("train.steps=6", "validation.every=0", "model.layers=1", "train.fused_layers=false")
    eager = start(workshop, config, *settings, name="eager")
    assert eager.wait() == [0], eager.texts()
    nowhere = {"TORCHINDUCTOR_CACHE_DIR": "/dev/null/nowhere"}
    gang = start(workshop, config, *settings, "train.compile=true", env=nowhere)
    assert gang.wait(300) == [0], gang.texts()
    (line,) = [line for line in gang.texts().splitlines() if "torch.compile failed" in line]
    assert "all ranks go on without it (rank 0: " in line
    assert gang.history.losses() == eager.history.losses()


@pytest.mark.slow
def test_a_compiled_gpt_resumes_exactly(workshop: Workshop, config: Path) -> None:
    """Training and validation are two graphs."""
    if not any(map(shutil.which, ("c++", "g++", "clang++"))):
        pytest.skip("torch.compile needs a C++ compiler here, and there is none")
    settings = ("train.compile=true", "model.layers=1", "train.steps=120", "checkpoint.every=5")
    cache = compiler_cache()
    untouched = start(workshop, config, *settings, name="untouched", env=cache)
    assert untouched.wait() == [0], untouched.texts()
    gang = start(workshop, config, *settings, env=cache)
    gang.wait_for_step(12)
    gang.wait_for_checkpoint()
    gang.signal(KILL)
    assert gang.wait() == [-KILL], "it was not over yet"
    last = start(workshop, config, *settings, env=cache)
    assert last.wait() == [0], last.texts()
    for attempt in (untouched, gang, last):
        assert "compiled in " in attempt.texts()
        assert "torch.compile failed" not in attempt.texts()
    assert "resumed from step " in last.texts()
    assert last.history.losses() == untouched.history.losses()
    assert last.history.validations() == untouched.history.validations() != {}
    assert last.history.stop()["digest"] == untouched.history.stop()["digest"] != ""


@pytest.mark.slow
def test_recomputing_resumes_exactly(workshop: Workshop, config: Path) -> None:
    """Dropout is drawn a second time where activations are computed again."""
    settings = ("train.activation_checkpointing=true", "model.layers=1", "train.steps=60")
    untouched = start(workshop, config, *settings, name="untouched")
    assert untouched.wait() == [0], untouched.texts()
    for at, signal in ((9, KILL), (17, NOTICE)):
        gang = start(workshop, config, *settings)
        gang.wait_for_step(at)
        gang.wait_for_checkpoint()
        gang.signal(signal)
        gang.wait()
    last = start(workshop, config, *settings)
    assert last.wait() == [0], last.texts()
    starts = [line["resumed_step"] for line in last.history.events("attempt_start")]
    assert 0 == starts[0] < starts[1], starts
    assert last.history.losses() == untouched.history.losses()
    assert last.history.validations() == untouched.history.validations()
    assert last.history.stop()["digest"] == untouched.history.stop()["digest"] != ""


@dataclass
class TwoRanks(Gang):
    """This rank, and a peer that says something else."""

    peer: str = ""

    def gather(self, value: str) -> list[str]:
        return [value, self.peer]


def test_a_peer_that_cannot_compile_takes_the_others_back_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE, str(tmp_path))
    model = torch.nn.Linear(2, 2)
    gang = TwoRanks(0, 2, 0, torch.device("cpu"), peer="CppCompileError: no space left")
    said = compile_or_eager([model], None, lambda: None, gang, tmp_path)
    assert said == "rank 1: CppCompileError: no space left"
    assert "forward" not in vars(model)
    assert "go on without it (rank 1: CppCompileError: no space left)" in caplog.text

    def too_large() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    gang.peer = ""
    with pytest.raises(torch.OutOfMemoryError):
        compile_or_eager([model], None, too_large, gang, tmp_path)


def test_a_compiler_that_a_notice_ends_has_not_failed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun signals it with its rank, of which a peer, on a node that stays, knows nothing yet. All stop
    before the first step, so nobody was to go on without it."""
    caplog.set_level(logging.INFO)
    monkeypatch.setenv(CACHE, str(tmp_path))
    model = torch.nn.Linear(2, 2)

    def killed() -> None:
        raise RuntimeError("C++ compile error") from subprocess.CalledProcessError(-15, "g++")

    gang = TwoRanks(0, 2, 0, torch.device("cpu"))
    assert not compile_or_eager([model], None, killed, gang, tmp_path, noticed=lambda: True)
    assert not compile_or_eager([model], None, lambda: None, replace(gang, peer=CUT_SHORT), tmp_path)
    assert "forward" not in vars(model), "what is half compiled is not called"
    assert caplog.messages == [
        f"a notice ended the compiler on rank {rank}: no step is done without it" for rank in (0, 1)
    ]


@pytest.mark.parametrize(
    ("asked", "device", "ranks", "micro_batches", "used", "said"),
    [
        ("reduce-overhead", "cuda", 1, 1, "reduce-overhead", ""),
        ("reduce-overhead", "cuda", 1, 4, "default", "CUDA graphs do not go with 4 micro-batches a step"),
        ("max-autotune", "cuda", 2, 1, "max-autotune-no-cudagraphs", "do not go with 2 ranks"),
        ("max-autotune-no-cudagraphs", "cuda", 2, 4, "max-autotune-no-cudagraphs", ""),
        (None, "cuda", 2, 4, None, ""),
        ("reduce-overhead", "cpu", 2, 4, "reduce-overhead", ""),
    ],
)
def test_cuda_graphs_are_recorded_only_where_nothing_is_overwritten(
    asked: str | None,
    device: str,
    ranks: int,
    micro_batches: int,
    used: str | None,
    said: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """They would end the run in its first step, or at its first validation."""
    assert mode_that_holds(asked, Gang(0, ranks, 0, torch.device(device)), micro_batches) == used
    assert said in caplog.text
    assert bool(said) == bool(caplog.records)


def test_recomputing_activations_changes_no_bit() -> None:
    grads = []
    for recompute in (False, True):
        torch.manual_seed(1)
        model = GPT(SHAPE, recompute=recompute)
        tokens = torch.randint(64, (4, 16))
        torch.manual_seed(2)  # of dropout
        loss = model(tokens, tokens)[1]
        assert loss is not None
        loss.backward()
        grads.append([p.grad for p in model.parameters()] + [loss.detach()])
    for plain, again in zip(*grads, strict=True):
        assert torch.equal(plain, again)


def test_recomputing_keeps_less() -> None:
    kept = []
    for recompute in (False, True):
        model = GPT(SHAPE, recompute=recompute)
        sizes: list[int] = []

        def pack(tensor: torch.Tensor, sizes: list[int] = sizes) -> torch.Tensor:
            sizes.append(tensor.numel())
            return tensor

        tokens = torch.zeros(4, 16, dtype=torch.int64)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(tokens, tokens)
        kept.append(sum(sizes))
    assert kept[1] < kept[0] / 2


def test_a_probe_leaves_no_trace() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.nn.Dropout(0.5))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()

    def fail() -> None:
        with unharmed(model):
            model(torch.randn(5, 3)).sum().backward()
            model.eval()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert model.training
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)


def test_tf32_is_no_matter_of_a_cpu() -> None:
    before = torch.get_float32_matmul_precision()
    allow_tf32(torch.device("cpu"), True)
    assert torch.get_float32_matmul_precision() == before
    assert not has_tf32(torch.device("cpu"))


@pytest.mark.parametrize(("allowed", "within"), [(True, "high"), (False, "highest"), (None, "medium")])
def test_tf32_of_a_measurement_ends_with_it(
    allowed: bool | None, within: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    before = torch.get_float32_matmul_precision()
    convolutions = torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("medium")
    try:
        with with_tf32(torch.device("cuda"), allowed):
            assert torch.get_float32_matmul_precision() == within
            assert torch.backends.cudnn.allow_tf32 == (convolutions if allowed is None else allowed)
        assert torch.get_float32_matmul_precision() == "medium"
        assert torch.backends.cudnn.allow_tf32 == convolutions
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_tf32_that_a_program_sets_by_its_newer_name_stays_as_it_is(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch refuses to be asked by the older names from then on."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    before = torch.get_float32_matmul_precision()
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        assert not has_tf32(torch.device(device))
        for allowed in (None, False):
            with with_tf32(torch.device(device), allowed):
                assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    finally:
        torch.set_float32_matmul_precision(before)


# --------------------------------------------------------------------- traces


def test_a_window_of_steps_is_traced_with_its_phases(workshop: Workshop, config: Path) -> None:
    gang = start(workshop, config, "train.steps=8", "train.profile=2-3", "train.tensorboard=true")
    assert gang.wait() == [0], gang.texts()
    trace = gang.history.run.attempt(1) / "trace-2-3.json"
    names = [event.get("name") for event in json.loads(trace.read_text())["traceEvents"]]
    for phase in ("data", "forward", "backward", "optimizer"):
        assert names.count(phase) >= 2, phase
    assert "steps 2 to 3 were profiled: open " in gang.texts()
    (events,) = (gang.history.run.path / "tensorboard").iterdir()
    assert b"validation loss" in events.read_bytes()


def test_a_notice_within_the_window_leaves_a_trace_and_the_next_attempt_traces_the_rest(
    workshop: Workshop, config: Path
) -> None:
    """The process ended by SIGSEGV, after its save, and the trace was lost."""
    words = ("train.steps=5000", "train.profile=2-4000")
    gang = start(workshop, config, *words)
    gang.wait_for_text("step 10:")
    gang.signal(NOTICE)
    assert gang.wait() == [0], gang.texts()
    stopped = gang.termination().step
    assert (gang.history.run.attempt(1) / f"trace-2-{stopped - 1}.json").stat().st_size
    again = start(workshop, config, *words)
    again.wait_for_text(f"step {stopped // 10 * 10 + 20}:")
    again.signal(NOTICE)
    assert again.wait() == [0], again.texts()
    assert f"steps {stopped} to {again.termination().step - 1} were profiled: open " in again.texts()


def test_where_a_notice_leaves_no_time_the_trace_is_not_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    window = Window(range(1, 9), tmp_path, torch.device("cpu"))
    window.begin(1)
    window.close(3, seconds=1.0)
    assert not window.open
    assert "no time is left to write the trace of steps 1 to 3" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_a_trace_that_cannot_be_written_costs_the_trace(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    window = Window(range(1, 9), tmp_path / "missing", torch.device("cpu"))
    window.begin(0)
    assert not window.open
    window.begin(1)
    assert window.open
    window.close(1)  # the run ended within the window
    assert not window.open
    assert "the trace of steps 1 to 1 could not be written to " in caplog.text
    window.begin(2)
    assert not window.open, "one window a run"


@pytest.mark.parametrize("text", ["20", "20:25", "25-20", "a-b", ""])
def test_what_is_no_window(text: str) -> None:
    with pytest.raises(ConfigError, match="is no window of steps; say FIRST-LAST, such as 20-24"):
        parse_window(text)
