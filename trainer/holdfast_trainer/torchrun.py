"""torchrun around supervised ranks, which imports PyTorch once for itself and for them.

``python -m holdfast_trainer.torchrun TORCHRUN-OPTIONS -- SUPERVISE-OPTIONS -- COMMAND ...``

This is torchrun: its own `main`, in this process, with its own options. Executed ranks would import
PyTorch again, one after the other with torchrun, and that is most of a start. So torchrun is told to fork
them (``--start-method=fork``), and where the command is a Python program it goes on in the process that
was forked (in_place.py). Any other command is executed, as is every command where the kernel does not let a
forked rank show /proc what it is.

Nothing here touches CUDA: a driver that is initialized before the fork does not work after it.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from . import in_place, supervise
from .contract import ENV_RUN_DIR, RunDir
from .prefetch import Prefetch

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
    if may_fork and in_place.program_of(rest[rest.index("--") + 1 :]) is not None:
        stub = Path(__file__).with_name("rank.py")
        return [*own, "--start-method=fork", "--run-path", "--", str(stub), *rest]
    return [*own, "--no-python", "--", sys.executable, "-m", supervise.__name__, *rest]


def _without_traceback(record: logging.LogRecord) -> bool:
    """torchrun logs how it learnt of a rank's end: its own frames, below what the rank has said."""
    record.exc_info = None
    return True


def main(argv: list[str]) -> int:
    try:
        words = arguments(argv, may_fork=in_place.can_show())
    except supervise.UsageError as error:
        print(f"torchrun: {error}\n{USAGE}", file=sys.stderr)
        return supervise.EXIT_USAGE
    ahead = Prefetch(RunDir(Path(there))) if (there := os.environ.get(ENV_RUN_DIR)) else None
    from torch.distributed.run import main as torchrun  # seconds, in which the disk has nothing else to do

    if ahead is not None:
        ahead.stop()
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").addFilter(_without_traceback)
    torchrun(words)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
