"""What Prometheus reads, read as it does."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from holdfast_controller.metrics import Metrics


def sample(metrics: Metrics, series: str, labels: dict[str, str] | None = None) -> float | None:
    """The value of a series with exactly these labels, None where there is none."""
    text = b"".join(metrics.text()).decode()
    for family in text_string_to_metric_families(text):
        for found in family.samples:
            if (found.name, found.labels) == (series, labels or {}):
                return float(found.value)
    return None
