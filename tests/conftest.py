"""What every test stands on: a clean environment, no process left behind, quick tests first."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import gpus
import hypothesis
import left_behind
import pytest
import workers
from processes import MARK, Processes
from tests.cluster.build import build
from tests.cluster.errors import ClusterError
from tests.cluster.fixtures import (  # noqa: F401  here they are one for all directories
    cluster,
    control_plane,
    controller_image,
    gather,
    gathered,
    namespace,
    short_lived,
    trainer_image,
)
from tests.cluster.machine import why_no_node
from tests.cluster.system import install
from tests.cluster.tools import BUILT_FOR, NEED_NODES
from waiting import Deadline
from xdist.remote import Producer
from xdist.workermanage import WorkerController

from holdfast_trainer.spinning import spin_briefly

# How long an example takes says how busy the machine is, and nothing of the code.
# CI judges a change, by the same examples each time; people find new ones.
hypothesis.settings.register_profile(
    "holdfast",
    deadline=None,
    derandomize=bool(os.environ.get("CI")),
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("holdfast")

CLUSTER_LOGS = Path(__file__).parents[1] / "build" / "cluster-logs"


def pytest_configure(config: pytest.Config) -> None:
    # A developer's own settings must not decide what the tests see.
    # HOLDFAST_CACHE stays: it says where built programs and images lie, never what they are.
    for name in [name for name in os.environ if name.startswith("HOLDFAST_") and name != "HOLDFAST_CACHE"]:
        del os.environ[name]
    gpus.hide()
    spin_briefly(os.environ)  # else a test beside another takes five times as long
    # What a shell starts in the background ignores Ctrl-C, and so would all that tests start.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # It clears up after SIGTERM, too, by which what runs tests may end them; workers may just die.
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(workers.ClustersEnd())
        workers.begin_elsewhere(config)
    else:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        # Before any test: from then on trainings compute otherwise (holdfast_trainer/native.py).
        with contextlib.suppress(ClusterError):
            install({"g++": "g++"})


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Cheap answers first: unmarked, then slow, then cluster; the order within each stays.

    Where workers share the tests, what takes long comes first instead: see workers.py.
    """
    there = getattr(config, "workerinput", {}).get("groups")
    if there:
        items.sort(key=lambda item: item.path)  # each worker came upon the files in another order
    items.sort(key=lambda item: bool(item.get_closest_marker("slow")) + 2 * _on_cluster(item))
    if there:
        workers.arrange(items, Path(there))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """Modules, tests and all that they import stay: the collector need look at them neither now nor later."""
    gc.disable()  # a third of the time that a process takes to read all tests anew
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.set_threshold(10_000, 10, 10)  # instead of 700: a fiftieth of all CPU time went into that
        gc.enable()


def _on_cluster(item: pytest.Item) -> bool:
    return item.get_closest_marker("cluster") is not None


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """For `-n auto`."""
    return None if os.environ.get("PYTEST_XDIST_AUTO_NUM_WORKERS") else workers.how_many(config)


def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    left_behind.begin(config)


def pytest_configure_node(node: WorkerController) -> None:
    workers.prepare(node)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> workers.GroupsAndFiles:
    return workers.GroupsAndFiles(config, log)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[object]:
    """Build what the test stands on before its time limit begins: a compiler takes as long as it takes."""
    for name in getattr(item, "fixturenames", ()):
        for module in BUILT_FOR.get(name, ()):
            if name in NEED_NODES and (os.environ.get("KUBECONFIG_UNDER_TEST") or why_no_node()):
                break
            try:
                build(module)
            except ClusterError:
                break  # the fixture that needs it says why
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[object]:
    """Where a test of the cluster fails, keep the components' logs and events before they go."""
    report = yield
    if report.failed and _on_cluster(item):  # type: ignore[attr-defined]
        gather(CLUSTER_LOGS / item.name.replace("/", "-"))
    return report


@pytest.fixture(autouse=True)
def processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Processes]:
    """Processes of this test. Also what the code under test starts by itself ends with the test."""
    started = Processes()
    monkeypatch.setenv(MARK, started.mark)
    yield started
    started.end_all()


@pytest.fixture
def deadline() -> Deadline:
    """Five minutes, shared by all waits of a test."""
    return Deadline(300)
