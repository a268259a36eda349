"""A controller with the chart's rights on a real apiserver, two teams, and callers of every kind.

`team-a` has a viewer, an editor and an account without any right; `team-b` has an editor of its own, the
neighbour. Each caller's token is what `kubectl create token` gives; the forged ones are in callers.py.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from processes import Processes
from tests.chart.as_installed import Running, give, install, start
from tests.chart.conftest import Helm, helm  # noqa: F401  a fixture
from tests.cluster import training_operator
from tests.cluster.component import end_all
from tests.cluster.control_plane import ControlPlane, start_control_plane
from tests.cluster.errors import MissingTool
from tests.cluster.machine import erase
from tests.cluster.rights import wait_until_allowed
from tests.cluster.site import site
from waiting import wait_until

SYSTEM, TEAM, OTHER = "holdfast-system", "team-a", "team-b"
SPEC: dict[str, Any] = {
    "image": "registry.example.org/team/trainer:1",
    "command": ["true"],
    "resources": {"memory": "1Gi"},
}


def a_job(name: str, **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "holdfast.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": name},
        "spec": {**SPEC, **spec},
    }


@dataclass(frozen=True)
class Live:
    """The controller under test, and who may ask it."""

    plane: ControlPlane
    running: Running
    tokens: dict[str, str]
    """Of viewer, editor and stranger in team-a, of the neighbour in team-b."""

    @property
    def url(self) -> str:
        return self.running.url

    def http(self, caller: str | None, **headers: str) -> httpx.Client:
        """A client with this caller's token; None: without any."""
        given = {"Authorization": f"Bearer {self.tokens[caller]}"} if caller else {}
        return httpx.Client(
            base_url=self.url, headers={**given, **headers}, trust_env=False, verify=False, timeout=300
        )

    def submit(self, name: str, caller: str = "editor", namespace: str = TEAM, **spec: Any) -> dict[str, Any]:
        """Over REST; what was made."""
        with self.http(caller) as client:
            answer = client.post(f"/v1/namespaces/{namespace}/jobs", json=a_job(name, **spec))
        assert answer.status_code == 201, answer.text
        made: dict[str, Any] = answer.json()
        return made

    def first_attempt(self, name: str) -> dict[str, Any]:
        """The PyTorchJob of a job's first attempt, once it is there."""
        words = ("get", "pytorchjob", f"{name}-1", f"-n={TEAM}", "-o=json")

        def found() -> str:
            done = self.plane.kubectl.attempt(*words)
            return done.stdout if done.returncode == 0 else ""

        made: dict[str, Any] = json.loads(wait_until(found, f"the first attempt of {name}"))
        return made


@pytest.fixture(scope="session")
def live(helm: Helm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:  # noqa: F811
    where = site(f"security-{uuid.uuid4().hex[:8]}")
    processes, started = Processes(), []
    try:
        plane = start_control_plane(where)
        if not plane.has_controllers:
            pytest.skip("KUBEBUILDER_ASSETS has no controllers: nobody aggregates the chart's roles")
        kubectl = plane.kubectl
        kubectl.apply(training_operator.crd(kubectl))
        install(kubectl, helm, "live", SYSTEM)
        for namespace, roles in (
            (TEAM, {"viewer": "view", "editor": "edit", "stranger": None, "leaver": "edit"}),
            (OTHER, {"neighbour": "edit"}),
        ):
            kubectl.run("create", "namespace", namespace)
            give(kubectl, namespace, **roles)
        running = start(
            kubectl,
            helm,
            processes,
            tmp_path_factory.mktemp("live"),
            release="live",
            system=SYSTEM,
            namespace=TEAM,
            defaultClaim="runs",
            allowedImages=["registry.example.org/team/*"],
            limits={"replicas": 4, "memory": "64Gi", "cpu": "8"},
        )
        started.append(running)
        tokens = {name: running.token(name) for name in ("viewer", "editor", "stranger", "leaver")}
        tokens["neighbour"] = running.token("neighbour", namespace=OTHER)
        there = Live(plane, running, tokens)
        _wait_until_roles_count(there)
        yield there
    except MissingTool as error:
        pytest.skip(str(error))
    finally:
        processes.end_all()
        for one in started:
            one.process.wait()
        end_all(where)
        erase(where.home)


def _wait_until_roles_count(live: Live) -> None:
    """The cluster's own `view` and `edit` take the chart's rules in within a moment."""
    for caller, namespace, verb in (("viewer", TEAM, "watch"), ("editor", TEAM, "delete"),
                                    ("neighbour", OTHER, "delete")):  # fmt: skip
        wait_until_allowed(live.plane.kubectl, namespace, caller, verb)
