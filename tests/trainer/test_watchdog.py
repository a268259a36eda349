"""A gang that stands still is noticed, says where everybody stands, and ends; a slow one is left alone."""

from __future__ import annotations

import errno
import faulthandler
import json
import os
import queue
import re
import signal
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from gangs import KILL, LOOP, Gang, Workshop
from waiting import wait_until

from holdfast_trainer import parallel
from holdfast_trainer.contract import RunDir
from holdfast_trainer.schema import ConfigError
from holdfast_trainer.watchdog import (
    AUTO_SECONDS,
    Clock,
    HangAfter,
    Watchdog,
    compare,
    last_of,
    telling_most,
    write_stacks,
)

pytestmark = pytest.mark.long

QUICK = {"HOLDFAST_HANG_SECONDS": "10"}


# ---------------------------------------------------------------- how long is long


@pytest.mark.parametrize(
    ("text", "longest", "seconds"),
    [
        ("auto", None, 3 * AUTO_SECONDS),  # the first step compiles
        ("auto", 0.2, AUTO_SECONDS),
        ("auto", 100.0, 3000.0),
        ("120", None, 360.0),
        ("120", 100.0, 120.0),
        (7, 0.1, 7.0),
    ],
)
def test_patience_grows_with_the_steps_unless_it_is_given(
    text: str | float, longest: float | None, seconds: float
) -> None:
    assert HangAfter.parse(text).patience(longest) == seconds


@pytest.mark.parametrize("text", ["never", "-1", "nan", "inf", ""])
def test_a_wrong_setting_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match=r"say auto, or a number of seconds \(0: never\)") as caught:
        HangAfter.parse(text)
    assert repr(text) in str(caught.value)


def test_time_in_which_the_process_was_stopped_does_not_count() -> None:
    now = 100.0
    clock = Clock(lambda: now)
    now += 3
    assert clock.look(5) == 3
    now += 3600  # SIGSTOP, and an hour later SIGCONT
    assert clock.look(5) == 8
    now += 2
    assert clock.beat() == 10
    now += 1
    assert clock.look(5) == 1


@pytest.mark.parametrize("after", [HangAfter(), HangAfter(0.0)])
def test_how_long_nothing_was_done_is_known_where_nobody_watches(after: HangAfter, tmp_path: Path) -> None:
    """After the loop, and where hangs are not looked for: a run that did nothing there was at full speed."""
    now = 100.0
    gang = parallel.Gang(0, 1, 0, torch.device("cpu"))
    watchdog = Watchdog(RunDir(tmp_path), 1, gang, after, lambda *told: None)
    watchdog.start()
    watchdog.stop()
    watchdog._clock = Clock(lambda: now)
    watchdog.beat()
    now += 3600
    assert watchdog.quiet() == (3600.0, None)
    watchdog.beat(step=False)  # a part of a validation
    assert watchdog.quiet() == (0.0, None)


def test_whoever_is_watched_no_more_has_no_timer_left_that_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop ends in the moment in which the thread is about to set it anew."""
    told: list[str] = []
    setting, cancelled = threading.Event(), threading.Event()

    def set_anew(seconds: float, *, exit: bool) -> None:
        setting.set()
        assert cancelled.wait(60)
        told.append("set")

    def cancel() -> None:
        told.append("cancelled")
        cancelled.set()

    monkeypatch.setattr(faulthandler, "dump_traceback_later", set_anew)
    monkeypatch.setattr(faulthandler, "cancel_dump_traceback_later", cancel)
    run = RunDir(tmp_path)
    watchdog = Watchdog(run, 1, parallel.Gang(0, 1, 0, torch.device("cpu")), HangAfter(), lambda *told: None)
    watchdog.start()
    assert setting.wait(60)
    watchdog.stop()
    wait_until(lambda: not any(thread.name == "watchdog" for thread in threading.enumerate()), "its end")
    assert told[-2:] == ["set", "cancelled"]


def test_a_rank_that_left_its_loop_alone_says_where_it_is_once_another_hangs(tmp_path: Path) -> None:
    """Each decides when to stop by the loss of its own data, say. It was said to say nothing: "stopped, gone,
    or stuck outside Python"."""
    run, told = RunDir(tmp_path), queue.Queue[tuple[str, float, str, str]]()
    run.attempt(1).mkdir(parents=True)
    gang = parallel.Gang(0, 2, 0, torch.device("cpu"))
    watchdog = Watchdog(run, 1, gang, HangAfter(1.0), lambda *words: told.put(words))
    for once_more in (True, False):
        watchdog.start()
        watchdog.beat()
        watchdog.stop()
        watchdog.stand_by()
        assert watchdog.quiet()[1] is None, "nothing is to be done by it"
        if once_more:
            watchdog.stop()
            wait_until(lambda: threads("standing by") == 0, "the end of that")
    write_stacks(run.stacks(1, 1), "loop.py:7 train")
    who, _, mine, _ = told.get(timeout=60)
    assert mine.endswith(", out of its loop over run.steps")
    assert who == f"rank 0 stands at {mine}, rank 1 at loop.py:7 train"
    watchdog.stop()  # it would end this process by now


def test_a_rank_whose_log_is_on_a_full_disk_says_that_it_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its watchdog died of the first line that it wrote there, and no word was left behind."""
    run, told = RunDir(tmp_path), queue.Queue[str]()
    run.attempt(1).mkdir(parents=True)
    alone = parallel.Gang(0, 1, 0, torch.device("cpu"))
    watchdog = Watchdog(run, 1, alone, HangAfter(0.1), lambda who, *more: told.put(who))

    def full(*_: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with open("/dev/full", "wb") as disk:
        monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=full, flush=full, fileno=disk.fileno))
        watchdog.start()
        assert told.get(timeout=60).startswith("every rank stands at ")
        watchdog.stop()


def threads(name: str) -> int:
    return sum(thread.name == name for thread in threading.enumerate())


# ------------------------------------------------------------------ who stands where


@pytest.mark.parametrize(
    ("stands", "said"),
    [
        (["a", "b", "a", "a"], "rank 1 at b; the others wait at a"),
        (["a", "b", "a", "c"], "rank 1 at b, rank 3 at c; the others wait at a"),
        (["a", "a"], "every rank stands at a"),
        (["a"], "every rank stands at a"),
        (["a", "b"], "rank 0 stands at a, rank 1 at b"),
        (["a", None, "a"], "rank 1 says nothing: stopped, gone, or stuck outside Python"),
        ([None, None, "a"], "ranks 0, 1 say nothing: stopped, gone, or stuck outside Python"),
        ([None] * 10 + ["a"], "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more say nothing"),
        ([*"aabb"], "ranks 0, 1 stand at a, ranks 2, 3 at b"),
    ],
)
def test_the_one_that_holds_up_the_others_is_named(stands: list[str | None], said: str) -> None:
    assert compare(dict(enumerate(stands))).startswith(said)


@pytest.mark.parametrize(
    ("stands", "said"),
    [
        ({2: "a", 3: "a"}, "every rank of this replica stands at a; not seen from here: ranks 0, 1"),
        ({2: "a", 3: None}, "rank 3 says nothing: stopped, gone, or stuck outside Python; not seen from"),
    ],
)
def test_who_cannot_be_seen_from_here_is_not_blamed(stands: dict[int, str | None], said: str) -> None:
    assert compare(stands, [0, 1]).startswith(said)


# ------------------------------------------------------------------------ the real thing


@pytest.mark.parametrize(
    ("stands", "told"),
    [
        pytest.param({0: "a", 1: "b", 2: "a"}, [1, 0], id="who stands elsewhere comes first"),
        pytest.param({0: "a", 1: None, 2: "a"}, [0, 2], id="who says nothing has none"),
        pytest.param({0: None}, [], id="nobody has any"),
    ],
)
def test_whose_stacks_the_ledger_has(stands: dict[int, str | None], told: list[int]) -> None:
    assert telling_most(stands, 2) == told


def test_of_long_stacks_the_ledger_has_the_last_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.stacks"
    assert last_of(path) == ""
    path.write_text('{"stands": "a"}\nThread 1\n  File a\nThread 2\n  File b\n')
    assert last_of(path) == "Thread 1\n  File a\nThread 2\n  File b"
    assert last_of(path, 22) == "Thread 2\n  File b"


def assert_hung(gang: Gang, rank: int) -> str:
    assert gang.ranks[rank].wait() == 1, gang.texts()
    message = gang.termination(rank)
    assert message.outcome == "hung"
    assert message.error.startswith("no step for ")
    return message.error


@pytest.mark.slow
def test_a_rank_that_waits_for_ever_is_named_and_its_stack_is_kept(workshop: Workshop) -> None:
    untouched = workshop.finish("untouched", ranks=3, steps=20)
    gang = workshop.start(ranks=3, steps=20, hang_at=13, hang_rank=1, env=QUICK)
    for rank in range(3):
        assert "; the others wait at " in (said := assert_hung(gang, rank))
        assert "rank 1 at loop_script.py:" in said
        assert "wait_for_ever (in threading.py:" in said
        assert "all stacks of this rank" in gang.ranks[rank].text()
    stacks = gang.history.run.stacks(1, 1).read_text()
    assert "wait_for_ever" in json.loads(stacks.splitlines()[0])["stands"]
    assert "most recent call first" in stacks
    hangs = gang.history.events("hang")
    assert sorted((line["rank"], line["step"]) for line in hangs) == [(0, 13), (1, 13), (2, 13)]
    assert all(line["seconds"] >= 10 for line in hangs)
    told = {line["rank"]: line["stacks"] for line in hangs}
    assert "in wait_for_ever" in told[1], "the ledger has the stacks too"
    assert not any("in wait_for_ever" in told[rank] for rank in (0, 2))
    assert (gang.history.stop()["outcome"], gang.history.stop()["durable_step"]) == ("hung", 10)

    assert workshop.finish(ranks=3, steps=20, env=QUICK).losses() == untouched.losses()


@pytest.mark.parametrize("disk", ["hangs", "fails"])
def test_a_rank_whose_run_directory_hangs_or_fails_says_that_it_hangs(workshop: Workshop, disk: str) -> None:
    """Its watchdog waited for that directory too, or died of it, so that no word was left behind."""
    environment = {"HOLDFAST_HANG_SECONDS": "2"}
    steps = {"steps": 40, "hang_at": 12} if disk == "fails" else {"steps": 10**6}
    gang = workshop.start(disk_at=9, disk=disk, env=environment, **steps)
    said = assert_hung(gang, 0)
    assert re.search(r"rank 0 stands at .* wait_for_ever .*; its run directory does not answer$", said), said
    assert disk == "fails" or "ledger.py" in gang.texts(), "the log has all stacks"
    assert gang.termination().storage_unavailable == (disk == "hangs"), "else it is the job's failure"


@pytest.mark.slow
def test_machines_that_share_a_directory_over_nfs_see_each_others_saves_and_stacks(
    workshop: Workshop,
) -> None:
    """Its client remembers for up to a minute what was not there: a save took that long to be durable, longer
    than a notice lasts, and whoever had told where it hangs was called silent."""
    untouched = workshop.finish("untouched", ranks=2, steps=20)
    arguments = [json.dumps({"steps": 20, "hang_at": 13, "hang_rank": 1})]
    script = LOOP.with_name("nfs_loop.py")
    gang = workshop.start(ranks=2, script=script, arguments=arguments, env=QUICK)
    said = assert_hung(gang, 0)
    assert re.search(r"rank 0 stands at .*, rank 1 at loop_script\.py:\d+ wait_for_ever", said)
    assert [line["step"] for line in gang.history.events("checkpoint")] == [5, 10]
    assert (gang.history.stop()["outcome"], gang.history.stop()["durable_step"]) == ("hung", 10)
    assert workshop.finish(ranks=2, steps=20).losses() == untouched.losses()


@pytest.mark.slow
def test_the_peers_of_a_frozen_rank_say_that_it_is_silent(workshop: Workshop) -> None:
    gang = workshop.start(ranks=2, steps=100_000, pause=0.02, env=QUICK)
    gang.wait_for_step(8)
    gang.signal(signal.SIGSTOP, [1])
    assert "rank 1 says nothing: stopped, gone, or stuck outside Python" in assert_hung(gang, 0)
    gang.signal(KILL, [1])
    assert gang.ranks[1].wait() == -KILL


@pytest.mark.slow
def test_a_rank_that_freezes_where_a_save_is_agreed_on_is_named_too(workshop: Workshop) -> None:
    gang = workshop.start(ranks=2, steps=100_000, freeze_before_save=1, env=QUICK)
    assert "rank 1 says nothing: stopped, gone, or stuck outside Python" in assert_hung(gang, 0)
    assert gang.history.events("hang")[0]["step"] == 5
    gang.signal(KILL, [1])
    assert gang.ranks[1].wait() == -KILL


@pytest.mark.slow
def test_a_rank_in_which_no_python_can_run_ends_too(workshop: Workshop) -> None:
    """None of its threads can say so, and alone it has no peers: the log has where it stood."""
    gang = workshop.start(steps=40, hang_at=7, hang_in="C", env={"HOLDFAST_HANG_SECONDS": "2"})
    assert gang.wait() == [1], gang.texts()
    assert re.search(rf"Timeout \(0:00:\d\d\)!(.|\n)+{LOOP.name}", gang.texts()), gang.texts()
    # From step 5, or anew: the thread that saved it stood still as well, perhaps before it was durable.
    assert len(workshop.finish(steps=12).events("attempt_start", 2)) == 1


@pytest.mark.slow
def test_a_validation_that_takes_longer_than_a_hang_may_is_none(workshop: Workshop) -> None:
    history = workshop.finish(steps=12, validate_every=10, validation_pause=3.0, env=QUICK)
    assert history.events("hang") == []


SLOWER_THAN_AN_EXCHANGE = """
import sys, time
from datetime import timedelta
import torch
from holdfast_trainer import parallel

parallel.RENDEZVOUS_TIMEOUT = timedelta(seconds=2)
from holdfast_trainer.run import Run

run = Run()
model = run.wrap(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
run.track(model=model, optimizer=optimizer)
for step in run.steps(6):
    loss = model(torch.ones(1, 2)).square().sum()
    if step == 3 and run.rank == 1:
        time.sleep(4)  # the other one is in its backward pass
    optimizer.zero_grad()
    loss.backward()
    run.log(loss=loss)
    optimizer.step()
    if step == 4 and run.rank == 0:
        time.sleep(4)  # the other one is at the end of its step
if sys.argv[1] == "late" and run.rank == 0:
    time.sleep(300)
run.mean(1.0)
"""


@pytest.mark.parametrize("late", ["", "late"])
def test_how_long_a_step_may_take_is_not_for_an_exchange_to_say(
    workshop: Workshop, tmp_path: Path, late: str
) -> None:
    """Of several ranks none could wait longer than ten minutes, whatever hangSeconds said. Out of the loop
    nobody watches, and an exchange has its bound."""
    script = tmp_path / "slow.py"
    script.write_text(SLOWER_THAN_AN_EXCHANGE)
    gang = workshop.start(ranks=2, script=script, arguments=[late], env={"HOLDFAST_HANG_SECONDS": "60"})
    assert gang.ranks[1].wait() == bool(late), gang.texts()
    assert gang.history.last_step() == 6
    assert ("Timed out waiting 2000ms" in gang.texts()) == bool(late)
    what_to_do = "init_process_group(timeout=...) before Run(), and torch.distributed.barrier()"
    assert (what_to_do in gang.terminations[1].read_text()) == bool(late)
