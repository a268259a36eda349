"""Before a run: what it needs, how long it takes, and what to change, from facts and from real steps."""

from __future__ import annotations

import importlib
import json
import re
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gangs import Workshop
from gpt_runs import COMMAND, write_config

from holdfast_trainer.config import Config, load
from holdfast_trainer.contract import EXIT_CONFIG_ERROR
from holdfast_trainer.diagnose_command import main
from holdfast_trainer.diagnose_config import as_text
from holdfast_trainer.diagnosis import Facts, estimate, findings, out_of_memory
from holdfast_trainer.hf_weights import save_weights
from holdfast_trainer.links import Link
from holdfast_trainer.memory_need import largest_micro_batch, memory_need
from holdfast_trainer.model import build_model, parameter_count
from holdfast_trainer.probing import disk_speed, paced
from holdfast_trainer.rehearsal import StepTimes
from holdfast_trainer.tune.census import Line
from holdfast_trainer.tune.diagnosis import WorkloadFacts, explain
from holdfast_trainer.tune.settings import Settings

GOOD = (
    "model.vocab_size=64",
    "model.layers=2",
    "model.heads=2",
    "model.width=64",
    "model.context=32",
    "data.path=data",
    "train.steps=1000",
    "train.global_batch=64",
    "train.micro_batch=16",
    "optim.warmup_steps=10",
    "validation.every=100",
)
FACTS = Facts(
    device="a GPU",
    device_type="cuda",
    precision="bf16",
    world_size=1,
    cores=8,
    memory_total=10_000_000,
    memory_peak=7_000_000,
    samples=20_000,
    step_seconds=0.5,
    data_seconds=0.0005,
    start_seconds=5.0,
    optimizer_seconds=0.05,
    fast_bf16=True,
    validation_seconds=2.0,
    disk_bytes_per_second=1e9,
    state_bytes=2_000_000_000,
    notice_seconds=27.0,
)


def config(*changes: str) -> Config:
    return load(None, [*GOOD, *changes], environ={})


def test_a_sound_run_has_nothing_to_change() -> None:
    assert findings(config(), FACTS) == []
    assert estimate(config(), FACTS) == pytest.approx(5.0 + 1000 * 0.5 + 10 * 2.0 + 2.0)
    text = as_text(config(), FACTS, [])
    assert "nothing to change" in text
    assert "time        8.8 minutes for 1,000 steps" in text


def test_a_small_model_has_sizes_that_say_something() -> None:
    """Whoever tries it with a model of a few kilobytes read of 0.00 GB, in every place."""
    text = as_text(config(), replace(FACTS, memory_peak=56_000, state_bytes=42_000), [])
    assert "\nmemory      56 kB measured of 10 MB; reckoned 5.1 MB (state 1.68 MB, " in text
    assert "\ncheckpoint  42 kB, " in text


@pytest.mark.parametrize(
    ("changes", "facts", "level", "setting", "said"),
    [
        (
            (),
            {"device_type": "cpu", "own_malloc": False},
            "note",
            "LD_PRELOAD",
            "install libtcmalloc-",
        ),
        (
            (),
            {"attention": "flash", "slow_attention": "rank 0: pip install nvidia-cudnn-frontend"},
            "note",
            "train.deterministic",
            "attention could repeat its bits faster, by cuDNN (rank 0: pip install nvidia-cudnn-frontend)",
        ),
        (
            (),
            {"device_type": "cpu", "own_malloc": True, "slow_attention": "rank 1: its bits did not repeat"},
            "note",
            "train.precision",
            "could be had faster, by matrix products (rank 1: its bits did not repeat)",
        ),
        (
            (),
            {"large_loss": "rank 0: pip install cuda-bindings"},
            "note",
            "train.compile",
            "in less time and memory by kernels of its own (rank 0: pip install cuda-bindings)",
        ),
        (
            (),
            {"device_type": "cpu", "own_malloc": True, "slow_layers": "rank 0: it needs a C++ compiler once"},
            "note",
            "train.fused_layers",
            "faster, by kernels of its own (rank 0: it needs a C++ compiler once)",
        ),
        ((), {"bad_loss": "nan"}, "error", "model", "the loss of these steps comes to nan, at which a run"),
        ((), {"bad_loss": "inf", "precision": "fp16"}, "error", "train.precision", "fp16 ends at 65504: "),
        (
            ("train.init_from=gpt2",),
            {"bad_loss": "nan"},
            "error",
            "train.init_from",
            "see whether these weights are whole",
        ),
        (
            (),
            {"memory_peak": 9_900_000},
            "error",
            "train.micro_batch",
            "too close to all: set it to 8, which",
        ),
        (
            ("train.micro_batch=1",),
            {"memory_peak": 9_900_000},
            "error",
            "train.activation_checkpointing",
            "too close to all: turn it on, or use train.parallel=fsdp with more ranks",
        ),
        (
            ("train.micro_batch=1", "train.activation_checkpointing=true", "train.parallel=fsdp"),
            {"memory_peak": 9_900_000},
            "error",
            "model",
            "too close to all: make it or its context smaller, or use more ranks",
        ),
        (
            ("train.micro_batch=1",),
            {"memory_peak": 9_900_000, "precision": "fp16"},
            "error",
            "train.activation_checkpointing",
            "or use train.parallel=fsdp and train.precision=fp32 with more ranks",
        ),
        (
            (),
            {"memory_peak": 2_000_000},
            "warning",
            "train.micro_batch",
            "accumulated over 4 passes: 64 should fit",
        ),
        (
            ("train.micro_batch=64",),
            {"memory_peak": 2_000_000},
            "note",
            "train.global_batch",
            "a rank's whole share of a step, 64 sequences: there is room for about ",
        ),
        ((), {"samples": 5000}, "warning", "train.steps", "goes through the data 12.8 times; beyond 4"),
        (
            ("train.steps=1", "optim.warmup_steps=0"),
            {"samples": 50},
            "warning",
            "train.global_batch",
            "and the data 50",
        ),
        ((), {"data_seconds": 0.25}, "warning", "data.path", "50% of a step waits for data"),
        (
            (
                "data.path=null",
                "data.stream={sources: [a], tokenizer: t.json, validation_fraction: 0.1}",
            ),
            {"data_seconds": 0.25, "samples": None},
            "warning",
            "data.stream",
            "50% of a step waits for data: it is tokenised meanwhile; prepare does that once, before",
        ),
        (
            (),
            {"disk_bytes_per_second": 1e7},
            "warning",
            "checkpoint",
            "takes 200.0 s until it is durable and a notice",
        ),
        (
            ("checkpoint.every=2000",),
            {},
            "warning",
            "checkpoint.every",
            "loses up to 17 minutes; auto weighs",
        ),
        (
            ("checkpoint.every=2",),
            {},
            "warning",
            "checkpoint.every",
            "2 steps take 1.0 s and a save 2.0 s: training",
        ),
        (
            ("train.threads=9",),
            {},
            "warning",
            "train.threads",
            "9 threads of each of 1 rank(s) here, on 8 cores, wait for each other: 8 a rank would not",
        ),
        (
            ("train.threads=3", "train.micro_batch=null"),
            {"world_size": 4, "ranks_here": 4},
            "warning",
            "train.threads",
            "3 threads of each of 4 rank(s) here, on 8 cores, wait for each other: 2 a rank would not",
        ),
        (
            ("model.vocab_size=65",),
            {},
            "warning",
            "model.vocab_size",
            "65 is no multiple of 64, which slows the ",
        ),
        (
            ("optim.learning_rate=0.1",),
            {},
            "warning",
            "optim.learning_rate",
            "0.1 is 61 times what is usual for",
        ),
        (
            ("train.precision=fp32",),
            {"precision": "fp32", "memory_peak": 7_000_000},
            "warning",
            "train.precision",
            "this device multiplies bf16 faster",
        ),
        (
            ("train.fused_optimizer=false",),
            {},
            "warning",
            "train.fused_optimizer",
            "one by one, 10% of a step: turn it on",
        ),
        (
            (),
            {"optimizer_seconds": 0.2},
            "warning",
            "train.global_batch",
            "40% of a step is the optimizer",
        ),
        (("optim.warmup_steps=0",), {}, "note", "optim.warmup_steps", "no warm-up"),
        (("validation.every=0",), {}, "note", "validation.every", "overfitting goes unseen"),
        (
            (),
            {"step_seconds": 30.0, "data_seconds": 0.0},
            "note",
            "train.compile",
            "on a run of hours the minute",
        ),
    ],
)
def test_each_mistake_is_named_with_its_setting(
    changes: tuple[str, ...], facts: dict[str, object], level: str, setting: str, said: str
) -> None:
    found = findings(config(*changes), replace(FACTS, **facts))  # type: ignore[arg-type]
    assert [(f.level, f.setting) for f in found] == [(level, setting)]
    assert said in found[0].message


def test_a_vocabulary_that_weights_have_already_is_left_as_it_is() -> None:
    assert findings(config("model.vocab_size=65", "train.init_from=gpt2"), FACTS) == []


def test_the_best_of_what_nobody_validates_is_warned_of() -> None:
    """And not refused: a run may have validated before, and keeps the best of then."""
    found = findings(config("validation.every=0", "checkpoint.keep_best=2"), FACTS)
    told = next(finding for finding in found if finding.setting == "checkpoint.keep_best")
    assert told.level == "warning"
    assert "which nobody measures: set validation.every" in told.message


def test_errors_come_first() -> None:
    found = findings(config("validation.every=0"), replace(FACTS, memory_peak=9_900_000, samples=5000))
    assert [finding.level for finding in found] == ["error", "warning", "note"]


# --------------------------------------------------------------------- memory


def test_what_is_needed_grows_and_shrinks_with_the_settings() -> None:
    plain = memory_need(config(), "fp32", 1, 16)
    assert plain.state == 16 * parameter_count(config().model)
    assert memory_need(config(), "fp32", 1, 32).activations == 2 * plain.activations
    kept = memory_need(config("train.activation_checkpointing=true"), "fp32", 1, 16)
    assert kept.activations < plain.activations
    assert memory_need(config("train.parallel=fsdp"), "fp32", 4, 16).state == plain.state // 4
    assert memory_need(config(), "bf16", 1, 16).copies > plain.copies == 0
    narrow, wide = (memory_need(config("train.parallel=fsdp"), name, 4, 16) for name in ("bf16", "fp32"))
    assert narrow.copies == wide.copies == 0 < narrow.gathered < wide.gathered, "gathered in bf16"


def test_the_largest_batch_that_fits_divides_the_share() -> None:
    need = memory_need(config(), "bf16", 1, 16).total
    assert largest_micro_batch(config(), "bf16", 1, need) == 16
    assert largest_micro_batch(config(), "bf16", 1, 2 * need) >= 32
    assert largest_micro_batch(config(), "bf16", 1, 2 * need, correction=2.0) == 16
    assert largest_micro_batch(config(), "bf16", 1, 1000) is None


@pytest.mark.parametrize(
    ("changes", "room", "setting", "said"),
    [
        (
            (),
            0.6,
            "train.micro_batch",
            "16 sequences a pass does not fit: it needs about 7.84 MB (state 1.68 MB",
        ),
        ((), 0.8, "train.micro_batch", ": set it to 8, which should fit"),
        ((), 2.0, "train.micro_batch", ": set it to 8, which should fit"),  # reckoned too low
        (
            ("train.micro_batch=1", "model.layers=20", "model.context=512"),
            0.5,
            "train.activation_checkpointing",
            ": turn it on and set train.micro_batch to 1, which",
        ),
        ((), 0.001, "model", "; not even one sequence would: use train.parallel=fsdp with more ranks, a "),
        (("train.parallel=fsdp",), 0.001, "model", "; not even one sequence would: use more ranks, a smal"),
    ],
)
def test_what_did_not_fit_is_told_with_the_setting_that_would(
    changes: tuple[str, ...], room: float, setting: str, said: str
) -> None:
    """`room` is a share of what is reckoned."""
    tried = config(*changes)
    need = memory_need(tried, "fp32", 1, tried.train.micro_batch or 64).total
    found = out_of_memory(tried, "fp32", 1, int(room * need))
    assert (found.level, found.setting) == ("error", setting)
    assert said in found.message


def test_what_would_fit_is_no_combination_that_is_refused() -> None:
    """As fp16 cut over ranks is: its scaler would have to see the gradients of all."""
    said = out_of_memory(config(), "fp16", 1, 1000).message
    assert "would: use train.parallel=fsdp and train.precision=fp32 with more ranks, a smaller model" in said


# ------------------------------------------------------------------ the command


def test_real_steps_are_measured_and_leave_nothing_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_config(tmp_path)
    before = set(tmp_path.rglob("*"))
    arguments = [str(file), "-o", "json", "--steps", "2", "--run-dir", str(tmp_path / "runs" / "a")]
    assert main([*arguments, "optim.warmup_steps=0"]) == 0
    told = json.loads(capsys.readouterr().out)
    facts = told["facts"]
    assert facts["device"] == "cpu"
    assert facts["samples"] == (10_000 - 1) // 16
    assert facts["memory_peak"] > 0
    assert facts["disk_bytes_per_second"] > 0
    # Weights, two moments of each, and a step count for every parameter.
    parameters = parameter_count(load(file).model)
    assert 12 * parameters < facts["state_bytes"] < 12 * parameters + 4096
    assert told["estimated_seconds"] > 40 * facts["step_seconds"] > 0
    assert "optim.learning_rate" in [finding["setting"] for finding in told["findings"]]
    assert set(tmp_path.rglob("*")) == before, "nothing is saved, and the probe of the disk is gone"


def test_a_compiler_that_fails_is_a_finding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run goes on without it, and so do the steps that tell of it."""
    importlib.import_module("torch._dynamo")  # or not even an optimizer could be made
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/dev/null/nowhere")
    words = ["--steps", "1", "train.compile=true", "optim.learning_rate=1e-4", "model.layers=1"]
    assert main([str(write_config(tmp_path)), *words]) == 0
    said = capsys.readouterr().out
    assert "warning: train.compile: it fails here (rank 0: " in said
    assert "so the run would go on without it, as these steps did" in said
    assert torch.are_deterministic_algorithms_enabled(), "as in the run"


@pytest.mark.parametrize(
    ("waited", "made", "expected"),
    [
        pytest.param(0.0, 0.04, (0.1, 0.0), id="made while the step computes"),
        pytest.param(0.0, 0.25, (0.25, 0.15), id="not made in time, though it was ready here"),
        pytest.param(0.05, 0.02, (0.1, 0.05), id="read, and waited for"),
    ],
)
def test_a_step_takes_no_less_than_its_text_does(
    waited: float, made: float, expected: tuple[float, float]
) -> None:
    """Of five steps none waited, for their unit of text was there: a run was to wait for every other one."""
    assert paced(0.1, waited, made) == pytest.approx(expected)


def test_ranks_measure_what_lies_between_them(workshop: Workshop, tmp_path: Path) -> None:
    file = write_config(tmp_path)
    gang = workshop.start(script=COMMAND, ranks=2, arguments=["diagnose", str(file), "--steps", "1"])
    assert gang.wait(300) == [0, 0], gang.texts()
    assert "2 rank(s)" in gang.ranks[0].text()
    assert "B/s all-reduce bus bandwidth" in gang.ranks[0].text()
    assert "all-reduce" not in gang.ranks[1].text()


TOO_LARGE = f"model.vocab_size={2**45}"
"""An embedding beyond what a process can address: refused at once, however a machine overcommits."""


def test_a_model_that_does_not_fit_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before, too: in a container too small for it the kernel ends the process, which has no words then."""
    assert main([str(write_config(tmp_path)), TOO_LARGE]) == 1
    foreseen, told = capsys.readouterr().err.splitlines()[-2:]
    assert foreseen.startswith("warning: model: by reckoning a step with 3 sequences a pass does not fit: it")
    assert foreseen.endswith("a larger device. If this process is killed now, it is for that")
    assert told.startswith("error: rank 0: model: a step with 3 sequences a pass does not fit")


def test_all_ranks_end_where_one_runs_out_of_memory(workshop: Workshop, tmp_path: Path) -> None:
    script = tmp_path / "of_two_sizes.py"
    script.write_text(
        "import os, sys\n"
        "from holdfast_trainer.diagnose_command import main\n"
        f"sys.exit(main([*sys.argv[1:], *(['{TOO_LARGE}'] if os.environ['RANK'] == '1' else [])]))\n"
    )
    gang = workshop.start(script=script, ranks=2, arguments=[str(write_config(tmp_path))])
    assert gang.wait(300) == [1, 1], gang.texts()
    assert "error: rank 1: model: a step with 3 sequences a pass does not fit" in gang.ranks[1].text()
    assert "error: rank 0 lost another rank before all was measured" in gang.ranks[0].text()
    assert "Traceback" not in gang.texts()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train.stepz=5"], "train.stepz: unknown key; did you mean 'steps'?"),
        (["train.precision=fp16"], "train.precision: 'fp16' is not native to this cpu device"),
        (["data.path=/nowhere"], "/nowhere"),
    ],
)
def test_what_cannot_run_at_all(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(write_config(tmp_path)), *words]) == EXIT_CONFIG_ERROR
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "give CONFIG (or set HOLDFAST_CONFIG)"),
        (["a.yaml", "b.yaml"], "one configuration at a time, not a.yaml, b.yaml"),
        (["a.yaml", "--steps", "0"], "--steps 0: at least 1 is needed"),
        (["mine.py"], "mine.py: name its function, too, such as mine.py:make"),
        (["mine.py:make", "train.steps=3"], "train.steps=3: a function's settings are those of its Workload"),
        (
            ["mine.py:make", "--gpu-memory", "24"],
            "--gpu-memory reckons from a configuration: what mine.py:make",
        ),
    ],
)
def test_wrongly_asked(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HOLDFAST_CONFIG", raising=False)
    with pytest.raises(SystemExit) as raised:
        main(argv)
    assert raised.value.code == 2
    assert message in capsys.readouterr().err


def test_a_bucket_has_no_disk_to_measure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The disk of the current directory was measured, and told as what a save in the bucket would take."""
    for target in (str(write_config(tmp_path)), f"{WORKLOADS}:make"):
        assert main([target, "--steps", "1", "--run-dir", "s3://bucket/runs/a"]) == EXIT_CONFIG_ERROR
        said = capsys.readouterr()
        assert "error: --run-dir s3://bucket/runs/a: diagnose measures a directory's disk, and no" in said.err
        assert said.out == ""


def test_a_disk_that_cannot_be_written_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert disk_speed(tmp_path / "a" / "b", 1 << 16) > 0, "the nearest directory that is there"
    assert list(tmp_path.iterdir()) == []
    code = main([str(write_config(tmp_path)), "--steps", "1", "--run-dir", "/proc/self"])
    assert code == 1
    assert "error: the disk of the run directory cannot be measured: " in capsys.readouterr().err


# ------------------------------------------------------------- a model of one's own

WORKLOADS = Path(__file__).parent / "ragged_workload.py"


def test_a_loop_in_python_is_named_with_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"{WORKLOADS}:looping", "--steps", "2"]) == 0
    said = capsys.readouterr().out
    assert "device      cpu, 1 rank(s) here, " in said
    (line,) = [line for line in said.splitlines() if line.startswith("python: ")]
    making = next(
        n for n, text in enumerate(WORKLOADS.read_text().splitlines(), 1) if "torch.tensor(" in text
    )
    assert f"ragged_workload.py:{making}" in line
    assert "Pad or pack the samples into one batch" in line
    assert main([f"{WORKLOADS}:looping_at_most", "--steps", "2"]) == 0
    assert f"ragged_workload.py:{making}" in capsys.readouterr().out, "twice the batch does not fit"
    # Of a mean over many steps no busy neighbour changes the shares by much.
    assert main([f"{WORKLOADS}:make", "--steps", "200", "-o", "json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert 0 <= told["facts"]["memory"] < told["facts"]["room"]
    causes = [finding["cause"] for finding in told["findings"]]
    assert "python" not in causes
    assert {"batch", "optimizer"} <= set(causes)
    assert main([f"{WORKLOADS}:nothing"]) == EXIT_CONFIG_ERROR


def test_a_run_of_ones_own_is_foretold_with_its_checkpoint_and_its_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only of the reference GPT was the disk measured, and the time to finish estimated."""
    asked = ["--steps", "2", "--run-dir", str(tmp_path / "runs" / "a")]
    assert main([f"{WORKLOADS}:whole", *asked, "-o", "json"]) == 0
    told = json.loads(capsys.readouterr().out)
    facts = told["facts"]
    assert facts["state_bytes"] == 3 * 4 * (8 * 8 + 8) + 2 * 4, "weights, two moments, two counts of steps"
    assert facts["save_seconds"] == facts["state_bytes"] / facts["disk_bytes_per_second"]
    assert facts["start_seconds"] > 0
    steps = 100_000 * sum(facts["times"].values())
    assert told["estimated_seconds"] == pytest.approx(facts["start_seconds"] + steps + facts["save_seconds"])
    assert list(tmp_path.iterdir()) == [], "the probe of the disk is gone"

    assert main([f"{WORKLOADS}:whole", *asked]) == 0
    said = capsys.readouterr().out
    assert re.search(r"^checkpoint  872 B, .* s at .* .B/s; a notice leaves 27 s$", said, re.MULTILINE)
    assert re.search(r"^time        .* for 100,000 steps$", said, re.MULTILINE)
    assert main([f"{WORKLOADS}:make", *asked]) == 0
    assert "time        not estimated: Workload(steps=...) would say how" in capsys.readouterr().out


def test_a_run_of_ones_own_that_could_save_nothing_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"{WORKLOADS}:whole", "--steps", "1", "--run-dir", "/proc/self"]) == 1
    assert "error: the disk of the run directory cannot be measured: " in capsys.readouterr().err
    assert main([f"{WORKLOADS}:unsaved", "--steps", "1"]) == EXIT_CONFIG_ERROR
    assert "error: no checkpoint could be saved of it: model._extra_state" in capsys.readouterr().err


def test_a_model_of_ones_own_is_measured_with_the_kernels_that_its_run_takes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It was measured with torch's default ones, which are others, where `Run` takes deterministic ones."""
    with warnings.catch_warnings():
        assert main([f"{WORKLOADS}:scattering", "--steps", "1"]) == 0
    said = capsys.readouterr().out
    assert "settings    batch 4, fp32, 1 threads, deterministic\n" in said
    assert "kernels     none is deterministic for put_: a resume may not be bit-exact\n" in said
    with warnings.catch_warnings():
        assert main([f"{WORKLOADS}:scattering_strictly", "--steps", "1"]) == EXIT_CONFIG_ERROR
    refused = capsys.readouterr().err
    assert (
        "today's settings (batch 4, fp32, 1 threads, strictly deterministic) cannot be measured: " in refused
    )
    assert "put_ does not have a deterministic implementation" in refused
    with warnings.catch_warnings():
        assert main([f"{WORKLOADS}:scattering_as_it_comes", "--steps", "1"]) == 0
    said = capsys.readouterr().out
    assert "settings    batch 4, fp32, 1 threads, any kernels\n" in said
    assert "kernels     " not in said


def test_ranks_of_ones_own_model_measure_what_lies_between_them(workshop: Workshop) -> None:
    arguments = ["diagnose", f"{WORKLOADS}:whole", "--steps", "1"]
    gang = workshop.start(script=COMMAND, ranks=2, arguments=arguments)
    assert gang.wait(300) == [0, 0], gang.texts()
    assert "B/s all-reduce bus bandwidth over " in gang.ranks[0].text()
    assert "for 100,000 steps" in gang.ranks[0].text()
    assert "all-reduce" not in gang.ranks[1].text()


SOUND = WorkloadFacts(
    settings=Settings(batch=32, fused=True, precision="bf16"),
    times=StepTimes(data=0.001, forward=0.3, backward=0.6, optimizer=0.05),
    samples_per_second=30.0,
    operations=200,
    lines=[Line("model.py:7", 150, 0)],
    operations_of_one=0,
    cores=8,
    fast_bf16=True,
    device_type="cuda",
    start_seconds=5.0,
    disk_bytes_per_second=1e9,
    state_bytes=2_000_000_000,
    notice_seconds=27.0,
)


def test_what_a_save_and_the_network_hold_back_is_found_in_a_run_of_ones_own() -> None:
    """As of the reference GPT: a notice that is too short, and a link that ranks make little of."""
    (still, slow) = explain(replace(SOUND, disk_bytes_per_second=1e7))
    assert (still.cause, slow.cause) == ("compute", "checkpoint"), "no part of a step"
    assert slow.message.startswith("a checkpoint takes 200.0 s until it is durable and a notice leaves 27.0")
    link = Link("socket", "eth0", 1.25e9, setting="NCCL_SOCKET_IFNAME")
    assert explain(replace(SOUND, link=link, reduce_bytes_per_second=1e9))[0].cause == "compute"
    (found,) = explain(replace(SOUND, link=link, reduce_bytes_per_second=2.5e8))
    assert found.cause == "network"
    assert found.message.startswith(
        "NCCL_SOCKET_IFNAME: all-reduce reaches 250 MB/s, 20% of the 1.25 GB/s that"
    )


def test_steps_that_something_else_had_the_cores_of_are_told_to_have_taken_too_long() -> None:
    said = (
        "these steps waited for a core for 46% of the time that they would have computed, so the times above"
    )
    crowded = replace(FACTS, device_type="cpu", queued=0.46)
    (told,) = (one.message for one in findings(config(), crowded) if one.setting == "resources.cpu")
    assert told.startswith(said)
    for other in (
        findings(config(), replace(crowded, queued=0.1)),
        findings(config(), replace(crowded, queued=None)),  # the kernel does not tell
        findings(config(), replace(crowded, device_type="cuda")),
        findings(config("train.threads=16"), crowded),  # which wait for each other
    ):
        assert "resources.cpu" not in [one.setting for one in other]
    own = replace(SOUND, device_type="cpu", queued=0.46)
    (told,) = (one.message for one in explain(own) if one.cause == "no core")
    assert told.startswith(said)
    assert "no core" not in [one.cause for one in explain(replace(SOUND, queued=0.46))]


def test_more_workers_than_cores_are_told() -> None:
    settings = replace(SOUND.settings, workers=5)
    assert "workers" not in [one.cause for one in explain(replace(SOUND, settings=settings))]
    (found,) = explain(replace(SOUND, settings=settings, ranks_here=2))
    assert found.cause == "workers"
    assert found.message.startswith("10 workers of 2 rank(s) on 8 cores wait for each other")
    assert found.message.endswith("try workers=3")


@pytest.mark.parametrize(
    ("change", "cause", "said"),
    [
        ({}, "compute", "nothing stands out"),
        (
            {"times": StepTimes(2.0, 0.3, 0.6, 0.05)},
            "data",
            "no worker prepares batches while the model computes: try workers=4",
        ),
        (
            {"times": StepTimes(2.0, 0.3, 0.6, 0.05), "ranks_here": 8},
            "data",
            "of a step waits for data: do what it does beforehand",
        ),
        ({"operations_of_one": 120}, "python", "busiest at model.py:7 with 75% of them"),
        ({"settings": Settings(batch=32, fused=True)}, "precision", "fp32, in 95% of a step"),
        ({"settings": Settings(batch=1, fused=True, precision="bf16")}, "batch", "a pass holds one sample"),
        ({"settings": Settings(batch=1, fused=True)}, "batch", "a pass holds one sample"),
        (
            {"times": StepTimes(0.0, 0.1, 0.2, 0.9)},
            "optimizer",
            "75% of a step is the optimizer: accumulate several passes a step",
        ),
        (
            {
                "times": StepTimes(0.0, 0.1, 0.2, 0.9),
                "settings": Settings(batch=8, accumulate=4, fused=True, precision="bf16"),
            },
            "optimizer",
            "75% of a step is the optimizer: accumulate more passes a step",
        ),
    ],
)
def test_the_costliest_cause_comes_first(change: dict[str, object], cause: str, said: str) -> None:
    first = explain(replace(SOUND, **change))[0]  # type: ignore[arg-type]
    assert first.cause == cause
    assert said in first.message


def test_a_loss_that_is_no_number_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where the run would end at its first step, all was well by what was told of its speed."""
    assert main([f"{WORKLOADS}:lost", "--steps", "1"]) == EXIT_CONFIG_ERROR
    assert (
        "fp32, 1 threads, deterministic) cannot be measured: the loss comes to nan, at which a run ends"
        in (capsys.readouterr().err)
    )
    file, weights = write_config(tmp_path), tmp_path / "published"
    model = load(file).model
    state = build_model(model).state_dict()
    state["blocks.0.up.weight"][0, 0] = float("nan")
    save_weights(state, model, weights)
    assert main([str(file), f"train.init_from={weights}", "--steps", "1"]) == 1
    said = capsys.readouterr().out
    assert "\nerror: train.init_from: the loss of these steps comes to nan, at which a run ends and " in said
