"""Whether kernels of ours may stand in for torch's on this device: they are tried there, at each start."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, equal

Compute = Callable[[], tuple[Tensor, ...]]


def why_not(trial: Callable[[], str], package: str) -> str:
    """What a trial found wrong, or what it raised; empty where nothing was. `package` has what it imports."""
    try:
        return trial()
    except ImportError as error:
        return f"pip install {package} ({error})"
    except Exception as error:
        return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"


def compared(own: Compute, torchs: Compute, close: float) -> str:
    """Why not, though both compute the same: its bits do not repeat, or it is further away than `close`, a
    relative difference by norms. Empty where it may."""
    first = own()
    for _ in range(2):
        if not all(equal(one, other) for one, other in zip(first, own(), strict=True)):
            return "its bits did not repeat"
    for one, other in zip(first, torchs(), strict=True):
        if not (one.float() - other.float()).norm() <= close * other.float().norm():
            return "what it computes is too far from what PyTorch does"
    return ""
