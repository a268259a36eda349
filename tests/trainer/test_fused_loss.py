"""The fused loss of GPUs, as far as a CPU can tell: test_on_gpu.py has the rest.

Its kernels are compiled for the CPU here, with a thread for each of a block's, which meet where those of a
GPU would.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from holdfast_trainer.decoder import cross_entropy
from holdfast_trainer.fused_loss import SOURCE, choose, compile_kernels, fused_cross_entropy, tried

THREADS = 64
SHIM = """
#include <barrier>
#include <cmath>
#include <cstring>
#include <thread>
#include <vector>

#define __device__
#define __global__
#define __shared__ static
#define asm(...) static_assert(true)

constexpr int THREADS = %d;
struct Place { int x; };
static Place blockDim = {THREADS}, blockIdx;
static thread_local Place threadIdx;
static std::barrier<> all(THREADS);
static float shown[THREADS];

static float __int_as_float(unsigned bits) { float x; std::memcpy(&x, &bits, 4); return x; }
static void __syncthreads() { all.arrive_and_wait(); }
static float __shfl_xor_sync(unsigned, float x, int far) {
    shown[threadIdx.x] = x;
    __syncthreads();
    float found = shown[threadIdx.x ^ far];
    __syncthreads();
    return found;
}
static unsigned short rounded(float x) {  // to the nearest bf16, of two the even one
    unsigned bits;
    std::memcpy(&bits, &x, 4);
    return std::isnan(x) ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
template <class Kernel> static void launch(int blocks, Kernel kernel) {
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
        std::vector<std::thread> threads;
        for (int i = 0; i < THREADS; ++i) threads.emplace_back([=] { threadIdx.x = i; kernel(); });
        for (auto& thread : threads) thread.join();
    }
}
"""
CALLS = """
extern "C" void loss(int n, const Half* x, const long long* t, float* losses, Sum* sums, int vocab) {
    launch(n, [=] { loss_of_rows(x, t, losses, sums, vocab); });
}
extern "C" void gradient(
    int n, const Half* x, const long long* t, const Sum* sums, const float* grad, float rows,
    Half* found, int vocab
) {
    launch(n, [=] { gradient_of_rows(x, t, sums, grad, rows, found, vocab); });
}
"""

Loss = Callable[[Tensor, Tensor], Tensor]


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> Loss:
    """The kernels, in bf16."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    place = tmp_path_factory.mktemp("kernels")
    # What rounds is an instruction of a GPU; all else is compiled as it is.
    source = SOURCE.replace("Half bits;\n    asm(", "Half bits = rounded(x);\n    asm(")
    (place / "loss.cpp").write_text(SHIM % THREADS + "#define BF16\n" + source + CALLS)
    command = [compiler, "-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", "loss.cpp", "-o", "loss.so"]
    said = subprocess.run(command, cwd=place, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr
    library = ctypes.CDLL(str(place / "loss.so"))

    def at(tensor: Tensor) -> ctypes.c_void_p:
        return ctypes.c_void_p(tensor.data_ptr())

    class Computed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, logits: Tensor, targets: Tensor) -> Tensor:
            rows, vocab = logits.shape
            losses, sums = torch.full((rows,), 7.0), torch.full((rows, 2), 7.0)
            library.loss(rows, at(logits), at(targets), at(losses), at(sums), vocab)
            ctx.save_for_backward(logits, targets, sums)  # type: ignore[attr-defined]
            return losses.mean()

        @staticmethod
        def backward(ctx: object, *grads: Tensor) -> tuple[Tensor, None]:
            logits, targets, sums = ctx.saved_tensors  # type: ignore[attr-defined]
            rows, vocab = logits.shape
            found = torch.full_like(logits, torch.nan)
            share = ctypes.c_float(rows)
            library.gradient(rows, at(logits), at(targets), at(sums), at(grads[0]), share, at(found), vocab)
            return found, None

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        out: Tensor = Computed.apply(logits, targets)
        return out

    return loss


def both(
    on_cpu: Loss, logits: Tensor, targets: Tensor
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Loss and gradient, by the kernels and by torch."""

    def by(loss: Loss) -> tuple[Tensor, Tensor]:
        out = loss(logits, targets)
        return out.detach(), torch.autograd.grad(3 * out, logits)[0].float()

    logits = logits.bfloat16().requires_grad_()
    return by(on_cpu), by(cross_entropy)


@pytest.mark.parametrize("vocab", [1, 5, 8, 256, 1000, 1001, 5003, 6144])
def test_the_kernels_compute_what_torch_does(vocab: int, on_cpu: Loss) -> None:
    """Also of rows that do not begin at a multiple of 16 bytes, and that leave threads with nothing to do."""
    torch.manual_seed(vocab)
    targets = torch.randint(vocab, (5,))
    (loss, gradient), (expected, right) = both(on_cpu, 4 * torch.randn(5, vocab), targets)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient, right, rtol=0.01, atol=1e-6)


def test_large_logits_and_those_of_nothing_are_no_trouble(on_cpu: Loss) -> None:
    logits = torch.randn(4, 1000)
    logits[0] *= 1e4
    logits[1] -= 1e30
    logits[2, ::2] = -torch.inf
    logits[3, :995] = -torch.inf
    (loss, gradient), (expected, right) = both(on_cpu, logits, torch.tensor([1, 1, 1, 997]))
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(gradient, right, rtol=0.01, atol=1e-6)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_logit_that_is_no_number_is_heard_of(value: float, on_cpu: Loss) -> None:
    logits = torch.randn(2, 1000)
    logits[1, 500] = value
    (loss, gradient), _ = both(on_cpu, logits, torch.tensor([1, 2]))
    assert loss.isnan()
    assert gradient[1].isnan().any()
    assert not gradient[0].isnan().any()


@pytest.mark.parametrize("target", [-100, -1, 1000, 1 << 40])
def test_a_target_that_is_no_token_gives_no_number(target: int, on_cpu: Loss) -> None:
    loss = on_cpu(torch.randn(2, 1000).bfloat16(), torch.tensor([1, target]))
    assert loss.isnan()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_they_compile_for_gpus_from_ampere_on(dtype: torch.dtype) -> None:
    """That takes no GPU."""
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs PyTorch for CUDA")
    for architecture in ("sm_80", "sm_90", "sm_100"):
        assert compile_kernels(architecture, dtype).startswith(b"\x7fELF")


def test_what_computes_something_else_is_not_taken(on_cpu: Loss) -> None:
    noise = torch.Generator()

    def trembling(logits: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(logits, targets) * (1 + 0.01 * torch.randn((), generator=noise))

    def wrong(logits: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(1.01 * logits, targets)

    def found(loss: Loss) -> str:
        state = torch.get_rng_state()
        told = tried(loss, torch.device("cpu"), torch.bfloat16, 96)
        assert torch.equal(torch.get_rng_state(), state), "the training draws what it would have drawn"
        return told

    assert found(on_cpu) == ""
    assert found(trembling) == "its bits did not repeat"
    assert found(wrong) == "what it computes is too far from what PyTorch does"


def test_a_cpu_has_no_such_kernels() -> None:
    logits, targets = torch.randn(4, 100), torch.randint(100, (4,))
    assert torch.equal(fused_cross_entropy(logits, targets), cross_entropy(logits, targets)), "of fp32"
    lacking = choose(torch.device("cpu"), torch.bfloat16, 100)
    assert lacking == "it is for NVIDIA GPUs from Ampere on, in bf16 or fp16"
