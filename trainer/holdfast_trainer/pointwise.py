"""What a block computes between its matrix products: by PyTorch's operators, or what a caller gives in their
place (fused_layers.py)."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


class Pointwise:
    """By PyTorch's operators. Shapes are kept."""

    @staticmethod
    def gelu(x: Tensor) -> Tensor:
        """By tanh."""
        return F.gelu(x, approximate="tanh")

    @staticmethod
    def gated(gate: Tensor, up: Tensor) -> Tensor:
        """`up`, times SiLU of the gate."""
        return F.silu(gate) * up

    @staticmethod
    def norm(x: Tensor, norm: nn.LayerNorm | nn.RMSNorm) -> tuple[Tensor, Tensor]:
        """x, for who reads it besides, and the norm of it."""
        return x, norm(x)

    @staticmethod
    def add_norm(x: Tensor, branch: Tensor, norm: nn.LayerNorm | nn.RMSNorm) -> tuple[Tensor, Tensor]:
        """Their sum, and the norm of it."""
        x = x + branch
        return x, norm(x)

    @staticmethod
    def add(x: Tensor, branch: Tensor) -> Tensor:
        """Their sum."""
        return x + branch
