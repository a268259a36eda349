"""Peers of the benchmarks are installed apart, from what uv.lock pins and .venv lacks."""

from __future__ import annotations

from scripts.peers import only_of

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
