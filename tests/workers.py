"""Who runs which test where there are several processes for them (pytest-xdist), as in `make test`.

A file stays whole and in its order, in one worker: what its tests share is made once. Three groups stay whole
across files, each in one worker:

- `nodes`: tests that need a cluster with nodes. The machine has one, with one network, one BuildKit and one
  set of kernel settings, and some tests look at all of these before and after.
- `control plane`: the others of the cluster. A control plane touches nothing of the machine, and one serves
  most of them.
- `one machine`: tests whose local engine runs processes. It tells a kill for want of memory by the machine's
  own count of them, so a test that provokes one may not run beside a test that kills by hand.

The groups begin first, for nobody can help with them later. After them the long files, most of which wait for
most of their time: were one the last, its worker would be at it while the others had nothing. Then files take
turns: those with slow tests, most of which compute, those whose quick tests ask for a directory, most of
which wait for processes, and those whose tests ask for none, which but compute. While many wait at once, a
core has nothing to do. Those that ask most often come first, and in the last third no test is slow.

Workers collect the tests, the process that hands them out does not: it learns the groups from a file that
each worker writes. xdist's own marks do not reach it with pytest 9.2, see pytest-xdist's issue 1386.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from tests.cluster.tools import NEED_NODES
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

WORKERS = 5
"""More than twice as many as CI has cores: a test that waits, for a pod or for time to pass, leaves its core
to others. With four a thirteenth of all time had a core with nothing to do, with five a fiftieth. Each may
hold PyTorch twice, a benchmark or a cluster. PYTEST_XDIST_AUTO_NUM_WORKERS says otherwise."""

NODES, ONE_MACHINE, CONTROL_PLANE = "nodes", "one machine", "control plane"
_FIRST = (NODES, ONE_MACHINE, CONTROL_PLANE)
"""In this order, the longest before the others."""
ENGINES = ("local_world", "one_machine")
"""Modules that start local engines."""
OF_GROUPS = ("live", "cluster", "control_plane")
"""Fixtures of a whole session that no test asks for but those of one group."""

SLOW_UNTIL = 0.7
"""Of all files, where those with slow tests end."""

_INPUT = "groups"
_DIRECTORY = pytest.StashKey[Path]()


class GroupsAndFiles(LoadScopeScheduling):
    """Hands out a group or a file at a time, in the order of the tests."""

    def __init__(self, config: pytest.Config, log: Producer | None = None) -> None:
        super().__init__(config, log)
        self._groups: dict[str, str] = {}

    def schedule(self) -> None:
        for node in self.nodes if self.collection is None else ():
            groups = Path(node.workerinput[_INPUT])
            if groups.exists():  # else nothing was collected: a path that is none, which pytest tells
                self._groups |= json.loads(groups.read_text())
        super().schedule()

    def _split_scope(self, nodeid: str) -> str:
        return self._groups.get(nodeid) or nodeid.partition("::")[0]


def how_many(config: pytest.Config) -> int:
    """Workers for `-n auto`; 0, this process alone, where somebody looks on or has chosen tests."""
    option = config.option
    looked_on = option.capture == "no" or option.usepdb or option.trace
    chosen = config.args_source is pytest.Config.ArgsSource.ARGS or option.keyword
    again = any(config.getoption(name, False) for name in ("lf", "stepwise"))
    alone = looked_on or chosen or again or len(os.sched_getaffinity(0)) < 2
    return 0 if alone else WORKERS


def prepare(node: WorkerController) -> None:
    """Tell a worker, before it starts, where to write the groups."""
    stash = node.config.stash
    if _DIRECTORY not in stash:
        stash[_DIRECTORY] = Path(tempfile.mkdtemp(prefix="holdfast-tests-"))
        node.config.add_cleanup(lambda: shutil.rmtree(stash[_DIRECTORY]))
    node.workerinput[_INPUT] = str(stash[_DIRECTORY] / node.gateway.id)


def begin_elsewhere(config: pytest.Config) -> None:
    """Let each worker read all tests from another file on: what pytest has made of its assertions is kept, so
    that it finds most files as others have left them. In a fresh checkout each would else do all."""
    if config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        files = sorted(str(file) for place in config.args for file in Path(place).rglob("test_*.py"))
        number, count = int(config.workerinput["workerid"][2:]), config.workerinput["workercount"]  # type: ignore[attr-defined]
        first = len(files) * number // count
        config.args = files[first:] + files[:first]


def arrange(items: list[pytest.Item], there: Path) -> None:
    """Put first what takes longest, and write the groups `there`; within each the order stays."""
    groups = {item: group for item in items if (group := group_of(item))}
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    others = [item for item in items if item not in groups]
    long = list(dict.fromkeys(item.path for item in others if item.get_closest_marker("long")))
    short = [item for item in others if item.path not in long]
    much = list(dict.fromkeys(item.path for item in short if item.path in slow))
    quick = [item for item in short if item.path not in slow]
    asking = Counter(item.path for item in quick if "tmp_path" in getattr(item, "fixturenames", ()))
    waiting = [path for path, _ in asking.most_common()]
    computing = [path for path in dict.fromkeys(item.path for item in quick) if path not in asking]
    place = {path: SLOW_UNTIL * number / len(much) for number, path in enumerate(much)}
    place |= {path: number / len(waiting) for number, path in enumerate(waiting)}
    place |= {path: (1 + number) / len(computing) for number, path in enumerate(computing)}
    place |= {path: number - len(long) for number, path in enumerate(long)}

    def rank(item: pytest.Item) -> tuple[int, float, bool]:
        if item in groups:
            # Who starts a cluster of its own comes before that of the session, which would wait meanwhile.
            return _FIRST.index(groups[item]), "cluster" in getattr(item, "fixturenames", ()), False
        return len(_FIRST), place[item.path], item.path not in slow

    items.sort(key=rank)
    there.write_text(json.dumps({item.nodeid: group for item, group in groups.items()}))


class ClustersEnd:
    """After the last test of a group that asks for it a cluster ends, which takes a tenth of a core, and with
    nodes a quarter, though nobody asks it for anything. A test that asks nevertheless has it started again.

    A plugin, for a worker alone: where one process has all tests it may come back to the group. pytest asks
    no conftest.py below its root about a fixture of the whole session.
    """

    def __init__(self) -> None:
        self._made: list[tuple[pytest.FixtureDef[object], pytest.FixtureRequest]] = []
        """Of OF_GROUPS, in their order."""
        self._last: dict[tuple[str, str], pytest.Item] = {}
        """Test that asks for a fixture, by group and fixture."""

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            if group := group_of(item):
                asked = set(OF_GROUPS) & set(getattr(item, "fixturenames", ()))
                self._last |= dict.fromkeys(((group, name) for name in asked), item)

    @pytest.hookimpl(tryfirst=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest
    ) -> None:
        if fixturedef.argname in OF_GROUPS:
            self._made.append((fixturedef, request))

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        group = group_of(item)
        for fixture, request in reversed(self._made.copy()):
            if group and self._last.get((group, fixture.argname)) is item:
                self._made.remove((fixture, request))
                fixture.finish(request)


def group_of(item: pytest.Item) -> str | None:
    """By what the test asks for, or its module imports."""
    if item.get_closest_marker("cluster"):
        return NODES if set(NEED_NODES) & set(getattr(item, "fixturenames", ())) else CONTROL_PLANE
    names = vars(item.module).values() if isinstance(item, pytest.Function) else ()
    return ONE_MACHINE if any(getattr(one, "__module__", None) in ENGINES for one in names) else None
