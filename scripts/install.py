"""Makes .venv: exactly what uv.lock pins, checked by hash, and Holdfast itself in editable form.

Runs on any Python from 3.11 on with pip and nothing else; the standard library alone. Steps:

1. An empty .venv (no ensurepip needed, which Debian and Ubuntu ship apart).
2. uv into it, by the pip of this Python; version and hashes are read from uv.lock.
3. `uv export` writes the lock file as hashed requirements, `uv pip sync` installs them.
4. Holdfast itself, without dependencies and without build isolation: the build backend is pinned too.

With --optimised, by which `make` says that nobody has named this Python, the system's does all this where
this one was built without optimisation.

Packages come from the index that this machine's own configuration names: uv's, else pip's, else the
default. A stamp in .venv, the hash of all that decides its contents, makes the next call return at once. One
without a stamp is made anew: uv takes for installed what a full disk or a signal left half written.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
STAMP = ".holdfast-stamp"
FLOOR = (3, 11)
BELOW: str = getattr(sys, "_base_executable", sys.executable)
"""The Python below the virtual environment that this one may be of, which may be .venv itself."""
OVERRULED = {
    *("PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_CONSTRAINT"),
    *("UV_CONSTRAINT", "UV_OVERRIDE", "UV_EXCLUDE_NEWER", "UV_REQUIRE_HASHES", "VIRTUAL_ENV"),
}
"""Variables by which pip and uv would install elsewhere, or other than what uv.lock pins."""

OF_THE_SYSTEM = Path("/usr/bin")
"""Debian, Ubuntu and Fedora build their Pythons optimised, by a profile."""
WHOLE = """
import bz2, ctypes, json, lzma, pip, sqlite3, ssl, sys, sysconfig, venv
from pathlib import Path
headers = Path(sysconfig.get_path("include"), "Python.h").is_file()
print(json.dumps([sys.implementation.name, *sys.version_info[:2], sys.abiflags, sys.maxsize, headers]))
"""
"""What a Python is like; torch.compile needs the headers. Fails where its standard library is not whole or it
has no pip."""

Command = Sequence[str | Path]


class InstallError(Exception):
    """The message says what failed and what to do."""


def fingerprint(root: Path) -> str:
    """Of all that decides what .venv holds: lock file, project file, this script, place and Python."""
    digest = hashlib.sha256(f"{sys.version} {root}".encode())
    for name in ("uv.lock", "pyproject.toml", "scripts/install.py"):
        path = root / name
        if not path.is_file():
            raise InstallError(f"{path} is missing: this is no whole checkout")
        digest.update(path.read_bytes())
    return digest.hexdigest()


def kept(venv: Path) -> str | None:
    """The Python by which this .venv was made, where it is still there."""
    if (venv / STAMP).is_file() and (venv / "pyvenv.cfg").is_file():
        for line in (venv / "pyvenv.cfg").read_text(encoding="utf-8").splitlines():
            name, _, python = line.partition(" = ")
            if name == "executable" and os.access(python, os.X_OK):
                return python
    return None


def optimised(mine: str, configured: str, places: str | None) -> str:
    """The system's Python instead of `mine`, where that was `configured` without optimisation, as pyenv's are
    unless told otherwise: tests take a tenth more by it.

    `mine` itself where the system's is not on the search path `places`, is of another version, or lacks
    something.
    """
    name = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    python = str(OF_THE_SYSTEM / name)
    if "--enable-optimizations" in configured or os.path.realpath(mine) == os.path.realpath(python):
        return mine
    if str(OF_THE_SYSTEM) not in (places or os.defpath).split(os.pathsep) or not os.access(python, os.X_OK):
        return mine
    for question in (["-I", "-c", WHOLE], ["-m", "pip", "config", "list"]):  # which may lie beside a Python
        ours, theirs = (_says([one, *question]) for one in (mine, python))
        if theirs is None or ours != theirs:
            return mine
    say(f"{mine} was built without optimisation: {python} is taken (or: make PYTHON={mine})")
    return python


def uv_requirement(lock: str) -> str:
    """uv as a hashed requirement line, from the lock file's own text. Raises InstallError."""
    for package in tomllib.loads(lock)["package"]:
        if package["name"] == "uv":
            files = [*package.get("wheels", []), *([package["sdist"]] if "sdist" in package else [])]
            return " ".join([f"uv=={package['version']}", *(f"--hash={file['hash']}" for file in files)])
    raise InstallError("uv.lock does not pin uv: add it to the dev extra and run `make lock`")


def index_environment(environment: Mapping[str, str], pip_config: str) -> dict[str, str]:
    """Settings that let uv use the index, proxy, hosts and certificates that pip is configured with.

    What the user told uv itself wins. `pip_config` is the output of `pip config list`: lines such as
    `global.index-url='https://...'`, later lines (environment) over earlier ones (files).
    """
    found = {}
    for line in pip_config.splitlines():
        key, _, value = line.partition("=")
        found[key.rpartition(".")[2]] = value.strip().strip("'\"")
    settings = {"UV_HTTP_TIMEOUT": "300"}  # one wheel may be near a gigabyte
    told = {name.upper() for name in environment}
    if found.get("proxy") and not told & {"HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"}:
        settings["HTTP_PROXY"] = settings["HTTPS_PROXY"] = found["proxy"]
    if found.get("index-url") and "UV_INDEX_URL" not in environment:
        settings["UV_DEFAULT_INDEX"] = found["index-url"]
    if found.get("extra-index-url") and "UV_EXTRA_INDEX_URL" not in environment:
        settings["UV_INDEX"] = " ".join(found["extra-index-url"].replace("\\n", " ").split())
    if found.get("trusted-host"):
        settings["UV_INSECURE_HOST"] = " ".join(found["trusted-host"].replace("\\n", " ").split())
    if found.get("cert"):
        settings["SSL_CERT_FILE"] = found["cert"]
    return {name: value for name, value in settings.items() if name not in environment}


def uv_environment(*pips: Command) -> dict[str, str]:
    """This process's environment, and in it what lets uv go where pip goes: the first of `pips` that answers,
    by default this Python's, that of the Python below .venv (which has none itself), or the one on PATH."""
    anyone: list[Command] = [[sys.executable, "-m", "pip"], [BELOW, "-m", "pip"]]
    anyone += [[found] for found in (shutil.which("pip"), shutil.which("pip3")) if found]
    for pip in pips or anyone:
        listing = _says([*pip, "config", "list"])
        if listing is not None:
            return {**ours(os.environ), **index_environment(os.environ, listing)}
    return {**ours(os.environ), **index_environment(os.environ, "")}


def ours(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in OVERRULED}


def run(command: Command, environment: Mapping[str, str], remedy: str) -> None:
    """Raises InstallError with `remedy` where the command fails; its output is shown as it comes."""
    code = subprocess.run([str(word) for word in command], env=environment, cwd=ROOT, check=False).returncode
    if code:
        shown = " ".join(Path(command[0]).name if n == 0 else str(w) for n, w in enumerate(command))
        raise InstallError(f"`{shown}` ended with exit code {code}; {remedy}")


def pip_for(venv: Path) -> list[str | Path]:
    """The pip command that installs into `venv`: this Python's, that of the one below the virtual environment
    it is of, or else one that ensurepip puts there.

    Debian and Ubuntu ship Python without both: as root they are fetched, else the message says how.
    """
    outside: list[str | Path] = []
    for python in (sys.executable, BELOW):
        outside = [python, "-m", "pip", "--python", venv / "bin" / "python"]
        if _answers([*outside, "--version"]):  # no pip, or one before 22.3 without --python: no answer
            return outside
    inside: list[str | Path] = [venv / "bin" / "python", "-m", "pip"]
    if _answers([venv / "bin" / "python", "-m", "ensurepip"]) and _answers([*inside, "--version"]):
        return inside
    major, minor = sys.version_info[:2]
    nothing = InstallError(
        f"{BELOW} has no pip that can fill a virtual environment: install one, 22.3 or newer (Debian, "
        f"Ubuntu: sudo apt-get install python3-pip, or python{major}.{minor}-venv where that is older), or "
        "name another Python: make PYTHON=/path/to/python3.11"
    )
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        raise nothing
    say("this Python has no usable pip: installing python3-pip")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    apt = ["apt-get", "-o", "DPkg::Lock::Timeout=300"]
    run([*apt, "update", "-qq"], environment, "is the network there?")
    run([*apt, "install", "-qq", "-y", "python3-pip"], environment, "install python3-pip yourself")
    if not _answers([*outside, "--version"]):
        raise nothing
    return outside


def _answers(command: Command) -> bool:
    return _says(command) is not None


def _says(command: Command) -> str | None:
    """Its output; None where it fails."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    return None if done.returncode else done.stdout


def make_environment(venv: Path) -> None:
    """An empty virtual environment, whatever stood there before: perhaps what this very Python is of."""
    command: Command = [BELOW, "-m", "venv", "--clear", "--without-pip", venv]
    remedy = "is it yours to write? Where there is no module venv (Debian, Ubuntu): "
    run(command, os.environ, f"{remedy}sudo apt-get install python3-venv")


def usable(venv: Path) -> bool:
    """Whether .venv was filled to the end, at this place, holds the same Python as this one, and starts."""
    python, config = venv / "bin" / "python", venv / "pyvenv.cfg"
    if not all(path.is_file() for path in (venv / STAMP, python, config)):
        return False
    if str(venv) not in config.read_text(encoding="utf-8"):
        return False
    version = _says([python, "-c", "import sys; print(sys.version)"])
    return version is not None and version.strip() == sys.version


def install(root: Path, venv: Path) -> None:
    """Fill .venv from the lock file. Safe to call again after it was interrupted anywhere."""
    python, uv = venv / "bin" / "python", venv / "bin" / "uv"
    if not usable(venv):
        say(f"making {venv} with Python {sys.version.split()[0]} ({sys.executable})")
        make_environment(venv)
    (venv / STAMP).unlink(missing_ok=True)

    build = root / "build"
    pinned = build / "requirements-uv.txt"
    pinned.write_text(uv_requirement((root / "uv.lock").read_text(encoding="utf-8")) + "\n", encoding="utf-8")
    pip = pip_for(venv)
    environment = {**ours(os.environ), "PIP_USER": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    fetch = [*pip, "install", "--quiet", "--require-hashes", "-r", pinned]
    run(fetch, environment, "is the package index reachable? (pip config list)")

    environment = uv_environment(pip)
    locked = build / "requirements.txt"
    export: Command = [
        uv,
        "export",
        "--frozen",
        "--extra",
        "dev",
        "--no-emit-project",
        "--no-header",
        "--quiet",
    ]
    run([*export, "--python", python, "-o", locked], environment, "run `make lock`")
    count = sum(1 for line in locked.read_text(encoding="utf-8").splitlines() if "==" in line)
    say(f"installing up to {count} packages; PyTorch with CUDA is about 2.5 GB to download the first time")
    # Bytecode now, once: where Python may not write it (read-only trees, PYTHONDONTWRITEBYTECODE), each
    # rank of each attempt would compile PyTorch's 2,500 modules again, which doubles its start-up.
    sync: Command = [uv, "pip", "sync", "--python", python, "--require-hashes", "--compile-bytecode", locked]
    run(sync, environment, "is there network, and room on the disk (8 GB)? then try again")
    itself: Command = [
        uv,
        "pip",
        "install",
        "--quiet",
        "--python",
        python,
        "--no-deps",
        "--no-build-isolation",
    ]
    run([*itself, "-e", root], environment, "see the error above")


def say(text: str) -> None:
    print(f"holdfast: {text}", flush=True)


@contextmanager
def alone(lock: Path) -> Iterator[None]:
    """No other process is in here meanwhile, on file systems that have locks."""
    lock.parent.mkdir(exist_ok=True)
    with lock.open("w") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another make installs into this checkout: waiting for it")
            fcntl.flock(held, fcntl.LOCK_EX)
        except OSError:
            pass
        yield


def main() -> int:
    if sys.version_info < FLOOR:
        say(f"Python {sys.version.split()[0]} is too old, 3.11 is needed: make PYTHON=/path/to/python3.11")
        return 1
    venv = ROOT / ".venv"
    stamp = venv / STAMP
    if "--optimised" in sys.argv[1:]:
        configured = sysconfig.get_config_var("CONFIG_ARGS") or ""
        python = kept(venv) or optimised(BELOW, configured, os.environ.get("PATH"))
        if os.path.realpath(python) != os.path.realpath(sys.executable):
            os.execv(python, [python, __file__])
    try:
        wanted = fingerprint(ROOT)

        def there() -> bool:
            return stamp.is_file() and stamp.read_text() == wanted and (venv / "bin" / "python").exists()

        if there():
            return 0
        with alone(ROOT / "build" / "install.lock"):
            if there():
                return 0
            began = time.monotonic()
            install(ROOT, venv)
            stamp.write_text(wanted)
        say(f"installed in {time.monotonic() - began:.0f} s")
    except InstallError as error:
        say(str(error))
        return 1
    except OSError as error:
        say(f"{error.filename or venv}: {error.strerror}: make writes .venv and build/ in its checkout")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
