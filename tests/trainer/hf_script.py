"""With transformers beside: logits of its models and of ours, with each other's weights."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.append(sys.argv[1])

import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from holdfast_trainer.config import ModelConfig
from holdfast_trainer.hf_weights import load_weights, save_weights
from holdfast_trainer.model import build_model

GPT2 = (
    ModelConfig(vocab_size=96, layers=2, heads=2, width=32, context=16, bias=True),
    GPT2Config(vocab_size=96, n_layer=2, n_head=2, n_embd=32, n_positions=16),
)
LLAMA = (
    ModelConfig(
        vocab_size=96, layers=2, heads=4, width=32, context=16, family="llama", kv_heads=2, mlp_width=48,
        rope_theta=500.0, tied=False,
    ),
    LlamaConfig(
        vocab_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, hidden_size=32,
        intermediate_size=48, max_position_embeddings=16, rms_norm_eps=1e-5, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    ),
)  # fmt: skip


def farthest(ours: torch.nn.Module, theirs: torch.nn.Module, tokens: torch.Tensor) -> float:
    with torch.no_grad():
        return (ours.eval()(tokens)[0] - theirs.eval()(input_ids=tokens).logits).abs().max().item()


def main(scratch: Path) -> None:
    torch.manual_seed(1)
    tokens = torch.randint(96, (3, 16))
    found = {}
    for name, (config, shape) in {"gpt2": GPT2, "llama": LLAMA}.items():
        theirs = AutoModelForCausalLM.from_config(shape)
        theirs.save_pretrained(scratch / f"{name}-theirs")
        ours = build_model(config)
        before = farthest(ours, theirs, tokens)
        load_weights(ours, scratch / f"{name}-theirs")
        taken = farthest(ours, theirs, tokens)
        trained = build_model(config)
        save_weights(trained.state_dict(), config, scratch / f"{name}-ours")
        given = AutoModelForCausalLM.from_pretrained(scratch / f"{name}-ours")
        found[name] = {"before": before, "taken": taken, "given": farthest(trained, given, tokens)}
    print(json.dumps(found))


main(Path(sys.argv[2]))
