"""A client talks to the real server: what it may do, what it is refused, and how that is said."""

from __future__ import annotations

import gzip
import json
import re
import socket
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from asked_by_rest import JOBS, JSON, YAML, problem, submit
from served import TOKEN, Served, job_yaml, served
from waiting import wait_until

from holdfast_controller.api.lifecycle import fingerprint
from holdfast_controller.cluster import Unavailable
from holdfast_controller.jobs import Spec, TrainingJob

# ------------------------------------------------------------- a job's life


def test_submit_get_list_delete(http: httpx.Client) -> None:
    answer = submit(http)
    assert answer.status_code == 201
    assert answer.headers["location"] == f"{JOBS}/gpt-small"
    assert answer.json()["status"]["phase"] == "Queued"
    assert http.get(answer.headers["location"]).json() == answer.json()
    assert [item["metadata"]["name"] for item in http.get("/v1/jobs").json()["items"]] == ["gpt-small"]
    deleted = http.delete(f"{JOBS}/gpt-small")
    assert deleted.status_code == 202
    assert deleted.json()["metadata"]["deletionTimestamp"]


def test_json_is_as_good_as_yaml(http: httpx.Client) -> None:
    body = {"metadata": {"name": "j"}, "spec": {"command": ["x"]}}
    assert http.post(JOBS, json=body).status_code == 201


def test_suspend_and_resume_are_writes_to_the_spec(http: httpx.Client, server: Served) -> None:
    submit(http)
    assert http.post(f"{JOBS}/gpt-small/suspend").json()["spec"]["suspend"] is True
    assert http.post(f"{JOBS}/gpt-small/suspend").status_code == 200, "again is no error"
    assert http.post(f"{JOBS}/gpt-small/resume").json()["metadata"]["generation"] == 3
    server.set_status("gpt-small", phase="Succeeded")
    assert "default/gpt-small is Succeeded: there is nothing to suspend" in problem(
        http.post(f"{JOBS}/gpt-small/suspend"), 409, "not-ready"
    )


@pytest.mark.parametrize(("asked_for", "told"), [(0.0, "1"), (6.2, "7")])
def test_when_to_ask_again_is_as_the_apiserver_wants_it(
    asked_for: float, told: str, http: httpx.Client, server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it was busy and named its time, everybody was told to come again in a second."""

    async def busy(*_: object) -> TrainingJob:
        error = Unavailable("the apiserver is busy")
        error.retry_after = asked_for
        raise error

    monkeypatch.setattr(server.store, "get", busy)
    answer = http.get(f"{JOBS}/gpt-small")
    problem(answer, 503, "unavailable")
    assert answer.headers["retry-after"] == told


def test_a_dry_run_tells_the_plan_and_does_nothing(http: httpx.Client) -> None:
    plan = submit(http, params={"dryRun": "true"}).json()
    assert plan["feasible"] is True
    assert plan["manifests"][0]["command"] == ["torchrun", "python", "train.py"]
    assert http.get(f"{JOBS}/gpt-small").status_code == 404
    submit(http)
    again = submit(http, params={"dryRun": "true"}).json()
    assert again["reasons"] == ["the name is taken: default/gpt-small exists"]


def test_what_its_program_will_not_take_refuses_a_job(http: httpx.Client, server: Served) -> None:
    """A typo in spec.config, which Holdfast's own trainer reads: both were told that all is well."""
    server.engine.said = ("spec.config: train.stepz: unknown key",)
    plan = submit(http, params={"dryRun": "true"}).json()
    assert (plan["feasible"], plan["reasons"]) == (False, ["spec.config: train.stepz: unknown key"])
    refused = http.post(JOBS, content=job_yaml("gpt-small"), headers=YAML)
    assert "cannot run here: spec.config: train.stepz: unknown key" in problem(refused, 422, "invalid")
    assert http.get(f"{JOBS}/gpt-small").status_code == 404


def test_one_key_is_one_job(http: httpx.Client) -> None:
    """The answer of a submission is lost on the way; the client sends it again."""
    first = submit(http, "a").json()
    key = {**YAML, "Idempotency-Key": "k-1"}
    second = http.post(JOBS, content=job_yaml("b"), headers=key).json()
    same = http.post(JOBS, content=job_yaml("b") + "  gpus: 0\n", headers=key)
    assert same.status_code == 201, "another spelling of the same job"
    assert same.json()["metadata"]["uid"] == second["metadata"]["uid"] != first["metadata"]["uid"]
    detail = problem(http.post(JOBS, content=job_yaml("c"), headers=key), 409, "conflict")
    assert "k-1" in detail


class _LaterSpec(Spec):
    invented: int = 3


class _LaterJob(TrainingJob):
    spec: _LaterSpec


def test_a_job_that_is_sent_again_to_a_later_controller_is_the_same() -> None:
    """While a cluster's is upgraded answers are lost: its user was told to take a new key."""
    body: dict[str, Any] = {
        "metadata": {"name": "gpt"},
        "spec": {"command": ["x"], "checkpoint": {"keep": 5}},
    }
    asked = fingerprint(TrainingJob.model_validate(body))
    assert fingerprint(_LaterJob.model_validate(body)) == asked
    body["spec"]["checkpoint"] = {"keep": 6}
    assert fingerprint(TrainingJob.model_validate(body)) != asked


# ---------------------------------------------------------------- bad input


def test_two_jobs_of_one_name(http: httpx.Client) -> None:
    submit(http)
    assert "default/gpt-small exists" in problem(submit(http), 409, "already-exists")


def test_sixty_four_gpus_on_a_machine_with_none(http: httpx.Client) -> None:
    answer = http.post(JOBS, content=job_yaml() + "  gpus: 32\n", headers=YAML)
    detail = problem(answer, 422, "invalid")
    assert "default/gpt-small cannot run here: spec.gpus: the job needs 64 GPUs" in detail
    assert answer.json()["errors"] == ["spec.gpus: the job needs 64 GPUs and this machine has none; give 0"]
    assert http.get("/v1/jobs").json()["items"] == []


def test_an_unknown_key_names_the_nearest(http: httpx.Client) -> None:
    answer = http.post(JOBS, content=job_yaml() + "  replica: 3\n  chekpoint: {}\n", headers=YAML)
    problem(answer, 422, "invalid")
    assert answer.json()["errors"] == [
        "spec.replica: unknown key; did you mean 'replicas'?",
        "spec.chekpoint: unknown key; did you mean 'checkpoint'?",
    ]


def test_a_program_finds_each_fault_in_errors_where_it_is_one_alone_too(http: httpx.Client) -> None:
    submit(http)
    for answer in (
        http.post(JOBS, content=job_yaml() + "  replicas: 3\n", headers=YAML),
        http.post(JOBS, params={"dry_run": "true"}, content=job_yaml(), headers=YAML),
        http.get(f"{JOBS}/gpt-small/logs", params={"rank": 5}),
        http.get(JOBS, params={"labelSelector": "a,,b"}),
    ):
        assert answer.json()["errors"] == [problem(answer, 422, "invalid")]


@pytest.mark.parametrize(
    ("method", "path", "sent", "status", "slug", "told"),
    [
        ("POST", JOBS, {"content": "{", "headers": YAML}, 422, "invalid", "the body: line 2, column 1"),
        (
            "POST",
            JOBS,
            {"content": "{"},
            415,
            "unsupported-media",
            "Content-Type is missing: send application/json",
        ),
        ("POST", JOBS, {"data": {"a": "b"}}, 415, "unsupported-media", "--data-binary @job.yaml"),
        (
            "POST",
            JOBS,
            {"content": gzip.compress(job_yaml().encode()), "headers": YAML | {"Content-Encoding": "gzip"}},
            415,
            "unsupported-media",
            "Content-Encoding is gzip: send the body as it is",
        ),
        (
            "POST",
            JOBS + "?dryrun=true",
            {},
            422,
            "invalid",
            "unknown parameter 'dryrun'; did you mean 'dryRun'?",
        ),
        ("POST", "/v1/namespaces/A_B/jobs", {}, 422, "invalid", "'A_B' is no namespace"),
        ("GET", "/v1/jobs?phase=Runing", {}, 422, "invalid", "'Runing': input should be 'Queued'"),
        (
            "GET",
            "/v1/jobs?limit=0",
            {},
            422,
            "invalid",
            "limit: '0': input should be greater than or equal to 1",
        ),
        ("GET", "/v1/jobs?labelSelector=a+in", {}, 422, "invalid", "labelSelector: 'a in' is none of"),
        ("GET", "/v1/jobs?continue=x", {}, 422, "invalid", "continue: 'x' is no token of a list"),
        ("GET", JOBS + "/none", {}, 404, "not-found", "default/none"),
        ("DELETE", JOBS + "/none", {}, 404, "not-found", "default/none"),
        ("GET", JOBS + "/..%2f..%2fetc/logs", {}, 404, None, "there is nothing at"),
        ("GET", JOBS + "/j/logs?rank=-1", {}, 422, "invalid", "rank: '-1'"),
        ("POST", JOBS + "/j/drill", {"json": {"replica": 9}}, 422, "invalid", "replica 9: default/j has 2"),
        ("POST", JOBS + "/j/drill", {"json": {"replica": False}}, 422, "invalid", "a number is needed"),
        (
            "POST",
            JOBS + "/j/drill",
            {"json": {"knd": "kill"}},
            422,
            "invalid",
            "knd: unknown key; did you mean 'kind'?",
        ),
        ("POST", JOBS + "/j/drill", {"json": []}, 422, "invalid", "a list, not the mapping of a drill"),
        # Half a surrogate pair, as JSON can name it and nobody can write it again.
        (
            "POST",
            JOBS,
            {"content": rb'{"spec": {"env": {"A": "\ud800"}}}', "headers": JSON},
            422,
            "invalid",
            r"spec.env.A: '\ud800' holds half a surrogate pair",
        ),
        (
            "POST",
            JOBS + "/j/drill",
            {"content": rb'{"\ud800": "kill"}', "headers": JSON},
            422,
            "invalid",
            r"the key '\ud800' holds half",
        ),
        # With a key a digest is made of the job: no number may be too long for it.
        (
            "POST",
            JOBS,
            {
                "content": job_yaml("k") + f"  config: {{seed: 0x{'f' * 5000}}}\n",
                "headers": YAML | {"Idempotency-Key": "seed"},
            },
            422,
            "invalid",
            "spec.config.seed: an integer of 20000 bits does not fit into 64",
        ),
        ("POST", JOBS + "/j/drill", {}, 409, "not-ready", "default/j is Queued: nothing of it runs"),
        ("GET", JOBS + "/j/logs", {}, 404, "not-found", "default/j has had no attempt yet"),
        ("GET", JOBS + "/j/logs?rank=5", {}, 422, "invalid", "rank 5: default/j has 2"),
        ("GET", "/nowhere", {}, 404, None, "there is nothing at /nowhere"),
        ("PUT", "/v1/jobs", {}, 405, None, "PUT is not possible on /v1/jobs"),
        ("GET", "/v1/namespaces/Team/jobs", {}, 422, "invalid", "'Team' is no namespace: lower-case letters"),
        ("GET", JOBS + "/-j/logs", {}, 422, "invalid", "'-j' is no name: lower-case letters"),
    ],
)
def test_what_cannot_be_done_is_told(
    http: httpx.Client, method: str, path: str, sent: Any, status: int, slug: str | None, told: str
) -> None:
    submit(http, "j")
    answer = http.request(method, path, **sent)
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["type"] == (f"urn:holdfast:problem:{slug}" if slug else "about:blank")
    assert told in answer.json()["detail"]


def test_a_drill_of_a_suspended_job_says_what_would_make_it_run(http: httpx.Client, server: Served) -> None:
    """It was to be tried again when a replica runs, which none would."""
    submit(http, "j")
    server.set_status("j", phase="Suspended", attempt=1)
    answer = http.post(JOBS + "/j/drill")
    assert answer.status_code == 409
    told = "default/j is Suspended: nothing of it runs; `holdfast resume default/j` first"
    assert answer.json()["detail"] == told


def test_what_is_possible_instead_is_named_whole(http: httpx.Client) -> None:
    """It was the methods of one route alone: to DELETE a job was not among them."""
    for path, methods in {
        JOBS: "GET, HEAD, POST",
        f"{JOBS}/j": "DELETE, GET, HEAD",
        f"{JOBS}/j/suspend": "POST",
    }.items():
        assert http.patch(path).headers["allow"] == methods


# ---------------------------------------------------------------- who may call


@pytest.mark.parametrize("path", ["/v1/jobs", "/metrics", "/openapi.json", "/docs", "/nowhere", "/healthz/x"])
def test_without_the_token_nothing_but_the_probes(server: Served, path: str) -> None:
    for token, told in (
        (None, "send the header"),
        ("wrong", "is not the controller's"),
        (TOKEN + "x", "is not"),
    ):
        with server.http(token) as http:
            answer = http.get(path)
            assert told in problem(answer, 401, "unauthorized")
            assert answer.headers["www-authenticate"].startswith("Bearer")
            assert http.get("/healthz").text == "ok\n"
            assert http.get("/readyz").json()["ready"] is True


def test_a_controller_without_a_token_keeps_web_pages_out(tmp_path: Path) -> None:
    """A page in the user's browser can reach 127.0.0.1, also under a name of its own."""
    with served(tmp_path, token=None) as open_server, open_server.http(token=None) as http:
        assert http.get("/v1/jobs").status_code == 200
        assert http.get("/v1/jobs", headers={"Origin": open_server.url}).status_code == 200
        rebound = http.get("/v1/jobs", headers={"Host": "evil.example"})
        assert "on this machine only, not as 'evil.example'" in problem(rebound, 403, "forbidden")
        no_address = http.get("/v1/jobs", headers={"Host": "[::1"})
        assert "on this machine only" in problem(no_address, 403, "forbidden")
        foreign = http.post(f"{JOBS}/j/suspend", headers={"Origin": "https://evil.example"})
        assert "no requests from the web page 'https://evil.example'" in problem(foreign, 403, "forbidden")
        no_page = http.get("/v1/jobs", headers={"Origin": "http://["})
        assert "no requests from the web page 'http://['" in problem(no_page, 403, "forbidden")


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:8765", "[::1]:8765", "127.8.8.8:8765", "LOCALHOST"])
def test_a_controller_without_a_token_answers_at_each_address_that_it_may_listen_at(
    tmp_path: Path, host: str
) -> None:
    """`holdfast up --no-token --host 127.8.8.8` started, and refused whatever it was asked."""
    with served(tmp_path, token=None) as open_server, open_server.http(token=None) as http:
        assert http.get("/v1/jobs", headers={"Host": host}).status_code == 200


# ---------------------------------------------------------------- large bodies

FIFTY_MEGABYTES = 50 * 1024 * 1024


def test_a_body_of_fifty_megabytes(http: httpx.Client) -> None:
    body = b"#" * FIFTY_MEGABYTES
    assert "at most 1048576 bytes" in problem(http.post(JOBS, content=body, headers=YAML), 413, "too-large")


def test_a_body_of_fifty_megabytes_in_chunks_without_a_length(http: httpx.Client) -> None:
    chunk = b"#" * 65536
    sent = http.post(JOBS, content=(chunk for _ in range(FIFTY_MEGABYTES // len(chunk))), headers=YAML)
    problem(sent, 413, "too-large")
    assert http.get("/v1/jobs").status_code == 200


# ---------------------------------------------------------------- lists, watch


def test_a_client_that_leaves_in_the_middle_of_a_body_is_no_fault_of_the_controller(
    server: Served, caplog: pytest.LogCaptureFixture
) -> None:
    """A laptop that is closed while it submits: that was a traceback in the log, and an answer of 500."""
    address = httpx.URL(server.url)
    known = len(server.run(server.store.list_jobs()))
    with socket.create_connection((address.host, address.port or 0)) as leaving:
        head = f"POST {JOBS} HTTP/1.1\r\nHost: {address.host}\r\nAuthorization: Bearer {TOKEN}\r\n"
        leaving.sendall(f"{head}Content-Type: application/json\r\nContent-Length: 500\r\n\r\n{{".encode())
        leaving.shutdown(socket.SHUT_WR)
        assert leaving.recv(1) == b""
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []
    assert len(server.run(server.store.list_jobs())) == known


def test_list_by_phase_label_and_page(http: httpx.Client, server: Served) -> None:
    for number in range(5):
        text = job_yaml(f"j{number}").replace("}", f", labels: {{n: '{number}'}}}}", 1)
        assert http.post(JOBS, content=text, headers=YAML).status_code == 201
    server.set_status("j1", phase="Running")

    def names(**query: str) -> list[str]:
        return [item["metadata"]["name"] for item in http.get(JOBS, params=query).json()["items"]]

    assert names(phase="Running") == ["j1"]
    assert names(labelSelector="n=3") == ["j3"]
    assert names(name="j2") == ["j2"]
    first = http.get(JOBS, params={"limit": 2}).json()
    assert first["metadata"]["remainingItemCount"] == 3
    second = http.get(JOBS, params={"limit": 2, "continue": first["metadata"]["continue"]}).json()
    assert [item["metadata"]["name"] for item in second["items"]] == ["j2", "j3"]
    assert http.get("/v1/namespaces/other/jobs").json()["items"] == []


def test_a_watch_tells_changes_as_they_happen(http: httpx.Client, server: Served) -> None:
    submit(http)
    with http.stream("GET", JOBS, params={"watch": "true"}) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        lines = stream.iter_lines()

        def told() -> tuple[str, dict[str, Any]]:
            event = next(line for line in lines if line.startswith("event:"))
            data = next(line for line in lines if line.startswith("data:"))
            return event.removeprefix("event: "), json.loads(data.removeprefix("data: "))

        assert told()[0] == "ADDED"
        server.set_status("gpt-small", phase="Running")
        kind, job = told()
        assert (kind, job["status"]["phase"]) == ("MODIFIED", "Running")
        server.run(server.store.remove(server.job("gpt-small")))
        assert told()[0] == "DELETED"


def test_the_goodput_of_a_suspended_job_goes_on_sinking_though_nothing_is_written(
    http: httpx.Client, server: Served
) -> None:
    """It trained for 90 s of 100, and was suspended 900 s ago: every way to look at it says 9 %, not 90."""
    submit(http)
    start = datetime.now(UTC) - timedelta(seconds=1000)
    server.set_status(
        "gpt-small", phase="Suspended", attempt=1, goodput=0.9, useful_seconds=90.0, first_started_at=start
    )
    one, several = f"{JOBS}/gpt-small", http.get(JOBS).json()["items"]
    with http.stream("GET", JOBS, params={"watch": "true"}) as watch:
        told = next(line for line in watch.iter_lines() if line.startswith("data: "))
    looks = [http.get(one).json(), *several, json.loads(told.removeprefix("data: "))]
    looks += [http.post(f"{one}/suspend").json(), http.delete(one).json()]
    for look in looks:
        assert 0.08 < look["status"]["goodput"] <= 0.09
    assert server.job("gpt-small").status.goodput == 0.9, "what is written is as of the write"


def test_the_goodput_of_a_job_that_hangs_sinks_and_so_does_that_of_its_attempt(
    http: httpx.Client, server: Served
) -> None:
    """It trained for 90 s of 100 and has done no step since; the one before it is over and done with."""
    submit(http)
    now = datetime.now(UTC)
    begun, start = now - timedelta(seconds=2000), now - timedelta(seconds=1000)
    before = {"number": 1, "verdict": "Disrupted", "started_at": begun, "ended_at": start, "goodput": 0.5}
    last = {"number": 2, "started_at": start, "useful_seconds": 90.0, "goodput": 0.9}
    progress = {"step": 9, "updated_at": start + timedelta(seconds=100)}
    figures = {"goodput": 0.3, "useful_seconds": 300.0, "first_started_at": begun, "progress": progress}
    server.set_status("gpt-small", phase="Running", attempt=2, attempts=[before, last], **figures)
    status = http.get(f"{JOBS}/gpt-small").json()["status"]
    assert 0.14 < status["goodput"] <= 0.15
    first, second = (one["goodput"] for one in status["attempts"])
    assert first == 0.5
    assert 0.08 < second <= 0.09
    account = http.get(f"{JOBS}/gpt-small/ledger").json()
    assert 0.08 < account["attempts"][1]["goodput"] <= 0.09
    progress["tokensPerSecond"] = 7.0
    server.set_status("gpt-small", progress=progress)
    status = http.get(f"{JOBS}/gpt-small").json()["status"]
    assert (status["goodput"], status["attempts"][1]["goodput"]) == (0.3, 0.9), "it does steps"


# ---------------------------------------------------------------- operations


def test_what_may_be_old_as_nothing_can_be_written_is_said_with_it(server: Served) -> None:
    """A full disk: jobs run on, and are shown as they were."""
    full = "cannot write /data/jobs.db: the disk is full; free some space, nothing is lost so far"
    with server.http() as http:
        assert "Warning" not in http.get("/v1/jobs").headers
        server.store.fault = full
        try:
            said = http.get("/v1/jobs").headers["Warning"]
            assert said == f'110 holdfast "what is told of jobs may be out of date: {full}"'
            # What was answered before is remembered for a second.
            wait_until(lambda: http.get("/readyz").status_code == 503, "the probe to say so")
            assert http.get("/readyz").json()["checks"] == {"store": "failed", "reconciler": "ok"}
        finally:
            server.store.fault = None
        wait_until(
            lambda: http.get("/readyz").status_code == 200, "the probe to say that there is room again"
        )


def test_ready_means_that_the_reconciler_works(server: Served) -> None:
    with server.http(token=None) as http:
        server.fault.append("it has ended")
        try:
            answer = http.get("/readyz")
            assert answer.status_code == 503
            assert answer.json() == {
                "ready": False,
                "checks": {"store": "ok", "reconciler": "failed"},
                "missing": [],
            }
            assert http.get("/healthz").status_code == 200
        finally:
            server.fault.clear()


def test_the_openapi_document_is_whole(http: httpx.Client) -> None:
    text = http.get("/openapi.json").text
    document = json.loads(text)
    schemas = document["components"]["schemas"]
    references = set(re.findall(r'"\$ref": ?"([^"]*)"', text))
    assert references <= {f"#/components/schemas/{name}" for name in schemas}
    assert document["components"]["securitySchemes"]["HTTPBearer"]["scheme"] == "bearer"
    routes = [
        (path, route)
        for path, methods in document["paths"].items()
        for route in methods.values()
        if path not in ("/healthz", "/readyz")
    ]
    assert routes
    assert all(route["security"] for _, route in routes)
    for path in ("/v1/jobs", "/v1/namespaces/{namespace}/jobs"):
        listed = document["paths"][path]["get"]["responses"]["200"]["content"]
        assert list(listed) == ["application/json", "text/event-stream"], "of a watch"
    drill = document["paths"]["/v1/namespaces/{namespace}/jobs/{name}/drill"]["post"]
    assert list(drill["requestBody"]["content"]) == ["application/json", "application/yaml"]


def test_a_request_id_comes_back(http: httpx.Client) -> None:
    assert http.get("/v1/jobs", headers={"X-Request-ID": "abc-1"}).headers["x-request-id"] == "abc-1"
    assert http.get("/v1/jobs", headers={"X-Request-ID": "a b"}).headers["x-request-id"] != "a b"


def test_the_server_ends_though_somebody_watches(tmp_path: Path) -> None:
    """Streams never end by themselves; a controller that is asked to end does not wait for them."""
    opened, ended = threading.Event(), threading.Event()
    with served(tmp_path) as running:

        def watch() -> None:
            with running.http() as http, http.stream("GET", JOBS, params={"watch": "true"}) as stream:
                opened.set()
                for _ in stream.iter_lines():
                    pass
            ended.set()

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        assert opened.wait(300)
    assert ended.wait(300)
