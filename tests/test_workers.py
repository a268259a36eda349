"""Tests in several processes: what may not meet does not, files stay whole, and who looks on sees one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import psutil
import pytest
from left_behind import SESSION
from processes import MARK, Processes
from waiting import wait_until
from workers import WORKERS

ROOT = Path(__file__).parents[1]
TELL = """
import os
import pytest
worker = os.environ.get("PYTEST_XDIST_WORKER", "none")
with open("read", "a") as read:
    read.write(f"{worker} {__file__}\\n")
def tell():
    with open("told", "a") as told:
        told.write(f"{worker} {os.environ['PYTEST_CURRENT_TEST'].split()[0]}\\n")
"""
PLANE = "@pytest.mark.cluster\ndef test_plane(): tell()\n"
NODES = "@pytest.fixture\ndef cluster(): pass\n@pytest.mark.cluster\ndef test_nodes(cluster): tell()\n"
BRIEF = NODES.replace("cluster()", "short_lived()").replace("nodes(cluster)", "brief(short_lived)")
SLOW = "@pytest.mark.slow\ndef test_slow(): tell()\n"
QUICK = "@pytest.mark.parametrize('what', ['a@b', 'c'])\ndef test_quick(what): tell()\n"
LONG = "pytestmark = pytest.mark.long\n"
AT_A_PLACE = "def test_place(tmp_path): tell()\n"
ENGINE = "from local_world import local_engine\n"


NOTHING_BUILT = "BUILT_FOR.clear()  # the name of a fixture alone would have a cluster's programs built\n"


def project(place: Path, **files: str) -> None:
    (place / "stories").mkdir()
    conftest = (ROOT / "tests" / "conftest.py").read_text()
    (place / "stories" / "conftest.py").write_text(conftest + NOTHING_BUILT)
    for name, text in files.items():
        (place / "stories" / f"test_{name}.py").write_text(TELL + text)


def command(place: Path, *words: str) -> list[str | Path]:
    return [
        *(sys.executable, "-m", "pytest", "-n", "auto", "-p", "no:cacheprovider", "--rootdir", place),
        *("-c", ROOT / "pyproject.toml", "-o", "testpaths=stories", *words),
    ]


def run(place: Path, *words: str) -> list[tuple[str, str]]:
    """What `pytest -n auto` and these words run: worker ("none": this process alone) and test, in order."""
    done = subprocess.run(
        command(place, *words),
        cwd=place,
        capture_output=True,
        text=True,
        check=False,
        env={
            **{name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
            "PYTHONPATH": str(ROOT / "tests"),
            MARK: "inner",
        },
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split(maxsplit=1) for line in (place / "told").read_text().splitlines()]
    (place / "told").unlink()
    return [(worker, test.removeprefix("stories/")) for worker, test in lines]


def by_worker(told: list[tuple[str, str]]) -> dict[str, list[str]]:
    found = defaultdict(list)
    for worker, test in told:
        found[worker].append(test)
    return found


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core, one process")
def test_groups_come_first_and_files_stay_whole(tmp_path: Path) -> None:
    project(
        tmp_path,
        a=QUICK,
        b=QUICK + SLOW + PLANE + NODES,
        c=NODES + PLANE + BRIEF,
        d=ENGINE + SLOW,
        e=QUICK,
        f=QUICK + ENGINE,
    )
    told = by_worker(run(tmp_path))
    assert set(told) == {f"gw{number}" for number in range(WORKERS)}
    assert sum(len(tests) for tests in told.values()) == 15
    first = dict(line.split() for line in reversed((tmp_path / "read").read_text().splitlines()))
    assert len(set(first.values())) == WORKERS, "each begins to read at another file"
    groups = [
        ["test_c.py::test_brief", "test_b.py::test_nodes", "test_c.py::test_nodes"],
        ["test_f.py::test_quick[a@b]", "test_f.py::test_quick[c]", "test_d.py::test_slow"],
        ["test_b.py::test_plane", "test_c.py::test_plane"],
    ]
    for group in groups:
        (tests,) = (tests for tests in told.values() if set(group) & set(tests))
        assert tests[: len(group)] == group, "in one worker, before anything else"
        files = [test.partition("::")[0] for test in tests[len(group) :]]
        assert files == sorted(files, key=files.index), "a file is done before the next begins"
    whole = ["test_b.py::test_quick[a@b]", "test_b.py::test_quick[c]", "test_b.py::test_slow"]
    (tests,) = (tests for tests in told.values() if set(whole) & set(tests))
    assert [test for test in tests if test in whole] == whole, "in one worker, in their order"


def test_long_files_come_first_then_what_is_slow_waits_or_computes_in_turns(tmp_path: Path) -> None:
    twice = AT_A_PLACE + AT_A_PLACE.replace("place", "other")
    project(
        tmp_path,
        a=QUICK,
        b=AT_A_PLACE,
        c=twice,
        d=SLOW,
        e=AT_A_PLACE,
        f=QUICK,
        g=SLOW + AT_A_PLACE,
        h=LONG + QUICK,
        i=LONG + SLOW,
    )
    (tests,) = by_worker(run(tmp_path, "-n", "1")).values()
    assert "".join(dict.fromkeys(test.partition("::")[0][-4] for test in tests)) == "higcbdaef"


@pytest.mark.parametrize("words", [("-k", "quick"), ("-s",), ("stories/test_a.py",)])
def test_who_looks_on_or_has_chosen_tests_has_them_in_one_process(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    project(tmp_path, a=QUICK, b=SLOW + PLANE)
    told = run(tmp_path, *words)
    assert {worker for worker, _ in told} == {"none"}


CLUSTERS_OF_A_SESSION = """
import pathlib
@pytest.fixture(scope="session")
def control_plane():
    yield
    pathlib.Path("plane-ended").touch()
@pytest.fixture(scope="session")
def cluster():
    yield
    pathlib.Path("cluster-ended").touch()
@pytest.mark.cluster
@pytest.mark.parametrize("number", range(2))
def test_both(cluster, control_plane, number):
    assert not pathlib.Path("plane-ended").exists()
@pytest.mark.cluster
@pytest.mark.parametrize("number", range(2))
def test_nodes(cluster, number):
    assert pathlib.Path("plane-ended").exists()
    assert not pathlib.Path("cluster-ended").exists()
    tell()
"""
AFTER_IT = """
import pathlib
from waiting import wait_until
def test_the_cluster_has_ended():
    wait_until(pathlib.Path("cluster-ended").exists, "the cluster to end", 60)
    tell()
"""


def test_a_cluster_ends_with_the_tests_that_need_it_and_not_with_the_last_of_all(tmp_path: Path) -> None:
    # The other worker waits with its first ones, so the cluster's has some after it.
    project(tmp_path, a=CLUSTERS_OF_A_SESSION, **dict.fromkeys("bcdefghijkl", AFTER_IT))
    told = by_worker(run(tmp_path, "-n", "2"))
    (tests,) = (tests for tests in told.values() if "test_a.py::test_nodes[0]" in tests)
    assert any("test_the_cluster_has_ended" in test for test in tests), "its worker goes on without it"


LEAVES = """
import subprocess
import sys
import time
import pytest
@pytest.fixture(scope="module")
def apart():
    process = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(3600)"], start_new_session=True
    )
    yield process
    while True:
        try:
            time.sleep(3600)
        except KeyboardInterrupt:
            pass
def test_it(apart):
    with open("left", "w") as left:
        left.write(f"{apart.pid} ")
    time.sleep(3600)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_told_to_end_it_leaves_nothing_of_workers_that_had_no_time_to_clear_up(
    number: signal.Signals, tmp_path: Path, processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    project(tmp_path, a=QUICK, b=LEAVES)
    for name in os.environ:
        if name == SESSION or name.startswith("PYTEST_"):
            monkeypatch.delenv(name)
    words = command(tmp_path, "-n", "2")
    outer = processes.start(words, cwd=tmp_path, env={"PYTHONPATH": str(ROOT / "tests")})
    left = tmp_path / "left"
    wait_until(lambda: left.exists() and left.read_text().endswith(" "), "the test to run")
    process = psutil.Process(int(left.read_text()))
    outer.send_signal(number)
    outer.wait(300)
    assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
