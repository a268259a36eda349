"""GPT-2's layout at Hugging Face.

The two are one architecture under two sets of names. Hugging Face keeps the matrices of a block as
[in, out] (its Conv1D), ours are [out, in] (nn.Linear), so these four are transposed; q, k and v lie one
after the other in both. The output layer is tied to the token embedding, so `lm_head` is not stored apart.
A model of ours without biases is written with biases of zero, which computes the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from .config import ModelConfig
from .hf_layout import Layout, Pair, Stated
from .model import MLP_RATIO

_OUTER = {
    "token_embedding.weight": "wte.weight",
    "position_embedding.weight": "wpe.weight",
    "norm": "ln_f",
}
_NORMS = {"attention_norm": "ln_1", "mlp_norm": "ln_2"}
_MATRICES = {
    "attention.qkv": "attn.c_attn",
    "attention.out": "attn.c_proj",
    "up": "mlp.c_fc",
    "down": "mlp.c_proj",
}

_GELUS = ("gelu_new", "gelu_pytorch_tanh")
"""Two names of one function."""
_BY_LAYER = "scale_attn_by_inverse_layer_idx"


def layout(config: ModelConfig) -> Layout:
    pairs = tuple(_pairs(config.layers))
    return Layout(
        prefix="transformer.",
        pairs=pairs,
        beyond=f"h.{config.layers}.",
        buffers=(".attn.bias", ".attn.masked_bias"),
        tied=("wte.weight", "lm_head.weight"),
        missing=f"not GPT-2, or fewer than {config.layers} layers",
        unwanted="is a bias: set model.bias=true",
        settings={"token_embedding.weight": "model.vocab_size", "position_embedding.weight": "model.context"},
        shape=_shape(config),
        unlike=lambda shape: _unlike(shape, config),
        filled=frozenset(() if config.bias else (ours for ours, _, _ in pairs if ours.endswith(".bias"))),
        longer=frozenset({"position_embedding.weight"}),
    )


def _parts(layers: int) -> Iterator[Pair]:
    """Without `.weight`/`.bias` where both exist."""
    yield from ((ours, theirs, False) for ours, theirs in _OUTER.items())
    for layer in range(layers):
        for table, transposed in ((_NORMS, False), (_MATRICES, True)):
            for ours, theirs in table.items():
                yield f"blocks.{layer}.{ours}", f"h.{layer}.{theirs}", transposed


def _pairs(layers: int) -> Iterator[Pair]:
    for ours, theirs, transposed in _parts(layers):
        if ours.endswith(".weight"):
            yield ours, theirs, False
            continue
        yield f"{ours}.weight", f"{theirs}.weight", transposed
        yield f"{ours}.bias", f"{theirs}.bias", False


def _unlike(shape: Mapping[str, Any], config: ModelConfig) -> list[str]:
    kind = shape.get("model_type", "gpt2")
    if kind != "gpt2":
        other = "; set model.family=llama" if kind == "llama" else ""
        return [f"its config.json says model_type {kind}, the model's family is gpt2{other}"]
    width = shape.get("n_embd")
    # Where theirs is another one than the model's, the tensors tell.
    inner = MLP_RATIO * (width if isinstance(width, int) else config.width)
    stated = (
        # No tensor's shape tells the number of heads.
        Stated("n_head", shape.get("n_head"), (config.heads,), "set model.heads to fit", unsaid=12),
        Stated("n_inner", shape.get("n_inner"), (inner,)),
        Stated("activation_function", shape.get("activation_function"), _GELUS),
        Stated("layer_norm_epsilon", shape.get("layer_norm_epsilon"), (1e-5,)),
        Stated("scale_attn_weights", shape.get("scale_attn_weights"), (True,)),
        Stated(_BY_LAYER, shape.get(_BY_LAYER), (False,)),
    )
    return [fault for one in stated for fault in one.fault()]


def _shape(config: ModelConfig) -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": config.vocab_size,
        "n_positions": config.context,
        "n_embd": config.width,
        "n_layer": config.layers,
        "n_head": config.heads,
        "n_inner": MLP_RATIO * config.width,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "resid_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "attn_pdrop": config.dropout,
        "tie_word_embeddings": True,
    }
