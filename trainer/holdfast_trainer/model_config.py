"""The model's section of the configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from .schema import ConfigError, Positive, Range

LLAMA_ALONE = ("kv_heads", "mlp_width", "rope_theta", "norm_eps", "tied")
"""Settings that the gpt2 family has not."""


@dataclass(frozen=True)
class ModelConfig:
    """Shape of the model."""

    vocab_size: Positive
    """Rows of the embedding; at least the vocabulary of the prepared data. A multiple of 64 is fastest."""
    layers: Positive
    """Transformer blocks, one after the other."""
    heads: Positive
    """Attention heads; must divide `width`."""
    width: Positive
    """Size of the residual stream (the embedding); gpt2's MLP is four times as wide."""
    context: Positive
    """Tokens in one sequence; the cost of attention grows with its square."""
    dropout: Annotated[float, Range(0, 1, open_high=True)] = 0.0
    """Probability that a value is dropped. 0: a model that sees its data about once gains nothing from it."""
    bias: bool = False
    """Biases in linear layers and norms, of gpt2 alone. false: a little faster, no worse (as PaLM and
    later)."""
    family: Literal["gpt2", "llama"] = "gpt2"
    """gpt2: learned positions, layer norms, GELU. llama: rotary positions, RMS norms, a gated MLP. kv_heads,
    mlp_width, rope_theta, norm_eps and tied are of llama alone."""
    kv_heads: Positive | None = None
    """Heads of keys and values, which groups of `heads` share; must divide it. null: as many as `heads`."""
    mlp_width: Positive | None = None
    """Size of the gated MLP. null: 8/3 of `width`, up to a multiple of 64 (Touvron et al. 2023)."""
    rope_theta: Annotated[float, Range(0, open_low=True)] = 10000.0
    """Base of the rotary angles; contexts of many thousand tokens want more, such as 500000."""
    norm_eps: Annotated[float, Range(0, open_low=True)] = 1e-5
    """Added in the RMS norms, so that they never divide by zero; change it only to match given weights."""
    tied: bool = True
    """Whether the token embedding and the output layer are one matrix."""

    @property
    def key_value_heads(self) -> int:
        """`kv_heads`, worked out."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def mlp_size(self) -> int:
        """`mlp_width` of the llama family, worked out."""
        return -(-8 * self.width // (3 * 64)) * 64 if self.mlp_width is None else self.mlp_width

    def __post_init__(self) -> None:
        if self.width % self.heads:
            near = min(divisors(self.width), key=lambda h: abs(h - self.heads))
            raise ConfigError(
                f"heads: {self.heads} does not divide width {self.width}; the nearest that does is {near}"
            )
        self._check_family()

    def _check_family(self) -> None:
        """Raises ConfigError where a setting belongs to the other family, or heads do not go together."""
        if self.family == "gpt2":
            for name in LLAMA_ALONE:
                if getattr(self, name) != getattr(ModelConfig, name):
                    raise ConfigError(
                        f"{name}: a setting of the llama family; set model.family=llama, or leave it out"
                    )
            return
        if self.bias:
            raise ConfigError("bias: the llama family has none; leave it out, or set model.family=gpt2")
        if self.heads % self.key_value_heads:
            near = min(divisors(self.heads), key=lambda h: abs(h - self.key_value_heads))
            raise ConfigError(
                f"kv_heads: {self.kv_heads} does not divide heads {self.heads}; "
                f"the nearest that does is {near}"
            )
        if self.width % (2 * self.heads):
            raise ConfigError(
                f"heads: {self.heads} heads of a width of {self.width} have an odd size, and rotary "
                "positions turn dimensions in pairs; use fewer heads"
            )


def divisors(number: int) -> list[int]:
    """All of them, ascending."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})
