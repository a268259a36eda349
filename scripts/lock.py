"""uv.lock, kept fresh and free of any index's address.

uv writes into its lock file the address of the package index it resolved from and of every single
file. A lock file that names a host installs only from that host. This one keeps names, versions and
hashes, which prove what is installed, and leaves the address to whoever installs: each
`registry = "https://..."` becomes `registry = "index"`, each `url = "https://.../NAME"` becomes
`path = "NAME"`. `uv export` and `uv lock --check` read it as well as before, and the next `uv lock`
keeps its pins.

    lock.py                  resolve again, keep what is pinned where it still fits
    lock.py --upgrade        take the newest of everything (or --upgrade-package NAME)
    lock.py --check          say whether uv.lock is stale or names an address; no network
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]

_REGISTRY = re.compile(r'registry = "[a-z+]+://[^"]*"')
_FILE = re.compile(r'url = "[a-z+]+://[^"]*/([^"/?#]+)[^"/]*"')
_ADDRESS = re.compile(r"[a-z+]+://[^\s\"]*")


def without_addresses(lock: str) -> str:
    """The lock file's text with every index and file address replaced by a name."""
    return _FILE.sub(r'path = "\1"', _REGISTRY.sub('registry = "index"', lock))


def addresses(lock: str) -> list[tuple[int, str]]:
    """(line number, address) of every address that the text still names."""
    return [
        (number, match[0])
        for number, line in enumerate(lock.splitlines(), start=1)
        for match in _ADDRESS.finditer(line)
    ]


def check(root: Path) -> list[str]:
    """What is wrong with the lock file, in sentences; empty where nothing is."""
    path = root / "uv.lock"
    if not path.is_file():
        return ["uv.lock is missing: run `make lock`"]
    faults = []
    named = addresses(path.read_text(encoding="utf-8"))
    if named:
        number, address = named[0]
        faults.append(
            f"uv.lock names {len(named)} addresses, the first on line {number} ({address}): run `make lock`"
        )
    fresh = subprocess.run(
        _uv("lock", "--check", "--offline", "--quiet"),
        cwd=root,
        env=_without_settings(os.environ),
        capture_output=True,
        text=True,
        check=False,
    )
    if fresh.returncode:
        faults.append(f"uv.lock does not fit pyproject.toml: run `make lock`\n{fresh.stderr.strip()}")
    return faults


def update(root: Path, options: Sequence[str]) -> int:
    """Resolve and write the lock file; uv's exit code. A failed resolution leaves the file as it was."""
    from scripts.install import uv_environment

    path = root / "uv.lock"
    environment = {**uv_environment(), **os.environ}  # by what the user says of versions, too
    code = subprocess.run(_uv("lock", *options), cwd=root, env=environment, check=False).returncode
    if path.is_file():
        text = path.read_text(encoding="utf-8")
        path.write_text(without_addresses(text), encoding="utf-8")
    return code


def _uv(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "uv", *arguments]


def _without_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """None of what the user tells uv: to another index than its default one no lock file without addresses
    seems to fit."""
    kept = {
        name: value
        for name, value in environment.items()
        if not name.startswith("UV_") or name == "UV_CACHE_DIR"
    }
    return {**kept, "UV_NO_CONFIG": "1"}


def main() -> int:
    parser = argparse.ArgumentParser(description="Keep uv.lock fresh and free of addresses.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 where it is stale")
    arguments, options = parser.parse_known_args()
    if not arguments.check:
        return update(ROOT, options)
    faults = check(ROOT)
    print("\n".join(faults) or "uv.lock is fresh and names no address")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))  # run as a file, it finds its neighbours by scripts.*
    sys.exit(main())
