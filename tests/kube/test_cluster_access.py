"""Which right of the cluster each route needs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from holdfast_controller.api.access import OPEN_PATHS
from holdfast_controller.kube.access import right_for
from holdfast_controller.problem import Forbidden

OPENAPI = Path(__file__).parents[2] / "docs" / "openapi.json"


@pytest.mark.parametrize(
    ("method", "path", "words"),
    [
        ("GET", "/v1/jobs", "list trainingjobs in all namespaces"),
        ("GET", "/v1/namespaces/a/jobs", "list trainingjobs in namespace a"),
        ("POST", "/v1/namespaces/a/jobs", "create trainingjobs in namespace a"),
        ("GET", "/v1/namespaces/a/jobs/", "list trainingjobs in namespace a"),
        ("GET", "/v1/namespaces/a/jobs/b", "get trainingjobs in namespace a"),
        ("HEAD", "/v1/namespaces/a/jobs/b", "get trainingjobs in namespace a"),
        ("DELETE", "/v1/namespaces/a/jobs/b", "delete trainingjobs in namespace a"),
        ("POST", "/v1/namespaces/a/jobs/b/suspend", "update trainingjobs in namespace a"),
        ("POST", "/v1/namespaces/a/jobs/b/drill", "update trainingjobs in namespace a"),
        ("GET", "/v1/namespaces/a/jobs/b/logs", "get trainingjobs in namespace a"),
        ("GET", "/metrics", "get /metrics"),
    ],
)
def test_a_route_needs_what_kubectl_would(method: str, path: str, words: str) -> None:
    right = right_for(method, path)
    assert right is not None
    assert right.words == words


@pytest.mark.parametrize(
    ("query", "verb"),
    [
        ("", "list"),
        ("watch=true", "watch"),
        ("watch=1&watch=false", "watch"),
        ("watch", "watch"),
        ("limit=5&watch=YES", "watch"),
        ("watch=false", "list"),
        ("watched=true", "list"),
    ],
)
def test_a_list_that_goes_on_needs_another_right(query: str, verb: str) -> None:
    right = right_for("GET", "/v1/namespaces/a/jobs", query)
    assert right is not None
    assert right.words == f"{verb} trainingjobs in namespace a"


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("PUT", "/v1/namespaces/a/jobs/b"),
        ("GET", "/v1/namespaces/a/jobs/b/secrets"),
        ("GET", "/v1/namespaces/a/jobs/b/logs/../../../../../jobs"),
        ("GET", "/v1/namespaces//jobs"),
        ("GET", "//v1/jobs"),
        ("GET", "/v1/namespaces/a/jobs\n"),
        ("OPTIONS", "/v1/jobs"),
        ("GET", "/"),
    ],
)
def test_what_nobody_has_decided_about_is_closed(method: str, path: str) -> None:
    with pytest.raises(Forbidden, match="there is no such route, or no rule says who may use it"):
        right_for(method, path)


def test_every_route_that_there_is_has_a_rule() -> None:
    for path, methods in json.loads(OPENAPI.read_text())["paths"].items():
        for method in methods:
            if path in OPEN_PATHS:
                continue
            where = path.replace("{namespace}", "team").replace("{name}", "gpt")
            right = right_for(method.upper(), where)
            assert right is not None, (method, path)
            if "{namespace}" in path:
                assert ("namespace", "team") in right.attributes
