"""Append to one ledger from each of two machines at once: `append_script.py RUN NUMBER COUNT`."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from holdfast_trainer.contract import RunDir
from holdfast_trainer.ledger import Journal

run, number, count = RunDir(Path(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3])
journal = Journal(run, 1)
Path(f"ready-{number}").touch()
while f"ready-{1 - number}" not in os.listdir():
    time.sleep(0.01)
for index in range(count):
    journal.event("failure", rank=number, index=index)
