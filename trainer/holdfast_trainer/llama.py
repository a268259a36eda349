"""The Llama family (Touvron et al. 2023): RMS norms, rotary positions, a gated SiLU MLP, no biases.

Queries may share keys and values in groups (Ainslie et al. 2023). Rotary positions (Su et al. 2021) turn
dimension i together with dimension i + half, as Hugging Face's weights expect.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .attention import Attend
from .config import ModelConfig
from .decoder import Block, Decoder
from .pointwise import Pointwise


class Rotary(nn.Module):
    """Turns queries and keys by angles that grow with their position."""

    cosine: Tensor
    sine: Tensor

    def __init__(self, config: ModelConfig):
        super().__init__()
        size = config.width // config.heads
        # Also where the model is built without memory: nothing would fill them in later.
        options: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
        rates = config.rope_theta ** -(torch.arange(0, size, 2, **options) / size)
        angles = torch.outer(torch.arange(config.context, **options), rates).repeat(1, 2)
        # Functions of the configuration: no part of a checkpoint.
        self.register_buffer("cosine", angles.cos(), persistent=False)
        self.register_buffer("sine", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, heads, T, size], in and out."""
        # A block may be tried on the device before the model is there.
        cosine, sine = (table[: x.shape[2]].to(x.device) for table in (self.cosine, self.sine))
        first, second = x.float().chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
        return (x.float() * cosine + turned * sine).to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention; `kv_heads` keys and values serve `heads` queries."""

    def __init__(self, config: ModelConfig, attend: Attend):
        super().__init__()
        self.attend = attend
        self.heads, self.kv_heads = config.heads, config.key_value_heads
        size = config.width // config.heads
        self.dropout = config.dropout
        self.q = nn.Linear(config.width, config.width, bias=False)
        self.k = nn.Linear(config.width, self.kv_heads * size, bias=False)
        self.v = nn.Linear(config.width, self.kv_heads * size, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, rotary: Rotary) -> Tensor:
        q = self.q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k = self.k(x).unflatten(-1, (self.kv_heads, -1)).transpose(1, 2)
        v = self.v(x).unflatten(-1, (self.kv_heads, -1)).transpose(1, 2)
        y = self.attend(
            rotary(q),
            rotary(k),
            v,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=True,
            enable_gqa=self.kv_heads != self.heads,
        )
        out: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return out


class LlamaBlock(Block):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(
        self,
        config: ModelConfig,
        rotary: Rotary,
        attend: Attend,
        pointwise: type[Pointwise],
        *,
        recompute: bool,
    ):
        super().__init__(recompute=recompute)
        self.pointwise = pointwise
        # One for all layers, and so in no layer's list of modules.
        self._rotary = (rotary,)
        self.attention_norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.attention = Attention(config, attend)
        self.mlp_norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.gate = nn.Linear(config.width, config.mlp_size, bias=False)
        self.up = nn.Linear(config.width, config.mlp_size, bias=False)
        self.down = nn.Linear(config.mlp_size, config.width, bias=False)
        self.dropout = nn.Dropout(config.dropout)

    def transform(self, x: Tensor) -> Tensor:
        x, normed = self.pointwise.norm(x, self.attention_norm)
        attended = self.dropout(self.attention(normed, self._rotary[0]))
        x, normed = self.pointwise.add_norm(x, attended, self.mlp_norm)
        gated = self.pointwise.gated(self.gate(normed), self.up(normed))
        return self.pointwise.add(x, self.dropout(self.down(gated)))


class Llama(Decoder):
    """Initialised from torch's global generator: seed it first for a repeatable model."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        recompute: bool = False,
        attend: Attend = F.scaled_dot_product_attention,
        pointwise: type[Pointwise] = Pointwise,
    ):
        super().__init__(config)
        self.token_embedding = nn.Embedding(config.vocab_size, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.rotary = Rotary(config)
        self.blocks = nn.ModuleList(
            LlamaBlock(config, self.rotary, attend, pointwise, recompute=recompute)
            for _ in range(config.layers)
        )
        self.norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.output = None if config.tied else nn.Linear(config.width, config.vocab_size, bias=False)
        self.initialise()

    def hidden(self, tokens: Tensor) -> Tensor:
        x = self.dropout(self.token_embedding(tokens))
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.norm(x)
        return out

    def output_weight(self) -> Tensor:
        return super().output_weight() if self.output is None else self.output.weight


def parameter_count(config: ModelConfig) -> int:
    """Trainable parameters of `Llama(config)`; a tied embedding counts once."""
    width = config.width
    key_value = config.key_value_heads * (width // config.heads)
    layer = 2 * width * width + 2 * width * key_value + 3 * width * config.mlp_size + 2 * width
    return (1 if config.tied else 2) * config.vocab_size * width + config.layers * layer + width
