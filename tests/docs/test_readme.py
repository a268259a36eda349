"""What the documents tell people to type exists: targets, commands, options, files, jobs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from torch.utils.data import default_collate

from holdfast_controller.jobs import TrainingJob
from holdfast_trainer.config import load
from holdfast_trainer.tune.workload import load_workload

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    *(
        ROOT / name
        for name in (
            "README.md",
            "CONTRIBUTING.md",
            "docker/README.md",
            "k8s/README.md",
            "trainer/CHECKPOINTS.md",
        )
    ),
    *sorted(ROOT.glob("docs/*.md")),
]
JOBS = [
    path
    for path in sorted(ROOT.glob("k8s/examples/**/*.yaml"))
    if "kind: TrainingJob" in path.read_text(encoding="utf-8")
]


def commands(document: Path, program: str) -> list[str]:
    """Lines of the shell blocks that start with `program`, comments cut off."""
    blocks = re.findall(r"```sh\n(.*?)```", document.read_text(), flags=re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [line.split("   #")[0].strip() for line in lines if line.startswith(program + " ")]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_target_exists(document: Path) -> None:
    targets = set(re.findall(r"^([a-z%-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = set(re.findall(r"(?:`|^)make ([a-z]+(?:-[a-z]+)*)", document.read_text(), flags=re.MULTILINE))
    assert named or document.name != "README.md"
    for target in named:
        benchmark = target.removeprefix("bench-")
        assert target in targets or (ROOT / "bench" / f"{benchmark}.py").is_file(), target


def test_the_configuration_that_is_made_of_an_example_is_one(tmp_path: Path) -> None:
    """The commands for `gpt.yaml` named a file that nothing had made."""
    (command,) = re.findall(r"^python -c .* > gpt\.yaml$", (ROOT / "README.md").read_text(), re.MULTILINE)
    command = command.replace("python", sys.executable, 1).replace("> gpt.yaml", f"> {tmp_path}/gpt.yaml")
    subprocess.run(command, shell=True, check=True, cwd=ROOT)
    assert load(tmp_path / "gpt.yaml").train.steps == 300


def test_the_model_of_ones_own_that_is_shown_can_be_measured(tmp_path: Path) -> None:
    (shown,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/training.md").read_text(), re.DOTALL)
    (tmp_path / "mine.py").write_text(shown)
    workload = load_workload(f"{tmp_path}/mine.py:make")
    batch = default_collate([workload.dataset[i] for i in range(workload.settings.batch)])
    assert workload.loss(workload.model(), batch).isfinite()


def anchors(document: Path) -> set[str]:
    """What GitHub lets a link name in a page: its headings in lower case, of other signs than letters,
    digits, - and _ nothing left, blanks as hyphens. What looks like one within a code block is none."""
    text = re.sub(r"^ *```.*?^ *```", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ +(.+?) *$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_somewhere(document: Path) -> None:
    for link in re.findall(r"\]\(([^)]+)\)", document.read_text()):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        page = document.parent / path if path else document
        assert page.exists(), link
        assert not anchor or anchor in anchors(page), f"{link}: no such heading"


@pytest.mark.parametrize(
    ("program", "how"),
    [
        ("holdfast", [str(Path(sys.executable).parent / "holdfast")]),
        ("python -m holdfast_trainer", [sys.executable, "-m", "holdfast_trainer"]),
    ],
    ids=["holdfast", "trainer"],
)
def test_every_command_and_option_exists(program: str, how: list[str]) -> None:
    spoken = [line for document in DOCUMENTS for line in commands(document, program)]
    assert len(spoken) > 5
    helps: dict[str, str] = {}
    for line in spoken:
        name, *words = re.sub(r'"[^"]*"', '""', line.removeprefix(program)).split()
        if name not in helps:
            shown = subprocess.run([*how, name, "--help"], capture_output=True, text=True, check=False)
            assert shown.returncode == 0, f"{program} {name}: {shown.stderr}"
            helps[name] = shown.stdout
        for option in re.findall(r"(?<= )--?[a-z][a-z-]*", f" {' '.join(words)}"):
            assert re.search(rf"(^|\W){option}\b", helps[name]), f"{line}: no {option}"


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.name)
def test_every_example_job_is_valid(path: Path) -> None:
    job = TrainingJob.model_validate(yaml.safe_load(path.read_text()))
    if job.spec.command[1:] == ["-m", "holdfast_trainer", "train"]:
        from holdfast_trainer.config import Config, from_mapping

        config = from_mapping(Config, job.spec.config, path)
        assert config.train.global_batch % job.spec.world_size == 0
