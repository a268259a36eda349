"""From a signal to an agreement: notices, sums over ranks, and who is not a rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import Processes
from waiting import wait_until

from holdfast_trainer.contract import RunDir, Termination
from holdfast_trainer.interruption import Exchange, Notice
from holdfast_trainer.parallel import Gang, is_lost_peer

ALONE = Gang(0, 1, 0, torch.device("cpu"))


def test_the_deadline_comes_before_the_kill() -> None:
    called = threading.Event()
    notice = Notice(0.2, called.set)
    assert notice.remaining() == pytest.approx(0.18)
    assert not notice.received
    notice._receive(signal.SIGTERM, None)
    assert notice.received
    assert notice.remaining() <= 0.18
    assert called.wait(300)
    assert notice.remaining() == 0.0


def test_a_stop_made_in_order_needs_no_deadline() -> None:
    called = threading.Event()
    notice = Notice(60, called.set)
    notice._receive(signal.SIGTERM, None)
    notice.settle()
    assert notice._timer is not None
    notice._timer.join(300)
    assert not notice._timer.is_alive()
    assert not called.is_set()


def test_a_notice_in_the_last_save_of_a_program_that_ends_is_no_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Python 3.12 starts no thread by then: its handler broke off that save, and the run had failed."""

    def refused(timer: threading.Timer) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Timer, "start", refused)
    notice = Notice(60, lambda: None)
    notice._receive(signal.SIGTERM, None)
    assert notice.received
    assert 0 < notice.remaining() <= 54, "what is left is known all the same"
    notice.settle()


def test_a_stop_is_agreed_on_at_the_exchange_after_the_notice() -> None:
    notice = Notice(60, lambda: None)
    exchange = Exchange(ALONE, notice)
    exchange.contribute(1, save=True)
    notice._receive(signal.SIGTERM, None)
    agreed = exchange.finish()
    assert (agreed.stop, agreed.save) == (False, True)
    exchange.contribute(2)
    assert exchange.finish().stop
    notice.settle()


def test_losses_come_in_order_and_none_is_left() -> None:
    exchange = Exchange(ALONE, Notice(60, lambda: None))
    exchange.contribute(1)
    exchange.offer_loss(1, torch.tensor(0.5))  # told after the optimizer's turn
    assert exchange.finish().loss is None
    exchange.offer_loss(2, torch.tensor([[0.25]]))
    exchange.offer_loss(3, 0.125)  # a number, as `loss.item()` gives it
    exchange.contribute(2)
    assert exchange.finish().loss == (1, 0.5)
    assert [agreed.loss for agreed in exchange.drain(3)] == [(2, 0.25), (3, 0.125)]
    assert list(exchange.drain(3)) == []


def test_counts_are_told_once_and_of_their_step() -> None:
    exchange = Exchange(ALONE, Notice(60, lambda: None))
    exchange.count(1, 0, 0)
    exchange.contribute(1)
    assert exchange.finish().counts is None
    for _ in range(3):
        exchange.count(2, 10, 1)  # in parts
    exchange.contribute(2)
    exchange.count(2, 5, 0)  # after the optimizer's turn
    assert exchange.finish().counts == (2, 30, 3)
    assert exchange.owes_counts(2)
    exchange.count(3, 10, 1)
    exchange.contribute(3)
    assert exchange.finish().counts == (2, 5, 0)
    assert not exchange.owes_counts(2)
    assert [agreed.counts for agreed in exchange.drain(3)] == [(3, 10, 1)]


@pytest.mark.parametrize(
    ("device", "ranks", "seconds", "early"),
    [
        pytest.param("cpu", 2, [], False, id="nobody knows yet how long a step is"),
        pytest.param("cpu", 2, [0.1], True, id="a notice may be heard of a short step later"),
        pytest.param("cpu", 2, [0.1, 0.0], True, id="a sum between steps says nothing of steps"),
        pytest.param("cpu", 2, [0.1, 20.0], False, id="but not 20 s later"),
        pytest.param("cuda", 2, [0.1], False, id="a loss would have to be read back"),
        pytest.param("cpu", 1, [0.1], False, id="there is nobody to wait for"),
    ],
)
def test_when_a_sum_begins_with_its_step(device: str, ranks: int, seconds: list[float], early: bool) -> None:
    class Alike(Gang):
        """All ranks tell the same."""

        def sum_async(self, vector: torch.Tensor) -> Callable[[], torch.Tensor]:
            return lambda: vector * self.world_size

    control: Any = object() if ranks > 1 else None
    exchange = Exchange(Alike(0, ranks, 0, torch.device(device), control), Notice(60, lambda: None))
    for step, took in enumerate(seconds, start=1):
        exchange.contribute(step, seconds=took)
        exchange.finish()
    assert exchange.early is early


def test_parts_that_ranks_tell_of_a_whole_add_up_to_it() -> None:
    """Each of six ranks told a sixth of the samples and tokens: one less was counted, and of one none."""

    class Six(Gang):
        def sum_async(self, vector: torch.Tensor) -> Callable[[], torch.Tensor]:
            return lambda: sum((vector for _ in range(5)), vector)

    control: Any = object()
    exchange = Exchange(Six(0, 6, 0, torch.device("cpu"), control), Notice(60, lambda: None))
    exchange.count(1, 8192 / 6, 1 / 6)  # type: ignore[arg-type]
    exchange.contribute(1)
    counts = exchange.finish().counts
    assert counts is not None
    assert (counts.tokens, counts.samples) == (8192, 1)


@pytest.mark.parametrize(
    ("losses", "message"),
    [
        ([torch.tensor(1.0), torch.tensor(1.0)], "step 1 has told its loss already: add up the parts"),
        ([torch.zeros(3)], r"a loss of shape \[3\]: tell one number, such as loss.mean\(\)"),
    ],
)
def test_a_loss_told_wrongly_is_refused(losses: list[torch.Tensor], message: str) -> None:
    exchange = Exchange(ALONE, Notice(60, lambda: None))
    *good, bad = losses
    for loss in good:
        exchange.offer_loss(1, loss)
    with pytest.raises(ValueError, match=message):
        exchange.offer_loss(1, bad)


def test_what_counts_as_a_lost_peer() -> None:
    gloo = "[third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:43210"
    assert is_lost_peer(RuntimeError(gloo))
    assert is_lost_peer(torch.distributed.DistNetworkError("connection reset"))
    assert not is_lost_peer(RuntimeError("shapes do not match"))
    assert not is_lost_peer(ValueError("gloo"))


LOADER = """
    import sys, time, torch
    from torch import nn
    from torch.utils.data import DataLoader, Dataset
    from holdfast_trainer.run import Run

    class Slow(Dataset):
        def __len__(self):
            return 100_000
        def __getitem__(self, index):
            time.sleep(0.01)
            return torch.full((4,), float(index % 7))

    run = Run(checkpoint_every=10_000)
    model = run.wrap(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    run.track(model=model, optimizer=optimizer)
    batches = iter(DataLoader(Slow(), batch_size=2, num_workers=2, multiprocessing_context="fork"))
    for step in run.steps(50_000):
        loss = model(next(batches)).square().mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        run.log(loss=loss)
        print("step", step, flush=True)
"""


def test_loader_workers_outlive_a_signal_to_the_whole_group(tmp_path: Path, processes: Processes) -> None:
    """torchrun signals a rank's process group; a worker that died of it would end the step by an error."""
    script = tmp_path / "loop.py"
    script.write_text(textwrap.dedent(LOADER))
    message = tmp_path / "message"
    env = {
        "HOLDFAST_RUN_DIR": str(tmp_path / "run"),
        "HOLDFAST_TERMINATION_LOG": str(message),
        "OMP_NUM_THREADS": "1",
    }
    rank = processes.start(
        [sys.executable, script], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert rank.stdout is not None
    lines = []
    for line in rank.stdout:
        lines.append(line)
        if line.startswith("step 3"):
            os.killpg(rank.pid, signal.SIGTERM)
            break
    rest, _ = rank.communicate(timeout=300)
    assert rank.returncode == 0, "".join(lines) + rest
    told = Termination.from_json(message.read_text())
    assert told is not None
    assert told == Termination("interrupted", told.step, told.step)
    assert told.step >= 4
    assert RunDir(tmp_path / "run").checkpoint(told.step).is_dir()
    wait_until(lambda: not processes.running(), "the workers to end with their rank")
