"""helm and kubeconform, built once into the cache as all of the cluster's programs are."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.cluster.build import program
from tests.cluster.errors import MissingTool
from tests.cluster.kubectl import BRIEFLY, Kubectl

CHART = Path(__file__).parents[2] / "helm/holdfast"
KUBERNETES = "1.36.3"
SYSTEM = "holdfast-system"
ELSEWHERE = (
    "monitoring.coreos.com/v1/ServiceMonitor",
    "monitoring.coreos.com/v1/PodMonitor",
    "kubeflow.org/v1/PyTorchJob",
)
"""What other charts bring."""


@dataclass(frozen=True)
class Helm:
    binary: Path

    def attempt(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self.binary), *arguments],
            env={**BRIEFLY, **os.environ},
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )

    def template(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        common = ("template", "holdfast", str(CHART), "-n", "holdfast-system", "--kube-version", KUBERNETES)
        return self.attempt(*common, *arguments)

    def render(self, *arguments: str) -> str:
        done = self.template(*arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def documents(self, *arguments: str) -> list[dict[str, Any]]:
        return [one for one in yaml.load_all(self.render(*arguments), yaml.CSafeLoader) if one]


def release(helm: Helm, kubectl: Kubectl, *arguments: str) -> str:
    """What helm says when it does something to the cluster."""
    done = helm.attempt(*arguments, "-n", SYSTEM, "--kubeconfig", str(kubectl.kubeconfig))
    assert done.returncode == 0, done.stderr
    return done.stdout


def built(name: str) -> Path:
    try:
        return program(name)
    except MissingTool as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def helm() -> Helm:
    return Helm(built("helm"))


@pytest.fixture(scope="session", params=["helm", "helm4"])
def each_helm(request: pytest.FixtureRequest) -> Helm:
    """Of the two lines that people use, one after the other."""
    return Helm(built(request.param))


@pytest.fixture(scope="session")
def kubeconform() -> Path:
    return built("kubeconform")
