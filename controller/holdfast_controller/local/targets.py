"""Where Prometheus finds rank 0 of every running attempt: a file for its `file_sd_configs`.

Trainers on this machine take any free port, so no scrape configuration can name them. The file does, with
the labels that the chart's PodMonitor gives a pod's series: the same queries work in both places.
Prometheus reads the file again when it changes; it is replaced in one piece.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import structlog

from .active import ActiveAttempt

log = structlog.get_logger(__name__)


def targets(attempts: Iterable[ActiveAttempt]) -> list[dict[str, Any]]:
    """A target for each attempt that runs and listens, as Prometheus wants them."""
    found = []
    for attempt in attempts:
        address = None if attempt.gone else attempt.address
        if address is not None:
            namespace, _, name = attempt.key.partition("/")
            labels = {
                "namespace": namespace,
                "holdfast_dev_job": name,
                "holdfast_dev_attempt": str(attempt.launch.attempt),
            }
            found.append({"targets": [address], "labels": labels})
    return sorted(found, key=lambda one: (one["labels"]["namespace"], one["labels"]["holdfast_dev_job"]))


class TargetsFile:
    """In the data directory, kept up to date by `write`; written when something changed, and at first."""

    def __init__(self, data: Path) -> None:
        self._path = data / "prometheus-targets.json"
        self._written: str | None = None
        self._told = False

    def write(self, attempts: Iterable[ActiveAttempt]) -> None:
        """What cannot be written is tried again the next time, and told once: training does not need it."""
        text = json.dumps(targets(attempts), indent=1) + "\n"
        if text == self._written:
            return
        temporary = self._path.with_name(f".{self._path.name}.new")
        try:
            temporary.write_text(text, encoding="utf-8")
            os.replace(temporary, self._path)
        except OSError as error:
            if not self._told:
                log.warning("Prometheus will not find the jobs", file=str(self._path), error=str(error))
            self._told = True
        else:
            self._written, self._told = text, False
