"""From a signal to an agreement: notices, sums over ranks, and who is not a rank."""

from __future__ import annotations

import os
import signal
import socket
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
    assert notice._timer is not None
    assert notice._timer.interval == pytest.approx(0.18), "last words take the rest"
    assert notice._timer.daemon, "a program that ends by itself does not wait for it"
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


def test_a_notice_to_a_program_that_can_start_no_thread_is_no_fault() -> None:
    """As in its last save, as it ends: from Python 3.12 on it starts none by then, and its handler broke off
    that save, and the run had failed."""
    notice = Notice(60, lambda: None)
    threading.stack_size(1 << 47)  # more than there are addresses
    try:
        notice._receive(signal.SIGTERM, None)
    finally:
        threading.stack_size(0)
    assert notice._timer is not None
    assert not notice._timer.is_alive()
    assert notice.received
    assert 0 < notice.remaining() <= 54, "what is left is known all the same"
    notice.settle()


def test_what_another_handler_raises_while_a_notice_is_taken_is_heard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """PyTorch tells so that a loader's process was killed, and once: it was taken for a thread that could not
    be started, and the loop waited for its batch."""

    def lost(*_: object) -> None:
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed.")

    def begin(timer: threading.Timer) -> None:
        begin_(timer)
        signal.raise_signal(signal.SIGCHLD)

    begin_ = threading.Timer.start
    monkeypatch.setattr(threading.Timer, "start", begin)
    before = signal.signal(signal.SIGCHLD, lost)
    notice = Notice(60, lambda: None)
    try:
        with pytest.raises(RuntimeError, match="DataLoader worker"):
            notice._receive(signal.SIGTERM, None)
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert notice.received
    assert notice._timer is not None
    assert notice._timer.is_alive()
    notice.settle()


@pytest.mark.parametrize(
    ("signals", "hasty"),
    [
        pytest.param(["INT"], False, id="its thread was faster"),
        pytest.param(["TERM", "INT"], False, id="the first Ctrl-C after a notice"),
        pytest.param(["TERM", "TERM", "INT"], False, id="nor after two"),
        pytest.param(["INT", "TERM"], False, id="torchrun sends the one and then the other"),
        pytest.param(["INT", "INT"], True, id="a second Ctrl-C"),
        pytest.param(["TERM", "INT", "INT"], True, id="also after a notice"),
    ],
)
def test_a_second_ctrl_c_and_nothing_else_breaks_off_what_is_being_saved(
    signals: list[str], hasty: bool
) -> None:
    notice = Notice(60, lambda: None)
    assert notice._begin(), "the thread that waits for signals may come before the handler"
    raised = []
    for name in signals:
        try:
            notice._receive(signal.Signals[f"SIG{name}"], None)
            raised.append(False)
        except KeyboardInterrupt:  # which would end pytest
            raised.append(True)
    assert raised == [*(False for _ in signals[1:]), hasty]
    notice.settle()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGCHLD])
@pytest.mark.parametrize("looks", [True, False], ids=["looks", "waits"])
def test_a_signal_is_known_from_the_wakeup_descriptor(number: signal.Signals, looks: bool) -> None:
    """The thread waits there while the main one is in C; who looks first need not wait for it."""
    notice = Notice(60, lambda: None)
    notice._waking, notice._wakeup = socket.socketpair()
    with notice._waking, notice._wakeup:
        assert not notice.look()
        notice._wakeup.send(bytes([signal.SIGWINCH, number]))
        if looks:
            assert notice.look() is (number != signal.SIGCHLD)
        notice._wakeup.shutdown(socket.SHUT_WR)
        notice._watch()
        assert notice.received is (number != signal.SIGCHLD)
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


def test_work_that_is_told_as_samples_alone_counts() -> None:
    exchange = Exchange(ALONE, Notice(60, lambda: None))
    exchange.count(1, 0, 3)
    exchange.contribute(1)
    assert exchange.finish().counts == (1, 0, 3)


def test_a_sum_that_has_begun_takes_no_more_in() -> None:
    """The optimizer of a second model has its turn in the same step: what was told first was counted by
    nobody."""
    exchange = Exchange(ALONE, Notice(60, lambda: None))
    exchange.count(1, 10, 1)
    exchange.contribute(1)
    exchange.count(1, 5, 1)
    exchange.contribute(1)
    assert exchange.finish().counts == (1, 10, 1)
    assert [agreed.counts for agreed in exchange.drain(1)] == [(1, 5, 1)]


def test_what_was_told_of_a_step_that_is_done_anew_counts_once() -> None:
    exchange = Exchange(ALONE, Notice(60, lambda: None))
    for step in (1, 2):
        exchange.offer_loss(step, float(step))
        exchange.count(step, 10, 1)
    exchange.take_back(2)
    exchange.offer_loss(2, 2.5)
    exchange.count(2, 10, 1)
    told = [(agreed.loss, agreed.counts) for agreed in exchange.drain(2)]
    assert told == [((1, 1.0), (1, 10, 1)), ((2, 2.5), (2, 10, 1))]


def test_of_two_norms_of_a_step_the_newest_is_told() -> None:
    exchange = Exchange(ALONE, Notice(60, lambda: None))
    exchange.offer_norm(1, 4.0)
    exchange.offer_norm(1, 2.0)
    exchange.contribute(1)
    assert exchange.finish().grad_norm == 2.0


def two_exchanges() -> list[Exchange]:
    """Of two ranks; what both have begun to tell is what either hears."""
    told: dict[int, torch.Tensor] = {}

    class Member(Gang):
        def sum_async(self, vector: torch.Tensor) -> Callable[[], torch.Tensor]:
            told[self.rank] = vector
            return lambda: told[0] + told[1]

    control: Any = object()
    members = [Member(rank, 2, 0, torch.device("cpu"), control) for rank in (0, 1)]
    return [Exchange(member, Notice(60, lambda: None)) for member in members]


def test_a_stop_waits_for_the_rank_on_which_none_may_be() -> None:
    """There it would be in the middle of a step, or of a validation with other weights."""
    noticed, other = two_exchanges()
    noticed._notice._receive(signal.SIGTERM, None)
    for waits in (True, False):
        noticed.contribute(1)
        other.contribute(1, waits=waits)
        assert (noticed.finish().stop, other.finish().stop) == (not waits, not waits)
    noticed._notice.settle()


def test_a_loss_is_the_mean_of_those_that_told_one_and_what_is_broken_has_its_step() -> None:
    """One rank tells a norm alone; the other's loss was halved by it."""
    first, second = two_exchanges()
    first.offer_loss(4, 3.0, 1.0)
    second.offer_norm(4, float("inf"))
    first.contribute(5)
    second.contribute(5)
    agreed = first.finish()
    assert (agreed.loss, agreed.told, agreed.broken) == ((4, 3.0), 2, 4)
    assert second.finish().loss is None
    second.offer_loss(5, float("nan"))
    first.contribute(6)
    second.contribute(6)
    assert first.finish().broken == 5, "told by the other rank alone"


def test_counts_are_of_the_step_that_they_were_told_of() -> None:
    """By the rank itself, or by those that told any."""
    first, second = two_exchanges()
    second.count(3, 10, 1)
    for one in (first, second):
        one.contribute(4)
    assert [one.finish().counts for one in (first, second)] == [(3, 10, 1), (3, 10, 1)]
    first.count(4, 10, 1)
    second.count(6, 10, 1)
    for one in (first, second):
        one.contribute(6)
    assert [one.finish().counts for one in (first, second)] == [(4, 20, 2), (6, 20, 2)]


def test_a_step_is_as_long_as_ranks_take_for_it_on_average() -> None:
    """On many ranks a sum that began with its step was begun at its end, as for steps of half a minute."""
    first, second = two_exchanges()
    for one in (first, second):
        one.contribute(1, seconds=0.3)
    assert [one.finish() and one.early for one in (first, second)] == [True, True]


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
