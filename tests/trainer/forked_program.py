"""What ranks of test_torchrun.py run."""

import sys

CAME_WITH_TORCH = "torch" in sys.modules

import atexit  # noqa: E402
import json  # noqa: E402
import multiprocessing  # noqa: E402
import os  # noqa: E402
import signal  # noqa: E402
import threading  # noqa: E402
import time  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import numpy  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402


def shown(name: str) -> list[str]:
    with open(f"/proc/self/{name}") as file:
        return file.read().split("\0")[:-1]


def look() -> None:
    """What this process is, by its own account and by /proc's."""
    environment = dict(variable.split("=", 1) for variable in shown("environ"))
    process = multiprocessing.current_process()
    main = sys.modules["__main__"]
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGPIPE, signal.SIGCHLD)
    body = {
        "torch came with the process": CAME_WITH_TORCH,
        "cmdline": shown("cmdline"),
        "name": Path("/proc/self/comm").read_text(),
        "environ": environment,
        "environment": dict(os.environ),
        "argv": sys.argv,
        "path": [os.path.abspath(entry) for entry in sys.path],
        "main": [main.__name__, main.__file__, main is sys.modules[look.__module__]],
        "process": [process.name, process.daemon, str(multiprocessing.parent_process())],
        "start method": multiprocessing.get_start_method(),
        "signals": {number.name: str(signal.getsignal(number)) for number in numbers},
        "files": [number for number in os.listdir("/proc/self/fd") if int(number) < 3],
        "own session": os.getsid(0) == os.getpid(),
        "threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "directory": os.getcwd(),
        "CUDA is spoilt": torch.cuda._is_in_bad_fork(),
        "buffered": [sys.stdout.line_buffering, sys.stdout.write_through],
    }
    print(json.dumps(body))


def twice(number: int) -> int:
    return number * 2


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((1000,), index / 1000)


def work() -> None:
    dist.init_process_group("gloo")
    total = torch.ones(1) * (dist.get_rank() + 1)
    dist.all_reduce(total)
    print(f"rank {dist.get_rank()}: sum {int(total)}; draws {numpy.random.rand()} {torch.rand(1).item()}")
    for method in ("spawn", "fork"):
        context: Any = multiprocessing.get_context(method)
        with context.Pool(1) as pool:
            doubled = pool.map(twice, [1, 2])
        loader = torch.utils.data.DataLoader(Numbers(), num_workers=1, multiprocessing_context=context)
        print(f"{method}: {doubled} {sum(batch.sum().item() for batch in loader):.1f}")
    dist.destroy_process_group()


def stay() -> None:
    noticed = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: noticed.set())
    print("staying", flush=True)
    while not noticed.wait(0.05):
        pass
    print("noticed", flush=True)


if __name__ == "__main__":
    match sys.argv[1]:
        case "look":
            look()
            threading.Thread(target=lambda: (time.sleep(0.1), print("a thread ended"))).start()
            atexit.register(print, "an exit handler ran")
        case "work":
            work()
        case "stay":
            stay()
        case "rank 0 stays" if os.environ["RANK"] == "0":
            stay()
        case "fail":
            raise ValueError("boom")
        case "exit 3":
            sys.exit(3)
        case "exit with words":
            sys.exit("with words")
        case "os.abort":
            os.abort()
