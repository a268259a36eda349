"""A decoder-only GPT: pre-norm blocks, causal attention, GELU MLP, learned positions, tied embedding.

The shape and the initialisation are GPT-2's (Radford et al. 2019): weights from N(0, 0.02), the
projections that write into the residual stream scaled by 1/sqrt(2 x layers), so that its variance
does not grow with depth. Attention is `scaled_dot_product_attention`, which picks the fastest
kernel of the device.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .config import ModelConfig

INIT_STD = 0.02
MLP_RATIO = 4


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=config.bias)
        self.out = nn.Linear(config.width, config.width, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = self.qkv(x).view(batch, time, 3, self.heads, width // self.heads).unbind(dim=2)
        y = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=True,
        )
        out: Tensor = self.out(y.transpose(1, 2).reshape(batch, time, width))
        return out


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, *, recompute: bool = False):
        super().__init__()
        self.recompute = recompute
        self.attention_norm = nn.LayerNorm(config.width, bias=config.bias)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width, bias=config.bias)
        self.up = nn.Linear(config.width, MLP_RATIO * config.width, bias=config.bias)
        self.down = nn.Linear(MLP_RATIO * config.width, config.width, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute and torch.is_grad_enabled():
            kept: Tensor = checkpoint(self._transform, x, use_reentrant=False)
            return kept
        return self._transform(x)

    def _transform(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        out: Tensor = x + self.dropout(self.down(F.gelu(self.up(self.mlp_norm(x)), approximate="tanh")))
        return out


class GPT(nn.Module):
    """Initialised from torch's global generator: seed it first for a repeatable model.

    `recompute` keeps only the input of each block for the backward pass, which computes the rest anew
    (Chen et al. 2016): about a third more work, and a fraction of the activations.
    """

    def __init__(self, config: ModelConfig, *, recompute: bool = False):
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.width)
        self.position_embedding = nn.Embedding(config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, recompute=recompute) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, bias=config.bias)
        self._initialise()

    def _initialise(self) -> None:
        residual_std = INIT_STD / math.sqrt(2 * self.config.layers)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                writes_residual = name.endswith((".out", ".down"))
                nn.init.normal_(module.weight, std=residual_std if writes_residual else INIT_STD)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=INIT_STD)

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
        positions = torch.arange(time, device=tokens.device)
        x = self.dropout(self.token_embedding(tokens) + self.position_embedding(positions))
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.token_embedding.weight)
        if targets is None:
            return logits, None
        return None, F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def parameter_count(config: ModelConfig) -> int:
    """Trainable parameters of `GPT(config)`; the tied embedding counts once."""
    width, bias = config.width, int(config.bias)
    norm = width * (1 + bias)
    attention = 4 * width * width + bias * 4 * width
    mlp = 2 * MLP_RATIO * width * width + bias * (MLP_RATIO + 1) * width
    embeddings = (config.vocab_size + config.context) * width
    return embeddings + config.layers * (attention + mlp + 2 * norm) + norm


def flops_per_token(config: ModelConfig) -> float:
    """Floating-point operations a token costs in forward and backward: 6 N + 12 L H Q T.

    Chowdhery et al. 2022 (PaLM), appendix B: N parameters that multiply, L layers, H heads of size Q,
    T tokens of context. Position embeddings are looked up, not multiplied, and are left out of N; the
    tied token embedding multiplies once, as the output layer. The causal mask is not discounted and
    recomputation is not counted, as is usual for MFU.
    """
    multiplying = parameter_count(config) - config.context * config.width
    return 6.0 * multiplying + 12.0 * config.layers * config.width * config.context
