"""Which precision a device gets, and that one loop serves all of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gangs import Workshop
from gpt_runs import MIXED, write_config

from holdfast_trainer.config import ConfigError, OptimConfig
from holdfast_trainer.optim import build_optimizer, clip_gradients
from holdfast_trainer.precision import Bf16, bf16_of_cpu, choose_precision, precision

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "device", "bf16", "expected"),
    [
        ("auto", "cpu", Bf16.FAST, "bf16"),
        ("auto", "cpu", Bf16.SLOW, "fp32"),
        ("auto", "cpu", Bf16.NONE, "fp32"),
        ("auto", "cuda", Bf16.FAST, "bf16"),
        ("auto", "cuda", Bf16.NONE, "fp16"),
        ("auto", "mps", Bf16.NONE, "fp32"),
        ("fp32", "cuda", Bf16.FAST, "fp32"),
        ("fp16", "cuda", Bf16.FAST, "fp16"),
        ("bf16", "cpu", Bf16.FAST, "bf16"),
        ("bf16", "cpu", Bf16.SLOW, "bf16"),
    ],
)
def test_a_precision_the_device_has(name: str, device: str, bf16: Bf16, expected: str) -> None:
    assert choose_precision(name, device, bf16) == expected


@pytest.mark.parametrize(
    ("name", "device", "message"),
    [
        ("bf16", "cpu", "'bf16' is not native to this cpu device, which has fp32; use one of these, or auto"),
        ("fp16", "cpu", "'fp16' is not native to this cpu device"),
        (
            "bf16",
            "cuda",
            "this cuda device, which has fp16, fp32; use one of these, or auto",
        ),
    ],
)
def test_a_precision_the_device_has_not_is_refused(name: str, device: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        choose_precision(name, device, Bf16.NONE)
    assert message in str(caught.value)


INTEL = "vendor_id\t: GenuineIntel\nmodel name\t: x\n"
AMD = "vendor_id\t: AuthenticAMD\nmodel name\t: x\n"


@pytest.mark.parametrize(
    ("cpuinfo", "machine", "expected"),
    [
        (f"{AMD}flags\t\t: fpu avx512f avx512_bf16 avx512vl\n", "x86_64", Bf16.FAST),
        (f"{AMD}flags\t\t: fpu avx512_bf16 avx512_fp16\n", "x86_64", Bf16.FAST),
        (f"{AMD}flags\t\t: fpu avx2\n", "x86_64", Bf16.NONE),
        (f"{INTEL}flags\t\t: fpu avx512f avx512_bf16\n", "x86_64", Bf16.FAST),
        (f"{INTEL}flags\t\t: fpu avx512_bf16 avx512_fp16 amx_bf16 amx_tile\n", "x86_64", Bf16.FAST),
        (f"{INTEL}flags\t\t: fpu avx512_bf16 avx512_fp16\n", "x86_64", Bf16.SLOW),
        (f"{INTEL}flags\t\t: fpu avx512_bf16 avx512_fp16\n{INTEL}flags\t: fpu\n", "x86_64", Bf16.SLOW),
        (f"{INTEL}flags\t\t: fpu avx2 avx512f\n", "x86_64", Bf16.NONE),
        ("Features\t: fp asimd i8mm bf16\n", "aarch64", Bf16.FAST),
        ("Features\t: fp asimd\n", "aarch64", Bf16.NONE),
        ("", "arm64", Bf16.NONE),
        ("", "x86_64", Bf16.NONE),
    ],
)
def test_what_a_processor_makes_of_it(cpuinfo: str, machine: str, expected: Bf16) -> None:
    assert bf16_of_cpu(cpuinfo, machine) is expected


def test_machines_of_two_kinds_agree_on_what_suits_both(workshop: Workshop, tmp_path: Path) -> None:
    """As one gang of a spot pool gets them: that is no difference in settings, and no reason to fail."""
    words = ["--config", str(write_config(tmp_path)), "train.precision=auto", "train.steps=6"]
    gang = workshop.start(script=MIXED, ranks=2, arguments=words)
    assert gang.wait() == [0, 0], gang.texts()
    assert "M parameters, fp32 on cpu" in gang.texts()
    alone = workshop.start("alone", script=MIXED, arguments=words)
    assert alone.wait() == [0], alone.texts()
    assert "M parameters, bf16 on cpu" in alone.texts()


@pytest.mark.parametrize("name", ["auto", "fp32"])
def test_one_loop_serves_every_precision(name: str) -> None:
    """The loop has no branches: scaler and autocast are there and do nothing where not needed."""
    chosen = precision(name, CPU)
    weight = torch.nn.Parameter(torch.ones(4, 4))
    optimizer = build_optimizer(torch.nn.ParameterList([weight]), OptimConfig(), CPU)
    with chosen.autocast():
        product = torch.ones(4, 4) @ weight
    assert product.dtype == chosen.dtype
    chosen.scaler.scale(product.float().sum()).backward()
    chosen.scaler.unscale_(optimizer)
    assert clip_gradients([weight], 1.0).item() == pytest.approx(16.0)
    chosen.scaler.step(optimizer)
    chosen.scaler.update()
    assert weight.dtype == torch.float32
    assert not torch.equal(weight, torch.ones(4, 4))
    assert chosen.scaler.state_dict() == {}
