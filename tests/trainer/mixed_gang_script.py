"""The trainer on machines of two kinds: rank 0's processor is fast in bf16, rank 1's has none of it, or
what OTHER says."""

from __future__ import annotations

import os
import sys

from holdfast_trainer import cpuinfo
from holdfast_trainer.train_command import main

KINDS = ("flags: avx512_bf16\nFeatures: bf16\n", os.environ.get("OTHER", "flags: avx2\nFeatures: fp\n"))

if __name__ == "__main__":
    cpuinfo.read = lambda: KINDS[int(os.environ["RANK"])]
    sys.exit(main(sys.argv[1:]))
