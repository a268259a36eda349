"""Whether this machine's CPU computes in bf16 itself, as some tests need."""

from __future__ import annotations

import pytest
import torch

from holdfast_trainer.precision import Bf16, bf16_of

HAS_BF16 = bf16_of(torch.device("cpu")) is not Bf16.NONE
WITHOUT_BF16 = "this CPU has no bf16"
needs_bf16 = pytest.mark.skipif(not HAS_BF16, reason=WITHOUT_BF16)
