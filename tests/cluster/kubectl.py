"""kubectl, as the tests use it: output parsed, failures told in its own words."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cluster.errors import ClusterError
from tests.cluster.reading import get

BRIEFLY = {"GOGC": "off", "GOMEMLIMIT": "512MiB", "GOMAXPROCS": "1"}
"""Of the twentieth of a second that it lives, a third goes to collecting garbage and starting threads. It is
collected where there is much of it: ten thousand jobs, or a watch that goes on for minutes."""


@dataclass(frozen=True)
class Kubectl:
    """kubectl as one user of one cluster."""

    kubeconfig: Path
    binary: Path

    def run(self, *arguments: str, document: str | None = None, seconds: float = 330) -> str:
        """Its standard output; `document` goes to its standard input. Raises ClusterError with its words."""
        done = self.attempt(*arguments, document=document, seconds=seconds)
        if done.returncode:
            raise ClusterError(f"kubectl {' '.join(arguments)}: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout

    def attempt(
        self, *arguments: str, document: str | None = None, seconds: float = 330
    ) -> subprocess.CompletedProcess[str]:
        """As `run`, leaving a failure to the caller."""
        command = [str(self.binary), f"--kubeconfig={self.kubeconfig}", *arguments]
        try:
            return subprocess.run(
                command,
                input=document or "",
                env={**BRIEFLY, **os.environ},
                capture_output=True,
                text=True,
                check=False,
                timeout=seconds,
            )
        except subprocess.TimeoutExpired as error:
            raise ClusterError(f"kubectl {' '.join(arguments)} did not end within {seconds:g} s") from error

    def get(self, *arguments: str) -> dict[str, Any]:
        """As `kubectl get ... -o json`, parsed; see reading.py for what it takes."""
        return get(self.kubeconfig, *arguments)

    def apply(self, *documents: dict[str, Any], namespace: str = "") -> None:
        """Server-side apply, so that objects may be as large as CRDs are."""
        text = "\n---\n".join(json.dumps(document) for document in documents)
        where = ["-n", namespace] if namespace else []
        self.run("apply", "--server-side", "--force-conflicts", *where, "-f", "-", document=text)
