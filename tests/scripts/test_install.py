"""The installer decides rightly what to install, from where, and when there is nothing to do."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import scripts.install as installer
from disks import remount, small_disk
from scripts.install import (
    ROOT,
    STAMP,
    WHOLE,
    InstallError,
    fingerprint,
    index_environment,
    make_environment,
    optimised,
    ours,
    run,
    usable,
    uv_environment,
    uv_requirement,
)


def checkout(root: Path) -> Path:
    (root / "scripts").mkdir(parents=True)
    for name in ("uv.lock", "pyproject.toml", "scripts/install.py"):
        shutil.copy(ROOT / name, root / name)
    return root


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_the_fingerprint_follows_what_decides_the_environment(tmp_path: Path) -> None:
    here, there = checkout(tmp_path / "here"), checkout(tmp_path / "there")
    before = fingerprint(here)
    assert before == fingerprint(here)
    assert before != fingerprint(there), "scripts in .venv name their place: another place is another .venv"
    with open(here / "uv.lock", "a") as lock:
        lock.write("\n")
    assert before != fingerprint(here)


def test_half_a_checkout_is_named(tmp_path: Path) -> None:
    root = checkout(tmp_path / "half")
    (root / "uv.lock").unlink()
    with pytest.raises(InstallError, match=r"half/uv\.lock is missing: this is no whole checkout"):
        fingerprint(root)


def test_a_checkout_may_lie_in_a_directory_with_spaces(tmp_path: Path) -> None:
    root = tmp_path / "my own" / "hold fast"
    (root / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "Makefile", root)
    (root / ".venv").symlink_to(sys.prefix)
    (root / "scripts/install.py").touch()
    (root / "scripts/verify.py").write_text("import os; print(f'verified in {os.getcwd()}')")
    made = subprocess.run(
        ["make", "--no-print-directory", f"PYTHON={sys.executable}", "ARGS=", "verify"],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (made.returncode, made.stdout) == (0, f"verified in {root}\n"), made.stderr


def test_uv_itself_is_pinned_with_hashes_by_the_lock_file() -> None:
    requirement = uv_requirement((ROOT / "uv.lock").read_text())
    assert requirement.startswith("uv==")
    assert requirement.count("--hash=sha256:") > 5


def test_a_lock_file_without_uv_is_refused() -> None:
    with pytest.raises(InstallError, match=r"uv\.lock does not pin uv: add it to the dev extra"):
        uv_requirement('[[package]]\nname = "idna"\nversion = "3.10"\n')


PIP = "global.cert='/etc/ssl/ca.pem'\nglobal.index-url='https://mirror.example.org/simple'\n"


@pytest.mark.parametrize(
    ("environment", "pip_config", "expected"),
    [
        ({}, "", {"UV_HTTP_TIMEOUT": "300"}),
        (
            {},
            PIP,
            {
                "UV_HTTP_TIMEOUT": "300",
                "UV_DEFAULT_INDEX": "https://mirror.example.org/simple",
                "SSL_CERT_FILE": "/etc/ssl/ca.pem",
            },
        ),
        # What the user told uv wins over what pip is told; a variable over a file.
        ({"UV_DEFAULT_INDEX": "u", "SSL_CERT_FILE": "c", "UV_HTTP_TIMEOUT": "9"}, PIP, {}),
        ({"UV_INDEX_URL": "u", "SSL_CERT_FILE": "c"}, PIP, {"UV_HTTP_TIMEOUT": "300"}),
        (
            {"UV_HTTP_TIMEOUT": "9", "SSL_CERT_FILE": "c"},
            PIP + ":env:.index-url='https://other.example.org/simple'\n",
            {"UV_DEFAULT_INDEX": "https://other.example.org/simple"},
        ),
        (
            {"UV_HTTP_TIMEOUT": "9"},
            "global.extra-index-url='\\nhttps://a.example.org\\nhttps://b.example.org'\n",
            {"UV_INDEX": "https://a.example.org https://b.example.org"},
        ),
        (
            {"UV_HTTP_TIMEOUT": "9"},
            "global.proxy='http://proxy.example.org:3128'\n",
            {
                "HTTP_PROXY": "http://proxy.example.org:3128",
                "HTTPS_PROXY": "http://proxy.example.org:3128",
            },
        ),
        (
            {"UV_HTTP_TIMEOUT": "9"},
            "global.trusted-host='\\na.example.org\\nb.example.org:8443'\n",
            {"UV_INSECURE_HOST": "a.example.org b.example.org:8443"},
        ),
        ({"UV_HTTP_TIMEOUT": "9", "https_proxy": "p"}, "global.proxy='http://proxy.example.org:3128'\n", {}),
    ],
)
def test_packages_come_from_where_this_machine_says(
    environment: dict[str, str], pip_config: str, expected: dict[str, str]
) -> None:
    assert index_environment(environment, pip_config) == expected


def test_an_environment_that_was_moved_is_made_anew(tmp_path: Path) -> None:
    """Scripts in .venv/bin begin with their interpreter's path: a moved .venv only seems to work."""
    venv, moved = tmp_path / "a" / ".venv", tmp_path / "b" / ".venv"
    assert not usable(venv)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    (venv / STAMP).touch()
    assert usable(venv)
    moved.parent.mkdir()
    venv.rename(moved)
    assert not usable(moved)


def test_an_environment_that_was_not_filled_to_the_end_is_made_anew(tmp_path: Path) -> None:
    """A disk that is full or a signal leaves packages of which half the files are there; for uv they are."""
    venv = tmp_path / ".venv"
    make_environment(venv)
    (packages,) = venv.glob("lib/python*/site-packages")
    (packages / "half").mkdir()
    (packages / "half-1.0.dist-info").mkdir()
    assert not usable(venv)
    make_environment(venv)
    assert not list(packages.iterdir())


def test_make_runs_by_the_python_of_the_environment_that_it_makes(tmp_path: Path) -> None:
    """As where it was activated: that one has no pip, and is gone when the next is made."""
    venv = tmp_path / ".venv"
    make_environment(venv)
    code = f"from pathlib import Path; from scripts import install; venv = Path({str(venv)!r}); "
    code += "install.make_environment(venv); print(*install.pip_for(venv))"
    done = subprocess.run(
        [venv / "bin" / "python", "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    pip = done.stdout.split()
    assert pip[1:] == ["-m", "pip", "--python", str(venv / "bin" / "python")], done.stderr
    assert Path(pip[0]).parent != venv / "bin"
    listing = subprocess.run([*pip, "list"], capture_output=True, text=True, check=True)
    assert not listing.stdout.strip(), "a pip was put there, for which Debian needs a package more"


def test_a_pip_that_is_still_too_old_when_apt_has_installed_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of Ubuntu 22.04 for a Python 3.11 from elsewhere: without --python, its own error misleads."""
    spoken = tmp_path / "spoken"
    program(tmp_path / "apt-get", f'echo "$*" >> {spoken}')
    python = program(tmp_path / "bin" / "python", "exit 2")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr("sys.executable", str(python))
    monkeypatch.setattr(installer, "BELOW", str(python))
    with pytest.raises(InstallError, match=r"has no pip .* 22\.3 or newer .* python3\.\d+-venv"):
        installer.pip_for(tmp_path)
    assert spoken.read_text().splitlines() == [
        "-o DPkg::Lock::Timeout=300 update -qq",
        "-o DPkg::Lock::Timeout=300 install -qq -y python3-pip",
    ], "what another apt holds is waited for"


def test_of_two_that_install_into_a_checkout_one_waits(tmp_path: Path) -> None:
    root = checkout(tmp_path / "both")
    (root / "build").mkdir()
    binaries = root / ".venv" / "bin"
    with (root / "build/install.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        second = subprocess.Popen(
            [sys.executable, root / "scripts" / "install.py"], stdout=subprocess.PIPE, text=True
        )
        assert second.stdout is not None
        assert second.stdout.readline() == (
            "holdfast: another make installs into this checkout: waiting for it\n"
        )
        binaries.mkdir(parents=True)
        (binaries / "python").symlink_to(sys.executable)
        (root / ".venv" / STAMP).write_text(fingerprint(root))
    assert (second.communicate(timeout=60)[0], second.returncode) == ("", 0)


def test_variables_that_lead_pip_and_uv_elsewhere_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """uv.lock decides what is installed, and .venv where: PIP_TARGET left it without uv."""
    monkeypatch.setenv("PIP_TARGET", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("UV_REQUIRE_HASHES", "1")
    assert {"PIP_TARGET", "UV_REQUIRE_HASHES"}.isdisjoint(uv_environment())
    kept = {"PATH": "/usr/bin", "PIP_INDEX_URL": "https://mirror.example.org/simple"}
    assert ours({**kept, "PIP_PREFIX": "/opt", "UV_CONSTRAINT": "c.txt"}) == kept


def test_a_checkout_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        root = checkout(disk / "here")
        remount(disk, "ro")
        done = subprocess.run(
            [sys.executable, root / "scripts" / "install.py"], capture_output=True, text=True, check=False
        )
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout == (
        f"holdfast: {root}/build: Read-only file system: make writes .venv and build/ in its checkout\n"
    )


def test_a_step_that_fails_says_what_to_do() -> None:
    with pytest.raises(InstallError, match=r"`false` ended with exit code 1; is the index reachable\?"):
        run(["/bin/false"], {}, "is the index reachable?")


def test_with_a_fresh_stamp_nothing_is_installed(tmp_path: Path) -> None:
    """The second `make` of a checkout returns at once, without network, pip or uv."""
    root = checkout(tmp_path / "fresh")
    binaries = root / ".venv" / "bin"
    binaries.mkdir(parents=True)
    (binaries / "python").symlink_to(sys.executable)
    (root / ".venv" / STAMP).write_text(fingerprint(root))
    done = subprocess.run(
        [sys.executable, root / "scripts" / "install.py"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_uv_goes_where_the_first_pip_that_answers_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A virtual environment without a pip on a machine whose index has a certificate of its own."""
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    machines = program(tmp_path / "pip", "echo \"global.cert='/etc/ssl/ca.pem'\"")
    absent = [sys.executable, "-m", "no_such_pip"]
    assert uv_environment(absent, [machines])["SSL_CERT_FILE"] == "/etc/ssl/ca.pem"
    assert "SSL_CERT_FILE" not in uv_environment(absent)


def speaking(place: Path, like: str = "[3, 11, true]", pip: str = "") -> str:
    """A Python that answers the two questions with these words; `like` "none": it lacks a module."""
    python = place / f"python{sys.version_info[0]}.{sys.version_info[1]}"
    answer = "exit 1" if like == "none" else f"echo '{like}'"
    return str(program(python, f'case "$1" in -I) {answer};; -m) echo "{pip}";; esac'))


@pytest.mark.parametrize(
    ("configured", "system", "taken"),
    [
        ("'--enable-shared'", {}, True),
        ("", {}, True),
        ("'--enable-shared' '--enable-optimizations'", {}, False),
        ("", {"like": "[3, 11, false]"}, False),
        ("", {"like": "none"}, False),
        ("", {"pip": "global.index-url='https://elsewhere.example.org'"}, False),
        ("", None, False),
    ],
    ids=["pyenv's", "unknown", "optimised", "no headers", "no pip", "other packages", "not there"],
)
def test_the_systems_python_does_it_where_the_first_was_built_without_optimisation(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    configured: str,
    system: dict[str, str] | None,
    taken: bool,
) -> None:
    """It takes a tenth less for the tests, and what pyenv builds is found first."""
    mine, there = speaking(tmp_path / "mine"), tmp_path / "system"
    python = speaking(there, **system) if system is not None else None
    monkeypatch.setattr(installer, "OF_THE_SYSTEM", there)
    assert optimised(mine, configured, f"{tmp_path}/mine:{there}") == (python if taken else mine)
    told = f"holdfast: {mine} was built without optimisation: {python} is taken (or: make PYTHON={mine})\n"
    assert capsys.readouterr().out == (told if taken else "")
    assert optimised(mine, configured, f"{tmp_path}/mine") == mine, (
        "who leaves it out of PATH does not want it"
    )


def test_a_python_says_what_it_is_like_or_that_it_lacks_pip(tmp_path: Path) -> None:
    def asked(**variables: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", WHOLE]
        env = {**os.environ, **variables}
        return subprocess.run(command, capture_output=True, text=True, check=False, env=env, cwd=tmp_path)

    assert "No module named 'pip'" in asked(PYTHONPATH="").stderr, ".venv has none"
    (tmp_path / "pip.py").touch()
    like = json.loads(asked(PYTHONPATH=str(tmp_path)).stdout)
    assert like[:3] == ["cpython", *sys.version_info[:2]]
    assert isinstance(like[-1], bool)


def test_what_made_the_environment_is_asked_the_next_time_too(tmp_path: Path) -> None:
    """Another might tell of another version, and the environment be made anew each time."""
    root = checkout(tmp_path / "here")
    first = program(tmp_path / "python", 'echo "$@"')
    (root / ".venv").mkdir()
    (root / ".venv" / "pyvenv.cfg").write_text(f"version = 3.11.2\nexecutable = {first}\n")
    (root / ".venv" / STAMP).touch()
    words = [sys.executable, root / "scripts" / "install.py", "--optimised"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"{root}/scripts/install.py\n"), done.stderr


def test_who_names_a_python_gets_it(tmp_path: Path) -> None:
    """The environment, or a word of make's: only where nobody has, `make` lets the installer choose."""
    root = tmp_path / "here"
    root.mkdir()
    shutil.copy(ROOT / "Makefile", root)
    python = program(tmp_path / "python3.11", '[ "$1" = -c ] || echo "$@"')
    make = ["make", "--no-print-directory", "install"]
    chosen = {**os.environ, "PATH": f"{tmp_path}:/usr/bin:/bin"}
    chosen.pop("PYTHON", None)
    for words, env, said in (
        ([], chosen, "scripts/install.py --optimised\n"),
        ([f"PYTHON={python}"], chosen, "scripts/install.py\n"),
        ([], {**chosen, "PYTHON": str(python)}, "scripts/install.py\n"),
    ):
        done = subprocess.run([*make, *words], cwd=root, env=env, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (0, said), done.stderr
