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


@dataclass(frozen=True)
class Result:
    check: Check
    code: int
    output: str
    seconds: float


def checks(root: Path = ROOT) -> list[Check]:
    """What `make verify` checks."""
    dockerfiles = sorted(str(path.relative_to(root)) for path in root.glob("docker/*.Dockerfile"))
    helm = find_helm()
    chart = [Check("chart (helm lint)", (str(helm), "lint", "--strict", "helm/holdfast"))] if helm else []
    promtool = shutil.which("promtool")
    alerts = (
        [
            Check(
                "alerts (promtool check rules)",
                (promtool, "check", "rules", "helm/holdfast/alerts/holdfast.yaml"),
            ),
            Check(
                "alerts (promtool test rules)",
                (promtool, "test", "rules", "tests/monitoring/alerts.test.yaml"),
            ),
        ]
        if promtool
        else []
    )  # `make test` installs it
    return [
        Check("types (mypy --strict)", ("mypy",)),
        Check("style (ruff check)", ("ruff", "check", ".")),
        Check("layout (ruff format)", ("ruff", "format", "--check", ".")),
        Check("imports point one way (import-linter)", ("lint-imports", "--no-cache")),
        Check("lock file", ("python", "scripts/lock.py", "--check")),
        Check("generated files", ("python", "scripts/generate.py", "--check")),
        Check("Dockerfiles (hadolint)", ("hadolint", "--config", "docker/hadolint.yaml", *dockerfiles)),
        *chart,
        *alerts,
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
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        for result in pool.map(run, wanted):
            mark = "FAILED" if result.code else "ok"
            print(f"{mark:>6}  {result.check.name}  {result.seconds:.1f} s", flush=True)
            if result.code:
                failed.append(result)
    for result in failed:
        print(f"\n--- {result.check.name}: {' '.join(result.check.command)}\n{result.output.rstrip()}")
    print(f"\n{len(wanted) - len(failed)} of {len(wanted)} checks passed")
    return len(failed)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))  # run as a file, it finds its neighbours by tests.*
    sys.exit(1 if verify(checks()) else 0)
