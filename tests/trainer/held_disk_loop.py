"""loop_script.py on a disk that stands still, for large writes, as long as the file named by HELD exists."""

from __future__ import annotations

import os
import runpy
import time
from pathlib import Path

from holdfast_trainer.checkpoint import directory
from holdfast_trainer.checkpoint.storage import Storage

held = Path(os.environ["HELD"])
LARGE = 1 << 20
"""Bytes. What is no tensor is smaller."""


class HeldDisk(Storage):
    def write(self, fd: int, data: memoryview, offset: int) -> None:
        while len(data) >= LARGE and held.exists():
            time.sleep(0.01)
        super().write(fd, data, offset)


directory.Storage = HeldDisk  # type: ignore[misc]
runpy.run_path(str(Path(__file__).with_name("loop_script.py")), run_name="__main__")
