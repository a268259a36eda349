"""docker-bake.hcl, as buildx reads it: each target exists, and is built from what its Dockerfile declares."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.build import build, program
from tests.cluster.errors import MissingTool
from tests.cluster.tools import BUILDX
from tests.docker.bake import ROOT, bake

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(2400)]

VARIANTS = ("trainer", "trainer-compile", "trainer-devel", "controller")


@pytest.fixture(scope="module", autouse=True)
def buildx() -> None:
    """Built once, which takes a minute or two."""
    try:
        build(BUILDX)
    except MissingTool as error:
        pytest.skip(str(error))


def test_bake_alone_builds_the_two_images_that_the_chart_and_the_jobs_name(tmp_path: Path) -> None:
    described = bake(tmp_path)
    assert set(described) == {"trainer", "controller"}
    assert described["trainer"]["tags"] == ["holdfast-trainer:0.1"]
    assert described["controller"]["tags"] == ["holdfast-controller:0.1"]


@pytest.mark.parametrize("name", VARIANTS)
def test_a_target_names_a_stage_and_arguments_that_its_dockerfile_has(tmp_path: Path, name: str) -> None:
    """A misspelt argument would be ignored, and the image built without what it asks for."""
    given = {"TRAINER_BASE": "one", "DEVEL_BASE": "two", "CONTROLLER_BASE": "three"}
    target = bake(tmp_path, name, given=given)[name]
    text = (ROOT / target["dockerfile"]).read_text()
    assert target["target"] in re.findall(r"^FROM .* AS (\S+)$", text, re.MULTILINE)
    assert set(target["args"]) <= set(re.findall(r"^ARG (\w+)", text, re.MULTILINE))
    assert target["context"] == "."


@pytest.mark.parametrize("name", VARIANTS)
def test_every_image_tells_what_is_in_it_and_how_it_was_built(tmp_path: Path, name: str) -> None:
    target = bake(tmp_path, name, given={"REVISION": "0ee558d"})[name]
    assert {"type": "sbom"} in target["attest"]
    assert {"type": "provenance", "mode": "max"} in target["attest"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert target["args"]["VERSION"] == project["version"]
    assert target["args"]["REVISION"] == "0ee558d"


def test_a_docker_that_keeps_no_sbom_builds_without_it_as_its_page_says(tmp_path: Path) -> None:
    words = "--sbom=false --provenance=false"
    assert f'make images ARGS="{words}"' in (ROOT / "docker/README.md").read_text()
    for target in bake(tmp_path, *words.split()).values():
        assert all(one["disabled"] for one in target["attest"])


def test_variables_choose_registry_tag_and_bases(tmp_path: Path) -> None:
    given = {
        "REGISTRY": "registry.example.org/team/",
        "TAG": "7",
        "TRAINER_BASE": "docker.io/library/debian:12-slim",
        "DEVEL_BASE": "docker.io/library/debian:12",
    }
    described = bake(tmp_path, "all", given=given)
    arguments: dict[str, dict[str, Any]] = {name: target["args"] for name, target in described.items()}
    assert {name: target["tags"] for name, target in described.items()} == {
        "trainer": ["registry.example.org/team/holdfast-trainer:7"],
        "trainer-compile": ["registry.example.org/team/holdfast-trainer:7-compile"],
        "trainer-devel": ["registry.example.org/team/holdfast-trainer:7-devel"],
        "controller": ["registry.example.org/team/holdfast-controller:7"],
    }
    for name in ("trainer", "trainer-compile", "trainer-devel"):
        assert arguments[name]["BASE_IMAGE"] == "docker.io/library/debian:12-slim"
    assert arguments["trainer-compile"]["COMPILER"] == "1"
    assert arguments["trainer-devel"]["DEVEL_IMAGE"] == "docker.io/library/debian:12"
    assert "BASE_IMAGE" not in arguments["controller"], "left out, the Dockerfile's own base counts"


def test_make_images_builds_what_it_is_told_of_this_commit(tmp_path: Path) -> None:
    docker = tmp_path / "bin" / "docker"
    docker.parent.mkdir()
    docker.write_text(f'#!/bin/sh\nshift\nexec {program("buildx")} "$@"\n')
    docker.chmod(0o755)
    path = f"{docker.parent}:{os.environ['PATH']}"
    done = make("images", "ARGS=--print controller", PATH=path, HOME=str(tmp_path))
    (told,) = json.loads(done.stdout)["target"].values()
    assert told["tags"] == ["holdfast-controller:0.1"]
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert told["args"]["REVISION"] == (head.stdout.strip() or "unknown")


def test_without_buildx_make_images_says_what_is_missing(tmp_path: Path) -> None:
    docker = tmp_path / "docker"
    docker.write_text('#!/bin/sh\necho "docker: unknown command" >&2\nexit 1\n')
    docker.chmod(0o755)
    done = make("images", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.returncode == 2
    assert "holdfast: images are built by docker buildx, which is not here" in done.stderr
    assert "unknown command" not in done.stderr


def make(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = ["make", "--no-print-directory", *words]
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
