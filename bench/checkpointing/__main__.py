"""One measurement of one subject in a process of its own, so that memory is its own; JSON on the last line.

Train, save once to warm up, then: a window of steps, a save, a window of steps beside the writing (a subject
that writes before it returns has nothing beside); a save with the training thread waiting, as on a notice;
a load from a cold page cache. Disks give more for a while than they can keep up, so beside our own save and
load as many bytes are written and read plainly, just before and just after.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import mean

import psutil
import torch
from torch import nn

from holdfast_trainer.config import ModelConfig
from holdfast_trainer.model import GPT

from .limits import Limits, forget, measure_limits
from .subjects import SUBJECTS, Subject

MODELS = {
    "124M": ModelConfig(vocab_size=50304, layers=12, heads=12, width=768, context=1024),
    "10M": ModelConfig(vocab_size=512, layers=6, heads=6, width=384, context=256),
    "tiny": ModelConfig(vocab_size=128, layers=1, heads=2, width=32, context=32),
}
TOKENS = 32
"""A step's batch: one short sequence, as the 124 M model on two cores would else take minutes."""
GPU_ROWS = 8
"""A step's batch on a GPU: so many sequences of the model's context, in bf16."""


class PeakMemory:
    """Largest resident memory of this process and its children while it watches, in bytes.

    Shared pages count once for each process that maps them.
    """

    def __init__(self) -> None:
        self._process = psutil.Process()
        self.peak = self._resident()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _resident(self) -> int:
        total = 0
        for process in [self._process, *self._process.children(recursive=True)]:
            try:
                total += process.memory_info().rss
            except psutil.Error:
                continue
        return total

    def _watch(self) -> None:
        while not self._done.wait(0.02):
            self.peak = max(self.peak, self._resident())

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> int:
        """The peak since it started."""
        self._done.set()
        self._thread.join()
        return max(self.peak, self._resident())


def state_bytes(model: nn.Module) -> int:
    """fp32 weights and two moments of Adam."""
    return 3 * sum(p.numel() * p.element_size() for p in model.parameters())


def now() -> float:
    """Seconds, once a GPU has done what is queued on it."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def build(name: str) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], None]]:
    torch.manual_seed(1)
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    model = GPT(MODELS[name]).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    batch = (GPU_ROWS, MODELS[name].context) if on_gpu else (1, TOKENS)
    data = torch.randint(0, MODELS[name].vocab_size, (2, *batch), device=device)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
            loss = model(data[0], data[1])[1]
        assert loss is not None
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def measure(
    subject_name: str, model_name: str, folder: Path, window: int, windows: int, limits: bool
) -> dict[str, float]:
    """Figures by metric; with `limits` also those of plain writes and reads beside."""
    model, optimizer, step = build(model_name)

    def steps(count: int) -> float:
        began = now()
        for _ in range(count):
            step()
        return now() - began

    training = PeakMemory()
    training.start()
    steps(3)
    alone = training.stop()
    memory = PeakMemory()
    memory.start()
    subject = SUBJECTS[subject_name](folder / "run", model, optimizer)
    subject.save(1)
    subject.wait()
    steps(2)
    figures = _beside_training(subject, steps, window, windows)
    figures["peak memory"] = max(0, memory.stop() - alone) / 1e9
    with ExitStack() as stack:
        plain = stack.enter_context(Limits(folder, state_bytes(model))) if limits else None
        figures |= _alone(subject, windows + 2, plain)
    return figures


def _beside_training(
    subject: Subject, steps: Callable[[int], float], window: int, windows: int
) -> dict[str, float]:
    """A save between two windows of steps, `windows` times."""
    stall = before = after = while_training = 0.0
    for number in range(windows):
        before += steps(window) if subject.asynchronous else 0.0
        began = now()
        subject.save(2 + number)
        stall += time.perf_counter() - began
        after += steps(window) if subject.asynchronous else 0.0
        stall += subject.held_up()
        while_training += subject.wait() - began
    figures = {"stall": stall / windows}
    if subject.asynchronous:
        figures |= {
            "step before": before / window / windows,
            "step after": after / window / windows,
            "throughput after save": before / after,
            "durable while training": while_training / windows,
        }
    return figures


def _alone(subject: Subject, number: int, plain: Limits | None) -> dict[str, float]:
    """A save that the training waits for, and a load from disk; `plain` writes and reads around them."""
    figures, writes, reads = {}, [], []
    if plain is not None:
        plain.write()  # chooses its way, and takes what the disk has saved up
        writes.append(plain.write())
    began = time.perf_counter()
    subject.save(number)
    figures["durable"] = subject.wait() - began
    if plain is not None:
        writes.append(plain.write())
        plain.read()
        reads.append(plain.read())
    for path in subject.files():
        forget(path)
    began = now()
    subject.load()
    figures["load"] = now() - began
    if plain is not None:
        reads.append(plain.read())
        figures |= {"plain write beside": mean(writes), "plain read beside": mean(reads)}
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.checkpointing", description=__doc__)
    parser.add_argument("subject", choices=["limits", *SUBJECTS])
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--window", type=int, default=20, help="steps (%(default)s)")
    parser.add_argument("--windows", type=int, default=1, help="saves beside training (%(default)s)")
    parser.add_argument("--limits", action="store_true", help="write and read plainly beside it too")
    options = parser.parse_args()
    if options.subject == "limits":
        size = state_bytes(build(options.model)[0])
        figures = {"state": size / 1e9, **measure_limits(options.folder, size)}
    else:
        folder = options.folder.absolute()
        figures = measure(
            options.subject, options.model, folder, options.window, options.windows, options.limits
        )
    print(json.dumps(figures), flush=True)
    os._exit(0)  # DCP's writer processes and gloo's threads have nothing more to say


if __name__ == "__main__":
    sys.exit(main())
