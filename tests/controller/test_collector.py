"""The controller looks for garbage less often, and still finds it by itself; a command all but never."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import gc, weakref
from holdfast_controller import __main__ as controller

class Node:
    pass

controller._collect_less()
print("frozen", gc.get_freeze_count() > 10_000 > len(gc.get_objects()))
node = Node()
node.itself = node
seen = weakref.ref(node)
del node
kept = [[number] for number in range(9_000)]
print("there", seen() is not None)
kept += [[number] for number in range(2_000)]
print("gone", seen() is None)
"""


def test_what_was_imported_is_left_alone_and_garbage_goes_by_itself() -> None:
    """In a process of its own: what is frozen stays so."""
    words = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.splitlines() == ["frozen True", "there True", "gone True"]


AT_THE_END = """
import atexit, gc
atexit.register(lambda: print("frozen", gc.get_freeze_count() > 10_000))
atexit.register(lambda: print("full passes", gc.get_stats()[2]["collections"]))
from holdfast_controller.__main__ import main
main()
"""


def test_a_command_does_not_look_for_garbage_in_what_it_imported() -> None:
    words = [sys.executable, "-c", AT_THE_END, "--help"]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.splitlines()[-2:] == ["full passes 0", "frozen True"]
