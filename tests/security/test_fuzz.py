"""Requests that schemathesis makes of the API's own description, fit and unfit, against the live controller.

None may end in a 5xx, and every answer must be one that the description promises: status, type, headers,
schema. The cases follow from `FUZZ_SEED`; there are `FUZZ_CASES` of them, of which a plain run makes a part
(`make test-fuzz` makes 5,000). Behind the API are a real apiserver and the reconciler, which takes up what is
submitted.
"""

from __future__ import annotations

import json
import os
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from tests.cluster.rights import wait_until_allowed
from tests.security.conftest import SPEC, Live, a_job

CASES = int(os.environ.get("FUZZ_CASES", "260"))
SEED = int(os.environ.get("FUZZ_SEED", "20261"))
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300 + CASES)]

DOCUMENT = json.loads((Path(__file__).parents[2] / "docs" / "openapi.json").read_text())
WITHOUT_INPUT = ("/healthz", "/readyz")
OPERATIONS = [
    f"{method.upper()} {path}"
    for path, methods in DOCUMENT["paths"].items()
    for method in methods
    if path not in WITHOUT_INPUT
]
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
NAMESPACE = "team-fuzz"
JOBS = 5


@pytest.fixture(scope="module")
def token(live: Live) -> str:
    """Of one who may do everything that the API offers, in all namespaces."""
    kubectl = live.plane.kubectl
    kubectl.run("create", "namespace", NAMESPACE)
    kubectl.run("create", "serviceaccount", "fuzzer", f"-n={NAMESPACE}")
    for role in ("edit", "live-holdfast-metrics-reader"):
        account = f"--serviceaccount={NAMESPACE}:fuzzer"
        kubectl.run("create", "clusterrolebinding", f"fuzzer-{role}", f"--clusterrole={role}", account)
    wait_until_allowed(kubectl, NAMESPACE, "fuzzer", "delete")
    return live.running.token("fuzzer", namespace=NAMESPACE)


@pytest.fixture
def session(live: Live, token: str) -> Iterator[requests.Session]:
    """A client; and jobs that some of the requests will meet."""
    with requests.Session() as client:
        client.trust_env = False
        client.headers["Authorization"] = f"Bearer {token}"
        for number in range(JOBS):
            client.post(
                f"{live.url}/v1/namespaces/{NAMESPACE}/jobs", json=a_job(f"job-{number}"), timeout=300
            )
        yield client


def aim(case: Any) -> None:
    """Let many requests meet something that is there, by what they are: the same ones in every run."""
    number = zlib.crc32(repr((case.path_parameters, case.query)).encode())
    if "namespace" in case.path_parameters and number % 4:
        case.path_parameters["namespace"] = NAMESPACE
    if "name" in case.path_parameters and number % 8 > 2:
        case.path_parameters["name"] = f"job-{number % JOBS}"
    for endless in ("watch", "follow"):
        if endless in (case.query or {}):
            case.query[endless] = "false"
    body = case.body
    if number % 2 and isinstance(body, dict) and isinstance(body.get("spec"), dict):
        # What is narrower than the schema can say, so that the rest of the document comes to be looked at.
        body["spec"] = {**body["spec"], **SPEC, "checkpoint": {}, "gpus": "0", "processes": 1, "replicas": 1}
        if isinstance(body.get("metadata"), dict):
            body["metadata"].pop("namespace", None)


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["fit", "unfit"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_no_request_ends_in_an_error_of_ours(
    live: Live, session: requests.Session, operation: str, mode: GenerationMode
) -> None:
    described = schemathesis.openapi.from_dict(DOCUMENT)
    described.config.update(base_url=live.url)
    method, _, path = operation.partition(" ")
    answers: Counter[int] = Counter()

    @seed(SEED)
    @settings(
        max_examples=-(-CASES // (2 * len(OPERATIONS))),
        phases=[Phase.generate],
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=described[path][method].as_strategy(generation_mode=mode))
    def ask(case: Any) -> None:
        aim(case)
        answer = case.call(session=session, timeout=300)
        answers[answer.status_code] += 1
        case.validate_response(answer, checks=CHECKS)

    ask()
    print(f"{operation} {mode.name}: {dict(sorted(answers.items()))}")
    assert not [status for status in answers if status >= 500]
