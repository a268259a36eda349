"""What torchrun runs in each process that it forks for a rank (see torchrun.py): a supervisor of the rank."""

import os
import signal
import sys

from holdfast_trainer import in_place, supervise


def main(argv: list[str]) -> int:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)  # torchrun's own handlers are for torchrun
    try:
        in_place.show([sys.executable, "-m", supervise.__name__, *argv], os.environ)
    except OSError:
        return supervise.main(argv)
    return supervise.main(argv, in_place=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
