"""loop_script.py, where rank 1 tells of its part of a save a second after rank 0 may have looked for it."""

from __future__ import annotations

import os
import runpy
import time
from pathlib import Path
from typing import Any

from holdfast_trainer.checkpoint.directory import CheckpointDirectory

report = CheckpointDirectory.report_part


def report_late(self: CheckpointDirectory, *arguments: Any) -> None:
    if os.environ["RANK"] == "1":
        time.sleep(1)
    report(self, *arguments)


CheckpointDirectory.report_part = report_late  # type: ignore[method-assign]
loop = Path(__file__).parents[1] / "trainer" / "loop_script.py"
runpy.run_path(str(loop), run_name="__main__")
