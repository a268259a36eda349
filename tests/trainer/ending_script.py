"""A program that fails, and one thing that its ending asks on the way fails too: `sys.argv[1]`."""

from __future__ import annotations

import sys
from typing import Any

from holdfast_trainer.ending import Ending, Standing


def fails(*_: Any) -> Any:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


class Unwritable:
    unwritten = 0
    event = staticmethod(fails)


broken = sys.argv[1]
if broken == "hook":
    sys.excepthook = fails
ending: Any = Ending()
ending.install()
ending.standing = lambda: Standing(7, 5)
ending.at_exit = lambda: print("completed", flush=True)
if broken == "journal":
    ending.journal = Unwritable()
elif broken != "hook":
    setattr(ending, broken, fails)
raise KeyError("what really happened")
