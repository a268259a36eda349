"""The gradient of attention by matrix products: as good as torch's own, the same bits each time, and taken
where it is the faster one."""

from __future__ import annotations

import platform
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gangs import KILL, NOTICE, Workshop
from gpt_runs import MIXED, start, write_config
from torch import Tensor
from torch.nn import functional as F

from holdfast_trainer import cpuinfo, product_attention
from holdfast_trainer.attention import attend_joined, attention_kernels
from holdfast_trainer.contract import read_lines
from holdfast_trainer.product_attention import choose, is_for, kernel

CPU = torch.device("cpu")
UNSTEADY = Path(__file__).parent / "unsteady_kernel_script.py"
AMD, INTEL = "vendor_id\t: AuthenticAMD\n", "vendor_id\t: GenuineIntel\n"


def drawn(*shape: int, scale: float = 1.0) -> Tensor:
    """Joined queries, keys and values."""
    return (scale * torch.randn(shape, generator=torch.Generator().manual_seed(3))).bfloat16()


def gradient(attend: Callable[[Tensor], Tensor], qkv: Tensor, seen: Tensor) -> Tensor:
    qkv = qkv.clone().requires_grad_()
    out = attend(qkv)
    (found,) = torch.autograd.grad(out, qkv, seen.to(qkv.dtype))
    return found


@pytest.mark.parametrize(
    ("batch", "time", "heads", "size", "scale"),
    [
        (2, 128, 2, 64, 1),
        (2, 256, 3, 32, 1),
        (1, 300, 2, 40, 1),
        (1, 600, 1, 64, 1),
        (2, 256, 2, 64, 3),
        (2, 256, 2, 64, 0.1),
        (2, 7, 2, 8, 1),
    ],
)
def test_it_is_as_near_to_the_truth_as_rounding_lets_it_be(
    batch: int, time: int, heads: int, size: int, scale: float
) -> None:
    """Beside fp64; torch's own rounds once less. With a large scale a few tokens have all of the attention,
    where a score that was rounded by itself would be wrong by a tenth."""
    qkv, seen = drawn(batch, time, 3, heads, size, scale=scale), drawn(batch, heads, time, size)
    truth = gradient(attend_joined, qkv.double(), seen)
    found, torchs = (gradient(one, qkv, seen) for one in (kernel(joined=True), attend_joined))
    for part in range(3):
        near, nearest = (
            (one[:, :, part] - truth[:, :, part]).norm() / truth[:, :, part].norm() for one in (found, torchs)
        )
        assert near < 0.01
        assert near < 3 * nearest
    assert torch.equal(kernel(joined=True)(qkv), attend_joined(qkv)), "the forward pass is torch's"


def test_each_in_its_own_tensor_is_the_same() -> None:
    qkv, seen = drawn(2, 130, 3, 2, 16), drawn(2, 2, 130, 16)
    own = kernel(joined=False)

    def apart(joined: Tensor) -> Tensor:
        q, k, v = (part.transpose(1, 2) for part in joined.unbind(2))
        return own(q, k, v, is_causal=True)

    assert torch.equal(gradient(apart, qkv, seen), gradient(kernel(joined=True), qkv, seen))


def test_what_a_query_may_not_see_has_no_part_however_large_it_is() -> None:
    """The exponential of its score is infinite."""
    qkv, seen = drawn(1, 300, 3, 2, 16), drawn(1, 2, 300, 16)
    usual = gradient(kernel(joined=True), qkv, seen)
    seen[:, :, 299] = 0  # the last query asks for nothing
    qkv[:, 299] *= 1000
    found = gradient(kernel(joined=True), qkv, seen)
    assert found.isfinite().all()
    assert torch.equal(found[:, :299, 0], usual[:, :299, 0]), "the queries before it"
    assert not found[:, 299].any()


def test_the_bits_repeat_and_a_few_heads_at_a_time_are_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    qkv, seen = drawn(3, 300, 3, 5, 16), drawn(3, 5, 300, 16)
    whole = gradient(kernel(joined=True), qkv, seen)
    assert torch.equal(gradient(kernel(joined=True), qkv, seen), whole)
    monkeypatch.setattr(product_attention, "SCORES", 4 * 300 * product_attention.KEYS)
    torch.testing.assert_close(gradient(kernel(joined=True), qkv, seen), whole)


def test_the_compiler_knows_it_by_its_shapes_alone() -> None:
    qkv = torch.empty(2, 32, 3, 4, 16, device="meta", dtype=torch.bfloat16, requires_grad=True)
    out = kernel(joined=True)(qkv)
    assert (out.shape, out.dtype) == ((2, 4, 32, 16), qkv.dtype)
    assert out.transpose(1, 2).is_contiguous(), "what follows need not copy it"
    out.backward(torch.empty_like(out))
    assert qkv.grad is not None
    assert qkv.grad.is_contiguous()


@pytest.mark.parametrize(
    ("text", "machine", "expected"),
    [
        (f"{AMD}flags\t\t: fpu avx512f avx512_bf16\n", "x86_64", True),
        (f"{AMD}flags\t\t: fpu avx512f\n", "x86_64", False),
        (f"{INTEL}flags\t\t: fpu avx512f avx512_bf16\n", "x86_64", True),
        (f"{INTEL}flags\t\t: fpu avx512_bf16 avx512_fp16 amx_bf16\n", "x86_64", True),
        (f"{INTEL}flags\t\t: fpu avx512_bf16 avx512_fp16\n", "x86_64", False),
        (f"{INTEL}flags\t\t: fpu amx_bf16\n", "x86_64", False),
        ("Features\t: fp asimd bf16\n", "aarch64", False),
        ("", "x86_64", False),
    ],
)
def test_it_is_for_processors_that_it_was_compared_on(text: str, machine: str, expected: bool) -> None:
    assert is_for(text, machine) is expected


def test_elsewhere_it_says_why_not() -> None:
    def lacking(dtype: torch.dtype, time: int = 128, kv_heads: int = 4, device: torch.device = CPU) -> str:
        return choose(device, dtype, (2, 4, time, 32), kv_heads, joined=True, fused=False)

    other = "it is for CPUs whose AVX512-BF16 or AMX makes bf16 fast, in bf16"
    assert lacking(torch.float32) == other
    assert lacking(torch.bfloat16, device=torch.device("cuda", 0)) == other
    if not is_for(cpuinfo.read(), platform.machine()):
        assert lacking(torch.bfloat16) == other
        return
    assert lacking(torch.bfloat16) == ""
    odd = "it is for contexts from 128 tokens on, and as many heads of keys as of queries"
    assert lacking(torch.bfloat16, time=127) == odd
    assert lacking(torch.bfloat16, kv_heads=2) == odd


def test_both_are_told_by_the_operator_that_ran_it() -> None:
    assert attention_kernels(lambda: kernel(joined=True)(drawn(1, 8, 3, 2, 16))) == "flash and products"
    assert attention_kernels(lambda: F.scaled_dot_product_attention(*drawn(3, 1, 2, 8, 16))) == "flash"


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="it is for processors of x86")
def test_a_kernel_that_does_not_repeat_its_bits_is_left_and_that_is_said(
    workshop: Workshop, tmp_path: Path
) -> None:
    words = ["--config", str(write_config(tmp_path)), "train.precision=bf16", "train.steps=6"]
    words += ["model.context=128", "model.dropout=0"]
    alone = workshop.start(script=UNSTEADY, arguments=words)
    assert alone.wait() == [0], alone.texts()
    assert "bf16 on cpu, attention by flash, 1 ranks" in alone.texts()
    assert "by matrix products, which is faster (rank 0: its bits did not repeat)" in alone.texts()


@pytest.mark.slow
@pytest.mark.skipif(not is_for(cpuinfo.read(), platform.machine()), reason="this CPU has no fast bf16")
@pytest.mark.parametrize(
    "words",
    [
        ("train.activation_checkpointing=true",),
        ("model.family=llama", "model.bias=false", "train.micro_batch=3"),
    ],
    ids=["gpt2, recomputed", "llama"],
)
def test_a_run_that_is_killed_and_given_notice_is_the_untouched_one(
    words: tuple[str, ...], workshop: Workshop, tmp_path: Path
) -> None:
    common = ("model.context=128", "model.dropout=0", "train.precision=bf16", *words)
    config = write_config(tmp_path)
    twin = start(workshop, config, *common, name="twin", ranks=2)
    assert twin.wait() == [0, 0], twin.texts()
    assert "bf16 on cpu, attention by flash and products" in twin.texts()
    for step, number in ((9, KILL), (20, NOTICE)):
        hit = start(workshop, config, *common, ranks=2)
        hit.wait_for_step(step)
        hit.signal(number)
        hit.wait()
    last = start(workshop, config, *common, ranks=2)
    assert last.wait() == [0, 0], last.texts()
    assert last.history.losses() == twin.history.losses()
    assert last.history.stop(3)["digest"] == twin.history.stop(1)["digest"]
    (began,) = [one for one in read_lines(last.history.run.ledger(1)) if one["event"] == "attempt_start"]
    assert began["attention"] == "flash and products"


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="it is for processors of x86")
def test_a_gang_of_two_kinds_of_machines_has_one_kernel(workshop: Workshop, tmp_path: Path) -> None:
    """Both are fast in bf16; for one of them it is not."""
    words = ["--config", str(write_config(tmp_path)), "train.precision=auto", "train.steps=6"]
    words += ["model.context=128", "model.dropout=0"]
    other = {"OTHER": "flags: amx_bf16\n"}
    gang = workshop.start(script=MIXED, ranks=2, arguments=words, env=other)
    assert gang.wait() == [0, 0], gang.texts()
    assert "bf16 on cpu, attention by flash, 2 ranks" in gang.texts()
    slower = "attention without a gradient by matrix products, which is faster (rank 1: it is for CPUs "
    assert slower in gang.texts()
    alone = workshop.start("alone", script=MIXED, arguments=words)
    assert alone.wait() == [0], alone.texts()
    assert "bf16 on cpu, attention by flash and products, 1 ranks" in alone.texts()
