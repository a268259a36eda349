"""Settings for a GPU: from its memory and the model's need, and true where a step can be measured."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gpt_runs import write_config

from holdfast_trainer.config import Config, check_world, load
from holdfast_trainer.contract import EXIT_CONFIG_ERROR
from holdfast_trainer.diagnose_command import main
from holdfast_trainer.diagnose_config import as_text
from holdfast_trainer.diagnosis import Facts
from holdfast_trainer.memory_need import FULL_SHARE, memory_need
from holdfast_trainer.model import build_model
from holdfast_trainer.recommend import Recommended, recommend, recommend_for, room_of

SIZES = (12, 16, 24, 40, 80, 141)
GPT2 = ("vocab_size=50304", "layers=12", "heads=12", "width=768", "context=1024")
LLAMA = ("family=llama", "vocab_size=512", "layers=2", "heads=8", "width=512", "context=256")
SEVEN_B = ("vocab_size=32000", "layers=32", "heads=32", "width=4096", "context=4096")


def config(model: tuple[str, ...] = GPT2, *changes: str) -> Config:
    words = [f"model.{word}" for word in model]
    words += ["data.path=/nowhere", "train.steps=100", "train.global_batch=256", "optim.warmup_steps=1"]
    return load(None, [*words, *changes], environ={})


def fitting(found: Recommended | int | None) -> Recommended:
    assert isinstance(found, Recommended), found
    return found


def words(found: Recommended | int | None) -> str:
    return " ".join(fitting(found).settings)


def test_the_larger_the_gpu_the_more_at_a_time_and_never_more_than_it_has() -> None:
    found = [fitting(recommend_for(config(), 1, size, 8.0)) for size in SIZES]
    assert [one.config.train.micro_batch for one in found] == sorted(
        one.config.train.micro_batch or 0 for one in found
    )
    for size, one in zip(SIZES, found, strict=True):
        assert one.bytes <= FULL_SHARE * room_of(size) < FULL_SHARE * size * 2**30
        double = 2 * (one.config.train.micro_batch or 0)
        larger = memory_need(one.config, "bf16", 1, double, fused_loss=True)
        assert larger.total > FULL_SHARE * one.room, "the largest"
        check_world(one.config, 1)


def test_precision_follows_the_capability() -> None:
    assert "train.precision=bf16" in words(recommend_for(config(), 1, 24, 8.9))
    assert "train.precision=fp16" in words(recommend_for(config(), 1, 16, 7.5))


@pytest.mark.parametrize("change", ["train.fused_loss=false", "train.compile=true"])
def test_where_the_loss_is_not_fused_less_fits(change: str) -> None:
    micro, other = (
        fitting(recommend_for(config(GPT2, *changes), 1, 24, 8.0)).config.train.micro_batch or 0
        for changes in ((), (change,))
    )
    assert micro > other > 0
    without = config(GPT2, "train.fused_loss=false")
    assert words(recommend_for(config(), 1, 16, 7.5)) == words(recommend_for(without, 1, 16, 7.5)), (
        "no Ampere"
    )


def test_what_costs_most_comes_last() -> None:
    """7 B parameters in fp32 with AdamW are 108 GB: one such GPU has no room for activations besides."""
    large = config(SEVEN_B)
    assert "parallel=fsdp train.activation_checkpointing=false" in words(recommend_for(large, 8, 141, 9.0))
    assert "parallel=ddp train.activation_checkpointing=true" in words(recommend_for(large, 1, 141, 9.0))
    assert recommend_for(large, 1, 80, 9.0) == 2, "so many, cut over them"
    assert "parallel=fsdp" in words(recommend_for(large, 4, 80, 9.0))
    assert recommend_for(config((*SEVEN_B[:-1], "context=4000000")), 1, 12, 8.0) is None


def test_fp16_is_left_where_it_cannot_be_cut_over_ranks() -> None:
    """Its scaler would have to see all ranks' gradients."""
    wide = config((*GPT2[:1], "layers=36", "heads=20", "width=1280", "context=1024"))
    assert "train.precision=fp16 train.parallel=ddp" in words(recommend_for(wide, 4, 24, 7.5))
    assert "train.precision=fp32 train.parallel=fsdp" in words(recommend_for(wide, 4, 13, 7.5))


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize(
    "model",
    [
        (*LLAMA, "family=gpt2"),
        LLAMA,
        (*LLAMA, "mlp_width=2048", "kv_heads=2"),  # as Llama 3.2 1B has them, a fourth as wide
        (*LLAMA, "mlp_width=4096"),
    ],
    ids=["gpt2", "llama", "few keys", "wide"],
)
def test_what_a_block_is_reckoned_to_keep_is_what_it_keeps(model: tuple[str, ...], precision: str) -> None:
    """A Llama's was that of a GPT-2 of its width, however wide its MLP: so settings were told for a GPU that
    did not fit it, and a step that needs half as much again was said to fit."""
    tried = config((*model, "layers=1"))
    (block,) = build_model(tried.model).blocks
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    x = torch.randn(4, 256, 512, requires_grad=True)
    keeping = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with keeping, torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        out = block(x)
    own = {weight.untyped_storage().data_ptr() for weight in block.parameters()}
    found = sum(size for place, size in kept.items() if place not in own)
    if precision == "bf16":
        found -= sum(2 * weight.numel() for weight in block.parameters())  # the copies, which count apart
    if tried.model.family == "llama":
        found -= 2 * 4 * x.numel()  # a CPU's RMS norm also keeps what it has normed; a GPU's does not
    two, one = (memory_need(config((*model, f"layers={n}")), precision, 1, 4).activations for n in (2, 1))
    assert out.shape == x.shape
    assert found == pytest.approx(two - one, rel=0.07)


def test_what_was_measured_corrects_what_was_reckoned() -> None:
    tried = config()
    reckoned = fitting(recommend(tried, "bf16", 1, 20 * 10**9))
    corrected = fitting(recommend(tried, "bf16", 1, 20 * 10**9, correction=2.0))
    assert reckoned.config.train.micro_batch == 2 * (corrected.config.train.micro_batch or 0)
    need = memory_need(tried, "bf16", 1, 256).total
    facts = Facts(
        device="a GPU",
        device_type="cuda",
        precision="bf16",
        world_size=1,
        cores=8,
        memory_total=20 * 10**9,
        memory_peak=2 * need,
        samples=10**6,
        step_seconds=1.0,
        data_seconds=0.0,
        start_seconds=1.0,
        optimizer_seconds=0.0,
        fast_bf16=True,
        validation_seconds=None,
        disk_bytes_per_second=1e9,
        state_bytes=1,
        notice_seconds=30.0,
    )
    (line,) = [line for line in as_text(tried, facts, []).splitlines() if line.startswith("settings ")]
    assert f"{' '.join(corrected.settings)}, which should take {corrected.bytes / 1e9:.2f} GB" in line
    assert "settings" not in as_text(tried, replace(facts, device_type="cpu"), [])


def test_the_command_needs_neither_data_nor_device_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "gpt.yaml"
    model = ", ".join(word.replace("=", ": ") for word in GPT2)
    file.write_text(
        f"model: {{{model}}}\ndata: {{path: /nowhere}}\ntrain: {{steps: 9, global_batch: 8}}\n"
        "optim: {warmup_steps: 1}\n"
    )
    assert main([str(file), "--gpu-memory", "24", "--gpu-memory", "80"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("nothing was run: all sizes are estimates")
    assert "\n1 GPU(s) of 24 GB: about 6.6 GB of 23.6 that tensors may have (28%): state 2.2, act" in said
    assert "  train.precision=bf16 train.parallel=ddp train.activation_checkpointing=false" in said
    assert "there is room for about 35 sequences: tune --grow tries a larger train.global_batch" in said
    (line,) = {line.strip() for line in said.splitlines() if "train.micro_batch=" in line}
    assert load(file, line.split(), environ={}).train.micro_batch == 8, "as it is printed it can be used"
    assert main([str(file), "--gpu-memory", "1", "-o", "json"]) == 1
    (body,) = json.loads(capsys.readouterr().out)
    assert (body["settings"], body["gpus_needed"], body["measured"]) == (None, None, False)
    more = ["--gpu-memory", "12", "model.layers=96"]
    assert main([str(file), *more]) == 1
    assert "does not fit; 2 of them would do, with train.parallel=fsdp\n" in capsys.readouterr().out
    assert main([str(file), *more, "--gpu-capability", "7.5"]) == 1  # which would take fp16
    assert "with train.parallel=fsdp and train.precision=fp32\n" in capsys.readouterr().out
    assert main([str(file), "--gpu-memory", "24", "--gpus", "3"]) == EXIT_CONFIG_ERROR
    assert "train.global_batch" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--gpu-memory 0.5", "--gpu-memory 0.5"),
        ("--gpu-memory 24 --gpus 0", "--gpus 0"),
        ("--gpu-memory 24 --gpu-memory nan --gpu-memory 1e400", "--gpu-memory nan, --gpu-memory inf"),
        ("--gpu-memory 1e300", "--gpu-memory 1e+300"),
        ("--gpu-memory -1 --gpus -2", "--gpu-memory -1, --gpus -2"),
    ],
)
def test_gpus_that_cannot_be_are_named(
    words: str, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "gpt.yaml"
    file.write_text(
        "model: {vocab_size: 256, layers: 1, heads: 2, width: 32, context: 16}\n"
        "data: {path: nowhere}\ntrain: {steps: 10, global_batch: 4}\n"
    )
    assert main([str(file), *words.split()]) == EXIT_CONFIG_ERROR
    assert capsys.readouterr().err == f"error: {named}: no such GPUs\n"


@pytest.mark.slow
def test_what_is_reckoned_is_what_a_step_takes(tmp_path: Path) -> None:
    """Of a model whose parts are large beside what an allocator keeps for itself, in a process that has kept
    nothing yet."""
    words = ["model.vocab_size=8192", "model.layers=4", "model.heads=6", "model.width=384"]
    words += ["model.context=256", "model.dropout=0", "train.micro_batch=3", "validation.every=0"]
    command = [sys.executable, "-m", "holdfast_trainer", "diagnose", str(write_config(tmp_path)), *words]
    done = subprocess.run(
        [*command, "--steps", "1", "-o", "json"], capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert 0.7 < told["facts"]["memory_peak"] / sum(told["memory_need"].values()) < 1.5
