"""All that can be checked without running the code: one line a check, every failure shown.

Checks run side by side, as many as there are cores; results come in the order of the list.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent


@dataclass(frozen=True)
class Check:
    """A command that exits 0 where all is well."""

    name: str
    command: tuple[str, ...]
    missing: str = ""
    """Why it cannot be made here, with the remedy; then nothing is run."""


@dataclass(frozen=True)
class Result:
    check: Check
    code: int
    output: str
    seconds: float


def checks(root: Path = ROOT) -> list[Check]:
    """What `make verify` checks."""
    dockerfiles = sorted(str(path.relative_to(root)) for path in root.glob("docker/*.Dockerfile"))
    helm, promtool = find_helm(), shutil.which("promtool")
    no_helm = "" if helm else "no helm yet; `make test` builds it as root"
    no_promtool = "" if promtool else "no promtool yet; `make test` installs it as root"
    rules, cases = "helm/holdfast/alerts/holdfast.yaml", "tests/monitoring/alerts.test.yaml"
    return [
        Check("types (mypy --strict)", ("mypy",)),
        Check("style (ruff check)", ("ruff", "check", ".")),
        Check("layout (ruff format)", ("ruff", "format", "--check", ".")),
        Check("imports point one way (import-linter)", ("lint-imports", "--no-cache")),
        Check("lock file", ("python", "scripts/lock.py", "--check")),
        Check("generated files", ("python", "scripts/generate.py", "--check")),
        Check("Dockerfiles (hadolint)", ("hadolint", "--config", "docker/hadolint.yaml", *dockerfiles)),
        Check("chart (helm lint)", (str(helm), "lint", "--strict", "helm/holdfast"), no_helm),
        Check("alerts (promtool check rules)", (str(promtool), "check", "rules", rules), no_promtool),
        Check("alerts (promtool test rules)", (str(promtool), "test", "rules", cases), no_promtool),
    ]


def find_helm() -> Path | None:
    """Where one is at hand; `make test` builds one, which takes minutes, and lints too."""
    from tests.cluster.tools import HELM

    built = HELM.built / "helm"
    return built if built.exists() else None


def run(check: Check) -> Result:
    """Run one check; a tool that is missing is a failure, not a crash."""
    began = time.monotonic()
    command = [str(BIN / check.command[0]), *check.command[1:]]
    try:
        done = subprocess.run(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        code, output = done.returncode, done.stdout
    except OSError as error:
        code, output = 127, f"{command[0]} does not start: {error.strerror}; run `make install`"
    return Result(check, code, output, time.monotonic() - began)


def verify(wanted: Sequence[Check]) -> int:
    """Run all, print a line each and the output of those that failed; the number of failures."""
    failed = []
    made = [check for check in wanted if not check.missing]
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        for result in pool.map(run, made):
            mark = "FAILED" if result.code else "ok"
            print(f"{mark:>6}  {result.check.name}  {result.seconds:.1f} s", flush=True)
            if result.code:
                failed.append(result)
    for check in wanted:
        if check.missing:
            print(f"  none  {check.name}: {check.missing}", flush=True)
    for result in failed:
        print(f"\n--- {result.check.name}: {' '.join(result.check.command)}\n{result.output.rstrip()}")
    untried = f", {len(wanted) - len(made)} not made" if len(made) < len(wanted) else ""
    print(f"\n{len(made) - len(failed)} of {len(made)} checks passed{untried}")
    return len(failed)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))  # run as a file, it finds its neighbours by tests.*
    sys.exit(1 if verify(checks()) else 0)
