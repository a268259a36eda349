"""The images of docker/, built by BuildKit into the node: what they hold, and what a change builds again."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cluster.buildkit import Built, build_image, copy_context, image_name
from tests.cluster.cluster import Cluster
from tests.cluster.errors import BuildFailed
from tests.cluster.images import ImageStore
from tests.cluster.machine import Machine
from tests.cluster.test_node import finish, pod

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(2400)]

MIB = 1 << 20


@pytest.fixture(scope="module")
def machine(cluster: Cluster) -> Machine:
    if cluster.site is None:
        pytest.skip("images are built on a cluster that is started here, not on KUBECONFIG_UNDER_TEST's")
    return Machine.running(cluster.site)


@pytest.fixture(scope="module")
def controller(machine: Machine) -> Built:
    return build_image(machine, "controller.Dockerfile", image_name("controller"))


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    return copy_context(tmp_path)


def dependency_layers(built: Built) -> set[str]:
    """The steps that install dependencies and were not run again."""
    return {step for step in built.cached if step.startswith("[dependencies")}


def test_the_controller_image_is_small_and_has_no_torch(
    cluster: Cluster, machine: Machine, controller: Built, namespace: str
) -> None:
    assert ImageStore(machine.site, machine.enter).size(controller.digest) < 250 * MIB
    script = "python -c 'import torch' 2>&1; python -m holdfast_controller --help >/dev/null && id -u"
    cluster.kubectl.apply(pod("look", controller.name, script), namespace=namespace)
    said = finish(cluster, namespace, "look")
    assert "No module named 'torch'" in said
    assert said.splitlines()[-1] == "65532"


@pytest.mark.parametrize("kind", ["controller", "trainer"])
def test_a_source_edit_installs_no_dependency_again(machine: Machine, checkout: Path, kind: str) -> None:
    dockerfile, name = f"{kind}.Dockerfile", f"{image_name(kind)}-edited"
    build_image(machine, dockerfile, name, context=checkout)
    edited = checkout / "trainer" / "holdfast_trainer" / "contract.py"
    edited.write_text(edited.read_text() + f"\n# {checkout}\n")
    again = build_image(machine, dockerfile, name, context=checkout)
    print(f"{kind}: built again in {again.seconds:.1f} s after an edit")
    assert dependency_layers(again)
    assert any(step.startswith("[uv") or "requirements" in step for step in again.cached)


def test_a_dockerfile_that_does_not_build_says_why(machine: Machine, checkout: Path) -> None:
    (checkout / "docker" / "broken.Dockerfile").write_text(
        "ARG BASE_IMAGE\nFROM ${BASE_IMAGE} AS runtime\nRUN echo no ink left && exit 3\n"
    )
    with pytest.raises(BuildFailed, match=r"broken\.Dockerfile does not build:[\s\S]*no ink left"):
        build_image(machine, "broken.Dockerfile", "docker.io/holdfast/broken:1", context=checkout)
