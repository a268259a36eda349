"""loop_script.py with its run directory on NFS, as one machine of several sees it.

Linux' client remembers that a name was missing for as long as it takes its directory to be unchanged, 30 to
60 seconds; here for ever. It forgets that when the directory is opened or listed, as it then asks the server
(close-to-open consistency). And rank 1 tells of its part of a save after rank 0 has looked for it.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import runpy
import time
from pathlib import Path
from typing import Any

from holdfast_trainer.checkpoint.directory import CheckpointDirectory

HERE = os.environ["HOLDFAST_RUN_DIR"]
FOR_RECORDS = f"{HERE}.looked-for"
"""What rank 0 has looked for in vain, a file each."""
stat, listed = os.stat, {"listdir": os.listdir, "scandir": os.scandir}
missing: set[str] = set()


def look(call: Any, path: Any, *more: Any, **named: Any) -> Any:
    """For what must be there."""
    name = os.fspath(path) if isinstance(path, str | Path) else ""
    if not f"{name}/".startswith(f"{HERE}/") or named.get("dir_fd") is not None:
        return call(path, *more, **named)
    if name in missing:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
    try:
        return call(path, *more, **named)
    except FileNotFoundError:
        missing.add(name)
        if os.environ["RANK"] == "0":
            Path(FOR_RECORDS, name.replace("/", "|")).touch()
        raise


def make(call: Any, *paths: Any, **named: Any) -> Any:
    """What this machine makes itself it knows to be there."""
    answer = call(*paths, **named)
    missing.difference_update(map(str, paths))
    return answer


def ask(call: Any, directory: Any, *more: Any, **named: Any) -> Any:
    """The server, what is in it."""
    answer = look(call, directory, *more, **named)
    missing.difference_update({name for name in missing if os.path.dirname(name) == str(directory)})
    return answer


def opened(call: Any, path: Any, flags: int, *more: Any, **named: Any) -> Any:
    if flags & os.O_CREAT:
        made = call(path, flags, *more, **named)
        missing.discard(str(path))
        return made
    return (ask if flags & os.O_DIRECTORY else look)(call, path, flags, *more, **named)


def opened_file(call: Any, path: Any, mode: str = "r", *more: Any, **named: Any) -> Any:
    if mode.startswith("r"):
        return look(call, path, mode, *more, **named)
    missing.discard(str(path))
    return call(path, mode, *more, **named)


def instead(way: Any, call: Any) -> Any:
    return lambda *arguments, **named: way(call, *arguments, **named)


report = CheckpointDirectory.report_part


def report_late(self: CheckpointDirectory, partial: Path, rank: int, *more: Any) -> None:
    if rank == 1:
        record = Path(FOR_RECORDS, str(partial / "rank-1.json").replace("/", "|"))
        while not record.exists():
            time.sleep(0.005)
    report(self, partial, rank, *more)


os.makedirs(FOR_RECORDS, exist_ok=True)
CheckpointDirectory.report_part = report_late  # type: ignore[method-assign]
for name, call in listed.items():
    setattr(os, name, instead(ask, call))
for name in ("mkdir", "rename", "replace", "link"):
    setattr(os, name, instead(make, getattr(os, name)))
os.stat = instead(look, stat)
os.open = instead(opened, os.open)
builtins.open = io.open = instead(opened_file, io.open)
runpy.run_path(str(Path(__file__).with_name("loop_script.py")), run_name="__main__")
