"""What the cluster is built from is pinned, built once, and told apart by all that decides its bytes."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from processes import Processes
from tests.cluster.build import asset, build, main
from tests.cluster.errors import BuildFailed, ClusterError, MissingTool, NoRoom
from tests.cluster.fixtures import gather
from tests.cluster.oci import Image, write_image
from tests.cluster.room import GB, need_room
from tests.cluster.site import cache_directory, site, site_apart
from tests.cluster.system import install, wanted_go
from tests.cluster.tools import KUBERNETES, MODULES, SMALL, Module

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.name)
def test_every_module_is_pinned_and_summed(module: Module) -> None:
    assert module.version or not module.main
    sums = (module.directory / "go.sum").read_text()
    assert not module.main or f"{module.main} {module.version} h1:" in sums


def test_all_of_kubernetes_is_of_one_release() -> None:
    """A staging module of another release would build, and misbehave."""
    minor = KUBERNETES.version.removeprefix("v1.")
    replaced = re.findall(r"=> (k8s\.io/\S+) (v\S+)", (KUBERNETES.directory / "go.mod").read_text())
    assert len(replaced) > 25
    assert {version for _, version in replaced} == {f"v0.{minor}"}


def test_the_key_follows_flags_and_sources(tmp_path: Path) -> None:
    other_stamp = replace(SMALL, stamp="main.version=1")
    assert SMALL.key == replace(SMALL).key
    assert SMALL.key != other_stamp.key
    assert len({module.key for module in MODULES}) == len(MODULES)


def test_the_cache_is_where_the_user_wants_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("HOLDFAST_CACHE", raising=False)
    assert cache_directory() == tmp_path / "xdg" / "holdfast"
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "mine"))
    assert cache_directory() == tmp_path / "mine"


def test_a_disk_that_is_too_full_is_told_before_anything_is_built(tmp_path: Path) -> None:
    need_room(tmp_path / "not" / "there" / "yet", 1, "a note")
    with pytest.raises(
        NoRoom, match=r"an image takes 1000000 GB and the disk of \S*/images has \d+\.\d GB free: make"
    ):
        need_room(tmp_path / "images", 1_000_000 * GB, "an image")


def test_two_clusters_do_not_meet() -> None:
    dev, other = site("dev"), site("other")
    assert dev.link != other.link
    assert not dev.network.overlaps(other.network)
    for network in (dev.pods, dev.cable, dev.services):
        assert network.subnet_of(dev.network)
    assert not dev.pods.overlaps(dev.services)
    assert not dev.pods.overlaps(dev.cable)


def test_a_cluster_for_a_while_keeps_off_the_networks_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path))
    networks = {one.network: one for one in (site(f"other-{number}") for number in range(2000))}
    assert len(networks) == 50
    free, *taken = (one for network, one in networks.items() if network != site("dev").network)
    for one in taken:
        one.state.mkdir(parents=True)
    assert site_apart("brief").network == free.network


def test_a_name_that_cannot_be_one_is_refused() -> None:
    with pytest.raises(
        ClusterError, match=r"'\.\./etc' is no name for a cluster: at most 20 lower-case letters"
    ):
        site("../etc")


def test_envtests_programs_are_taken_where_it_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("KUBEBUILDER_ASSETS", raising=False)
    assert asset("etcd") is None
    (tmp_path / "etcd").touch()
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(tmp_path))
    assert asset("etcd") == tmp_path / "etcd"
    assert asset("kubelet") is None
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(tmp_path / "gone"))
    with pytest.raises(MissingTool, match=r"KUBEBUILDER_ASSETS=.*/gone is no directory; unset it, or run"):
        asset("etcd")


def test_an_unknown_program_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kube-apiservr"]) == 2
    assert "nothing builds 'kube-apiservr'; there are: pause," in capsys.readouterr().err


def test_a_missing_package_is_named_where_it_cannot_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(MissingTool, match=r"only root may install them; .*: apt-get install chalk"):
        install({"/no/such/chalk": "chalk"})


def test_the_same_files_make_the_same_image(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("one")
    image = Image("docker.io/holdfast/one:1", files={"bin/program": program}, links={"bin/sh": "program"})
    first = write_image(image, tmp_path / "first.tar")
    program.touch()
    assert write_image(image, tmp_path / "second.tar") == first
    assert (tmp_path / "first.tar").read_bytes() == (tmp_path / "second.tar").read_bytes()
    program.write_text("two")
    assert write_image(image, tmp_path / "third.tar") != first


@pytest.mark.cluster
@pytest.mark.timeout(1800)  # Go itself may have to come first
def test_two_builders_build_once(
    tmp_path: Path, processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path))
    command = [sys.executable, "-m", "tests.cluster.build", "pause"]
    both = [processes.start(command, stdout=subprocess.PIPE, cwd=ROOT) for _ in range(2)]
    outputs = [one.communicate()[0] for one in both]
    assert [one.returncode for one in both] == [0, 0], outputs
    assert sum("building pause" in output for output in outputs) == 1
    assert (SMALL.built / "pause").exists()


@pytest.mark.cluster
@pytest.mark.timeout(1800)
def test_the_compilers_own_words_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path))
    broken = Module("small", {"gone": "./gone"})
    with pytest.raises(BuildFailed, match=r"go build of small failed\n.*gone: directory not found"):
        build(broken)
    assert not broken.built.exists()
    assert wanted_go() >= (1, 26)


def test_a_failed_test_leaves_what_there_is_where_nothing_can_ask_the_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user's cluster, say, and no compiler for a kubectl: the run of tests ended in the middle."""
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "cache"))

    def no_compiler() -> str:
        raise MissingTool("no Go: install it yourself")

    monkeypatch.setattr("tests.cluster.build.go", no_compiler)
    where = site("nobodys")
    where.kubeconfig.parent.mkdir(parents=True)
    where.kubeconfig.touch()
    monkeypatch.setattr("tests.cluster.fixtures._sites", [where])
    gather(tmp_path / "kept")
    assert "no Go" in (tmp_path / "kept/nobodys/events.txt").read_text()
