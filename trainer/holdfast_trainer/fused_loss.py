"""Cross-entropy of logits in 16 bits on a GPU: one pass over them, and one for their gradient.

torch's computes in fp32 as this does, but writes each stage to memory: the logits in fp32, their logarithms,
the gradient of those, that of the logits, and that in 16 bits. For a vocabulary of 50,000 that is a fifth of
the time of a step of a small GPT and half of its memory. Here a block of threads reads a row, keeps its
maximum and sum (in one pass: Milakov and Gimelshein 2018), and writes the gradient when it is asked for it.
Nothing is added up in an order that varies, so bits repeat. torch.compile makes the like by itself.

The kernels are compiled at each start, in half a second, by NVRTC, which comes with PyTorch for CUDA and
needs no other compiler. docs/figures.md has what they are worth.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .decoder import cross_entropy
from .kernel_trial import compared, why_not

OLDEST = 8
"""The least major compute capability: Ampere's, which rounds to bf16 by itself."""
PACKAGE = "cuda-bindings"
THREADS = 512
CLOSE = 0.005
"""Relative difference from torch's gradients, by norms: both round the same to 16 bits, but for few."""
SOURCE = r"""
#define LANES 32
#define NONE __int_as_float(0xff800000)  // -infinity
#undef NAN
#define NAN __int_as_float(0x7fc00000)
typedef unsigned short Half;

#ifdef BF16
__device__ float wide(Half bits) { return __int_as_float((unsigned)bits << 16); }
__device__ Half narrow(float x) {
    Half bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}
#else
__device__ float wide(Half bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
}
__device__ Half narrow(float x) {
    Half bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}
#endif

struct alignas(16) Pack { Half at[8]; };
struct Sum { float most, sum; };  // of exp(x - most)

__device__ float share(float x, float most) { return x == NONE ? 0.0f : expf(x - most); }

__device__ Sum joined(Sum a, Sum b) {
    float most = fmaxf(a.most, b.most);
    return {most, a.sum * share(a.most, most) + b.sum * share(b.most, most)};
}

__device__ Sum with(Sum found, const float* x, int count) {
    float most = found.most;
    for (int i = 0; i < count; ++i) most = fmaxf(most, x[i]);
    float sum = found.sum == 0.0f ? 0.0f : found.sum * share(found.most, most);
    for (int i = 0; i < count; ++i) sum += share(x[i], most);
    return {most, sum};
}

extern "C" __global__ void loss_of_rows(
    const Half* logits, const long long* targets, float* losses, Sum* sums, int vocab
) {
    __shared__ Sum warps[LANES];
    const Half* row = logits + (unsigned long long)blockIdx.x * vocab;
    Sum mine = {NONE, 0.0f};
    int packs = vocab % 8 ? 0 : vocab / 8;  // else rows begin anywhere
    for (int i = threadIdx.x; i < packs; i += blockDim.x) {
        Pack pack = ((const Pack*)row)[i];
        float x[8];
        for (int k = 0; k < 8; ++k) x[k] = wide(pack.at[k]);
        mine = with(mine, x, 8);
    }
    for (int i = packs * 8 + threadIdx.x; i < vocab; i += blockDim.x) {
        float x = wide(row[i]);
        mine = with(mine, &x, 1);
    }
    for (int far = LANES / 2; far; far /= 2) {
        float most = __shfl_xor_sync(0xffffffffu, mine.most, far);
        float sum = __shfl_xor_sync(0xffffffffu, mine.sum, far);
        mine = joined(mine, {most, sum});
    }
    if (threadIdx.x % LANES == 0) warps[threadIdx.x / LANES] = mine;
    __syncthreads();
    if (threadIdx.x == 0) {
        Sum all = warps[0];
        for (int i = 1; i < blockDim.x / LANES; ++i) all = joined(all, warps[i]);
        long long target = targets[blockIdx.x];
        bool known = 0 <= target && target < vocab;
        losses[blockIdx.x] = known ? logf(all.sum) - (wide(row[target]) - all.most) : NAN;
        sums[blockIdx.x] = all;
    }
}

extern "C" __global__ void gradient_of_rows(
    const Half* logits, const long long* targets, const Sum* sums, const float* grad, float rows,
    Half* found, int vocab
) {
    unsigned long long begin = (unsigned long long)blockIdx.x * vocab;
    const Half* row = logits + begin;
    long long target = targets[blockIdx.x];
    Sum all = sums[blockIdx.x];
    float inverse = 1.0f / all.sum, scale = *grad / rows;
    int packs = vocab % 8 ? 0 : vocab / 8;
    for (int i = threadIdx.x; i < packs; i += blockDim.x) {
        Pack pack = ((const Pack*)row)[i];
        for (int k = 0; k < 8; ++k) {
            float p = expf(wide(pack.at[k]) - all.most) * inverse;
            pack.at[k] = narrow((p - (8 * i + k == target ? 1.0f : 0.0f)) * scale);
        }
        ((Pack*)(found + begin))[i] = pack;
    }
    for (int i = packs * 8 + threadIdx.x; i < vocab; i += blockDim.x) {
        float p = expf(wide(row[i]) - all.most) * inverse;
        found[begin + i] = narrow((p - (i == target ? 1.0f : 0.0f)) * scale);
    }
}
"""


def choose(device: torch.device, dtype: torch.dtype, vocab_size: int) -> str:
    """Why `fused_cross_entropy` is not to be used for such logits there; empty where it is.

    It is tried: what does not repeat its bits, or is far from what torch computes, is not taken.
    """
    if not is_for(device, dtype):
        return "it is for NVIDIA GPUs from Ampere on, in bf16 or fp16"
    return why_not(lambda: tried(fused_cross_entropy, device, dtype, vocab_size), PACKAGE)


def is_for(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether it would be worth having."""
    if device.type != "cuda" or torch.version.hip or dtype not in _MACROS:
        return False
    return torch.cuda.get_device_capability(device)[0] >= OLDEST


def fused_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """As decoder.cross_entropy, of logits in 16 bits: the mean in nats, a float32 scalar.

    A target that is no token gives NaN. Of logits in fp32 the loss is torch's.
    """
    if logits.dtype not in _MACROS:
        return cross_entropy(logits, targets)
    loss: Tensor = _Loss.apply(logits.contiguous(), targets.contiguous())
    return loss


def tried(
    loss: Callable[[Tensor, Tensor], Tensor], device: torch.device, dtype: torch.dtype, vocab_size: int
) -> str:
    """What is wrong with it, beside torch's; empty where nothing is."""
    drawn = torch.Generator(device).manual_seed(1)
    logits = 4 * torch.randn(64, vocab_size, device=device, generator=drawn)
    logits = logits.to(dtype).requires_grad_()
    targets = torch.randint(vocab_size, (64,), device=device, generator=drawn)

    def computed(loss: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        out = loss(logits, targets)
        return out.detach(), torch.autograd.grad(64 * out, logits)[0]

    return compared(lambda: computed(loss), lambda: computed(cross_entropy), CLOSE)


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        rows, vocab_size = logits.shape
        losses, sums = (logits.new_empty(shape, dtype=torch.float32) for shape in ((rows,), (rows, 2)))
        _launch("loss_of_rows", logits, targets, losses, sums, vocab_size)
        ctx.save_for_backward(logits, targets, sums)
        return losses.mean()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        logits, targets, sums = ctx.saved_tensors
        found = torch.empty_like(logits)
        grad, rows = grads[0].contiguous(), float(len(logits))
        _launch("gradient_of_rows", logits, targets, sums, grad, rows, found, logits.shape[1])
        return found, None


_MACROS = {torch.bfloat16: "BF16", torch.float16: "FP16"}
_loaded: dict[tuple[int, torch.dtype], tuple[Any, Any]] = {}
"""By device: PyTorch's context there, and the module."""


def _launch(name: str, logits: Tensor, *rest: Tensor | float) -> None:
    """A block of threads for each row."""
    from cuda.bindings import driver

    device = logits.get_device()
    with torch.cuda.device(device):
        if (key := (device, logits.dtype)) not in _loaded:
            major, minor = torch.cuda.get_device_capability(device)
            module = _done(driver.cuModuleLoadData(compile_kernels(f"sm_{major}{minor}", logits.dtype)))
            _loaded[key] = _done(driver.cuCtxGetCurrent()), module
        context, module = _loaded[key]
        _done(driver.cuCtxSetCurrent(context))  # a thread of the backward pass may have none yet
        kernel = _done(driver.cuModuleGetFunction(module, name.encode()))
        stream = driver.CUstream(torch.cuda.current_stream(device).cuda_stream)
        given = [_c_value(one) for one in (logits, *rest)]
        places = (ctypes.c_void_p * len(given))(*(ctypes.addressof(one) for one in given))
        grid, block, shared = (len(logits), 1, 1), (THREADS, 1, 1), 0
        _done(driver.cuLaunchKernel(kernel, *grid, *block, shared, stream, ctypes.addressof(places), 0))


def _c_value(one: Tensor | float) -> ctypes.c_void_p | ctypes.c_int | ctypes.c_float:
    if isinstance(one, Tensor):
        return ctypes.c_void_p(one.data_ptr())
    return ctypes.c_int(one) if isinstance(one, int) else ctypes.c_float(one)


def compile_kernels(architecture: str, dtype: torch.dtype) -> bytes:
    """The kernels' code for GPUs of that architecture. Raises RuntimeError with what the compiler says."""
    from cuda.bindings import nvrtc

    program = _done(nvrtc.nvrtcCreateProgram(SOURCE.encode(), b"loss.cu", 0, [], []))
    options = [f"--gpu-architecture={architecture}".encode(), f"-D{_MACROS[dtype]}".encode()]
    try:
        _done(nvrtc.nvrtcCompileProgram(program, len(options), options))
    except RuntimeError as error:
        said = b" " * _done(nvrtc.nvrtcGetProgramLogSize(program))
        _done(nvrtc.nvrtcGetProgramLog(program, said))
        raise RuntimeError(f"{error}: {said.decode().strip()}") from None
    code: bytes = b" " * _done(nvrtc.nvrtcGetCUBINSize(program))  # it writes to where they are
    _done(nvrtc.nvrtcGetCUBIN(program, code))
    return code


def _done(answer: tuple[Any, ...]) -> Any:
    """What a call gave. Raises RuntimeError with its error."""
    error, *given = answer
    if error.value:
        raise RuntimeError(error.name)
    return given[0] if given else None
