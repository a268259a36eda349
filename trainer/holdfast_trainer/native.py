"""layers.cpp as a library: found compiled, or compiled on this machine, once for each of its users.

The trainer's image has it compiled (`python -m holdfast_trainer.native DIRECTORY`), and no compiler.
Elsewhere it takes g++, two seconds of the first start, and a file in the user's cache, which later starts
load. What is loaded runs as the user, so nothing is taken from where somebody else could have put it.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import cpuinfo

if TYPE_CHECKING:
    from torch import Tensor

SOURCE = Path(__file__).with_name("layers.cpp")
SHIPPED = Path(__file__).with_name("compiled")
"""Where the image has it."""
COMPILER = "g++"
V3 = ("avx2", "bmi1", "bmi2", "f16c", "fma", "movbe")
LEVELS = {
    "x86-64-v4": (*V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"),
    "x86-64-v3": V3,
}
"""What it is compiled for, the best first, and what Linux must show of such a processor."""
OPTIONS = (
    *("-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-mprefer-vector-width=512"),
    *("-fopenmp", "-shared", "-fPIC", "-s"),
)
"""None with which NaNs or an order of additions may be lost: what is added up in lanes says so itself."""
TIMEOUT = 60.0
"""Seconds for the compiler."""


class Unavailable(Exception):
    """Why there is no such library here."""


class Library:
    """Its functions, called with tensors, whole numbers and fractions."""

    def __init__(self, path: Path) -> None:
        """Raises OSError where it cannot be loaded."""
        import torch  # to compile it takes none

        self._threads = torch.get_num_threads
        self._code = ctypes.CDLL(str(path))
        self._functions: dict[str, Any] = {}
        self.digest = hashlib.sha256(path.read_bytes()).hexdigest()[:8]
        """Of its code: another compiler's may round otherwise."""

    def call(self, name: str, *given: Tensor | float | None) -> None:
        """For tensors that are contiguous, and always as many and of the same types; PyTorch's number of
        threads comes last."""
        function = self._functions.get(name)
        if function is None:
            function = self._functions[name] = self._code[name]
            function.argtypes = [*map(_c_type, given), ctypes.c_int64]
            function.restype = None
        plain = [one if one is None or isinstance(one, (int, float)) else one.data_ptr() for one in given]
        function(*plain, self._threads())


def _c_type(one: object) -> type[ctypes.c_void_p | ctypes.c_int64 | ctypes.c_float]:
    if isinstance(one, float):
        return ctypes.c_float
    return ctypes.c_int64 if isinstance(one, int) else ctypes.c_void_p


@cache
def library() -> Library:
    """Raises Unavailable with what there is to do."""
    found = level(cpuinfo.read(), platform.machine())
    if not found:
        raise Unavailable("it is for CPUs of x86 with AVX2 or AVX-512")
    shipped = SHIPPED / file_name(found)
    try:
        own = Library(shipped)
    except OSError as error:
        try:
            own = _from_cache(found)
        except Unavailable as lacking:
            from .contract import exists  # which is not there where an image's are compiled

            if not exists(shipped):
                raise
            raise Unavailable(f"{error}; to compile another {lacking}") from error
    if len(_thread_pools()) > 1:
        raise Unavailable("its threads would be others than PyTorch's, whose OpenMP is not g++'s")
    return own


def level(text: str, machine: str) -> str:
    """What to compile for, by the text of /proc/cpuinfo; empty where there is nothing. Pure."""
    flags = cpuinfo.first(text).get("flags", "").split()
    fitting = (name for name, needed in LEVELS.items() if not set(needed).difference(flags))
    return next(fitting, "") if machine == "x86_64" else ""


def file_name(level: str) -> str:
    """It has a name of its own for each source and way to compile it."""
    made_of = SOURCE.read_bytes() + " ".join((*OPTIONS, *LEVELS[level])).encode()
    return f"layers-{hashlib.sha256(made_of).hexdigest()[:12]}-{level}.so"


def compile_to(path: Path, level: str) -> None:
    """Raises Unavailable where it cannot be compiled, OSError where it cannot be written."""
    compiler = shutil.which(COMPILER)
    if compiler is None:
        raise Unavailable(f"it needs a C++ compiler once: apt-get install {COMPILER}")
    # Not into its place: another process may look there, and a disk that is full leaves a part of it.
    with tempfile.TemporaryDirectory(prefix=".layers-", dir=path.parent) as directory:
        made = Path(directory).absolute() / "layers.so"  # it runs elsewhere
        # The levels have names from GCC 11 on; RHEL 8 has GCC 8.
        instructions = (f"-m{'bmi' if flag == 'bmi1' else flag}" for flag in LEVELS[level])
        command = [compiler, *OPTIONS, *instructions, "-o", str(made), SOURCE.name]
        try:
            done = subprocess.run(
                command, check=False, capture_output=True, text=True, timeout=TIMEOUT, cwd=SOURCE.parent
            )
        except subprocess.TimeoutExpired:
            raise Unavailable(f"{compiler} was not done after {TIMEOUT:.0f} s") from None
        if done.returncode:
            raise Unavailable(f"{compiler} failed with {done.returncode}: {_cause(done.stderr)}")
        made.chmod(0o755)  # whatever the umask: others run what an image has, and none of them may write it
        os.replace(made, path)


def _cause(stderr: str) -> str:
    """What a compiler says of it in one line. Pure."""
    # Why a linker failed, as on a full disk, it says itself, and g++ only that it did.
    no_more = "collect2: error: ld returned"
    lines = [line for line in stderr.strip().splitlines() if not line.startswith(no_more)]
    return next((line for line in lines if "error" in line), lines[-1] if lines else "and said nothing")


def _from_cache(level: str) -> Library:
    with _own_directory() as directory:
        path = directory / file_name(level)
        found = _loaded(path)
        if found is None:
            try:
                compile_to(path, level)
                found = Library(path)
            except OSError as error:
                raise Unavailable(f"{error}; XDG_CACHE_HOME can name another place for it") from error
        return found


def _loaded(path: Path) -> Library | None:
    """None where it is not there, or not whole."""
    try:
        return Library(path)
    except OSError:
        return None


@contextlib.contextmanager
def _own_directory() -> Iterator[Path]:
    """Where this user's are kept; where that cannot be, or others may write there, one that goes again."""
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        kept = Path(base) / "holdfast" / "kernels"
        kept.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = kept.lstat()
        usable = stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid() and not about.st_mode & 0o022
        usable = usable and os.access(kept, os.W_OK)
    except (OSError, RuntimeError):  # no home
        usable = False
    if usable:
        yield kept
        return
    try:
        with tempfile.TemporaryDirectory(prefix="holdfast-kernels-") as directory:
            yield Path(directory)
    except OSError as error:
        raise Unavailable(f"there is no place to compile it in: {error}") from error


def _thread_pools() -> set[str]:
    """The OpenMP libraries that this process has loaded."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return set()
    paths = (line.split(maxsplit=5)[-1] for line in lines)
    names = ("libgomp", "libomp", "libiomp")
    return {path for path in paths if path.rpartition("/")[2].startswith(names)}


def main() -> int:
    """Compile for each level into the directory that is named; for other processors nothing."""
    directory = Path(sys.argv[1])
    directory.mkdir(parents=True, exist_ok=True)
    for name in LEVELS if platform.machine() == "x86_64" else ():
        compile_to(directory / file_name(name), name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
