"""torchrun around supervised ranks, which imports PyTorch once for itself and for them.

``python -m holdfast_trainer.torchrun TORCHRUN-OPTIONS -- SUPERVISE-OPTIONS -- COMMAND ...``

This is torchrun: its own `main`, in this process, with its own options. Executed ranks would import
PyTorch again, one after the other with torchrun, and that is most of a start. So torchrun is told to fork
them (``--start-method=fork``), and where the command is a Python program it goes on in the process that
was forked (in_place.py). Any other command is executed, as is every command where the kernel does not let a
forked rank show /proc what it is.

Nothing here touches CUDA, for a driver that is initialized before the fork does not work after it. torchrun
would: see `ask_no_driver`. Where something does all the same, the rank finds out, and is executed
(supervise.py).

First of all the process starts itself again where the machine has a better malloc (allocator.py): the ranks
have what torchrun has.

A gang waits for the slowest start, and the next attempt for the end of the last process of this one, so both
are short: no garbage is collected while PyTorch is imported, the address of replica 0 is tried more often
than c10d would, and unless others may still need it, it leaves without taking the interpreter apart.
"""

from __future__ import annotations

from .allocator import start_again

if __name__ == "__main__":
    start_again()  # before the rest, which is a start's twentieth of a second, is imported in vain

import logging
import multiprocessing
import os
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from . import in_place, supervise
from .contract import ENV_RUN_DIR, RunDir
from .importing import not_installed, without_collector
from .prefetch import Prefetch
from .spinning import spin_briefly

FIRST_SECONDS = 30.0
"""So long replica 0 is waited for here."""
SHORTEST_PAUSE, LONGEST_PAUSE = 0.01, 0.5
FORKS = "--start-method=fork"
SHUTDOWN_TIMEOUT = "shutdown_timeout"
"""Seconds that ranks have after a signal, before they are killed."""
USAGE = (
    "usage: python -m holdfast_trainer.torchrun TORCHRUN-OPTIONS -- SUPERVISE-OPTIONS -- COMMAND ...\n"
    "see `torchrun --help` and `python -m holdfast_trainer.supervise`"
)


def arguments(argv: list[str], *, may_fork: bool) -> list[str]:
    """torchrun's own, for a command line of ours. Raises supervise.UsageError."""
    if "--" not in argv:
        raise supervise.UsageError("the options of the supervisor follow torchrun's after `--`")
    cut = argv.index("--")
    own, rest = argv[:cut], argv[cut + 1 :]
    if "--" not in rest:
        raise supervise.UsageError("no command given; it follows the second `--`")
    # By default each attempt leaves directories in /tmp, with nothing in them.
    if not any(word.startswith(("--log-dir", "--log_dir")) for word in own):
        own.append(f"--log-dir={os.devnull}")
    forks = may_fork and in_place.program_of(rest[rest.index("--") + 1 :]) is not None
    # torchrun fills in `${local_rank}`, and makes one dollar of two: a shell's `$$` is its process's number.
    rest = [word.replace("$", "$$") for word in rest]
    if forks:
        stub = Path(__file__).with_name("rank.py")
        return [*own, FORKS, "--run-path", "--", str(stub), *rest]
    return [*own, "--no-python", "--", sys.executable, "-m", supervise.__name__, *rest]


def _without_traceback(record: logging.LogRecord) -> bool:
    """torchrun logs how it learnt of a rank's end: its own frames, below what the rank has said."""
    record.exc_info = None
    return True


def _values(own: list[str]) -> dict[str, str]:
    """Of options that are written as --name=value."""
    return dict(word.split("=", 1) for word in own if "=" in word)


def others_may_ask(own: list[str]) -> bool:
    """Whether this may be replica 0 of several: the store is there, which says whether all are done."""
    told = _values(own)
    return told.get("--nnodes") != "1" and told.get("--node-rank", "0") == "0"


def wait_for_first(own: list[str], seconds: float = FIRST_SECONDS) -> bool:
    """Until replica 0 listens at the address that torchrun's options name; False where it was not in time.

    c10d tries at once and then after half a second, and again later each time: whoever comes a moment too
    early would hold up all. It has the word where this gives up.
    """
    told = _values(own)
    try:
        replica, where = int(told["--node-rank"]), (told["--master-addr"], int(told["--master-port"]))
    except (KeyError, ValueError):
        return True  # other options: c10d knows what they mean
    if replica == 0:
        return True
    deadline, pause = time.monotonic() + seconds, SHORTEST_PAUSE
    while (left := deadline - time.monotonic()) > 0:
        try:
            socket.create_connection(where, timeout=left).close()
            return True
        except OSError:  # its name is not known yet, or nobody listens
            time.sleep(min(pause, left))
            pause = min(pause * 1.5, LONGEST_PAUSE)
    return False


def ask_no_driver(launch_config: Any) -> None:
    """Have torchrun's LaunchConfig made without a look at the GPUs.

    It asks whether there are any, to bind ranks to the CPUs beside them by default, and then binds none:
    PyTorch as it is published has no such default. But to ask (`torch.cuda.is_available`, in later versions
    through `torch.accelerator`) initializes the driver. PYTORCH_NVML_BASED_CUDA_CHECK=1 would not do: where
    NVML cannot tell, as of slices (MIG), the driver is asked after all.
    """
    import torch

    as_published = launch_config.__post_init__

    def without_asking(config: Any) -> None:
        ask, torch.cuda.is_available = torch.cuda.is_available, lambda: False
        try:
            as_published(config)
        finally:
            torch.cuda.is_available = ask

    launch_config.__post_init__ = without_asking


def tell_shutdown_timeout(words: list[str], launch_config: Any) -> list[str]:
    """`words` for a torchrun without --shutdown-timeout, as that of PyTorch 2.11, which would end with its
    usage: it is told by the default of what it calls."""
    if hasattr(launch_config, SHUTDOWN_TIMEOUT):
        return words
    from torch.distributed.elastic.multiprocessing.api import PContext

    option = "--" + SHUTDOWN_TIMEOUT.replace("_", "-") + "="
    own = words[: words.index("--")]
    if told := [word for word in own if word.startswith(option)]:
        PContext.close.__defaults__ = (None, int(told[-1].removeprefix(option)))
    return [word for word in own if word not in told] + words[len(own) :]


def run(argv: list[str]) -> int:
    """torchrun, for a command line of ours; its exit code."""
    try:
        words = arguments(argv, may_fork=in_place.can_show())
    except supervise.UsageError as error:
        print(f"torchrun: {error}\n{USAGE}", file=sys.stderr)
        return supervise.EXIT_USAGE
    ahead = Prefetch(RunDir(Path(there))) if (there := os.environ.get(ENV_RUN_DIR)) else None
    spin_briefly(os.environ)
    try:
        with without_collector():  # seconds, in which the disk has nothing else to do
            from torch.distributed.elastic.multiprocessing.api import SignalException
            from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
            from torch.distributed.launcher.api import LaunchConfig
            from torch.distributed.run import main as torchrun
    except ModuleNotFoundError as error:
        return supervise.refuse(not_installed(error), who="torchrun")

    ask_no_driver(LaunchConfig)
    if ahead is not None:
        ahead.stop()
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").addFilter(_without_traceback)
    try:
        if FORKS in words:
            multiprocessing.Lock()  # as torchrun makes for its ranks; it would not say where there is no room
    except OSError as error:
        return supervise.could_not_begin("cannot make a semaphore, which lies in /dev/shm", error)
    wait_for_first(argv[: argv.index("--")])
    # In its own words either takes thirty lines, which on a cluster stand for the last ones of the rank.
    try:
        torchrun(tell_shutdown_timeout(words, LaunchConfig))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        how = f"exit code {failure.exitcode}" if failure.exitcode >= 0 else failure.signal_name()
        print(f"torchrun: rank {rank} ended with {how}", file=sys.stderr)
        return 1
    except SignalException as error:
        print(*traceback.format_exception_only(error), end="", file=sys.stderr)
        return 1
    return 0


def main(argv: list[str]) -> int:
    """Ends this process, unless others may still ask it something: then it returns, and ends slowly."""
    code = in_place.code_of(lambda: run(argv))
    if code or not others_may_ask(argv[: argv.index("--")]):
        in_place.end(code)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
