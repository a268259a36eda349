"""The trainer where the gradient of attention by matrix products does not repeat its bits."""

from __future__ import annotations

import sys
from itertools import count

import torch

from holdfast_trainer import cpuinfo, product_attention  # noqa: F401  # the latter registers the operator
from holdfast_trainer.train_command import main

if __name__ == "__main__":
    cpuinfo.read = lambda: "flags: avx512_bf16 amx_bf16\n"
    steady, calls = torch.ops.holdfast.product_attention_backward, count(1)
    torch.ops.holdfast.product_attention_backward = lambda *given: steady(*given) * (1 + next(calls) / 64)
    sys.exit(main(sys.argv[1:]))
