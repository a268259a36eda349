"""The generator of the CRD: structural through and through, and loud where it has no words."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from scripts.crd import RULES, crd, definition, structural

from holdfast_controller.columns import columns, duration
from holdfast_controller.jobs import JobProgress, Phase, Status


def nodes(schema: dict[str, Any], path: str = "") -> list[tuple[str, dict[str, Any]]]:
    found = [(path, schema)]
    for name, child in schema.get("properties", {}).items():
        found += nodes(child, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            found += nodes(schema[key], f"{path}.{key}")
    return found


def test_every_node_is_structural() -> None:
    schema = definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    everything = nodes(schema)
    assert len(everything) > 70
    for path, node in everything:
        assert "type" in node or node.get("x-kubernetes-int-or-string"), path
        assert not {"$ref", "$defs", "anyOf", "allOf", "oneOf", "title", "patternProperties"} & set(node), (
            path
        )
        assert not ("properties" in node and "additionalProperties" in node), path
        assert node.get("default", "") is not None, path
    placed = sum(len(node.get("x-kubernetes-validations", ())) for _, node in everything)
    assert placed == sum(map(len, RULES.values())), "a rule stands at a path that is not there"


def test_helm_finds_nothing_to_fill_in_and_keeps_it() -> None:
    text = crd()
    assert "{{" not in text
    assert yaml.safe_load(text)["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}


def test_a_model_that_has_no_structural_form_is_not_passed_over() -> None:
    with pytest.raises(ValueError, match=r"spec\.size: anyOf has no structural form"):
        structural({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "spec.size", {})


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0s"), (59.6, "1m"), (192, "3m12s"), (7500, "2h5m"), (3600, "1h"), (273_600, "3d4h"), (-5, "0s")],
)
def test_durations_as_kubectl_writes_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@given(st.floats(0, 1e7))
def test_a_duration_has_two_units_at_most(seconds: float) -> None:
    assert sum(letter.isalpha() for letter in duration(seconds)) in (1, 2)


def test_what_is_not_known_is_left_out_of_the_columns() -> None:
    assert columns(Status(), "kubernetes") == {"engine": "kubernetes"}
    status = Status(phase=Phase.SUCCEEDED, goodput=1.0, progress=JobProgress(step=9, eta_seconds=3))
    assert columns(status, "kubernetes") == {"engine": "kubernetes", "goodput": "100.0%"}
