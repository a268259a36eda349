"""Peers of the benchmarks are installed apart, from what uv.lock pins and .venv lacks."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from scripts.peers import PeersError, install, only_of

PEERS = """\
lightning==2.6.6 \\
    --hash=sha256:aa \\
    --hash=sha256:bb
    # via holdfast
torch==2.15.0 \\
    --hash=sha256:cc
"""
DEV = "torch==2.15.0 \\\n    --hash=sha256:cc\npytest==8.4 --hash=sha256:dd\n"


def test_only_what_is_missing_is_installed_with_its_hashes() -> None:
    (line,) = only_of(PEERS, DEV)
    assert line.split() == ["lightning==2.6.6", "--hash=sha256:aa", "--hash=sha256:bb"]


UV = """\
#!/bin/sh
# As `python -m uv`: exports one package, and takes its time to install it, or fails.
case "$*" in
  *"uv export"*--only-group*) echo "lightning==2.6.6 --hash=sha256:aa" ;;
  *"uv export"*) ;;
  *"uv pip install"*)
    echo "$*" >> "$0.installs"
    test -e "$0.away" && { echo "error: no such index" >&2; exit 2; }
    while test $# -gt 0; do test "$1" = --target && target=$2; shift; done
    mkdir -p "$target/lightning" && sleep 0.5 && touch "$target/lightning/__init__.py" ;;
esac
"""


@pytest.fixture
def uv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    program = tmp_path / "uv"
    program.write_text(UV)
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "cache"))
    return program


def test_who_wants_them_at_once_gets_one_whole_directory(uv: Path) -> None:
    with ThreadPoolExecutor() as pool:
        places = set(
            pool.map(lambda _: (place := install(), (place / "lightning/__init__.py").exists()), range(4))
        )
    ((place, whole),) = places
    assert whole
    assert install() == place
    assert len(uv.with_name("uv.installs").read_text().splitlines()) == 1


def test_what_cannot_be_installed_leaves_nothing_that_looks_whole(uv: Path, tmp_path: Path) -> None:
    away = uv.with_name("uv.away")
    away.touch()
    with pytest.raises(PeersError, match=r"`uv pip install` ended with 2: error: no such index"):
        install()
    assert not [path for path in (tmp_path / "cache" / "peers").iterdir() if path.is_dir()]
    away.unlink()
    assert (install() / "lightning").is_dir()
