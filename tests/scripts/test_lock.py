"""The lock file names packages, versions and hashes, never a host; and it is noticed when it is stale."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from scripts.lock import addresses, check, update, without_addresses

ROOT = Path(__file__).parents[2]

AS_UV_WRITES_IT = """\
version = 1
revision = 3
requires-python = ">=3.11"

[[package]]
name = "idna"
version = "3.10"
source = { registry = "https://index.example.org/simple" }
sdist = { url = "https://files.example.org/packages/f1/70/idna-3.10.tar.gz", hash = "sha256:12f65c9b" }
wheels = [
    { url = "https://files.example.org/packages/76/c6/idna-3.10-py3-none-any.whl", hash = "sha256:946d195a" },
    { url = "https://user:secret@example.org/f/idna-3.10-cp311.whl#sha256=1", hash = "sha256:1" },
]
"""


def test_every_address_becomes_a_name_and_nothing_else_changes() -> None:
    lock = without_addresses(AS_UV_WRITES_IT)
    assert addresses(lock) == []
    assert 'source = { registry = "index" }' in lock
    assert 'sdist = { path = "idna-3.10.tar.gz", hash = "sha256:12f65c9b" }' in lock
    assert '{ path = "idna-3.10-py3-none-any.whl", hash = "sha256:946d195a" }' in lock
    assert '{ path = "idna-3.10-cp311.whl", hash = "sha256:1" }' in lock
    assert re.findall(r"sha256:\w+", lock) == re.findall(
        r"sha256:\w+", AS_UV_WRITES_IT.replace("#sha256=1", "")
    )


def test_doing_it_twice_is_doing_it_once() -> None:
    once = without_addresses(AS_UV_WRITES_IT)
    assert without_addresses(once) == once


def test_a_lock_file_that_names_a_host_is_refused_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "x"\nversion = "1"\n')
    (tmp_path / "uv.lock").write_text(AS_UV_WRITES_IT)
    first, *_ = check(tmp_path)
    assert first == (
        "uv.lock names 4 addresses, the first on line 8 (https://index.example.org/simple): run `make lock`"
    )


def test_a_dependency_that_was_added_without_relocking_is_noticed(tmp_path: Path) -> None:
    project = (ROOT / "pyproject.toml").read_text()
    (tmp_path / "README.md").write_text("x")
    (tmp_path / "LICENSE").write_text("x")
    (tmp_path / "uv.lock").write_text((ROOT / "uv.lock").read_text())
    (tmp_path / "pyproject.toml").write_text(project.replace("dependencies = []", 'dependencies = ["flask"]'))
    faults = check(tmp_path)
    assert len(faults) == 1
    assert faults[0].startswith("uv.lock does not fit pyproject.toml: run `make lock`")


@pytest.mark.parametrize("how", ["variable", "file"])
def test_a_lock_file_fits_whatever_index_this_machine_has(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a mirror `make verify` called it stale, and `make lock` did not help."""
    for name in ("README.md", "LICENSE", "pyproject.toml", "uv.lock"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    if how == "variable":
        monkeypatch.setenv("UV_DEFAULT_INDEX", "https://mirror.example.org/simple")
    else:
        (tmp_path / "uv").mkdir()
        index = '[[index]]\nurl = "https://mirror.example.org/simple"\ndefault = true\n'
        (tmp_path / "uv" / "uv.toml").write_text(index)
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert check(tmp_path) == []


def test_what_is_resolved_comes_from_where_pip_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "UV_INDEX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))
    project = '[project]\nname = "x"\nversion = "1"\nrequires-python = ">=3.11"\ndependencies = ["idna"]\n'
    (tmp_path / "pyproject.toml").write_text(project)
    assert update(tmp_path, []) != 0
    assert "http://127.0.0.1:9/simple/idna/" in capfd.readouterr().err


def test_a_missing_lock_file_is_noticed(tmp_path: Path) -> None:
    assert check(tmp_path) == ["uv.lock is missing: run `make lock`"]


@pytest.mark.parametrize("line", ['name = "https"', 'version = "1.0"', 'hash = "sha256:aa"'])
def test_what_is_no_address_stays(line: str) -> None:
    assert addresses(line) == []
    assert without_addresses(line) == line
