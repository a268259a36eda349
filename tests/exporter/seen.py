"""One scrape, as a test asks about it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from holdfast_controller.exporter.collector import Snapshot
from holdfast_controller.exporter.series import families

PREFIX = "holdfast_gpu_"


@dataclass(frozen=True)
class Seen:
    """Samples by name (without the common prefix) and labels."""

    samples: dict[str, list[tuple[dict[str, str], float]]]
    snapshot: Snapshot | None = None

    @classmethod
    def of(cls, snapshot: Snapshot) -> Seen:
        return cls(_samples(families(snapshot)), snapshot)

    @classmethod
    def of_text(cls, text: str) -> Seen:
        return cls(_samples(text_string_to_metric_families(text)))

    def all(self, name: str, **labels: str) -> list[tuple[dict[str, str], float]]:
        return [
            (own, value)
            for own, value in self.samples.get(name, [])
            if all(own.get(key) == wanted for key, wanted in labels.items())
        ]

    def value(self, name: str, **labels: str) -> float | None:
        """The one sample that fits; None where there is none."""
        found = self.all(name, **labels)
        assert len(found) <= 1, found
        return found[0][1] if found else None

    def by(self, label: str, name: str, **labels: str) -> dict[str, float]:
        return {own[label]: value for own, value in self.all(name, **labels)}

    def message(self, source: str) -> str:
        """What people are told of a source's fault."""
        assert self.snapshot is not None
        fault = self.snapshot.sources[source]
        return fault.message if fault else ""


def _samples(found: Iterable[Metric]) -> dict[str, list[tuple[dict[str, str], float]]]:
    samples: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in found:
        for sample in family.samples:
            name = sample.name.removeprefix(PREFIX)
            samples.setdefault(name, []).append((dict(sample.labels), float(sample.value)))
    return samples
