"""What people type, against the real server: what they see, and what the exit code says."""

from __future__ import annotations

import json
import os
import socket
import ssl
from pathlib import Path

import pytest
import typer
from served import TOKEN, Served, ingress, job_yaml, served
from tests.cluster.certificates import Authority
from typed import Holdfast

from holdfast_controller.cli import create_cli
from holdfast_controller.cli.connection import Connection, complete_job
from holdfast_controller.client import Unreachable
from holdfast_controller.data_directory import (
    DataDirectory,
    DataDirectoryError,
    ServerFile,
    make_token,
    read_token,
)
from holdfast_controller.local.ports import free_port
from holdfast_controller.server import claim
from holdfast_controller.settings import load_settings

NOBODY = 65534

# ------------------------------------------------------------------- submit


def test_submit_and_get(holdfast: Holdfast, job_file: Path) -> None:
    assert holdfast("submit", str(job_file)).stdout == "default/gpt-small submitted\n"
    table = holdfast("get").stdout.splitlines()
    assert table[0].split() == ["NAME", "PHASE", "STEP", "ATTEMPT", "DISRUPTIONS", "LOST", "GOODPUT", "AGE"]
    assert table[1].split()[:6] == ["gpt-small", "Queued", "-", "0", "0", "0"]
    assert holdfast("get", "-o", "name").stdout == "gpt-small\n"


def test_a_program_that_submits_can_ask_for_the_job_as_a_document(holdfast: Holdfast, job_file: Path) -> None:
    """-o was taken, and the answer was a sentence all the same."""
    done = holdfast("submit", str(job_file), "-o", "json")
    assert done.stderr == "default/gpt-small submitted\n"
    asked = json.loads(holdfast("get", "gpt-small", "-o", "json").stdout)
    assert json.loads(done.stdout)["metadata"]["uid"] == asked["metadata"]["uid"]
    assert "leave out -o, or -w" in holdfast("submit", str(job_file), "-w", "-o", "yaml", code=2).stderr


def test_submit_from_a_pipe_with_changes(holdfast: Holdfast) -> None:
    holdfast(
        "submit", "-", "--set", "spec.replicas=3", "--set", "spec.config.train.lr=1e-3",
        "--set", "metadata.name=other", "-n", "team-a", given=job_yaml(),
    )  # fmt: skip
    document = json.loads(holdfast("get", "team-a/other", "-o", "json").stdout)
    assert document["spec"]["replicas"] == 3
    assert document["spec"]["config"] == {"train": {"lr": 0.001}}


def test_json_from_a_pipe_may_spell_a_character_by_two(holdfast: Holdfast) -> None:
    """As Python's json.dumps does: it is read as YAML, which took the half of a pair for none."""
    words = ["say", "\N{WINKING FACE}"]
    document = json.dumps({"kind": "TrainingJob", "metadata": {"name": "says"}, "spec": {"command": words}})
    holdfast("submit", "-", given=document)
    assert json.loads(holdfast("get", "says", "-o", "json").stdout)["spec"]["command"] == words
    broken = document[:-1]
    assert "found invalid Unicode character escape" in holdfast("submit", "-", given=broken, code=1).stderr


def test_a_variable_that_is_not_set_is_no_file(holdfast: Holdfast) -> None:
    """It said `cannot read : Is a directory`."""
    assert "the name of the job's file is empty" in holdfast("submit", "", code=1).stderr


def test_what_get_prints_can_be_submitted(holdfast: Holdfast, job_file: Path) -> None:
    commit, run = "--set=metadata.labels.commit='12345e67'", "--set=spec.config.run='1e5'"
    holdfast("submit", str(job_file), commit, run)
    text = holdfast("get", "gpt-small", "-o", "yaml").stdout
    holdfast("submit", "-", "--set", "metadata.name=twin", given=text)
    assert holdfast("get", "-o", "name").stdout == "gpt-small\ntwin\n"
    twin = json.loads(holdfast("get", "twin", "-o", "json").stdout)
    assert twin["metadata"]["labels"] == {"commit": "12345e67"}
    assert twin["spec"]["config"] == {"run": "1e5"}, "text stays text"


@pytest.mark.parametrize(
    ("more", "words", "told"),
    [
        ("  env: {NO: '1'}\n", [], "spec.env: the key False is a true/false value; write it in quotes"),
        ("  config: {1: a}\n", [], "spec.config: the key 1 is a number; write it in quotes"),
        ("  config: {a: !!binary aGk=}\n", [], "spec.config.a: a bytes cannot be kept as JSON"),
        ("  config: {a: !!set {b}}\n", [], "spec.config.a: a set cannot be kept as JSON"),
        ("", ["--set", "spec.env={ON: x}"], "spec.env: the key True is a true/false value"),
        ("", ["--set", "spec.config.lr=.inf", "--dry-run"], "spec.config.lr: inf is no JSON number"),
    ],
)
def test_what_json_would_change_is_refused_as_rest_refuses_it(
    holdfast: Holdfast, more: str, words: list[str], told: str
) -> None:
    """`NO` is false to YAML. The job must not run without it, under a variable `false`."""
    assert told in holdfast("submit", "-", *words, given=job_yaml() + more, code=1).stderr
    assert holdfast("get", "-o", "name").stdout == ""


def test_a_dry_run_shows_the_plan(holdfast: Holdfast, job_file: Path) -> None:
    shown = holdfast("submit", str(job_file), "--dry-run")
    assert "- torchrun" in shown.stdout
    assert "it can run here, on the scripted engine; nothing was submitted" in shown.stdout
    refused = holdfast("submit", str(job_file), "--dry-run", "--set", "spec.gpus=32", code=1)
    assert "it cannot run here: spec.gpus: the job needs 64 GPUs and this machine has none" in refused.stderr
    assert json.loads(holdfast("submit", str(job_file), "--dry-run", "-o", "json").stdout)["feasible"] is True
    assert holdfast("get", "-o", "name").stdout == ""


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a: [", "job.yaml: line 2, column 1: did not find expected node content"),
        (
            "metadata: {name: j}\nspec: {command: [x], replica: 2}",
            "spec.replica: unknown key; did you mean 'replicas'?",
        ),
        ("apiVersion: v1\nkind: TrainingJob", "apiVersion: 'v1' should be 'holdfast.dev/v1alpha1'"),
        ("kind: Deployment", "kind: 'Deployment' should be 'TrainingJob'"),
        (
            "metadata: {name: j}\nspec: {command: [x], gpus: 64}",
            "the job needs 64 GPUs and this machine has none",
        ),
        ("metadata: {name: A}\nspec: {comand: [x]}", "error: 3 things are wrong"),
    ],
)
def test_a_faulty_file(holdfast: Holdfast, tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text + "\n")
    assert told in holdfast("submit", str(path), code=1).stderr


@pytest.mark.parametrize(
    ("assignment", "told"),
    [
        ("spec.replicas", "write it as a dotted path and a value, e.g. spec.replicas=2"),
        ("spec..x=1", "write it as a dotted path"),
        ("spec.command.x=1", "spec.command is ['python', 'train.py'], not a mapping"),
        ("spec.config=[1", "--set spec.config=[1: line 2, column 1"),
    ],
)
def test_a_faulty_set(holdfast: Holdfast, job_file: Path, assignment: str, told: str) -> None:
    assert told in holdfast("submit", str(job_file), "--set", assignment, code=1).stderr


def test_a_set_changes_the_place_it_names_alone(holdfast: Holdfast) -> None:
    """An alias and a merge stand for one mapping; the teacher got the student's layers."""
    config = "{teacher: &t {lr: 1, model: {layers: 8}}, student: {<<: *t}, twin: *t}"
    words = ("--set", "spec.config.student.model.layers=2", "--set", "spec.config.twin.lr=3", "-o", "json")
    shown = holdfast("submit", "-", *words, given=f"{job_yaml()}  config: {config}\n").stdout
    assert json.loads(shown)["spec"]["config"] == {
        "teacher": {"lr": 1, "model": {"layers": 8}},
        "student": {"lr": 1, "model": {"layers": 2}},
        "twin": {"lr": 3, "model": {"layers": 8}},
    }


def test_a_missing_file_and_a_taken_name(holdfast: Holdfast, job_file: Path, tmp_path: Path) -> None:
    assert f"there is no file {tmp_path}/no.yaml" in holdfast("submit", f"{tmp_path}/no.yaml", code=1).stderr
    assert "Is a directory" in holdfast("submit", str(tmp_path), code=1).stderr
    holdfast("submit", str(job_file))
    assert "default/gpt-small exists" in holdfast("submit", str(job_file), code=1).stderr


def test_wrong_usage_exits_2(holdfast: Holdfast) -> None:
    assert "No such command 'sumbit'" in holdfast("sumbit", code=2).stderr
    assert "Missing argument 'FILE'" in holdfast("submit", code=2).stderr
    assert "a/b names namespace 'a', but -n says 'c'" in holdfast("get", "a/b", "-n", "c", code=2).stderr
    assert "--for Done: one of Queued" in holdfast("wait", "j", "--for", "Done", code=2).stderr


def test_the_environment_s_namespace_is_of_what_names_none(
    holdfast: Holdfast, server: Served, job_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that messages wrote, or a job with a namespace, was refused: `-n`, which nobody typed, said
    another."""
    monkeypatch.setenv("HOLDFAST_NAMESPACE", "team-b")
    assert holdfast("submit", str(job_file)).stdout == "team-b/gpt-small submitted\n"
    changed = ("--set", "metadata.namespace=team-a")
    assert holdfast("submit", str(job_file), *changed).stdout == "team-a/gpt-small submitted\n"
    for words in (["get", "-o", "name"], ["get", "team-a/gpt-small", "-o", "name"]):
        assert holdfast(*words).stdout == "gpt-small\n"
    assert "sent to namespace 'c'" in holdfast("submit", str(job_file), *changed, "-n", "c", code=1).stderr
    assert holdfast("top", "--once").stdout.count("gpt-small") == 1
    assert holdfast("top", "--once", "-A").stdout.count("gpt-small") == 2
    assert holdfast("get", "-n", "team-a", "-l", "x=y").stderr == "no such jobs in namespace team-a\n"


# ------------------------------------------------------- finding the server


def test_no_controller(holdfast: Holdfast, monkeypatch: pytest.MonkeyPatch) -> None:
    address = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setenv("HOLDFAST_SERVER", address)
    told = holdfast("get", code=1).stderr
    assert told.startswith(f"error: no controller answers at {address}: start one with `holdfast up`;")
    assert "kubectl port-forward" in told
    monkeypatch.setenv("HOLDFAST_SERVER", f"http://127.0.0.2:{free_port()}")
    told = holdfast("get", code=1).stderr
    assert "look whether that is its address (--server, HOLDFAST_SERVER)" in told
    monkeypatch.setenv("HOLDFAST_SERVER", "localhost:1")
    assert "it should start with http://" in holdfast("get", code=1).stderr


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("http://[::1", "Invalid IPv6 URL"),
        ("http://localhost:port", "Port could not be cast"),
        ("http://localhost:99999", "Port out of range"),
        ("http://a..example", "label empty"),
        ("http://\N{SNOWMAN}.example", "Invalid IDNA hostname"),
    ],
)
def test_an_address_with_a_typo(
    holdfast: Holdfast, monkeypatch: pytest.MonkeyPatch, address: str, told: str
) -> None:
    """Each ended in a traceback."""
    monkeypatch.setenv("HOLDFAST_SERVER", address)
    said = holdfast("get", code=1).stderr
    assert said.startswith(f"error: {address!r} is no address of a controller: ")
    assert told in said


def test_something_else_answers(holdfast: Holdfast, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one that answered JSON there was a traceback, and of an ingress that wants TLS no word of that."""
    port = free_port()
    monkeypatch.setenv("HOLDFAST_SERVER", f"http://127.0.0.1:{port}")
    for body, told in (
        (b"<html>hello</html>", "answered '<html>hello</html>', not JSON: start one with `holdfast up`;"),
        (b"{}", "answered {}, no list: start one with `holdfast up`;"),
        (b"[1]", "answered [1], no list: "),
        (b'{"items": []}', 'answered {"items": []}, no list: '),
        (b'{"items": [], "metadata": {"resourceVersion": "7"}}', ", no list: "),
    ):
        with ingress(port, 200, body):
            assert told in holdfast("get", code=1).stderr
    with ingress(port, 308, b"", Location="https://holdfast.example/v1/jobs"):
        told = holdfast("get", code=1).stderr
    assert told.startswith(
        f"error: http://127.0.0.1:{port} answers that what was asked for is at https://hold"
    )
    assert "(--server, HOLDFAST_SERVER)" in told
    for status, body in ((404, b"<html>no such page</html>"), (404, b'{"kind": "Status"}'), (500, b"")):
        with ingress(port, status, body):
            for words in (["get", "gpt"], ["wait", "gpt"], ["logs", "-f", "gpt"], ["events", "gpt"]):
                told = holdfast(*words, code=1).stderr
                assert told.startswith(f"error: http://127.0.0.1:{port} answered {status} "), (words, told)
                assert "and not as a controller does: look whether that is its address" in told


def test_a_server_whose_certificate_nobody_vouches_for_gets_no_token(
    holdfast: Holdfast, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It answered; no controller did, it was said. And HTTPS:// was taken for no https at all."""
    authority = Authority(tmp_path / "authority")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(*authority.issue("server", "holdfast", hosts=["localhost"]))
    port = free_port()
    with ingress(port, 200, b'{"items": [], "metadata": {"continue": ""}}', tls=tls) as asked:
        for scheme in ("https", "HTTPS"):
            monkeypatch.setenv("HOLDFAST_SERVER", f"{scheme}://localhost:{port}")
            told = holdfast("get", "-o", "name", code=1).stderr
            assert f"://localhost:{port} answers, but its certificate is not trusted (unable to get " in told
        monkeypatch.setenv("SSL_CERT_FILE", str(authority.certificate))
        monkeypatch.setenv("HOLDFAST_SERVER", f"https://127.0.0.1:{port}")
        assert "(IP address mismatch, " in holdfast("get", code=1).stderr
        assert asked == []
        monkeypatch.setenv("HOLDFAST_SERVER", f"https://localhost:{port}")
        assert holdfast("get", "-o", "name").stdout == ""
        assert len(asked) == 1
    with ingress(port, 200):
        assert "look whether its address starts with http://" in holdfast("get", code=1).stderr
    for named, fault in ((tmp_path / "none.pem", "No such file"), (Path(__file__), "no certificate or crl")):
        monkeypatch.setenv("SSL_CERT_FILE", str(named))
        told = holdfast("get", code=1).stderr
        assert told.startswith(f"error: SSL_CERT_FILE is '{named}', with no certificates: ")
        assert fault in told


def test_a_proxy_that_cannot_be_used(holdfast: Holdfast, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_SERVER", "http://192.0.2.1")
    monkeypatch.setenv("ALL_PROXY", "socks9://127.0.0.1:1080")
    told = holdfast("get", code=1).stderr
    assert told.startswith("error: no way to http://192.0.2.1: the proxy that the environment names"), told


@pytest.mark.parametrize(
    "job", ["", "default/", "/gpt-small", "..", "default/..", "a/b/c", "Long", "long?watch=true"]
)
def test_what_is_no_name_of_a_job_leads_nowhere_else(holdfast: Holdfast, job: str) -> None:
    """`default/`, as it is completed, led to the list of jobs, which answered 307 without a reason, and what
    a shell makes of `$NS/gpt-small` without the one, to a job of another namespace."""
    for command in ("get", "delete", "suspend", "logs", "wait"):
        told = holdfast(command, job, code=1).stderr
        assert "is no namespace: lower-case" in told or "is no name: lower-case" in told, (command, told)


def test_a_token_with_the_end_of_its_line(holdfast: Holdfast, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one that a shell has read from a file of Windows. What can be no token is not shown either."""
    monkeypatch.setenv("HOLDFAST_TOKEN", f"{TOKEN}\r\n")
    holdfast("get")
    monkeypatch.setenv("HOLDFAST_TOKEN", f"Bearer {TOKEN}")
    told = holdfast("get", code=1).stderr
    assert told.startswith("error: HOLDFAST_TOKEN holds no token")
    assert TOKEN not in told


def test_a_wrong_token(holdfast: Holdfast, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_TOKEN", "wrong")
    assert "error: this token is not the controller's" in holdfast("get", code=1).stderr
    monkeypatch.delenv("HOLDFAST_TOKEN")
    told = holdfast("get", code=1).stderr
    assert "as `holdfast` does with --token-file or HOLDFAST_TOKEN; `holdfast up` prints where it is" in told


def test_the_data_directory_leads_to_the_server(
    holdfast: Holdfast, server: Served, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("HOLDFAST_SERVER", "HOLDFAST_TOKEN", "HOLDFAST_DATA_DIR"):
        monkeypatch.delenv(name)
    (tmp_path / "server.json").write_text(json.dumps({"url": server.url, "tokenFile": "x", "pid": 1}))
    token = tmp_path / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    holdfast("--data-dir", str(tmp_path), "get")
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    home = f"~/{tmp_path.name}"  # as a shell leaves it in --data-dir=~/jobs
    holdfast("--data-dir", home, "get")
    holdfast("--server", server.url, "--token-file", f"{home}/token", "get")
    token.chmod(0o644)
    assert "has mode 0644" in holdfast("--data-dir", str(tmp_path), "get", code=1).stderr


def test_a_data_directory_whose_controller_does_not_run_leads_to_no_other(
    holdfast: Holdfast, server: Served, job_file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A job was submitted to whoever answered at the usual address, and jobs were deleted there."""
    monkeypatch.setattr("holdfast_controller.cli.connection.DEFAULT_SERVER", server.url)
    monkeypatch.delenv("HOLDFAST_SERVER")
    monkeypatch.delenv("HOLDFAST_DATA_DIR")
    holdfast("submit", str(job_file))  # with a token that was given, as through kubectl port-forward
    monkeypatch.delenv("HOLDFAST_TOKEN")
    (tmp_path / "my jobs").mkdir()
    (tmp_path / "my jobs" / "token").write_text(TOKEN)
    (tmp_path / "my jobs" / "token").chmod(0o600)
    told = holdfast("--data-dir", str(tmp_path / "my jobs"), "delete", "gpt-small", code=1).stderr
    assert told == (
        f"error: no controller runs with the data directory {tmp_path}/my jobs: start one with `holdfast "
        f"--data-dir '{tmp_path}/my jobs' up`, or name the one that you mean with --server\n"
    )
    with monkeypatch.context() as as_another_user:
        as_another_user.setattr("os.access", lambda *_: False)
        told = holdfast("--data-dir", str(tmp_path / "my jobs"), "delete", "gpt-small", code=1).stderr
    assert told.startswith(f"error: the data directory {tmp_path}/my jobs is closed to you: name its ")
    monkeypatch.setenv("HOLDFAST_TOKEN", TOKEN)
    assert "gpt-small" in holdfast("get").stdout


def listening(user: int, host: str, port: int = 0) -> socket.socket:
    """A listener of that user's; takes root."""
    os.seteuid(user)
    try:
        return socket.create_server((host, port), family=socket.getaddrinfo(host, port)[0][0])
    finally:
        os.seteuid(0)


@pytest.fixture
def directory(tmp_path: Path) -> DataDirectory:
    """One with a token, where another user can be made to listen."""
    if os.getuid() != 0:
        pytest.skip("listening as another user needs root")
    made = DataDirectory(tmp_path / "data")
    made.create()
    make_token(made.token)
    return made


@pytest.mark.parametrize("server", [None, "http://localhost:{}", "http://[::1]:{}"])
def test_this_machines_token_is_not_sent_to_another_user_who_listens_in_the_controllers_place(
    server: str | None, directory: DataDirectory
) -> None:
    for theirs in (True, False):
        host = "::1" if server and "::1" in server else "127.0.0.1"
        with listening(NOBODY if theirs else 0, host) as listener:
            port = listener.getsockname()[1]
            if server is None:  # the controller was killed and has left its address
                directory.write_server_file(ServerFile(f"http://127.0.0.1:{port}", None, 1))
            connection = Connection(server and server.format(port), None, directory.path)
            if theirs:
                with pytest.raises(DataDirectoryError, match=rf"another user .* \(uid {NOBODY}\), who would"):
                    connection.token()
                os.chown(directory.token, NOBODY, -1)  # root asks another's controller, by his directory
                assert connection.token()
                os.chown(directory.token, 0, -1)
            else:
                assert connection.token()


def test_who_has_no_controller_yet_is_told_that_the_one_at_the_usual_address_is_another_users(
    directory: DataDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two share a machine; the second was told to send a token, which only the first has."""
    directory.token.unlink()
    connection = Connection(None, None, None)
    monkeypatch.setenv("HOLDFAST_DATA_DIR", str(directory.path))
    with listening(NOBODY, "127.0.0.1") as listener:
        usual = f"http://127.0.0.1:{listener.getsockname()[1]}"
        monkeypatch.setattr("holdfast_controller.cli.connection.DEFAULT_SERVER", usual)
        with pytest.raises(DataDirectoryError) as told:
            connection.token()
        assert str(told.value) == (
            f"at {usual} another user of this machine answers (uid {NOBODY}), and you have no controller of "
            f"your own in {directory.path}: start one with `holdfast up --port 0`, or name the one that you "
            "mean with --server and --token-file"
        )
        assert Connection(usual, None, None).token() is None, "it was named: whoever answers has the word"
    assert connection.token() is None, "nobody listens there, which the request tells"


def test_the_token_of_a_controller_that_listened_on_all_addresses_is_not_sent_to_another_user_either(
    tmp_path: Path,
) -> None:
    """It was: what came after it there was looked at for 127.0.0.1 alone, and its file named 0.0.0.0."""
    if os.getuid() != 0:
        pytest.skip("listening as another user needs root")
    directory = DataDirectory(tmp_path / "data")
    with claim(load_settings(data_dir=directory.path, listen_host="0.0.0.0", listen_port=0)) as ours:
        port = int(ours.url.rsplit(":", 1)[1])
        connection = Connection(None, None, directory.path)
        assert connection.address() == f"http://127.0.0.1:{port}", "as one is reached from here"
        assert connection.token()
        left = directory.server_file.read_text()
    directory.server_file.write_text(left)  # as a controller that is killed leaves it
    as_it_said = Connection(f"http://0.0.0.0:{port}", None, directory.path)
    assert as_it_said.token(), "nobody listens there"
    for there in ("127.0.0.1", "0.0.0.0"):
        with listening(NOBODY, there, port):
            for one in (connection, as_it_said):
                with pytest.raises(DataDirectoryError, match=rf"another user .* \(uid {NOBODY}\), who"):
                    one.token()


def test_the_token_of_a_controller_at_an_address_of_its_own_is_not_sent_to_another_user_either(
    directory: DataDirectory,
) -> None:
    """All of 127/8 is this machine's, and so is what its network gave it."""
    with listening(NOBODY, "127.0.0.9") as listener:
        address = f"http://127.0.0.9:{listener.getsockname()[1]}"
        directory.write_server_file(ServerFile(address, None, 1))
        with pytest.raises(DataDirectoryError, match=rf"another user .* \(uid {NOBODY}\), who would"):
            Connection(None, None, directory.path).token()


def test_a_command_that_waits_for_its_controller_sends_the_token_to_nobody_who_comes_in_its_place(
    directory: DataDirectory, tmp_path: Path
) -> None:
    """It was looked at once, as the command began, and `wait` comes again and again."""
    port = free_port()
    with Connection(f"http://127.0.0.1:{port}", None, directory.path).client() as client:
        with served(tmp_path, token=read_token(directory.token), port=port):
            assert client.list_jobs(None) == []
        with listening(NOBODY, "127.0.0.1", port) as listener:
            with pytest.raises(DataDirectoryError, match=rf"another user .* \(uid {NOBODY}\), who would"):
                client.list_jobs(None)
            listener.settimeout(0)
            with pytest.raises(BlockingIOError):
                listener.accept()


def test_a_command_that_waits_finds_the_controller_that_came_back_on_another_port(
    directory: DataDirectory, tmp_path: Path
) -> None:
    token = read_token(directory.token)
    with served(tmp_path, token=token) as first:
        directory.write_server_file(ServerFile(first.url, None, 1))
        client = Connection(None, None, directory.path).client()
        named = Connection(first.url, None, directory.path).client()
        assert client.list_jobs(None) == named.list_jobs(None) == []
    with client, named, served(tmp_path, token=token) as second:
        directory.write_server_file(ServerFile(second.url, None, 1))
        with pytest.raises(Unreachable, match=f"no controller answers at {first.url}"):
            client.list_jobs(None)
        assert client.list_jobs(None) == []
        for _ in range(2):
            with pytest.raises(Unreachable, match=f"no controller answers at {first.url}"):
                named.list_jobs(None)


def test_this_machines_token_is_not_sent_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOLDFAST_TOKEN", raising=False)
    token = tmp_path / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    assert Connection("http://127.0.0.1:8765", None, tmp_path).token() == TOKEN
    assert Connection("https://elsewhere.example", None, tmp_path).token() is None


# -------------------------------------------------------------- completion


def test_job_names_are_completed(
    holdfast: Holdfast, server: Served, job_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    holdfast("submit", str(job_file))
    holdfast("submit", str(job_file), "--set", "metadata.name=resnet")
    ctx = typer.Context(typer.main.get_command(create_cli(lambda *_: None, lambda *_: None)))
    ctx.params = {"server": server.url}
    assert complete_job(ctx, "") == ["gpt-small", "resnet"]
    assert complete_job(ctx, "g") == ["gpt-small"]
    ctx.params = {"server": f"http://127.0.0.1:{free_port()}"}
    assert complete_job(ctx, "g") == [], "no controller, no names, no traceback in the user's line"
