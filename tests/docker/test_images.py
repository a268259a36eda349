"""What holds for the images without building them: who they run as, what they are built from, versions."""

from __future__ import annotations

import json
import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCKERFILES = sorted(ROOT.glob("docker/*.Dockerfile"))


def instructions(path: Path) -> list[tuple[str, str]]:
    """(name, arguments) of each instruction, continuation lines joined, comments left out."""
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ").splitlines()
    return [(line.split()[0], line.split(maxsplit=1)[1].strip()) for line in joined if line.strip()]


def final_stage(path: Path) -> dict[str, str]:
    """The last of each instruction after the last FROM."""
    every = instructions(path)
    last = max(n for n, (name, _) in enumerate(every) if name == "FROM")
    return dict(every[last:])


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_it_runs_as_nobody_special_and_gets_signals_itself(path: Path) -> None:
    stage = final_stage(path)
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", stage["USER"]), "a number: runAsNonRoot can prove it"
    assert json.loads(stage["ENTRYPOINT"])[0] == "python", "exec form: a shell would swallow SIGTERM"
    assert "org.opencontainers.image.version" in stage["LABEL"]
    assert "org.opencontainers.image.revision" in stage["LABEL"]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_what_it_copies_is_in_the_context(path: Path) -> None:
    """.dockerignore lets in a short list; a COPY of anything else would only fail at build time."""
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for name, arguments in instructions(path):
        if name == "COPY" and "--from=" not in arguments:
            *sources, _ = [word for word in arguments.split() if not word.startswith("--")]
            for source in sources:
                above = [source, *map(str, Path(source).parents)]
                assert any(fnmatch(name, pattern) for name in above for pattern in allowed), source
                assert (ROOT / source).exists(), source


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_dependencies_are_hashed_and_nothing_fetches_a_frontend(path: Path) -> None:
    text = path.read_text()
    assert not text.startswith("# syntax=")
    for name, arguments in instructions(path):
        if name == "RUN" and re.search(r"(uv|-m) pip install", arguments):
            assert "--require-hashes" in arguments or "--no-deps" in arguments, arguments


def test_the_controller_image_is_asked_for_no_torch() -> None:
    assert "--extra trainer" not in (ROOT / "docker" / "controller.Dockerfile").read_text()
