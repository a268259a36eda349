"""`python -m holdfast_trainer COMMAND`: wiring only. Each command is imported when it is asked for."""

from __future__ import annotations

import errno
import importlib
import os
import select
import sys
from collections.abc import Sequence

from holdfast_trainer.allocator import start_again
from holdfast_trainer.contract import NO_ROOM
from holdfast_trainer.importing import not_installed, without_collector
from holdfast_trainer.spinning import spin_briefly
from holdfast_trainer.supervise import refuse

COMMANDS = {
    "train": ("holdfast_trainer.train_command", "train a GPT, alone or under torchrun; resumes by itself"),
    "check": ("holdfast_trainer.check_command", "say at once whether train takes a configuration"),
    "explain": ("holdfast_trainer.explain_command", "show every setting: what it takes, default, meaning"),
    "diagnose": ("holdfast_trainer.diagnose_command", "measure a few steps; say what to change before a run"),
    "tune": ("holdfast_trainer.tune.command", "measure what each setting buys here; write those to use"),
    "checkpoint": ("holdfast_trainer.checkpoint_command", "list, verify, export and compare checkpoints"),
    "export-hf": ("holdfast_trainer.hf_command", "write a run's model in Hugging Face's layout"),
    "prepare": ("holdfast_trainer.prepare", "turn text and JSONL files into token shards"),
}

USAGE = "usage: python -m holdfast_trainer COMMAND [options]\n\ncommands:\n" + "".join(
    f"  {name:<11} {summary}\n" for name, (_, summary) in COMMANDS.items()
)

PIPE_CLOSED = 141
"""What a shell says of a program that ended by SIGPIPE: whoever read its output has seen enough."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command with the arguments after it; returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        try:
            return _command(arguments)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except OSError as error:
        if sys.excepthook is not sys.__excepthook__ or error.filename is not None:
            raise
        if isinstance(error, BrokenPipeError) and _nobody_reads():
            _drop_output()
            return PIPE_CLOSED
        if error.errno not in NO_ROOM | {errno.EFBIG}:
            raise
        _drop_output()
        print(f"error: the output could not be written: {error.strerror}", file=sys.stderr)
        return 1


def _command(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0] in {"-h", "--help"}:
        print(USAGE + "\nCOMMAND --help explains one.", file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    name, *rest = arguments
    if name not in COMMANDS:
        print(f"unknown command {name!r}\n\n{USAGE}", file=sys.stderr, end="")
        return 2
    spin_briefly(os.environ)
    try:
        with without_collector():
            command = importlib.import_module(COMMANDS[name][0])
        status: int = command.main(rest)
    except (KeyboardInterrupt, ModuleNotFoundError) as error:
        if sys.excepthook is not sys.__excepthook__:
            raise  # a run has begun, which tells how it ends
        if isinstance(error, ModuleNotFoundError):
            return refuse(not_installed(error), who=name)
        print("interrupted", file=sys.stderr)
        return 130
    return status


def _nobody_reads() -> bool:
    """Whether standard output is a pipe whose other end is closed: a worker's may be broken, too."""
    look = select.poll()
    look.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in look.poll(0))


def _drop_output() -> None:
    """Python must not try to flush the rest as it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    start_again()
    sys.exit(main())
