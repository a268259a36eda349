"""Which labels of a job reach its pods: none that the operator did not name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_controller.policy.pod_labels import passed_on

LABELS = {
    "team": "vision",
    "tea": "green",
    "app": "database",
    "cost.example.org/center": "17",
    "cost.example.org/project": "gpt",
    "evil.cost.example.org/center": "18",
    "holdfast.dev/job": "another",
    "kueue.x-k8s.io/queue-name": "another",
    "app.kubernetes.io/part-of": "shop",
    "training.kubeflow.org/replica-index": "7",
    "job[1]": "no name of a label",
}


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        ((), ()),
        (("team",), ("team",)),
        (("te?m", "job[1]"), ("job[1]",)),
        (("tea*",), ("team", "tea")),
        (("*",), ("team", "tea", "app", "job[1]")),
        (("cost.example.org/*",), ("cost.example.org/center", "cost.example.org/project")),
        (("*.example.org/*", "*/*", "*/center"), ()),
        (("app.kubernetes.io/*", "kueue.x-k8s.io/*", "training.kubeflow.org/*"), ()),
        (("app.kubernetes.io/part-of",), ("app.kubernetes.io/part-of",)),
        (("holdfast.dev/job", "holdfast.dev/*"), ()),
    ],
)
def test_a_label_goes_through_if_its_name_was_allowed(
    patterns: tuple[str, ...], names: tuple[str, ...]
) -> None:
    assert passed_on(LABELS, patterns) == {name: LABELS[name] for name in names}


@given(st.dictionaries(st.text(min_size=1), st.text()), st.lists(st.text()))
def test_nothing_is_made_up(labels: dict[str, str], patterns: list[str]) -> None:
    assert passed_on(labels, patterns).items() <= labels.items()
    assert passed_on(labels, []) == {}
    assert passed_on(labels, list(labels)) == {
        name: value for name, value in labels.items() if not _ours(name)
    }


def _ours(name: str) -> bool:
    domain, _, _ = name.rpartition("/")
    return domain == "holdfast.dev" or domain.endswith(".holdfast.dev")
