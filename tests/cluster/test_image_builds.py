"""The images of docker/, built by BuildKit into the node: what they hold, and what a change builds again."""

from __future__ import annotations

import platform
import tomllib
from pathlib import Path
from typing import Any

import pytest
from tests.cluster import base_image
from tests.cluster.buildkit import ROOT, Built, build_image, copy_context, image_name, lint
from tests.cluster.cluster import Cluster
from tests.cluster.errors import BuildFailed
from tests.cluster.images import ImageStore
from tests.cluster.machine import Machine
from tests.cluster.test_node import pod
from tests.docker.bake import bake
from waiting import Deadline

from holdfast_trainer import cpuinfo
from holdfast_trainer.native import LEVELS, file_name, level

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(2400)]


@pytest.fixture(scope="module")
def machine(cluster: Cluster) -> Machine:
    if cluster.site is None:
        pytest.skip("images are built on a cluster that is started here, not on KUBECONFIG_UNDER_TEST's")
    return Machine.running(cluster.site)


@pytest.fixture(scope="module")
def baked(machine: Machine, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Built]:
    """Trainer and controller, built with what the bake file gives them."""
    described = bake(tmp_path_factory.mktemp("buildx"), given={"REVISION": "0ee558d"})
    return {
        kind: build_image(
            machine,
            Path(target["dockerfile"]).name,
            f"{image_name(kind)}-baked",
            arguments=target["args"],
            target=target["target"],
        )
        for kind, target in described.items()
    }


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    return copy_context(tmp_path)


def dependency_layers(built: Built) -> set[str]:
    """The steps that install dependencies and were not run again."""
    return {step for step in built.cached if step.startswith("[dependencies")}


def restricted(name: str, image: str, **container: Any) -> dict[str, Any]:
    """A pod as the restricted Pod Security Standard wants it, with nothing to write to but /tmp."""
    made = pod(name, image, "")
    main = made["spec"]["containers"][0]
    del main["command"]
    main.update(
        container,
        securityContext={
            "readOnlyRootFilesystem": True,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
        volumeMounts=[{"name": "tmp", "mountPath": "/tmp"}],
    )
    made["spec"].update(
        automountServiceAccountToken=False,
        securityContext={"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        volumes=[{"name": "tmp", "emptyDir": {}}],
    )
    return made


def said_by(cluster: Cluster, namespace: str, name: str) -> str:
    """Log of a pod that must end well, however busy the machine is."""
    ended = ("wait", f"-n={namespace}", f"pod/{name}", "--for=jsonpath={.status.phase}=Succeeded")
    done = cluster.kubectl.attempt(*ended, "--timeout=300s")
    log = cluster.kubectl.attempt("logs", f"-n={namespace}", name).stdout
    assert done.returncode == 0, f"{done.stderr}{log}"
    return log


def test_the_controller_image_is_small_and_holds_all_that_the_controller_imports(
    cluster: Cluster, machine: Machine, baked: dict[str, Built], namespace: str
) -> None:
    built = baked["controller"]
    assert ImageStore(machine.site, machine.enter).size(built.digest) < 250 * 1_000_000
    look = (
        "import importlib, pkgutil, holdfast_controller as package\n"
        "for module in pkgutil.walk_packages(package.__path__, 'holdfast_controller.'):\n"
        "    importlib.import_module(module.name)\n"
        "from kubernetes.aio.client import ApiClient\n"
        "import torch\n"
    )
    script = 'id -u; holdfast --help | head -n 1; touch /made; python -c "$LOOK"; true'
    doc = restricted(
        "look",
        built.name,
        command=["sh", "-c", f"exec 2>&1; {script}"],
        env=[{"name": "LOOK", "value": look}],
    )
    cluster.kubectl.apply(doc, namespace=namespace)
    said = said_by(cluster, namespace, "look")
    assert "65532" in said.splitlines()
    assert "\nUsage: holdfast " in f"\n{said}"
    assert "/made': Read-only file system" in said
    missing = said.splitlines()[-1]
    assert missing == "ModuleNotFoundError: No module named 'torch'", "the one thing that is not there"


def test_in_the_trainer_image_torchrun_is_the_first_process_and_root_is_nobody(
    cluster: Cluster, baked: dict[str, Built], namespace: str
) -> None:
    script = "tr '\\0' ' ' </proc/1/cmdline; echo; id -u; touch /made 2>&1; touch /tmp/made && echo written"
    words = ["--standalone", "--nproc-per-node=1", "--no-python", "sh", "-c", script]
    cluster.kubectl.apply(restricted("rank", baked["trainer"].name, args=words), namespace=namespace)
    said = said_by(cluster, namespace, "rank").splitlines()
    # What the first process says of itself comes through another pipe, at any place.
    assert any(line.startswith("python -m torch.distributed.run --standalone ") for line in said)
    assert "65532" in said
    assert any(line.endswith("Read-only file system") for line in said)
    assert "written" in said


def test_a_rank_in_the_trainer_image_has_the_malloc_that_it_brings(
    cluster: Cluster, baked: dict[str, Built], namespace: str
) -> None:
    command = ["python", "-m", "holdfast_trainer.torchrun", "--standalone", "--nproc-per-node=1"]
    command += ["--", "--tee", "--", "grep", "-om1", "libtcmalloc_minimal.so", "/proc/self/maps"]
    cluster.kubectl.apply(restricted("malloc", baked["trainer"].name, command=command), namespace=namespace)
    assert "libtcmalloc_minimal.so" in said_by(cluster, namespace, "malloc").split()


def test_in_the_trainer_image_layers_are_fused_without_a_compiler(
    cluster: Cluster, baked: dict[str, Built], namespace: str
) -> None:
    look = (
        "import shutil, torch\n"
        "from holdfast_trainer import fused_layers, native\n"
        "lacking = fused_layers.choose(torch.device('cpu'), torch.float32)\n"
        "print([lacking, shutil.which('g++'), sorted(path.name for path in native.SHIPPED.iterdir())])\n"
    )
    doc = restricted("layers", baked["trainer"].name, command=["python", "-c", look])
    cluster.kubectl.apply(doc, namespace=namespace)
    shipped = sorted(map(file_name, LEVELS))
    here = level(cpuinfo.read(), platform.machine())
    lacking = "" if here else "it is for CPUs of x86 with AVX2 or AVX-512, in bf16 or fp32"
    assert said_by(cluster, namespace, "layers").splitlines()[-1] == str([lacking, None, shipped])


@pytest.mark.parametrize("kind", ["controller", "trainer"])
def test_an_image_says_who_it_is_and_runs_as_nobody(
    machine: Machine, baked: dict[str, Built], kind: str
) -> None:
    config = ImageStore(machine.site, machine.enter).config(baked[kind].digest)
    labels = config["Labels"]
    assert config["User"] == "65532:65532"
    assert config["Entrypoint"][:2] == ["python", "-m"]
    assert labels["org.opencontainers.image.title"] == f"Holdfast {kind}"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert labels["org.opencontainers.image.version"] == project["version"]
    assert labels["org.opencontainers.image.revision"] == "0ee558d"


@pytest.mark.parametrize(
    ("dockerfile", "target"),
    [
        ("controller.Dockerfile", "runtime"),
        ("trainer.Dockerfile", "runtime"),
        ("trainer.Dockerfile", "devel"),
    ],
)
def test_buildkits_own_checks_find_nothing(machine: Machine, dockerfile: str, target: str) -> None:
    given = {"DEVEL_IMAGE": base_image.NAME} if target == "devel" else {}
    assert lint(machine, dockerfile, arguments=given, target=target) == ""


def test_a_dockerfile_with_a_bad_habit_is_told(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "loose.Dockerfile").write_text(
        "ARG BASE_IMAGE\nFROM ${BASE_IMAGE} AS runtime\nCMD echo hello\n"
    )
    found = lint(machine, "loose.Dockerfile", context=tmp_path, directory=tmp_path)
    assert "JSONArgsRecommended" in found


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


def test_an_image_whose_name_has_gone_to_a_newer_one_takes_no_room(
    machine: Machine, tmp_path: Path, deadline: Deadline
) -> None:
    store, name = ImageStore(machine.site, machine.enter), "docker.io/holdfast/rewritten:1"

    def rewritten(text: str) -> str:
        recipe = f"ARG BASE_IMAGE\nFROM ${{BASE_IMAGE}} AS runtime\nRUN echo {text} >/text\n"
        (tmp_path / "rewritten.Dockerfile").write_text(recipe)
        return build_image(machine, "rewritten.Dockerfile", name, context=tmp_path, directory=tmp_path).digest

    def kept(digest: str) -> list[str]:
        return [name for name, there in store.digests().items() if there == digest]

    old = rewritten("old")
    deadline.wait_until(lambda: len(kept(old)) == 2, "the CRI plugin to know the image")
    new = rewritten("new")
    deadline.wait_until(lambda: len(kept(new)) == 2, "the CRI plugin to know the newer image")
    assert len(kept(old)) == 1, "it stays under its second name"
    others = {name for name, digest in store.digests().items() if not name.startswith("sha256:")}
    store.forget_replaced()
    assert kept(old) == []
    assert len(kept(new)) == 2
    assert others <= store.digests().keys(), "what has its name stays"
