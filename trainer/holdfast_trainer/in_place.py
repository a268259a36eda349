"""Run a Python command in this process, as if it had been executed afresh.

A rank that torchrun has forked has PyTorch imported already: to execute an interpreter would import it a
second time, which takes seconds at each start. So a command that is nothing but ``python [-u] FILE ...`` or
``python [-u] -m MODULE ...``, for this very interpreter, runs where it is. /proc shows its own command and
environment all the same, for those are what processes are told apart by (prctl(2), PR_SET_MM_MAP: no
privilege is needed, but the kernel must have CONFIG_CHECKPOINT_RESTORE, as distributions' kernels have).

What the program sees is what a fresh interpreter would have shown it: arguments, search path, `__main__`,
signals, exit handlers, multiprocessing's main process. Linux only; standard library only.
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import gc
import importlib.util
import io
import itertools
import multiprocessing.context
import multiprocessing.process
import multiprocessing.util
import os
import runpy
import shutil
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, TextIO

_PR_SET_NAME = 15
_PR_SET_MM = 35
_PR_SET_MM_MAP = 14
_PR_SET_MM_MAP_SIZE = 15
_NO_EXECUTABLE = 0xFFFFFFFF
"""Leave the link to the executable as it is: to change it would take a privilege."""
_MAIN = multiprocessing.process.current_process()
"""This module is imported before anything is forked."""
_RUNNERS = (__name__, "runpy")
"""Whose frames stand between the process and the program, and say nothing of it."""


@dataclass(frozen=True)
class Program:
    """A module, or else a script, and its arguments."""

    module: str | None
    script: str | None
    arguments: tuple[str, ...]
    unbuffered: bool = False
    """-u"""


def program_of(command: Sequence[str]) -> Program | None:
    """What the command would have this interpreter run; None where only executing it will do."""
    if not command or not _is_this_interpreter(command[0]):
        return None
    unbuffered = list(command[1:2]) == ["-u"]
    words = command[2 if unbuffered else 1 :]
    if len(words) > 1 and words[0] == "-m":
        return Program(words[1], None, tuple(words[2:]), unbuffered)
    if words and not words[0].startswith("-") and os.path.isfile(words[0]):
        return Program(None, words[0], tuple(words[1:]), unbuffered)
    return None


def _is_this_interpreter(name: str) -> bool:
    """Two environments may share one executable: what counts is the path that it is called by."""
    found = shutil.which(name)
    if found is None:
        return False
    there, here = Path(os.path.abspath(found)), Path(os.path.abspath(sys.executable))
    return there.parent == here.parent and there.resolve() == here.resolve()


def cuda_is_spoilt() -> bool:
    """Whether CUDA was initialized before this process was forked, and so refuses to work in it."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda._is_in_bad_fork())


# ------------------------------------------------------------------- what /proc shows


class _Map(ctypes.Structure):
    """struct prctl_mm_map of <linux/prctl.h>."""

    _fields_ = (
        ("start_code", ctypes.c_uint64),
        ("end_code", ctypes.c_uint64),
        ("start_data", ctypes.c_uint64),
        ("end_data", ctypes.c_uint64),
        ("start_brk", ctypes.c_uint64),
        ("brk", ctypes.c_uint64),
        ("start_stack", ctypes.c_uint64),
        ("arg_start", ctypes.c_uint64),
        ("arg_end", ctypes.c_uint64),
        ("env_start", ctypes.c_uint64),
        ("env_end", ctypes.c_uint64),
        ("auxv", ctypes.c_uint64),
        ("auxv_size", ctypes.c_uint32),
        ("exe_fd", ctypes.c_uint32),
    )


on_exit: Callable[[Any], None] | None = None
"""Told what a program's SystemExit has, of which its exit handlers hear nothing; set by the program."""
_shown: list[object] = []
"""The memory that the kernel reads from: kept for as long as the process."""


def can_show() -> bool:
    """Whether this kernel lets a process say what /proc shows of it."""
    size = ctypes.c_uint(0)
    return _prctl(_PR_SET_MM_MAP_SIZE, ctypes.addressof(size), 0) == 0


def show(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Make cmdline, comm and environ in /proc/self show these. Raises OSError where the kernel refuses."""
    words = b"".join(os.fsencode(word) + b"\0" for word in command)
    variables = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environment.items())
    memory = ctypes.create_string_buffer(words + variables)
    begin = ctypes.addressof(memory)
    fields = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rsplit(")", 1)[1].split()

    def field(number: int) -> int:
        """As proc_pid_stat(5) counts; the first two, which end with the last `)`, are cut off."""
        return int(fields[number - 3])

    of = _Map(
        start_code=field(26),
        end_code=field(27),
        start_data=field(45),
        end_data=field(46),
        start_brk=field(47),
        start_stack=field(28),
        arg_start=begin,
        arg_end=begin + len(words),
        env_start=begin + len(words),
        env_end=begin + len(words) + len(variables),
        exe_fd=_NO_EXECUTABLE,
    )
    libc = ctypes.CDLL(None)
    libc.sbrk.restype, libc.sbrk.argtypes = ctypes.c_void_p, [ctypes.c_ssize_t]
    while of.brk != (end := libc.sbrk(0)):  # again where this very call has made the heap grow
        of.brk = end
        if failed := _prctl(_PR_SET_MM_MAP, ctypes.addressof(of), ctypes.sizeof(of)):
            raise OSError(failed, f"prctl(PR_SET_MM_MAP): {os.strerror(failed)}")
    _shown[:] = [memory]
    libc.prctl(_PR_SET_NAME, Path(command[0]).name.encode()[:15])


def _prctl(option: int, address: int, size: int) -> int:
    """0, or the error's number."""
    libc = ctypes.CDLL(None, use_errno=True)
    done = libc.prctl(_PR_SET_MM, option, ctypes.c_void_p(address), ctypes.c_ulong(size), ctypes.c_ulong(0))
    return 0 if done == 0 else ctypes.get_errno() or errno.EINVAL


# ------------------------------------------------------------------- being it


def become(program: Program) -> NoReturn:
    """Run the program in this process, just forked, and end as an interpreter does. Never returns."""

    def run() -> int:
        gc.freeze()  # what came with the fork stays shared: a collection would touch, so copy, all of it
        _forget_the_parent()
        if program.unbuffered:
            sys.stdout, sys.stderr = _unbuffered(sys.stdout), _unbuffered(sys.stderr)
        _run(program)
        return 0

    try:
        end(code_of(run))
    finally:  # the program's own hook for errors may fail
        os._exit(1)


def end(code: int) -> NoReturn:
    """Leave as an interpreter does, but do not take it apart: with PyTorch imported that takes 0.4 s."""
    left = 1
    try:
        left = _finish(code)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        os._exit(left)


def _forget_the_parent() -> None:
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False  # the parent's temporary files are the parent's
    multiprocessing.util._finalizer_registry.clear()  # type: ignore[attr-defined]
    multiprocessing.process._current_process = _MAIN  # type: ignore[attr-defined]
    multiprocessing.process._parent_process = None  # type: ignore[attr-defined]
    multiprocessing.process._process_counter = itertools.count(1)  # type: ignore[attr-defined]
    multiprocessing.context._default_context._actual_context = None  # type: ignore[attr-defined]
    # Or ranks of one torchrun would draw the same numbers; `random` sees to it by itself.
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()


def _unbuffered(stream: TextIO) -> TextIO:
    """As the interpreter opens it under -u."""
    raw = open(stream.fileno(), "wb", buffering=0, closefd=False)  # noqa: SIM115 - as long as the process
    return io.TextIOWrapper(raw, stream.encoding, stream.errors, write_through=True)


def _run(program: Program) -> None:
    if program.module is not None:
        sys.argv = [program.module, *program.arguments]
        runpy.run_module(program.module, run_name="__main__", alter_sys=True)
    else:
        assert program.script is not None
        sys.argv = [program.script, *program.arguments]
        if not sys.flags.safe_path:  # its own directory in the place of the working directory
            sys.path[0] = str(Path(program.script).resolve().parent)
        runpy.run_path(program.script, run_name="__main__")


def code_of(run: Callable[[], int]) -> int:
    """The exit code of what it returns or raises; an error is shown as an interpreter shows it."""
    try:
        return run()
    except SystemExit as left:
        if on_exit is not None:
            on_exit(left.code)
        if left.code is not None and not isinstance(left.code, int):
            print(left.code, file=sys.stderr)
        return status_of(left.code)
    except BaseException as error:
        error.__traceback__ = _own_part(error.__traceback__)  # there are hooks that look here
        sys.excepthook(type(error), error, error.__traceback__)
        return 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1


def status_of(code: Any) -> int:
    """The status that a SystemExit with this leaves: of a number its last byte, and 1 of a text."""
    if code is None:
        return 0
    return code & 0xFF if isinstance(code, int) else 1


def _own_part(trace: TracebackType | None) -> TracebackType | None:
    """Without the frames that run the program; all of them where nothing else is left."""
    inner = trace
    while inner is not None and inner.tb_frame.f_globals.get("__name__") in _RUNNERS:
        inner = inner.tb_next
    return inner or trace


def _finish(code: int) -> int:
    """Wait for threads, run the exit handlers, write out what is buffered."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            code = code or 120  # as the interpreter does
    ctypes.CDLL(None).fflush(None)
    return code


def found(module: str) -> bool:
    """Whether it can be run by name; where not, a fresh interpreter says best why."""
    try:
        return importlib.util.find_spec(module) is not None
    except Exception:  # a parent package that cannot be imported may raise anything
        return False
