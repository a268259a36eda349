"""Installs what benchmarks measure beside, apart from .venv: pinned by uv.lock, checked by hash.

The packages of the dependency group `peers`, without what .venv has already, go into a directory of the
cache, under a key of what it holds; a process that is to find them gets that directory as the last entry of
its path. So nothing of Holdfast can come to depend on them, and the environment that tests run in is that of
the product. The directory appears by a rename when it is whole, and processes that want it at once wait for
the one that makes it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from scripts.install import uv_environment
from tests.cluster.locks import locked
from tests.cluster.site import cache_directory

ROOT = Path(__file__).parents[1]


class PeersError(Exception):
    """The message says what failed and what to do."""


def find(packages: Iterable[str], heard: Callable[[str], None]) -> list[Path]:
    """Where `packages` are: in this environment, or in one made from uv.lock; said where neither can be."""
    if all(importlib.util.find_spec(name) for name in packages):
        return []
    try:
        return [install()]
    except (PeersError, OSError) as error:
        heard(f"peers are left out: {error}")
        return []


def missing(packages: Iterable[str], path: Sequence[Path]) -> set[str]:
    """Those that are neither in this environment nor in a directory of `path`."""
    return {
        name
        for name in packages
        if not any((place / name).is_dir() for place in path) and importlib.util.find_spec(name) is None
    }


def only_of(group: str, others: str) -> list[str]:
    """The requirement lines (with their hashes) of `group` whose package `others` does not name."""
    known = {line.partition("==")[0] for line in _requirements(others)}
    return [line for line in _requirements(group) if line.partition("==")[0] not in known]


def _requirements(text: str) -> list[str]:
    joined = text.replace("\\\n", " ")
    return [line.strip() for line in joined.splitlines() if "==" in line.partition("#")[0]]


def install(root: Path = ROOT) -> Path:
    """The directory, filled. Raises PeersError, and OSError where the cache cannot be written."""
    lines = only_of(_export(root, "--only-group", "peers"), _export(root, "--extra", "dev"))
    key = hashlib.sha256("\n".join([sys.version, *lines]).encode()).hexdigest()[:16]
    place = cache_directory() / "peers" / key
    if not place.exists():
        with locked(place.with_suffix(".lock")):
            if not place.exists():
                _fill(root, place, lines)
    return place


def _fill(root: Path, place: Path, lines: Sequence[str]) -> None:
    with tempfile.TemporaryDirectory(prefix=f"{place.name}-", dir=place.parent) as beside:
        listing = Path(beside) / "requirements.txt"
        listing.write_text("\n".join(lines) + "\n", encoding="utf-8")
        whole = Path(beside) / "whole"
        command = ["pip", "install", "--quiet", "--target", str(whole), "--no-deps", "--require-hashes"]
        _uv(root, *command, "--compile-bytecode", "-r", str(listing))
        whole.rename(place)


def _export(root: Path, *choice: str) -> str:
    return _uv(root, "export", "--frozen", *choice, "--no-emit-project", "--no-header", "--quiet")


def _uv(root: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "uv", *arguments]
    if arguments[0] == "pip":
        command += ["--python", sys.executable]
    done = subprocess.run(
        command, cwd=root, env=uv_environment(), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise PeersError(
            f"`uv {arguments[0]} {arguments[1]}` ended with {done.returncode}: {done.stderr.strip()[-600:]}"
        )
    return done.stdout
