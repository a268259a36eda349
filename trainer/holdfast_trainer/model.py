"""A decoder-only GPT: pre-norm blocks, causal attention, GELU MLP, learned positions, tied embedding.

The shape is GPT-2's (Radford et al. 2019); `llama.py` has the other family, and `build_model` picks.
Attention is torch's, which picks the fastest kernel of the device, or what a caller gives in its place; so is
what lies between the products.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from . import llama
from .attention import Attend, attend_joined
from .config import ModelConfig
from .decoder import Block, Decoder
from .pointwise import Pointwise

MLP_RATIO = 4


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, config: ModelConfig, attend: Attend):
        super().__init__()
        self.attend = attend
        self.heads = config.heads
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=config.bias)
        self.out = nn.Linear(config.width, config.width, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        qkv = self.qkv(x).view(batch, time, 3, self.heads, width // self.heads)
        y = self.attend(qkv, dropout_p=self.dropout if self.training else 0.0)
        out: Tensor = self.out(y.transpose(1, 2).reshape(batch, time, width))
        return out


class GPTBlock(Block):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, attend: Attend, pointwise: type[Pointwise], *, recompute: bool):
        super().__init__(recompute=recompute)
        self.pointwise = pointwise
        self.attention_norm = nn.LayerNorm(config.width, bias=config.bias)
        self.attention = Attention(config, attend)
        self.mlp_norm = nn.LayerNorm(config.width, bias=config.bias)
        self.up = nn.Linear(config.width, MLP_RATIO * config.width, bias=config.bias)
        self.down = nn.Linear(MLP_RATIO * config.width, config.width, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def transform(self, x: Tensor) -> Tensor:
        x, normed = self.pointwise.norm(x, self.attention_norm)
        x, normed = self.pointwise.add_norm(x, self.dropout(self.attention(normed)), self.mlp_norm)
        return self.pointwise.add(x, self.dropout(self.down(self.pointwise.gelu(self.up(normed)))))


class GPT(Decoder):
    """Initialised from torch's global generator: seed it first for a repeatable model."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        recompute: bool = False,
        attend: Attend = attend_joined,
        pointwise: type[Pointwise] = Pointwise,
    ):
        super().__init__(config)
        self.token_embedding = nn.Embedding(config.vocab_size, config.width)
        self.position_embedding = nn.Embedding(config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(
            GPTBlock(config, attend, pointwise, recompute=recompute) for _ in range(config.layers)
        )
        self.norm = nn.LayerNorm(config.width, bias=config.bias)
        self.initialise()

    def hidden(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.token_embedding(tokens) + self.position_embedding(positions))
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.norm(x)
        return out


def joins(config: ModelConfig) -> bool:
    """Whether the family's queries, keys and values are parts of one tensor when they meet."""
    return config.family == "gpt2"


def build_model(
    config: ModelConfig,
    *,
    recompute: bool = False,
    attend: Attend | None = None,
    pointwise: type[Pointwise] = Pointwise,
) -> Decoder:
    """The configured family's model, with random weights (see `Decoder`).

    `attend` in place of torch's attention: called as `attend_joined` where the family `joins`, else as
    `scaled_dot_product_attention`.
    """
    given: dict[str, Any] = {} if attend is None else {"attend": attend}
    family = llama.Llama if config.family == "llama" else GPT
    return family(config, recompute=recompute, pointwise=pointwise, **given)


def parameter_count(config: ModelConfig) -> int:
    """Trainable parameters of the model; a tied embedding counts once."""
    if config.family == "llama":
        return llama.parameter_count(config)
    width, bias = config.width, int(config.bias)
    norm = width * (1 + bias)
    attention = 4 * width * width + bias * 4 * width
    mlp = 2 * MLP_RATIO * width * width + bias * (MLP_RATIO + 1) * width
    embeddings = (config.vocab_size + config.context) * width
    return embeddings + config.layers * (attention + mlp + 2 * norm) + norm


def flops_per_token(config: ModelConfig) -> float:
    """Floating-point operations a token costs in forward and backward: 6 N + 12 L H Q T.

    Chowdhery et al. 2022 (PaLM), appendix B: N parameters that multiply, L layers, H heads of size Q,
    T tokens of context. Embeddings of positions, and of tokens where the output layer has its own matrix,
    are looked up, not multiplied, and are left out of N; a tied one multiplies once, as the output layer.
    The causal mask is not discounted and recomputation is not counted, as is usual for MFU.
    """
    looked_up = config.context if config.family == "gpt2" else 0 if config.tied else config.vocab_size
    multiplying = parameter_count(config) - looked_up * config.width
    return 6.0 * multiplying + 12.0 * config.layers * config.width * config.context
