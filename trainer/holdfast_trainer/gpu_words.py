"""Words for GPUs that need not be here."""

from __future__ import annotations

import argparse
import os

TENSOR_CORES_FOR_BF16 = 8.0
"""Compute capability: Ampere."""


def add_gpus(parser: argparse.ArgumentParser) -> None:
    """The options; `--gpu-memory` asks for advice, the others say more of those GPUs."""
    parser.add_argument(
        "--gpu-memory",
        type=float,
        action="append",
        metavar="GB",
        help="work out settings for a GPU of this size, which need not be here; may be given again",
    )
    parser.add_argument(
        "--gpus",
        type=int,
        default=int(os.environ.get("WORLD_SIZE", "1")),
        help="how many such GPUs (%(default)s)",
    )
    parser.add_argument(
        "--gpu-capability",
        type=float,
        default=TENSOR_CORES_FOR_BF16,
        metavar="X.Y",
        help="their compute capability: bf16 from 8.0 on, fp16 before (%(default)s)",
    )
