"""Models that are trained, by name."""

from __future__ import annotations

SHAPES = {
    "10M": {"layers": 6, "heads": 6, "width": 384, "context": 256, "vocab_size": 512, "batch": 16},
    "124M": {"layers": 12, "heads": 12, "width": 768, "context": 1024, "vocab_size": 50304, "batch": 16},
    "tiny": {"layers": 2, "heads": 2, "width": 64, "context": 32, "vocab_size": 512, "batch": 2},
}
