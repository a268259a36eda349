"""Every route that the API describes, asked by everybody who might ask.

The description is the list: a route that is added to it and not to `NEEDS` fails here until somebody has
said whose right it takes. The apiserver is real, and so are tokens, roles and the controller.
"""

from __future__ import annotations

import http.client
import json
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from tests.cluster.rights import wait_until_allowed
from tests.security.callers import claims_of, forgeries, signed
from tests.security.conftest import OTHER, TEAM, Live, a_job
from waiting import wait_until

from holdfast_controller.problem import MEDIA_TYPE

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

DESCRIBED = json.loads((Path(__file__).parents[2] / "docs" / "openapi.json").read_text())["paths"]
ROUTES = [(method.upper(), path) for path, methods in DESCRIBED.items() for method in methods]
_JOB = "/v1/namespaces/{namespace}/jobs/{name}"

OPEN = {("GET", "/healthz"), ("GET", "/readyz")}
"""Reviewed: what answers without a token: ok or not, and which CRD is missing; nothing of any job."""
NEEDS = {
    ("GET", "/v1/jobs"): "cluster",
    ("GET", "/metrics"): "metrics",
    ("GET", "/v1/namespaces/{namespace}/jobs"): "view",
    ("POST", "/v1/namespaces/{namespace}/jobs"): "edit",
    ("GET", _JOB): "view",
    ("DELETE", _JOB): "edit",
    ("POST", f"{_JOB}/suspend"): "edit",
    ("POST", f"{_JOB}/resume"): "edit",
    ("POST", f"{_JOB}/drill"): "edit",
    ("GET", f"{_JOB}/logs"): "view",
    ("GET", f"{_JOB}/events"): "view",
    ("GET", f"{_JOB}/ledger"): "view",
    ("GET", f"{_JOB}/steps"): "view",
}
"""Reviewed: the role that a route takes. `cluster` and `metrics` take more than any role in a namespace."""
MAY = {"viewer": {"view"}, "editor": {"view", "edit"}, "stranger": set(), "neighbour": set()}
"""What each caller may do in team-a."""


def filled(path: str, name: str = "gpt", namespace: str = TEAM) -> str:
    return path.replace("{namespace}", namespace).replace("{name}", name)


@pytest.fixture(scope="module")
def jobs(live: Live) -> None:
    """One in each team."""
    for caller, namespace in (("editor", TEAM), ("neighbour", OTHER)):
        with live.http(caller) as client:
            answer = client.post(f"/v1/namespaces/{namespace}/jobs", json=a_job("gpt"))
            assert answer.status_code == 201, answer.text


def raw(live: Live, method: str, target: str, headers: list[tuple[str, str]]) -> tuple[int, str]:
    """A request with its target and headers exactly as given; clients tidy both."""
    there = urlsplit(live.url)
    connection = http.client.HTTPConnection(there.hostname or "", there.port or 0, timeout=300)
    try:
        connection.putrequest(method, target, skip_accept_encoding=True)
        for name, value in headers:
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, answer.read(100_000).decode(errors="replace")
    finally:
        connection.close()


def bearer(token: str) -> list[tuple[str, str]]:
    return [("Authorization", f"Bearer {token}")]


def must_refuse(answer: httpx.Response, status: int, what: str) -> None:
    assert answer.status_code == status, f"{what}: {answer.status_code} {answer.text[:300]}"
    assert answer.headers["content-type"] == MEDIA_TYPE, what
    assert set(answer.json()) <= {"type", "title", "status", "detail", "instance"}, what
    if status == 401:
        assert answer.headers["www-authenticate"].startswith("Bearer"), what


def test_every_route_has_been_reviewed() -> None:
    assert set(ROUTES) == OPEN | set(NEEDS)


@pytest.mark.parametrize(
    "headers", [{}, {"Authorization": "Bearer"}, {"Authorization": "Basic YWRtaW46YWRtaW4="}]
)
def test_without_a_token_only_the_open_routes_answer(live: Live, jobs: None, headers: dict[str, str]) -> None:
    with live.http(None, **headers) as client:
        for method, path in ROUTES:
            answer = client.request(method, filled(path))
            if (method, path) in OPEN:
                assert answer.status_code == 200, answer.text
                assert "gpt" not in answer.text
            else:
                must_refuse(answer, 401, f"{method} {path}")
        for path in DESCRIBED:
            for method in ("PUT", "PATCH", "OPTIONS", "TRACE", "PROPFIND"):
                answer = client.request(method, filled(path))
                assert answer.status_code == (405 if ("GET", path) in OPEN else 401), (method, path)
        for path in (
            "/openapi.json",
            "/docs",
            "/docs/oauth2-redirect",
            "/redoc",
            "/",
            "/v1",
            "/debug",
            "/config",
        ):
            must_refuse(client.get(path), 401, path)


@pytest.mark.parametrize("caller", MAY)
def test_each_caller_gets_what_his_roles_allow(live: Live, jobs: None, caller: str) -> None:
    with live.http(caller) as client:
        for (method, path), needs in NEEDS.items():
            # What an editor changes here is a job that is not there: allowed, and without effect.
            name = "not-there" if method != "GET" else "gpt"
            answer = client.request(method, filled(path, name))
            if needs in MAY[caller]:
                assert answer.status_code not in (401, 403), f"{caller}: {method} {path}: {answer.text}"
                assert answer.status_code < 500, answer.text
            else:
                must_refuse(answer, 403, f"{caller}: {method} {path}")
                assert (
                    f"system:serviceaccount:{OTHER if caller == 'neighbour' else TEAM}:{caller} may not"
                    in (answer.json()["detail"])
                )
        # The description of the API is every user's, and says nothing of any job.
        assert client.get("/openapi.json").status_code == 200


def test_what_expired_or_was_forged_opens_nothing(live: Live, jobs: None, tmp_path: Path) -> None:
    real, (_, trusted) = live.tokens["editor"], live.plane.authority.key_pair("service-accounts")
    allowed = filled("/v1/namespaces/{namespace}/jobs")
    with live.http(None) as client:
        again = signed(claims_of(real), trusted)
        assert client.get(allowed, headers=dict(bearer(again))).status_code == 200, "the forgery itself works"
        for name, token in forgeries(real, trusted, tmp_path).items():
            for method, path in NEEDS:
                answer = client.request(method, filled(path), headers=dict(bearer(token)))
                must_refuse(answer, 401, f"{name}: {method} {path}")
        for guess in ("admin", "holdfast", "changeme", "password", "null", "undefined", "x" * 20_000):
            must_refuse(client.get(allowed, headers=dict(bearer(guess))), 401, guess[:20])
        must_refuse(client.get(allowed, params={"access_token": real}), 401, "a token in the query")
        must_refuse(client.get(allowed, headers={"Cookie": f"token={real}"}), 401, "a token in a cookie")


def test_who_leaves_is_out_within_seconds(live: Live, jobs: None) -> None:
    with live.http("leaver") as client:
        path = filled("/v1/namespaces/{namespace}/jobs")
        assert client.get(path).status_code == 200
        live.plane.kubectl.run("delete", "serviceaccount", "leaver", f"-n={TEAM}")
        wait_until(lambda: client.get(path).status_code == 401, "the token to be refused")


def test_names_of_users_are_taken_from_tokens_alone(live: Live, jobs: None) -> None:
    """What a proxy may say elsewhere says nothing here, and two tokens are none."""
    claimed = [
        ("Impersonate-User", "system:admin"),
        ("Impersonate-Group", "system:masters"),
        ("X-Remote-User", "system:admin"),
        ("X-Remote-Group", "system:masters"),
        ("X-Forwarded-User", "admin"),
        ("X-Forwarded-For", "127.0.0.1"),
        ("X-Original-URL", "/healthz"),
        ("X-Rewrite-URL", "/healthz"),
        ("X-HTTP-Method-Override", "GET"),
    ]
    path = filled(_JOB)
    assert raw(live, "DELETE", path, claimed)[0] == 401
    assert raw(live, "DELETE", path, [*bearer(live.tokens["stranger"]), *claimed])[0] == 403
    assert raw(live, "DELETE", path, [*bearer(live.tokens["viewer"]), *claimed])[0] == 403
    stranger, editor = bearer(live.tokens["stranger"]), bearer(live.tokens["editor"])
    for both in ([*stranger, *editor], [*editor, *stranger]):
        status, text = raw(live, "GET", path, both)
        assert status == 401
        assert "the header Authorization is given 2 times" in text


@pytest.mark.parametrize(
    "target",
    [
        "//v1/jobs",
        "/v1//jobs",
        "/v1/jobs/",
        "/v1/jobs;healthz",
        "/v1/jobs?/healthz",
        "/%76%31/jobs",
        "/healthz/../v1/jobs",
        "/healthz/",
        "/healthz%2f..%2fv1/jobs",
        "/readyz/v1/jobs",
        "/HEALTHZ",
        "http://127.0.0.1/v1/jobs",
    ],
)
def test_no_spelling_of_a_path_goes_round_the_gate(live: Live, jobs: None, target: str) -> None:
    status, text = raw(live, "GET", target, [])
    assert status == 401, text
    status, text = raw(live, "GET", target, bearer(live.tokens["stranger"]))
    assert status == 403, text


def test_one_who_may_list_and_not_watch_does_not_watch(live: Live, jobs: None) -> None:
    kubectl = live.plane.kubectl
    kubectl.run("create", "serviceaccount", "lister", f"-n={TEAM}")
    kubectl.run(
        "create", "role", "lister", f"-n={TEAM}", "--verb=list", "--resource=trainingjobs.holdfast.dev"
    )
    account = f"--serviceaccount={TEAM}:lister"
    kubectl.run("create", "rolebinding", "lister", f"-n={TEAM}", "--role=lister", account)
    wait_until_allowed(kubectl, TEAM, "lister", "list")
    headers = dict(bearer(live.running.token("lister")))
    path = filled("/v1/namespaces/{namespace}/jobs")
    with live.http(None) as client:
        assert client.get(path, headers=headers).status_code == 200
        answer = client.get(path, headers=headers, params={"watch": "true"})
        must_refuse(answer, 403, "watch")
        assert "may not watch trainingjobs in namespace team-a" in answer.json()["detail"]
        must_refuse(client.get(filled(_JOB), headers=headers), 403, "get")
