"""What layers compute between products, by kernels of their own: as near to the truth as PyTorch's, the same
bits each time, and told wherever it is not had."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled_layers import needs_them
from gangs import KILL, NOTICE, Workshop
from gpt_runs import start, write_config
from native_bf16 import needs_bf16
from torch import Tensor, nn

from holdfast_trainer import cpuinfo, fused_layers, native, product_attention
from holdfast_trainer.attention import attend_joined
from holdfast_trainer.fused_layers import Fused, choose, tried
from holdfast_trainer.model import build_model
from holdfast_trainer.model_config import ModelConfig
from holdfast_trainer.pointwise import Pointwise

CPU = torch.device("cpu")
BOTH = (torch.float32, torch.bfloat16)


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 3, scale: float = 1.0) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return (scale * values).to(dtype).requires_grad_()


def norm_of(kind: str, width: int) -> Any:
    norm = nn.RMSNorm(width, eps=1e-5) if kind == "rms" else nn.LayerNorm(width, bias=kind == "layer")
    for number, value in enumerate(norm.parameters()):
        value.data.copy_(drawn(width, seed=number).data)
    return norm


def gradients(out: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    seen = drawn(*out.shape, seed=9).detach()
    return list(torch.autograd.grad(out, leaves, seen.to(out.dtype)))


def apart(one: Tensor, truth: Tensor) -> float:
    return float((one.double() - truth).norm() / truth.norm())


@needs_them
@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("scale", [0.1, 1.0, 8.0])
@pytest.mark.parametrize("shape", [(3, 5), (2, 7, 4096 + 3)])
@pytest.mark.parametrize("function", ["gelu", "gated"])
def test_activations_are_as_near_to_the_truth_as_torchs(
    function: str, shape: tuple[int, ...], scale: float, dtype: torch.dtype
) -> None:
    given = [drawn(*shape, dtype=dtype, seed=seed, scale=scale) for seed in (1, 2)]
    given = given[: 1 if function == "gelu" else 2]

    def computed(layers: type[Pointwise], *inputs: Tensor) -> list[Tensor]:
        out: Tensor = getattr(layers, function)(*inputs)
        return [out.detach(), *gradients(out, list(inputs))]

    truth = computed(Pointwise, *(one.detach().double().requires_grad_() for one in given))
    rounding = 1e-6 if dtype == torch.float32 else 3e-3
    for own, torchs, exact in zip(computed(Fused, *given), computed(Pointwise, *given), truth, strict=True):
        assert own.dtype == dtype
        assert apart(own, exact) < max(rounding, 1.5 * apart(torchs, exact))


@needs_them
@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("kind", ["layer", "layer without bias", "rms"])
@pytest.mark.parametrize(("rows", "width"), [(1, 8), (37, 40), (64, 384)])
def test_sums_and_norms_are_as_near_to_the_truth_as_torchs(
    rows: int, width: int, kind: str, dtype: torch.dtype
) -> None:
    """In bf16 as a block has them under autocast: the residual stays fp32, products and norms do not."""
    norm = norm_of(kind, width)
    leaves = [drawn(2, rows, width, scale=3), drawn(2, rows, width, dtype=dtype, seed=5)]

    def computed(layers: type[Pointwise], norm: Any, *given: Tensor, dtype: torch.dtype) -> list[Tensor]:
        x, branch = given
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            x, normed = layers.norm(x, norm)
            x, again = layers.add_norm(x, branch * normed.to(dtype), norm)
            out = layers.add(x, branch * again.to(dtype))
        return [out.detach(), *gradients(out, [*given, *norm.parameters()])]

    truth = computed(
        Pointwise,
        copy.deepcopy(norm).double(),
        *(one.detach().double().requires_grad_() for one in leaves),
        dtype=torch.float64,
    )
    own, torchs = (computed(layers, norm, *leaves, dtype=dtype) for layers in (Fused, Pointwise))
    rounding = 2e-6 if dtype == torch.float32 else 6e-3
    for one, other, exact in zip(own, torchs, truth, strict=True):
        assert one.dtype == other.dtype
        assert apart(one, exact) < max(rounding, 1.5 * apart(other, exact))


@needs_them
@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf"), 1e30, -1e30])
def test_what_is_no_number_stays_none_and_nothing_else_becomes_so(bad: float, dtype: torch.dtype) -> None:
    """A step that went wrong is found by its loss."""
    x = torch.linspace(-4, 4, 64, dtype=dtype)
    usual = Fused.gelu(x)
    x[10] = bad
    found = Fused.gelu(x)
    assert torch.equal(found[:10], usual[:10])
    assert torch.equal(found[11:], usual[11:])
    assert found[10].isfinite() == (abs(bad) < float("inf"))
    assert found[10].isnan() == (bad != bad)
    gated = Fused.gated(x, torch.ones_like(x))
    assert gated[10].isnan() == (bad != bad)
    norm = norm_of("layer", 64).to(torch.float32)
    _, normed = Fused.add_norm(torch.zeros(2, 64), x.expand(2, 64), norm)
    assert normed[0].isnan().any() == (not abs(bad) < float("inf"))


@needs_them
def test_large_and_small_values_are_what_they_tend_to() -> None:
    x = torch.tensor([-100.0, -20.0, 20.0, 100.0, 0.0], requires_grad=True)
    out = Fused.gelu(x)
    torch.testing.assert_close(out.detach(), torch.tensor([0.0, 0.0, 20.0, 100.0, 0.0]), rtol=0, atol=1e-30)
    (slope,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(slope, torch.tensor([0.0, 0.0, 1.0, 1.0, 0.5]))


@needs_them
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_bits_repeat_and_go_by_the_number_of_threads_alone(threads: int) -> None:
    before = torch.get_num_threads()
    norm, x = norm_of("layer", 48), drawn(70, 48)

    def computed() -> list[Tensor]:
        total, normed = Fused.norm(x, norm)
        out = Fused.add(total, Fused.gelu(normed))
        return [out.detach(), *gradients(out, [x, *norm.parameters()])]

    torch.set_num_threads(threads)
    try:
        first = computed()
        for _ in range(5):
            assert all(torch.equal(a, b) for a, b in zip(first, computed(), strict=True))
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(first, computed())


@needs_them
def test_what_nobody_reads_has_no_gradient_and_weights_that_are_frozen_get_none() -> None:
    norm = norm_of("rms", 16)
    norm.weight.requires_grad_(False)
    x, branch = drawn(4, 16), drawn(4, 16, seed=5)
    total, normed = Fused.add_norm(x, branch, norm)
    only_sum = torch.autograd.grad(total.sum(), (x, branch), retain_graph=True)
    assert all(torch.equal(one, torch.ones(4, 16)) for one in only_sum)
    only_norm = torch.autograd.grad(normed.square().sum(), (x, branch))
    _, expected = Pointwise.add_norm(x, branch, norm)
    torch.testing.assert_close(only_norm, torch.autograd.grad(expected.square().sum(), (x, branch)))


@needs_them
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_of_types_that_it_has_no_function_for_the_result_is_torchs(dtype: torch.dtype) -> None:
    x, branch, norm = (
        drawn(4, 8, dtype=dtype),
        drawn(4, 8, dtype=dtype, seed=5),
        norm_of("layer", 8).to(dtype),
    )
    for own, torchs in (
        (Fused.gelu(x), Pointwise.gelu(x)),
        (Fused.gated(x, branch), Pointwise.gated(x, branch)),
        (Fused.norm(x, norm)[1], norm(x)),
        (Fused.add_norm(x, branch, norm)[1], norm(x + branch)),
        (Fused.add(x, branch), x + branch),
    ):
        assert torch.equal(own, torchs)


@needs_them
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_model_that_was_moved_to_another_device_is_torchs_there(family: Any) -> None:
    """Called with addresses that are none of the CPU's, the library would end the process."""
    config = ModelConfig(family=family, layers=1, heads=2, width=32, context=16, vocab_size=50)
    model, tokens = build_model(config, pointwise=Fused), torch.zeros(3, 16, dtype=torch.int64)
    there = copy.deepcopy(model).to("meta")
    assert there(tokens.to("meta"))[0].shape == model(tokens)[0].shape


@needs_them
def test_weights_in_the_products_type_as_those_that_fsdp_gathers_are_torchs() -> None:
    x, norm = drawn(4, 8, dtype=torch.bfloat16), norm_of("layer", 8).to(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(Fused.norm(x, norm)[1], Pointwise.norm(x, norm)[1])


@needs_them
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_model_with_it_is_the_model(family: Any, dtype: torch.dtype, recompute: bool) -> None:
    config = ModelConfig(family=family, layers=2, heads=2, width=32, context=16, vocab_size=50)
    tokens = torch.randint(50, (3, 16), generator=torch.Generator().manual_seed(1))

    def computed(layers: type[Pointwise]) -> list[Tensor]:
        torch.manual_seed(1)
        model = copy.deepcopy(build_model(config, recompute=recompute, pointwise=layers))
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            loss = model(tokens, tokens)[1]
        assert loss is not None
        return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]

    own, torchs = computed(Fused), computed(Pointwise)
    close = 1e-5 if dtype == torch.float32 else 0.02
    for one, other in zip(own, torchs, strict=True):
        assert one.dtype == other.dtype
        assert apart(one, other.double()) < close
    assert all(torch.equal(a, b) for a, b in zip(own, computed(Fused), strict=True))


@needs_them
@pytest.mark.parametrize(("time", "heads", "size"), [(128, 2, 64), (300, 3, 40), (600, 1, 8), (7, 2, 16)])
@pytest.mark.parametrize("joined", [True, False])
def test_the_gradient_of_attention_has_the_same_from_it(
    joined: bool, time: int, heads: int, size: int
) -> None:
    qkv = drawn(2, time, 3, heads, size, dtype=torch.bfloat16)

    def computed(attend: Any, qkv: Tensor) -> Tensor:
        parts = [qkv] if joined else [part.transpose(1, 2) for part in qkv.unbind(2)]
        out = attend(*parts)
        (found,) = gradients(out, [qkv])
        return found

    kernel = product_attention.kernel
    truth = gradients(attend_joined(exact := qkv.detach().double().requires_grad_()), [exact])[0]
    own = computed(kernel(joined=joined, fused=True), qkv)
    assert apart(own, truth) < 1.1 * apart(computed(kernel(joined=joined), qkv), truth)
    assert torch.equal(own, computed(kernel(joined=joined, fused=True), qkv))


@needs_them
def test_it_is_chosen_where_it_is_tried_and_fits() -> None:
    assert [choose(CPU, dtype) for dtype in BOTH] == ["", ""]
    other = "it is for CPUs of x86 with AVX2 or AVX-512, in bf16 or fp32"
    assert choose(CPU, torch.float16) == other
    assert choose(torch.device("cuda", 0), torch.bfloat16) == other


@needs_them
def test_what_is_wrong_or_does_not_repeat_its_bits_is_not_taken() -> None:
    class Wrong(Fused):
        @staticmethod
        def gelu(x: Tensor) -> Tensor:
            return torch.nn.functional.gelu(x) * 1.02

    class Unsteady(Fused):
        @staticmethod
        def gelu(x: Tensor) -> Tensor:
            return Fused.gelu(x) * (1 + torch.rand(()) / 1e4)

    assert tried(Wrong, torch.float32) == "what it computes is too far from what PyTorch does"
    assert tried(Unsteady, torch.float32) == "its bits did not repeat"
    assert tried(Fused, torch.float32) == ""


def test_a_processor_that_it_is_not_for_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpuinfo, "read", lambda: "Features\t: fp asimd bf16\n")
    assert not fused_layers.is_for(CPU, torch.float32)
    assert choose(CPU, torch.float32) == "it is for CPUs of x86 with AVX2 or AVX-512, in bf16 or fp32"


@pytest.mark.slow
@needs_them
@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("train.precision=fp32", "model.family=llama", "model.bias=false"), id="llama in fp32"),
        pytest.param(
            ("train.precision=bf16", "train.activation_checkpointing=true"),
            id="gpt2 in bf16, recomputed",
            marks=needs_bf16,
        ),
    ],
)
def test_a_run_that_is_killed_and_given_notice_is_the_untouched_one(
    words: tuple[str, ...], workshop: Workshop, tmp_path: Path
) -> None:
    config = write_config(tmp_path)
    twin = start(workshop, config, *words, name="twin", ranks=2)
    assert twin.wait() == [0, 0], twin.texts()
    assert ", fused layers, 2 ranks" in twin.texts()
    for step, number in ((9, KILL), (20, NOTICE)):
        hit = start(workshop, config, *words, ranks=2)
        hit.wait_for_step(step)
        hit.signal(number)
        hit.wait()
    last = start(workshop, config, *words, ranks=2)
    assert last.wait() == [0, 0], last.texts()
    assert last.history.losses() == twin.history.losses()
    assert last.history.stop(3)["digest"] == twin.history.stop(1)["digest"]
    assert last.history.events("attempt_start", 3)[0].get("differences", []) == []


@pytest.mark.slow
@needs_them
def test_who_goes_on_without_it_is_told_that_bits_differ(workshop: Workshop, tmp_path: Path) -> None:
    config = write_config(tmp_path)
    words = ("train.steps=6",)
    assert start(workshop, config, *words).wait() == [0]
    nowhere = {"XDG_CACHE_HOME": str(tmp_path / "none"), "PATH": "/nowhere"}
    expected = f"layers: fused ({native.library().digest}) -> torch"
    off = ("train.fused_layers=false",)
    for attempt, changes, environment in ((2, off, {}), (3, (), {}), (4, (), nowhere)):
        gang = start(workshop, config, *words, *changes, env=environment)
        assert gang.wait() == [0], gang.texts()
        assert (", fused layers" in gang.texts()) == (attempt == 3)
        told = gang.history.events("attempt_start", attempt)[0]["differences"]
        assert told == ([expected] if attempt != 3 else []), "beside the first one's, which saved last"
    slower = "layers without kernels of their own, which are faster (rank 0: it needs a C++ compiler once: "
    assert slower in gang.texts()
