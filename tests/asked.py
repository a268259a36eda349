"""Rank 0, asked as the controller and Prometheus ask it."""

from __future__ import annotations

import urllib.request

from gangs import Gang
from prometheus_client.parser import text_string_to_metric_families
from waiting import wait_until


def get(address: str, path: str) -> str:
    with urllib.request.urlopen(f"http://{address}{path}", timeout=300) as answer:
        return str(answer.read().decode())


def series(text: str) -> dict[str, float]:
    """Every sample, as `name` or `name{label=value}`."""
    return {
        sample.name + "".join(f"{{{k}={v}}}" for k, v in sample.labels.items()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def address_of(gang: Gang) -> str:
    path = gang.history.run.progress_address(gang.attempt)
    return wait_until(lambda: path.exists() and path.read_text(), "rank 0 to serve")
