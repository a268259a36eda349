"""Stands in for torchrun where a test needs its process tree and not torch: starts in 30 ms.

Takes flags as the local engine gives them to torchrun. Like torchrun it numbers the ranks, passes a
SIGTERM on to each of them, ends the others when one fails, and exits 1 after a signal, whose name is its last
word, or a failure.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

SIGNALLED = "torch.distributed.elastic.multiprocessing.api.SignalException:"


def main(argv: list[str]) -> int:
    flags = dict(word[2:].partition("=")[::2] for word in argv[: argv.index("--")])
    supervised = argv[argv.index("--") + 1 :]
    each = int(flags["nproc-per-node"])
    first = int(flags["node-rank"]) * each
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "holdfast_trainer.supervise", *supervised],
            env={**os.environ, "RANK": str(first + local), "LOCAL_RANK": str(local)},
            start_new_session=True,
        )
        for local in range(each)
    ]
    told = False
    while True:
        codes = [rank.poll() for rank in ranks]
        failed = any(code for code in codes)
        if (asked or failed) and not told:
            told = True
            for rank in ranks:
                if rank.poll() is None:
                    rank.terminate()
        if all(code is not None for code in codes):
            if asked:
                print(f"{SIGNALLED} Process {os.getpid()} got signal: {asked[0]}", file=sys.stderr)
            return 1 if failed or asked else 0
        time.sleep(0.01)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
