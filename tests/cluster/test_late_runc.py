"""A node at another time of day: what its runc makes, and what programs see then."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.cluster import clocks, late_runc
from tests.cluster.errors import MissingTool


def asked(tmp_path: Path, *words: str) -> list[str]:
    """What the real one is asked, where `words` are said to the one before it."""
    runc = tmp_path / "runc"
    runc.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    runc.chmod(0o755)
    before = [sys.executable, "-I", late_runc.__file__, str(runc), "/lib/libwallclock.so", "-600"]
    return subprocess.run([*before, *words], check=True, capture_output=True, text=True).stdout.split()


def test_a_container_that_is_made_sees_another_time_of_day(tmp_path: Path) -> None:
    config = {"process": {"args": ["python"], "env": ["A=1"]}, "mounts": [{"destination": "/proc"}]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ["--root", "/run/runc", "create", "--bundle", str(tmp_path), "abc"]
    assert asked(tmp_path, *words) == words
    changed = json.loads((tmp_path / "config.json").read_text())
    assert changed["process"]["args"] == ["python"]
    assert changed["process"]["env"][0] == "A=1"
    assert changed["process"]["env"][1:] == [f"LD_PRELOAD={late_runc.INSIDE}", "WALL_CLOCK_AHEAD=-600"]
    assert [mount["destination"] for mount in changed["mounts"]] == ["/proc", late_runc.INSIDE]
    assert changed["mounts"][1]["source"] == "/lib/libwallclock.so"


def test_all_else_is_handed_on(tmp_path: Path) -> None:
    words = ["--root", "/run/runc", "kill", "--all", "abc", "15"]
    assert asked(tmp_path, *words) == words


CLOCKS = """
import threading, time
began = time.monotonic(), time.clock_gettime(time.CLOCK_BOOTTIME)
time.sleep(0.01)
threading.Event().wait(0.01)
threading.Lock().acquire(timeout=0.01)
print(time.time(), time.time_ns() / 1e9, *began)
"""


@pytest.mark.parametrize("ahead", [600, -600])
def test_a_program_sees_the_time_of_day_moved_and_no_other_clock(tmp_path: Path, ahead: int) -> None:
    try:
        library = clocks.build(tmp_path / "libwallclock.so")
    except MissingTool as error:
        pytest.skip(str(error))
    environment = {**os.environ, "LD_PRELOAD": str(library), "WALL_CLOCK_AHEAD": str(ahead)}
    first = [time.time() + ahead] * 2 + [time.monotonic(), time.clock_gettime(time.CLOCK_BOOTTIME)]
    told = subprocess.run(
        [sys.executable, "-I", "-c", CLOCKS], env=environment, check=True, capture_output=True, text=True
    )
    last = [time.time() + ahead] * 2 + [time.monotonic(), time.clock_gettime(time.CLOCK_BOOTTIME)]
    for before, seen, after in zip(first, map(float, told.stdout.split()), last, strict=True):
        assert before <= seen <= after
