"""The tests' own floor holds: waits end in time with a clear sentence, and no process survives."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from processes import MARK, Processes
from tests.cluster.component import environment, on_node
from tests.cluster.site import Site
from waiting import Deadline, DeadlinePassed, wait_until, wait_until_async

# A parent that starts a child in a session of its own, as torchrun's workers and supervisors are.
PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)
print(child.pid, flush=True)
child.wait()
"""


def test_a_wait_ends_with_the_first_true_value() -> None:
    answers = iter([None, "", "ready"])
    assert wait_until(lambda: next(answers), "an answer") == "ready"


def test_a_wait_that_fails_says_what_it_waited_for_and_what_it_saw() -> None:
    with pytest.raises(DeadlinePassed, match=r"waited 0\.02 s for step 3; last seen: 0"):
        wait_until(lambda: 0, "step 3", seconds=0.02)


def test_an_asynchronous_wait_takes_plain_and_coroutine_conditions() -> None:
    import asyncio

    async def ready() -> str:
        return "ready"

    async def story() -> None:
        assert await wait_until_async(ready, "an answer") == "ready"
        assert await wait_until_async(lambda: 7, "a number") == 7
        with pytest.raises(DeadlinePassed, match="for never"):
            await wait_until_async(lambda: False, "never", seconds=0.02)

    asyncio.run(story())


def test_a_condition_that_costs_more_is_asked_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept = [0.0], []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    def asked(cost: float) -> list[float]:
        def condition() -> bool:
            now[0] += cost
            return len(slept) == 20

        slept.clear()
        assert wait_until(condition, "the twentieth time")
        return list(slept)

    monkeypatch.setattr("waiting.time.monotonic", lambda: now[0])
    monkeypatch.setattr("waiting.time.sleep", sleep)
    cheap = asked(0)
    assert cheap == sorted(cheap)
    assert cheap[0] < 0.01 < cheap[-1] == pytest.approx(0.1)
    assert asked(0.05) == pytest.approx([0.5] * 20), "a program's start"
    assert asked(5) == pytest.approx([1] * 20), "what waits by itself"


def test_waits_share_one_deadline() -> None:
    deadline = Deadline(0.01)
    with pytest.raises(DeadlinePassed):
        deadline.wait_until(lambda: False, "the first thing")
    assert deadline.passed
    assert deadline.wait_until(lambda: True, "what is true already")


def test_an_orphan_in_its_own_session_ends_too() -> None:
    """The parent is shot, its child lives on under init; the test's end still finds and kills it."""
    story = Processes()
    parent = story.start([sys.executable, "-c", PARENT], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    assert child.is_running()
    story.end_all()
    assert story.running() == []
    try:
        assert child.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        pass  # whoever adopted it has buried it
    parent.stdout.close()


def test_a_test_that_fails_leaves_nothing_that_makes_another_fail() -> None:
    """An open pipe, or a child not waited for, warns when it is collected: in whichever test then runs."""
    story = Processes()
    left = story.start([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    story.end_all()
    assert left.returncode == -signal.SIGKILL
    assert [pipe.closed for pipe in (left.stdout, left.stderr) if pipe is not None] == [True, True]


def test_what_the_code_under_test_starts_by_itself_is_marked(processes: Processes) -> None:
    plain = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    assert wait_until(processes.running, "the process to show its mark")[0].pid == plain.pid
    processes.end_all()
    assert plain.wait() == -signal.SIGKILL


def test_quick_tests_come_first(tmp_path: Path) -> None:
    """Collected in the order cluster, slow, plain; run in the order plain, slow, cluster."""
    (tmp_path / "test_order.py").write_text(
        "import pytest\n"
        "@pytest.mark.cluster\ndef test_c(): pass\n"
        "@pytest.mark.slow\ndef test_s(): pass\n"
        "def test_p(): pass\n"
    )
    (tmp_path / "conftest.py").write_text((Path(__file__).parent / "conftest.py").read_text())
    root = Path(__file__).parents[1]
    listing = subprocess.run(
        f"{sys.executable} -m pytest -q --collect-only -c {root}/pyproject.toml".split()
        + f"-p no:cacheprovider --rootdir {tmp_path} {tmp_path}".split(),
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(root / "tests"), "PYTEST_ADDOPTS": "", MARK: "inner"},
    )
    names = [line.rpartition("::")[2] for line in listing.stdout.splitlines() if "::" in line]
    assert names == ["test_p", "test_s", "test_c"], listing.stdout + listing.stderr


def test_what_ends_while_it_is_asked_for_is_found_whole_or_not_at_all(tmp_path: Path) -> None:
    """What ends shows no variables a moment before it is a zombie: to ask it twice fails, now and then."""
    site = Site(name="brief", home=tmp_path, number=3)
    rounds = [subprocess.Popen(["true"], env=environment(site)) for _ in range(3)]
    found = 0
    deadline = Deadline(60)
    while found < 80:
        assert not deadline.passed
        found += len(on_node(site))
        assert on_node(site.node(1)) == []
        rounds = [
            one if one.poll() is None else subprocess.Popen(["true"], env=environment(site)) for one in rounds
        ]
    for one in rounds:
        one.wait()
