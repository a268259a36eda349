"""What the reference language models have in common: tokens in; logits or their loss out.

The initialisation is GPT-2's (Radford et al. 2019): weights from N(0, 0.02), the projections that write
into the residual stream scaled by 1/sqrt(2 x layers), so that its variance does not grow with depth.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .config import ModelConfig

INIT_STD = 0.02


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """[N, vocab_size] and int64 [N] to the mean in nats, a float32 scalar, computed in float32."""
    return F.cross_entropy(logits.float(), targets)


class Block(nn.Module):
    """One layer: [B, T, width] in and out.

    `recompute` keeps only its input for the backward pass, which computes the rest anew (Chen et al.
    2016): about a third more work, and a fraction of the activations.
    """

    def __init__(self, *, recompute: bool):
        super().__init__()
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute and torch.is_grad_enabled():
            kept: Tensor = checkpoint(self.transform, x, use_reentrant=False)
            return kept
        return self.transform(x)

    def transform(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class Decoder(nn.Module):
    """A stack of causal blocks. A family gives `blocks`, `token_embedding` and `hidden`."""

    blocks: nn.ModuleList
    token_embedding: nn.Embedding

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.cross_entropy: Callable[[Tensor, Tensor], Tensor] = cross_entropy
        """What computes the loss; see the function."""

    def hidden(self, tokens: Tensor) -> Tensor:
        """What the output layer reads: int64 [B, T] to [B, T, width]."""
        raise NotImplementedError

    def output_weight(self) -> Tensor:
        """[vocab_size, width]; the token embedding's, where it is tied."""
        return self.token_embedding.weight

    def initialise(self) -> None:
        """Random weights, from torch's global generator."""
        for name, layer in self._layers():
            self._initialise(name, layer)

    def initial_values(self) -> Iterator[tuple[str, Tensor]]:
        """Name and value of each parameter as this model, on the meta device now, would have them had it been
        built on the CPU.

        From torch's global generator, one layer at a time. The model may be cut before the first is taken.
        """
        layers = [(name, copy.deepcopy(layer)) for name, layer in self._layers()]

        def values() -> Iterator[tuple[str, Tensor]]:
            for _, layer in layers:  # constructors draw, too, before any value is drawn that stays
                _real(layer).reset_parameters()
            for name, layer in layers:
                made = _real(layer)
                self._initialise(name, made)
                yield from ((f"{name}.{key}", value.detach()) for key, value in made.named_parameters())

        return values()

    def _layers(self) -> Iterator[tuple[str, Any]]:
        """What has parameters of its own, in the order in which it was constructed."""
        for name, module in self.named_modules():
            if next(module.parameters(recurse=False), None) is not None:
                yield name, module

    def _initialise(self, name: str, layer: Any) -> None:
        if isinstance(layer, nn.Linear):
            residual_std = INIT_STD / math.sqrt(2 * self.config.layers)
            writes_residual = name.endswith((".out", ".down"))
            nn.init.normal_(layer.weight, std=residual_std if writes_residual else INIT_STD)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
        elif isinstance(layer, nn.Embedding):
            nn.init.normal_(layer.weight, std=INIT_STD)
        else:  # a norm, which draws nothing
            layer.reset_parameters()

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> tuple[Tensor | None, Tensor | None]:
        """`(logits, None)` without targets, `(None, loss)` with them.

        `tokens` and `targets` are int64 [B, T] with T at most `context`; logits are [B, T, vocab_size];
        loss is the mean cross-entropy in nats, a float32 scalar. With targets the logits are not handed
        out: they are the largest tensor of the step, and nobody should keep them alive.
        Raises ValueError where T is longer than the context.
        """
        time = tokens.shape[1]
        if time > self.config.context:
            raise ValueError(f"{time} tokens do not fit into model.context {self.config.context}")
        logits = F.linear(self.hidden(tokens), self.output_weight())
        if targets is None:
            return logits, None
        return None, self.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _real(layer: nn.Module) -> Any:
    """Such a layer on the CPU, of undefined values."""
    return copy.deepcopy(layer).to_empty(device="cpu")
