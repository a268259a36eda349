"""A control plane or a whole cluster for all tests of a session; a namespace for each; logs where one fails.

- `control_plane`: etcd, apiserver and controllers, on any machine. Started once, in four seconds.
- `cluster`: pods run too. Needs root, unless KUBECONFIG_UNDER_TEST names a cluster.
- `namespace`: a fresh one in `cluster`.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cluster.buildkit import build_image, image_name
from tests.cluster.cluster import Cluster, down, named_cluster
from tests.cluster.cluster import cluster as cluster_at
from tests.cluster.component import end_all
from tests.cluster.control_plane import ControlPlane, start_control_plane
from tests.cluster.errors import CannotRunNode, ClusterError, MissingTool
from tests.cluster.machine import Machine, erase, why_no_node
from tests.cluster.nodes import share_image
from tests.cluster.site import DEFAULT_NAME, Site, site, site_apart
from tests.cluster.users import used

_sites: list[Site] = []


def _say(line: str) -> None:
    print(line, flush=True)


@pytest.fixture(scope="session")
def control_plane() -> Iterator[ControlPlane]:
    """One without nodes, this session's own."""
    where = site(f"plane-{uuid.uuid4().hex[:8]}")
    _sites.append(where)
    try:
        yield start_control_plane(where)
    except MissingTool as error:
        pytest.skip(str(error))
    finally:
        end_all(where)
        erase(where.home)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """One that runs pods: the named one, a developer's, or one started for the tests."""
    named = os.environ.get("KUBECONFIG_UNDER_TEST")
    if named:
        yield named_cluster(Path(named))
        return
    if reason := why_no_node():
        pytest.skip(f"{reason}; or let KUBECONFIG_UNDER_TEST name a cluster")
    where = site(DEFAULT_NAME)
    _sites.append(where)
    try:
        with used(where, _say) as there:
            yield there
    except (CannotRunNode, MissingTool) as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def trainer_image(cluster: Cluster) -> str:
    """Name of the trainer image that the cluster's nodes have: built from docker/, or the named one."""
    return _image(cluster, "trainer")


@pytest.fixture(scope="session")
def controller_image(cluster: Cluster) -> str:
    """Name of the controller image that the cluster's nodes have."""
    return _image(cluster, "controller")


def _image(cluster: Cluster, kind: str) -> str:
    if cluster.site is None:
        variable = f"{kind.upper()}_IMAGE_UNDER_TEST"
        if not os.environ.get(variable):
            pytest.skip(f"let {variable} name an image that the cluster of KUBECONFIG_UNDER_TEST can pull")
        return os.environ[variable]
    name = build_image(Machine.running(cluster.site), f"{kind}.Dockerfile", image_name(kind)).name
    share_image(cluster.site, name)
    return name


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[str]:
    """A namespace of `cluster` that goes with the test, ready for pods."""
    name = f"test-{uuid.uuid4().hex[:8]}"
    cluster.kubectl.run("create", "namespace", name)
    cluster.kubectl.run("wait", f"-n={name}", "--for=create", "serviceaccount/default", "--timeout=300s")
    yield name
    cluster.kubectl.run("delete", "namespace", name, "--wait=false")


@pytest.fixture
def short_lived() -> Iterator[Site]:
    """A place for a cluster of a test's own, cleared whatever the test leaves there."""
    where = site_apart("brief")
    _sites.append(where)
    yield where
    down(where, purge=True)


@pytest.fixture(scope="session")
def gathered() -> list[Site]:
    """The places whose logs are gathered where a test fails; who makes a cluster of his own adds it."""
    return _sites


def gather(target: Path) -> None:
    """Copy every cluster's logs, those of a start that failed too, and what its API says of events."""
    for where in _sites:
        for logs in (where.logs, where.home / "failed-logs"):
            if logs.exists():
                shutil.copytree(logs, target / where.name / logs.name, dirs_exist_ok=True)
        if where.kubeconfig.exists():
            (target / where.name).mkdir(parents=True, exist_ok=True)
            for name, words in {
                "events": ("get", "events", "-A", "--sort-by=.lastTimestamp"),
                "pods": ("describe", "pods", "-A"),
            }.items():
                (target / where.name / f"{name}.txt").write_text(_asked(where, *words))


def _asked(where: Site, *words: str) -> str:
    """What kubectl says, or why nobody can ask: a test that failed must not end those after it."""
    try:
        done = cluster_at(where).kubectl.attempt(*words, "--request-timeout=5s")
    except ClusterError as error:
        return f"{error}\n"
    return done.stdout + done.stderr
