"""Run one command so that its end is always known and it never outlives its supervisor.

``python -m holdfast_trainer.supervise [--log PATH] [--exit PATH] [--directory PATH] [--tee]
[--fail-on-notice] [--tell-exit] [--die-with-parent] -- CMD ...``

The command runs as a child in a session of its own, in another directory with ``--directory``. Its output is
appended to the log, which takes no more than HOLDFAST_LOG_BYTES of the disk (bounded_log.py), SIGTERM and
SIGINT are passed on to it once each, and when it ends the exit file says how, and beside a code that is
not 0 what it said last::

    {"code": 0, "ended": 1760000000.0, "peak_bytes": 734003200}     or     {"signal": 9, ...}     or
    {"code": 1, ..., "said": "NameError: name 'step' is not defined"}

The kernel kills the command when the supervisor dies (PR_SET_PDEATHSIG), and with
``--die-with-parent`` the supervisor itself when its parent dies. A local attempt stacks two of them,
one around torchrun and one around each rank, so a `kill -9` of any process in the stack takes down
all that is below it. ``{RANK}`` in a path is expanded from the environment: under torchrun each rank
knows its number only there. Linux only; standard library only, because a rank waits for it to start.

With ``--tee`` the output is shown as well. Where torchrun has started several ranks here, which share it,
whole lines are shown, each with the mark of its rank (contract.rank_mark), so that they can be told apart.
Where the log's disk stands still the command goes on, is shown, and ends all the same: the log lacks what
found no room in memory meanwhile, and the exit file may not be there (still_disk.py).

A rank that saved on notice exits 0, and torchrun calls that success: it then waits up to five minutes at
its exit barrier for agents that the same notice has ended, deaf to signals. With ``--fail-on-notice`` the
supervisor leaves with `EXIT_NOTICE` where the termination message says `interrupted`; torchrun ends its
other ranks and itself. The exit file tells how the command ended all the same.

A rank that a signal ends says nothing, and torchrun exits 1 whatever ended it. With ``--tell-exit`` the exit
file's text, with the rank's number, becomes the termination message of a bad end that nobody has explained:
``{"rank": 1, "signal": 9, ...}``. It is for an engine that cannot read the run directory.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from .bounded_log import SECONDS, kept_to
from .contract import (
    CUT,
    DEFAULT_TERMINATION_LOG,
    ENV_LOG_BYTES,
    ENV_TERMINATION_LOG,
    EXIT_CONFIG_ERROR,
    MAY_PASS,
    Termination,
    legible,
    newest_bytes,
    rank_mark,
    saved_before,
    write_termination,
)
from .kept_room import KeptFile, keep_room
from .still_disk import Apart
from .tee import MarkedLines, Newest, Sink, copy, write_all
from .within import within

USAGE = (
    "usage: python -m holdfast_trainer.supervise "
    "[--log PATH] [--exit PATH] [--directory PATH] [--tee] [--fail-on-notice] [--tell-exit] "
    "[--die-with-parent] -- CMD ..."
)
ENV_PARENT = "HOLDFAST_SUPERVISED_PID"
"""The pid of the supervised command, told to what runs below it."""
EXIT_USAGE = 64
EXIT_IO_ERROR = 74
EXIT_NOTICE = 143
"""As of a process that SIGTERM ended."""
EXIT_SECONDS = 60.0
"""For the exit file to be durable: without one a rank counts as killed, and a busy disk may take its time."""
SAID_BYTES = 1024
"""Of what a command said last, as it is told beside its exit code: the end of a traceback, or of a usage."""
SAID_SECONDS = 5.0
"""For the log's disk to give it back."""
_PR_SET_PDEATHSIG = 1
_FORWARDED = (signal.SIGTERM, signal.SIGINT)


class UsageError(ValueError):
    """The command line is wrong; the message says how."""


class Options:
    """The parsed command line."""

    def __init__(self) -> None:
        self.log: Path | None = None
        self.exit: Path | None = None
        self.directory: Path | None = None
        self.tee = False
        self.fail_on_notice = False
        self.tell_exit = False
        self.die_with_parent = False
        self.command: list[str] = []


def parse(argv: list[str]) -> Options:
    """Raises UsageError. By hand: argparse alone would double the time to start."""
    options = Options()
    words = list(argv)
    while words and words[0] != "--":
        word = words.pop(0)
        if word == "--tee":
            options.tee = True
        elif word == "--fail-on-notice":
            options.fail_on_notice = True
        elif word == "--tell-exit":
            options.tell_exit = True
        elif word == "--die-with-parent":
            options.die_with_parent = True
        elif word in ("--log", "--exit", "--directory"):
            if not words or words[0] == "--":
                raise UsageError(f"{word} needs a path")
            setattr(options, word[2:], expand(words.pop(0)))
        else:
            raise UsageError(f"unknown option {word!r}; the command follows `--`")
    options.command = words[1:]
    if not options.command:
        raise UsageError("no command given; it follows `--`")
    return options


def expand(path: str) -> Path:
    """Fill `{RANK}` from the environment; raises UsageError where RANK is not set."""
    if "{RANK}" not in path:
        return Path(path)
    try:
        return Path(path.replace("{RANK}", os.environ["RANK"]))
    except KeyError:
        raise UsageError(f"{path!r} names {{RANK}}, but RANK is not set: torchrun sets it") from None


def die_with_parent(expected: int | None) -> None:
    """Ask the kernel for SIGKILL when the parent dies; ends at once where it is dead already.

    `expected` is the parent's pid. Without it only a parent that died before (its child then
    belongs to another process) during this call is noticed.
    """
    parent = expected if expected is not None else os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl(PR_SET_PDEATHSIG): {os.strerror(error)}")
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


class Child:
    """A supervised command: started once, signalled, waited for."""

    def __init__(self, command: list[str], output: int | None, *, in_place: bool = False):
        """Fork and execute, or run it in the fork. Raises OSError where it cannot be executed."""
        self.sent: set[int] = set()
        self.pending: list[int] = []
        self.pid: int | None = None
        self.peak_bytes = 0
        """The most memory that one of its processes had, once it has ended."""
        for number in _FORWARDED:
            signal.signal(number, self._forward)
        parent = os.getpid()
        report, confess = os.pipe()  # closes by itself on exec; carries errno where exec fails
        pid = os.fork()
        if pid == 0:
            _become(command, output, parent, confess, in_place=in_place)
        os.close(confess)
        self.pid = pid
        with open(report, "rb") as pipe:
            failure = pipe.read()
        if failure:
            os.waitpid(pid, 0)
            raise OSError(int(failure), os.strerror(int(failure)), command[0])
        for missed in self.pending:
            os.kill(pid, missed)

    def _forward(self, number: int, _frame: object) -> None:
        if number in self.sent:
            return
        self.sent.add(number)
        if self.pid is None:
            self.pending.append(number)
        else:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def wait(self, tend: Callable[[], None] | None = None) -> int:
        """The exit code; a negative one is the signal that ended it. `tend` is done now and again."""
        assert self.pid is not None
        if tend is not None:
            ended = os.pidfd_open(self.pid)
            while not select.select([ended], [], [], SECONDS)[0]:
                tend()
            os.close(ended)
            tend()
        _, status, usage = os.wait4(self.pid, 0)
        self.peak_bytes = usage.ru_maxrss * 1024
        return os.waitstatus_to_exitcode(status)

    def copy_until_end(self, pipe: int, sinks: list[Sink]) -> int:
        """Copy the command's output until it ends; a grandchild that keeps the pipe holds up nothing."""
        assert self.pid is not None
        ended = os.pidfd_open(self.pid)
        poll = select.poll()
        poll.register(ended, select.POLLIN)
        poll.register(pipe, select.POLLIN)
        os.set_blocking(pipe, False)
        over = False
        while not over:
            ready = dict(poll.poll())
            over = ended in ready
            if not copy(pipe, sinks):
                poll.unregister(pipe)
                break
        os.close(ended)
        return self.wait()


def _become(command: list[str], output: int | None, parent: int, confess: int, *, in_place: bool) -> None:
    """In the child: never returns. Nothing here may raise into the supervisor's code."""
    try:
        signals = _FORWARDED
        signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        for number in (*signals, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        os.setsid()
        die_with_parent(parent)
        if output is not None:
            os.dup2(output, 1)
            os.dup2(output, 2)
        os.environ[ENV_PARENT] = str(os.getpid())
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
        if in_place:
            _run_in_place(command)
        os.execvp(command[0], command)
    except OSError as error:
        os.write(confess, str(error.errno or 0).encode())
    finally:
        os._exit(127)


def _run_in_place(command: list[str]) -> None:
    """Returns only where the command has to be executed after all."""
    from . import in_place  # most supervisors execute: they need not wait for its imports

    program = in_place.program_of(command)
    if program is None or (program.module is not None and not in_place.found(program.module)):
        return
    if in_place.cuda_is_spoilt():
        told = "CUDA was initialized before this rank was forked: it is executed, and imports PyTorch itself"
        _write(f"supervise: {told}")
        return
    with suppress(OSError):
        in_place.show(command, os.environ)
        in_place.become(program)


def run(options: Options, *, in_place: bool = False) -> int:
    """Supervise the command; returns the exit code to leave with."""
    log, trained = None, saved_before() is not None
    if options.log is not None:
        try:
            options.log.parent.mkdir(parents=True, exist_ok=True)  # in a pod nobody else makes it
            log = os.open(options.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            return could_not_begin(f"cannot write the log {options.log}", error, trained=trained)
    exit_file = KeptFile(options.exit) if options.exit is not None else None
    if ENV_TERMINATION_LOG in os.environ:
        keep_room(_termination_log())
    kept = None if log is None else kept_to(_log_limit(), log)
    pipe = feed = None
    if kept is not None and (options.tee or kept.piped):
        pipe, feed = os.pipe()
    try:
        if options.directory is not None:
            os.chdir(options.directory)
    except OSError as error:
        what = f"cannot enter the job's workingDir {options.directory}"
        if may_come(error, trained):
            return could_not_begin(what, error, trained=trained, log=log, exit_file=exit_file)
        return refuse(f"{what}: {error.strerror}", log, exit_file)
    for name in files_of(options.command):
        try:
            os.stat(name)
        except OSError as error:
            what = f"cannot read {_with_place(name)}"
            if may_come(error, trained):
                return could_not_begin(what, error, trained=trained, log=log, exit_file=exit_file)
            if name != options.command[0]:  # a program's absence is told where it is run
                return refuse(f"{what}: {error.strerror}; check the job's `command`", log, exit_file)
    try:
        child = Child(options.command, log if feed is None else feed, in_place=in_place)
    except OSError as error:
        return refuse(_cannot_run(options.command[0], error), log, exit_file)
    newest = Newest(SAID_BYTES + 1)
    if feed is not None and pipe is not None and kept is not None:
        os.close(feed)
        keep = Apart(kept, kept.end)
        code = _copy(child, pipe, [newest, keep], shown=options.tee)
    else:
        keep = None
        code = child.wait(None if kept is None else kept.tend)
        if code > 0 and options.log is not None:
            log_path = options.log  # what the command itself wrote there, where its disk tells
            within(SAID_SECONDS, lambda: newest(newest_bytes(log_path, SAID_BYTES + 1)))
    end = how_it_ended(code, child.peak_bytes, _said(newest.data) if code > 0 else "")
    if code != 0 and options.tell_exit:
        write_termination(_termination_log(), json.dumps({"rank": int(os.environ.get("RANK", "0")), **end}))
    if keep is None or keep.end():
        record(exit_file, end)
    else:
        what = f"the log {options.log} is not whole, and no exit file is written"
        _write(f"supervise: {what}: their disk does not answer")
    if code == 0 and options.fail_on_notice and _was_interrupted():
        return EXIT_NOTICE
    if in_place:
        for number in _FORWARDED:
            signal.signal(number, signal.SIG_DFL)
        if code == 0 and child.sent:
            return EXIT_NOTICE  # 0 would wait for torchrun to say that all are done, and it is ending them
    return code if code >= 0 else 128 - code


def files_of(command: list[str]) -> list[str]:
    """Those that it names and cannot begin without: a program by its path, a script of Python's."""
    files = [command[0]] if "/" in command[0] else []
    script = [word for word in command[1:3] if word != "-u"][:1]
    if Path(command[0]).name.startswith("python") and script and not script[0].startswith("-"):
        files += script
    return files


def _with_place(name: str) -> str:
    """Where a file was looked for."""
    with suppress(OSError):  # a working directory may be gone
        return name if os.path.isabs(name) else f"{name} in {os.getcwd()}"
    return name


def may_come(error: OSError, trained: bool) -> bool:
    """Whether what a command begins with may be there later, and is waited for."""
    return trained or error.errno in MAY_PASS


def could_not_begin(
    what: str,
    error: OSError,
    *,
    trained: bool = False,
    log: int | None = None,
    exit_file: KeptFile | None = None,
) -> int:
    """Tell that there is no room, no answer or no right for what is needed first; returns the exit code.

    `trained`: attempts before have, so that what this one misses may come, be it whatever the system says.
    """
    message = f"{what}: {error.strerror}"
    if trained and error.errno not in MAY_PASS:
        message += ", though attempts before have trained: is its volume mounted?"
    _write(f"supervise: {message}", log)
    return _ended(
        Termination("failed", 0, 0, message, storage_unavailable=may_come(error, trained)),
        EXIT_IO_ERROR,
        exit_file,
    )


def _log_limit() -> int:
    """Bytes; 0 where nobody asks for one."""
    try:
        return int(os.environ.get(ENV_LOG_BYTES, "0"))
    except ValueError:
        return 0


def _copy(child: Child, pipe: int, keep: list[Sink], *, shown: bool) -> int:
    """Keep what the command says, and show it, until it ends; returns its exit code."""
    if not shown:
        return child.copy_until_end(pipe, keep)
    if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) == 1:
        return child.copy_until_end(pipe, [*keep, lambda data: write_all(1, data)])
    lines = MarkedLines(1, rank_mark(int(os.environ.get("RANK", "0"))))
    code = child.copy_until_end(pipe, [*keep, lines])
    lines.end()
    return code


def _said(newest: bytes) -> str:
    """The lines of it that a person can read; `CUT` stands for what was before."""
    text = newest[-SAID_BYTES:].decode("utf-8", "ignore")
    lines = [line.rstrip() for line in legible(text).splitlines()]
    said = "\n".join(line for line in lines if line)
    return CUT + said if len(newest) > SAID_BYTES and said else said


def _was_interrupted() -> bool:
    """Whether a rank of this replica has said that it stopped before its work was done."""
    try:
        message = Termination.from_json(_termination_log().read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return False
    return message is not None and message.outcome == "interrupted"


def _termination_log() -> Path:
    return Path(os.environ.get(ENV_TERMINATION_LOG, DEFAULT_TERMINATION_LOG))


def _cannot_run(name: str, error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        remedy = "there is no such command on PATH; check the job's `command`"
    elif isinstance(error, PermissionError):
        remedy = "the file is not executable; `chmod +x` it, or put its interpreter (python, bash) first"
    else:
        remedy = f"{error.strerror}; put its interpreter (python, bash) first in the job's `command`"
    return f"cannot run {name!r}: {remedy}"


def refuse(
    message: str, log: int | None = None, exit_file: KeptFile | None = None, *, who: str = "supervise"
) -> int:
    """What was asked for cannot be done here, and no retry will mend that: say so everywhere it is read."""
    _write(f"{who}: {message}", log)
    return _ended(Termination("failed", 0, 0, message, config_error=True), EXIT_CONFIG_ERROR, exit_file)


def _ended(last: Termination, code: int, exit_file: KeptFile | None) -> int:
    """Keep what is known of an end before the command was there; returns the exit code."""
    write_termination(_termination_log(), last)
    record(exit_file, how_it_ended(code))
    return code


def how_it_ended(code: int, peak_bytes: int | None = None, said: str = "") -> dict[str, float | str | None]:
    """What the exit file says of a command that has just ended; a negative code is a signal's."""
    how = {"code": code} if code >= 0 else {"signal": -code}
    return {**how, "ended": time.time(), "peak_bytes": peak_bytes, **({"said": said} if said else {})}


def record(exit_file: KeptFile | None, end: dict[str, float | str | None]) -> None:
    """Write the exit file; where that fails the exit code alone has to do. There may be no room to say so
    either, and what Python cannot write to sys.stderr would change that code."""
    if exit_file is None:
        return
    write = exit_file.write
    fault = within(EXIT_SECONDS, lambda: write(json.dumps(end)))
    if isinstance(fault, OSError):
        _write(f"supervise: cannot write {exit_file.path}: {fault.strerror or 'its disk does not answer'}")


def _write(line: str, log: int | None = None) -> None:
    """Where there is room: what else is to be told of an end does not wait for that."""
    with suppress(OSError):
        write_all(2 if log is None else log, f"{line}\n".encode())


def main(argv: list[str], *, in_place: bool = False) -> int:
    """`in_place`: this process has imported what the command needs, and it need not be executed."""
    try:
        options = parse(argv)
    except UsageError as error:
        print(f"supervise: {error}\n{USAGE}", file=sys.stderr)
        return EXIT_USAGE
    if options.die_with_parent:
        known = os.environ.get(ENV_PARENT)
        die_with_parent(int(known) if known else None)
    return run(options, in_place=in_place)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
