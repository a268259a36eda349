"""The same bits from the same inputs, as far as torch has kernels for that.

torch has two ways to be asked. Strict, an operation without such a kernel raises. With warnings only, it
warns and goes on; and attention, whose kernels for GPUs can do either, then takes the backward pass that adds
in any order (aten/src/ATen/native/transformers/cuda/attention_backward.cu). So the reference training is
strict. A loop of somebody else's must not end for an operation that it needs: it is warned, and what it was
warned of goes into its checkpoints, so that a resume can say what may keep it from being exact.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, TextIO

import torch

WORKSPACES = "CUBLAS_WORKSPACE_CONFIG"
REPEATS = ":4096:8"
"""32 MiB, with which cuBLAS repeats its bits; on a Hopper GPU torch takes as much without being asked."""
HOPPER = 9
"""Its major compute capability."""
SIGNS = ("does not have a deterministic implementation", "defaults to a non-deterministic algorithm")
"""Of torch's warnings: of an operation that has no other kernel, and of attention."""


def make_deterministic(*, strict: bool = False) -> None:
    """An operation that has no deterministic kernel raises RuntimeError (`strict`), or warns."""
    os.environ.setdefault(WORKSPACES, REPEATS)
    _ask(2 if strict else 1)
    torch.backends.cudnn.benchmark = False
    if strict:
        # Nothing of ours reads memory that it has not written, and to fill new memory is a kernel each time.
        torch._C._set_deterministic_fill_uninitialized_memory(False)


def choose_kernels(deterministic: bool | Literal["strict"], device: torch.device) -> None:
    """As `Run` is asked. False: cuDNN measures its kernels for each shape and takes the fastest; runs may
    round differently."""
    if deterministic:
        make_deterministic(strict=deterministic == "strict")
        _have_it_read_once(device)
    else:
        torch.backends.cudnn.benchmark = True


def _have_it_read_once(device: torch.device) -> None:
    """Where that changes no workspace, torch before 2.12 is kept from reading WORKSPACES at every product.

    It does so by a regular expression (parseChosenWorkspaceSize in aten/src/ATen/cuda/CublasHandlePool.cpp),
    30 us or more of the host each, which may then be too slow for the GPU: see docs/figures.md. Whether bits
    repeat it asks at the first product alone.
    """
    reads_once = hasattr(torch._C, "_cuda_setCublasWorkspaceSize")
    if device.type != "cuda" or torch.version.hip or reads_once or os.environ.get(WORKSPACES) != REPEATS:
        return
    if torch.cuda.get_device_capability(device)[0] == HOPPER:
        square = torch.ones(8, 8, device=device)
        torch.mm(square, square)
        del os.environ[WORKSPACES]


@contextmanager
def with_kernels(deterministic: bool | Literal["strict"], device: torch.device) -> Iterator[None]:
    """As `choose_kernels` has it in a process that asked for nothing before, until the block ends; but cuBLAS
    keeps the workspaces that it was first told of."""
    asked, measures = torch.get_deterministic_debug_mode(), torch.backends.cudnn.benchmark
    fills = torch._C._get_deterministic_fill_uninitialized_memory()
    try:
        _ask(0)
        torch._C._set_deterministic_fill_uninitialized_memory(True)
        choose_kernels(deterministic, device)
        yield
    finally:
        _ask(asked)
        torch.backends.cudnn.benchmark = measures
        torch._C._set_deterministic_fill_uninitialized_memory(fills)


def _ask(mode: int) -> None:
    """Of torch and its compiler: 0, any kernels; 1, it warns of an operation without one; 2, it raises."""
    if "torch._inductor.config" in sys.modules:
        torch.use_deterministic_algorithms(mode > 0, warn_only=mode == 1)
        return
    # That would import the compiler, only to tell it what it reads here when it is imported.
    os.environ["TORCHINDUCTOR_DETERMINISTIC"] = str(int(mode > 0))
    torch.set_deterministic_debug_mode(mode)


def hear_of_operations(tell: Callable[[str], None]) -> None:
    """Have `tell` called from now on with the name of each operation that torch warns of, once for each.

    They are not printed then, and they are heard although the script has asked for no warnings before.
    """
    for sign in SIGNS:
        warnings.filterwarnings("default", message=f".*{sign}")
    show, heard = warnings.showwarning, set[str]()

    def hear(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        operation = operation_of(str(message))
        if operation is None:
            show(message, category, filename, lineno, file, line)
        elif operation not in heard:
            heard.add(operation)
            tell(operation)

    warnings.showwarning = hear


def operation_of(message: str) -> str | None:
    """Which operation is not deterministic, as torch warns or raises; None where it says something else."""
    for sign in SIGNS:
        name, found, _ = message.partition(sign)
        if found:
            return name.strip()
    return None
