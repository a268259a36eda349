"""What a client asks of REST, and how it is refused."""

from __future__ import annotations

from typing import Any

import httpx
from served import job_yaml

YAML = {"Content-Type": "application/yaml"}
JSON = {"Content-Type": "application/json"}
JOBS = "/v1/namespaces/default/jobs"


def submit(http: httpx.Client, name: str = "gpt-small", **more: Any) -> httpx.Response:
    return http.post(JOBS, content=job_yaml(name), headers=YAML, **more)


def problem(answer: httpx.Response, status: int, slug: str) -> str:
    """The detail of a problem document, after a check of its form."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    body = answer.json()
    assert body["status"] == status
    assert body["type"] == f"urn:holdfast:problem:{slug}"
    assert body["instance"] == answer.request.url.path
    assert body["title"]
    return str(body["detail"])
