"""Llama's layout at Hugging Face: the same matrices under other names, none of them transposed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from .config import ModelConfig
from .hf_layout import Layout, Pair, Stated

_LAYER = {
    "attention_norm": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
OUTPUT = "lm_head.weight"


def layout(config: ModelConfig) -> Layout:
    return Layout(
        prefix="",
        pairs=tuple(_pairs(config)),
        beyond=f"model.layers.{config.layers}.",
        buffers=(".rotary_emb.inv_freq",),
        tied=("model.embed_tokens.weight", OUTPUT) if config.tied else None,
        missing="not Llama, "
        + ("" if config.tied else "or tied (model.tied=true), ")
        + f"or fewer than {config.layers} layers",
        unwanted="is one that the model has not",
        settings={
            "token_embedding.weight": "model.vocab_size",
            "output.weight": "model.vocab_size",
            "attention.k.weight": "model.kv_heads",
            "attention.v.weight": "model.kv_heads",
            "gate.weight": "model.mlp_width",
            "up.weight": "model.mlp_width",
            "down.weight": "model.mlp_width",
        },
        shape=_shape(config),
        unlike=lambda shape: _unlike(shape, config),
    )


def _pairs(config: ModelConfig) -> Iterator[Pair]:
    yield "token_embedding.weight", "model.embed_tokens.weight", False
    for layer in range(config.layers):
        for ours, theirs in _LAYER.items():
            yield f"blocks.{layer}.{ours}.weight", f"model.layers.{layer}.{theirs}.weight", False
    yield "norm.weight", "model.norm.weight", False
    if not config.tied:
        yield "output.weight", OUTPUT, False


def _unlike(shape: Mapping[str, Any], config: ModelConfig) -> list[str]:
    faults = []
    kind = shape.get("model_type", "llama")
    if kind != "llama":
        other = "; set model.family=gpt2" if kind == "gpt2" else ""
        faults.append(f"its config.json says model_type {kind}, the model's family is llama{other}")
    scaling = _rope(shape)
    if scaling.get("rope_type", scaling.get("type", "default")) != "default":
        faults.append(f"its rotary positions are scaled ({scaling}), which this model does not compute")
    if shape.get("head_dim") not in (None, config.width // config.heads):
        faults.append(f"its heads are {shape['head_dim']} wide, the model's {config.width // config.heads}")
    theta = scaling.get("rope_theta", shape.get("rope_theta"))  # of two, the inner one counts there
    for name, theirs, ours, unsaid in (
        ("heads", shape.get("num_attention_heads"), config.heads, 32),
        ("rope_theta", theta, config.rope_theta, 10000.0),
        ("norm_eps", shape.get("rms_norm_eps"), config.norm_eps, 1e-6),
        ("tied", shape.get("tie_word_embeddings"), config.tied, None),
    ):
        faults += Stated(name, theirs, (ours,), f"set model.{name} to fit", unsaid).fault()
    return faults + Stated("hidden_act", shape.get("hidden_act"), ("silu",)).fault()


def _rope(shape: Mapping[str, Any]) -> Mapping[str, Any]:
    """From version 5 of transformers on all of it is under `rope_parameters`."""
    return shape.get("rope_parameters") or shape.get("rope_scaling") or {}


def _shape(config: ModelConfig) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.context,
        "hidden_size": config.width,
        "intermediate_size": config.mlp_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.key_value_heads,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": config.dropout,
        "tie_word_embeddings": config.tied,
    }
