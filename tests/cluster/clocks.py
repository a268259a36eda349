"""A node whose pods live at another time, from now on: late_runc.py stands before its runc."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.cluster import late_runc
from tests.cluster.node import runc_of
from tests.cluster.site import Site
from tests.cluster.system import install, run

SOURCE = Path(__file__).with_name("wall_clock.c")
COMPILER = {"cc": "gcc", "/usr/include/stdio.h": "libc6-dev"}


@contextmanager
def at_another_time(node: Site, seconds: int) -> Iterator[None]:
    """Containers that are made on the node while this holds see the time of day so many seconds ahead."""
    link = runc_of(node)
    before = link.readlink()
    library = build(link.with_name("libwallclock.so"))
    words = [sys.executable, "-I", late_runc.__file__, str(before), str(library), str(seconds)]
    script = link.with_name("late-runc")
    script.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    script.chmod(0o755)
    _replace(link, script)
    try:
        yield
    finally:
        _replace(link, before)


def build(target: Path) -> Path:
    """Compile wall_clock.c. Raises MissingTool, ClusterError with the compiler's words."""
    install(COMPILER)
    flags = ["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    run(["cc", *flags, "-o", target, SOURCE, "-ldl"], "compiling another time of day")
    return target


def _replace(link: Path, target: Path) -> None:
    beside = link.with_name(f"{link.name}.new")
    beside.symlink_to(target)
    beside.rename(link)
