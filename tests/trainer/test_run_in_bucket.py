"""Training whose run directory is in an object store: killed, refused, and looked at from outside."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import sys
import threading
import tracemalloc
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from disks import fill, small_disk
from gangs import KILL, Gang, History, RankServer, Workshop
from object_stores import ObjectServer, server
from processes import Processes
from waiting import wait_until
from werkzeug.serving import make_server, make_ssl_devcert

from holdfast_controller.local.ports import free_port
from holdfast_trainer.checkpoint import CheckpointError
from holdfast_trainer.checkpoint.bucket import Bucket
from holdfast_trainer.checkpoint.errors import StorageUnavailable, may_pass
from holdfast_trainer.checkpoint.store import CheckpointStore
from holdfast_trainer.checkpoint.stores import admit, open_store
from holdfast_trainer.checkpoint_command import main
from holdfast_trainer.contract import RunDir, line_of, read_lines
from holdfast_trainer.ledger import Journal, trained_before
from holdfast_trainer.place import Place
from holdfast_trainer.records import Records
from holdfast_trainer.schema import ConfigError

__all__ = ["server"]

LARGE = {"size": 80_000, "steps": 12}
"""Files of more than one part."""


class InBucket:
    """Attempts of one run in a bucket."""

    def __init__(self, server: ObjectServer, workshop: Workshop) -> None:
        self.url = f"s3://{server.bucket()}/runs/a"
        self.local = Path(server.environment["HOLDFAST_LOCAL_DIR"]) / self.url.removeprefix("s3://")
        self._environment = server.environment | {"HOLDFAST_RUN_DIR": self.url}
        self._workshop = workshop

    def start(self, *, env: dict[str, str] | None = None, **options: Any) -> Gang:
        return self._workshop.start(
            "bucket", env=self._environment | (env or {}), run_dir=self.local, **options
        )

    def finish(self, **options: Any) -> History:
        gang = self.start(**options)
        assert set(gang.wait(300)) == {0}, gang.texts()
        return gang.history

    @property
    def store(self) -> CheckpointStore:
        return open_store(RunDir(self.local, self.url), 0)


@pytest.fixture
def environment(server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.fail()
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def bucket(server: ObjectServer, rank_server: RankServer, workshop: Workshop, environment: None) -> InBucket:
    return InBucket(server, workshop)


@pytest.mark.slow
def test_killed_in_the_middle_of_an_upload_and_resumed_on_another_machine(
    bucket: InBucket, server: ObjectServer, workshop: Workshop
) -> None:
    twin = workshop.finish("twin", ranks=2, **LARGE)
    part = {"method": "PUT", "path": "step-00000010/.*rank-1", "query": "partNumber=2", "answer": "stall"}
    server.fail(part | {"times": 9})
    gang = bucket.start(ranks=2, **LARGE)
    objects = Bucket(bucket.url)
    wait_until(
        lambda: any(
            "step-00000010" in key and key.endswith("rank-0.json") for key in objects.keys("checkpoints/")
        ),
        "rank 0 to have written its part of step 10",
    )
    assert bucket.store.steps() == [5]
    gang.signal(KILL)
    gang.wait()
    server.fail()
    assert objects.uploads("checkpoints/")
    shutil.rmtree(bucket.local)

    history = bucket.finish(ranks=2, **LARGE)
    assert history.events("attempt_start", 2)[0]["resumed_step"] == 5
    assert history.stop(2)["digest"] == twin.stop()["digest"]
    assert history.losses() == twin.losses()
    assert history.events("checkpoint", 1)[0]["step"] == 5, "the first attempt's ledger came along"
    assert objects.uploads("checkpoints/") == []
    assert main(["diff", bucket.url, str(twin.run.path)]) == 0


def test_a_local_disk_without_room_to_begin_is_no_fault_of_the_job(bucket: InBucket, tmp_path: Path) -> None:
    """The bucket took the attempt, and the disk for logs had no room: that was a traceback, and a failure."""
    with small_disk(tmp_path / "small") as disk:
        local = {"HOLDFAST_LOCAL_DIR": str(disk)}
        first = bucket.start(steps=10, env=local)
        assert first.wait() == [0], first.texts()
        fill(disk / "others")
        full = bucket.start(steps=20, env=local)
        assert full.wait() == [1], full.texts()
        message = full.termination()
        assert (message.outcome, message.storage_unavailable) == ("failed", True)
        assert message.error.startswith(f"there is no room to begin in run directory {disk}")
        assert "Traceback" not in full.texts()
        (disk / "others").unlink()
        last = bucket.start(steps=20, env=local)
        assert last.wait() == [0], last.texts()
        assert "resumed from step 10" in last.texts()


def test_memory_that_sufficed_before_is_asked_for_again_on_a_machine_without_records(
    bucket: InBucket,
) -> None:
    """Only rank 0 fetches them, and it is rank 1 that has no room: nothing was durable, steps were done."""
    options = {"ranks": 2, "apart": True, "save_every": 50, "fail_rank": 1}
    bucket.start(**options, fail_at=3).wait()
    gang = bucket.start(**options, fail_at=0, fail_as="memory")
    codes = gang.wait()
    told = gang.termination(1)
    assert "Steps of earlier attempts fitted, on this device or with more memory" in told.error, told
    assert (codes[1], told.config_error) == (1, False)


@pytest.mark.slow
def test_a_rank_that_hangs_on_another_machine_is_not_taken_for_one_that_says_nothing(
    bucket: InBucket,
) -> None:
    """It says where it stands on a disk of its own; so does who waits for it, and blames nobody."""
    env = {"HOLDFAST_HANG_SECONDS": "4"}
    gang = bucket.start(ranks=2, apart=True, hang_at=3, hang_rank=1, env=env)
    assert gang.wait() == [1, 1], gang.texts()
    for rank, where, other in ((0, "loop_script.py:", 1), (1, "wait_for_ever", 0)):
        told = gang.termination(rank)
        assert told.outcome == "hung"
        assert "every rank of this replica stands at loop_script.py:" in told.error, told.error
        assert where in told.error
        assert told.error.endswith(f"; not seen from here: rank {other}")


def test_training_goes_on_while_saves_fail(bucket: InBucket, server: ObjectServer) -> None:
    server.fail(
        {"method": "PUT", "path": "step-00000005", "answer": "slow-down", "times": 999},
        {"method": "PUT", "path": "step-00000010/.*manifest", "answer": "forbidden", "times": 999},
    )
    history = bucket.finish(steps=20, save_every=5)
    told = {line["step"]: line["error"] for line in history.events("checkpoint_failed")}
    assert set(told) == {5, 10}
    assert "SlowDown (Please reduce your request rate.) 3 times" in told[5]
    assert "is not permitted (AccessDenied: Access Denied). Needed are s3:GetObject, s3:PutObject" in told[10]
    assert [line["step"] for line in history.events("checkpoint")] == [15, 20]
    assert history.stop()["durable_step"] == 20
    assert bucket.store.steps() == [20, 15]


def test_a_store_that_does_not_answer_at_the_start_is_no_fault_of_the_job(
    bucket: InBucket, server: ObjectServer
) -> None:
    bucket.finish(steps=10, save_every=5)
    for fault in ({"answer": "slow-down"}, {"method": "GET", "path": "step-00000010", "answer": "slow-down"}):
        server.fail({**fault, "times": 9999})
        gang = bucket.start(ranks=2, steps=15, save_every=5)
        assert gang.wait() == [1, 1], gang.texts()
        message = gang.termination()
        assert (message.outcome, message.storage_unavailable) == ("failed", True), message
        assert "answered SlowDown (Please reduce your request rate.) 3 times" in message.error
    server.fail({"answer": "forbidden", "times": 9999})
    gang = bucket.start(steps=15, save_every=5)
    assert gang.wait() == [1], gang.texts()
    assert not gang.termination().storage_unavailable, "somebody has to see to that"
    server.fail()
    history = bucket.finish(ranks=2, steps=15, save_every=5)
    assert [line["step"] for line in history.events("checkpoint")] == [5, 10, 15]


def test_a_loop_that_is_left_early_saves_when_the_interpreter_is_ending(
    bucket: InBucket, server: ObjectServer
) -> None:
    by_name = {"AWS_ENDPOINT_URL": f"http://localhost:{server.port}"}  # which must be looked up
    history = bucket.finish(steps=20, save_every=50, break_at=7, env=by_name)
    assert history.stop()["durable_step"] == 8


def test_a_ledger_that_could_not_be_written_whole_is_fetched_again(
    environment: None, server: ObjectServer, tmp_path: Path
) -> None:
    """The disk of another machine has room for the beginning of it alone."""
    url = f"s3://{server.bucket()}/run"
    first = RunDir(tmp_path / "first", url)
    first.attempt(1).mkdir(parents=True)
    first.ledger(1).write_text('{"event": "checkpoint"}\n' * 100)
    Records(first, 1).publish()
    elsewhere = RunDir(tmp_path / "elsewhere", url)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            Records(elsewhere, 2).fetch()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    Records(elsewhere, 2).fetch()
    assert elsewhere.ledger(1).read_text() == first.ledger(1).read_text()
    assert list(elsewhere.attempt(1).iterdir()) == [elsewhere.ledger(1)]


def test_a_copy_of_the_newest_lines_takes_memory_for_these_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of weeks has written gigabytes of steps, and copies some with each checkpoint."""
    run, sent = RunDir(tmp_path / "run", "s3://bucket/run"), dict[str, bytes]()
    monkeypatch.setattr(Bucket, "put", lambda self, key, data: sent.update({key: data}))
    run.attempt(1).mkdir(parents=True)
    old, new = b'{"step": 1}\n' * (1 << 20), b'{"step": 2}\n'
    run.steps(1).write_bytes(old)
    records = Records(run, 1)
    records.publish()
    with run.steps(1).open("ab") as file:
        file.write(new)
    tracemalloc.start()
    try:
        records.publish()
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    begin = "attempts/0001/steps.jsonl."
    assert sent == {f"{begin}{0:012d}": old, f"{begin}{len(old):012d}": new}
    assert most < 1 << 20


def test_what_many_checkpoints_left_of_a_ledger_is_fetched_many_pieces_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After weeks there are tens of thousands, and all ranks wait for them before they can begin."""
    run, count = RunDir(tmp_path / "run", "s3://bucket/run"), 64
    lines = {
        f"attempts/0001/ledger.jsonl.{n:012d}": line_of({"event": "attempt_start", "n": n})
        for n in range(count)
    }
    at_once = threading.Barrier(16, timeout=30)

    def get(_: Bucket, key: str) -> bytes:
        at_once.wait()
        return lines[key]

    monkeypatch.setattr(Bucket, "keys", lambda self, below: list(reversed(lines)))
    monkeypatch.setattr(Bucket, "get", get)
    Records(run, 2).fetch()
    assert [line["n"] for line in read_lines(run.ledger(1))] == list(range(count))


def test_records_of_many_attempts_are_fetched_several_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five hundred interruptions leave a thousand files, for which each start on another machine waits."""
    run, attempts, at_once = RunDir(tmp_path / "run", "s3://bucket/run"), 16, threading.Barrier(8, timeout=30)

    def get(_: Bucket, key: str) -> bytes:
        at_once.wait()
        return line_of({"event": "attempt_start", "from": key})

    keys = [f"attempts/{number:04d}/ledger.jsonl.{0:012d}" for number in range(1, attempts + 1)]
    monkeypatch.setattr(Bucket, "keys", lambda self, below: keys)
    monkeypatch.setattr(Bucket, "get", get)
    Records(run, attempts + 1).fetch()
    told = [line["from"] for number in run.attempt_numbers() for line in read_lines(run.ledger(number))]
    assert told == keys


def test_steps_of_weeks_are_fetched_without_all_of_them_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, piece, count = RunDir(tmp_path / "run", "s3://bucket/run"), b'{"step": 1}\n' * (1 << 14), 320
    keys = [f"attempts/0001/steps.jsonl.{n * len(piece):012d}" for n in range(count)]
    monkeypatch.setattr(Bucket, "keys", lambda self, below: keys)
    monkeypatch.setattr(Bucket, "get", lambda self, key: bytes(bytearray(piece)))
    tracemalloc.start()
    try:
        Records(run, 2).fetch()
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert run.steps(1).stat().st_size == count * len(piece)
    assert most < count * len(piece) // 2


def test_a_first_step_is_known_on_another_machine_though_its_attempt_was_killed(
    environment: None, server: ObjectServer, tmp_path: Path
) -> None:
    """A step that does not fit the memory there is then no fault that every machine would have."""
    url = f"s3://{server.bucket()}/run"
    here, elsewhere = RunDir(tmp_path / "here", url), RunDir(tmp_path / "elsewhere", url)
    journal = Journal(here, 1)
    journal.event("attempt_start")
    journal.event("first_step", step=1)

    def known() -> bool:
        shutil.rmtree(elsewhere.path, ignore_errors=True)
        Records(elsewhere, 2).fetch()
        return trained_before(elsewhere, 2)

    wait_until(known, "the next attempt to hear of the first step")


def test_where_the_rest_of_a_ledger_lies_is_told_when_the_store_is_away_at_the_end(
    environment: None, server: ObjectServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It was said to be tried again, which no later attempt does."""
    run = RunDir(tmp_path / "run", f"s3://{server.bucket()}/run")
    journal = Journal(run, 1)
    journal.event("attempt_start")
    server.fail({"method": "PUT", "path": "attempts/0001", "answer": "forbidden", "times": 1000})
    journal.event("stop")
    assert f"the ledger's newest lines are in {run.attempt(1)} alone" in caplog.text


def test_a_ledger_is_fetched_where_another_rank_has_left_lines_of_its_own(
    environment: None, server: ObjectServer, tmp_path: Path
) -> None:
    """Rank 1's machine is rank 0's in the next attempt: that must not begin without a past."""
    url = f"s3://{server.bucket()}/run"
    first, second = RunDir(tmp_path / "first", url), RunDir(tmp_path / "second", url)
    Journal(second, 1, first=False).event("failure", rank=1)
    journal = Journal(first, 1)
    journal.event("attempt_start")
    journal.event("checkpoint", step=5)
    for _ in range(2):
        Records(second, 2).fetch()
        told = [line["event"] for line in read_lines(second.ledger(1))]
        assert told == ["attempt_start", "checkpoint", "failure"]


def test_a_store_that_is_slow_leaves_the_random_numbers_of_the_training_alone(
    environment: None, server: ObjectServer
) -> None:
    """How long to wait before a request is made again is drawn, and not from what a script draws from."""
    random.seed(7)
    before = random.getstate()
    bucket = Bucket(f"s3://{server.bucket()}/run")
    server.fail({"answer": "slow-down", "times": 2})
    bucket.put("a", b"whole")
    server.fail({"answer": "slow-down", "times": 2})
    assert bucket.get("a") == b"whole"
    assert random.getstate() == before


def test_the_command_reads_a_bucket(
    bucket: InBucket, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bucket.finish(steps=10, save_every=5)
    assert main(["ls", bucket.url]) == 0
    assert "good" in capsys.readouterr().out
    assert main(["verify", bucket.url]) == 0
    assert capsys.readouterr().out == "step-00000010: good\nstep-00000005: good\n"
    assert main(["export", f"{bucket.url}@5", "--out", str(tmp_path / "w.safetensors")]) == 0
    assert main(["diff", f"{bucket.url}@5", bucket.url]) == 1
    assert main(["ls", f"{bucket.url}-not"]) == 2
    assert "has no checkpoints/ below it, so it is no run that saved" in capsys.readouterr().err


# ------------------------------------------------------------------- what cannot be


def test_a_prefix_with_an_at_of_its_own_is_named_as_it_is(
    server: ObjectServer, environment: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """What came after its last @ was taken for a step, or refused for not being one."""
    for prefix in ("me@host/a", "a/me@host", "a@500/"):
        url = f"s3://{server.bucket()}/{prefix}"
        assert main(["ls", url]) == 2
        assert f"error: {url} has no checkpoints/ below it" in capsys.readouterr().err


def refused(url: str, attempt: int | None = None) -> str:
    with pytest.raises(CheckpointError) as error:
        admit(RunDir(Path("/nowhere"), url), attempt)
    return str(error.value)


def test_what_is_said_of_a_store_that_refuses_or_is_not_there(
    environment: None, server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"s3://{server.bucket()}/run"
    assert f"there is no bucket 'test-none' at {server.url}. Create it" in refused("s3://test-none/run")
    server.fail({"answer": "forbidden", "times": 99})
    assert "list_objects_v2 of a list is not permitted" in refused(url)
    for answer, remedy in {
        "expired": "(where they are for a time only, AWS_SESSION_TOKEN too)",
        "other-region": "expecting 'eu-west-1'. Name the region of the bucket in AWS_DEFAULT_REGION",
        "other-time": "RequestTimeTooSkewed The difference is too large. Set the clock of this machine",
    }.items():
        server.fail({"answer": answer, "times": 99})
        assert remedy in refused(url)
    server.fail({"answer": "slow-down", "times": 99})
    assert "answered SlowDown" in refused(url)
    server.fail({"answer": "slow-down", "times": 2})  # of three tries
    assert admit(RunDir(Path("/nowhere"), url), None) == 1
    server.fail({"answer": "stall", "times": 99})
    monkeypatch.setenv("HOLDFAST_STORAGE_TIMEOUT_SECONDS", "0.5")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    assert f"no answer from {server.url} in 1 tries" in refused(url)
    server.fail()
    monkeypatch.setenv("HOLDFAST_STORAGE_TIMEOUT_SECONDS", "soon")
    assert "HOLDFAST_STORAGE_TIMEOUT_SECONDS='soon' is not a number of seconds above 0" in refused(url)
    monkeypatch.delenv("HOLDFAST_STORAGE_TIMEOUT_SECONDS")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    assert "Check AWS_ENDPOINT_URL and the network" in refused(url)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "localhost:9000")
    assert "Invalid endpoint: localhost:9000. AWS_ENDPOINT_URL has to begin with http://" in refused(url)


def test_where_nothing_may_be_deleted_the_first_attempt_is_told(
    environment: None, server: ObjectServer
) -> None:
    """It trained, and the one after its first interruption was refused."""
    server.fail({"method": "POST", "query": "delete", "answer": "forbidden", "times": 99})
    assert "delete_objects of a list is not permitted" in refused(f"s3://{server.bucket()}/run")
    server.fail()


def test_a_certificate_that_is_not_trusted_is_named_as_what_is_wrong(
    environment: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It passed for a store that does not answer, for which a job waits without end."""
    certificate, key = make_ssl_devcert(str(tmp_path / "own"), host="localhost")
    private = make_server("127.0.0.1", 0, lambda *_: [], threaded=True, ssl_context=(certificate, key))
    thread = threading.Thread(target=private.serve_forever)
    thread.start()
    try:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"https://localhost:{private.port}")
        with pytest.raises(CheckpointError, match="shows a certificate that is not trusted here") as raised:
            admit(RunDir(Path("/nowhere"), "s3://bucket/run"), None)
        assert not may_pass(raised.value)
        assert "in AWS_CA_BUNDLE, or have the certificate renewed" in str(raised.value)
    finally:
        private.shutdown()
        thread.join()
        private.server_close()


def test_what_is_said_of_credentials(
    environment: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = Processes()
    monkeypatch.setenv("INITIAL_NO_AUTH_ACTION_COUNT", "1")  # of this server: it asks who comes, but once
    try:
        strict = ObjectServer(started, tmp_path)
        monkeypatch.setenv("AWS_ENDPOINT_URL", strict.url)
        url = f"s3://{strict.bucket()}/run"
        assert f"{strict.url} does not accept the credentials (InvalidAccessKeyId)" in refused(url)
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
        monkeypatch.setenv("HOME", str(tmp_path))
        assert "there are no credentials. Set AWS_ACCESS_KEY_ID" in refused(url)
        strict.kill()
    finally:
        started.end_all()


def test_credentials_in_a_file_are_read_anew_when_they_are_renewed(
    environment: None, server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are for an hour, and something else writes the next ones: every save after that hour failed."""

    def renewed(key: str) -> None:
        file = tmp_path / "credentials"
        fresh = file.with_suffix(".new")
        fresh.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = s\n")
        fresh.replace(file)

    bucket = Bucket(f"s3://{server.bucket()}/run")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    renewed("FIRST")
    bucket.put("a", b"1")
    server.fail({"key": "Credential=FIRST/", "answer": "expired", "times": 1000})
    with pytest.raises(StorageUnavailable, match="ExpiredToken"):  # which may pass: it is waited for
        bucket.put("a", b"2")
    with pytest.raises(StorageUnavailable, match=r"does not accept the credentials \(400\)"):
        bucket.size("a")  # answered without a body, so without the word
    renewed("SECOND")
    bucket.put("a", b"3")
    assert bucket.get("a") == b"3"


def test_credentials_that_are_not_given_for_a_while_are_waited_for(
    environment: None, server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the service of a role is away when they end: a last save ended the training at once, and the
    message said to give it a role."""
    bucket = Bucket(f"s3://{server.bucket()}/run")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    given, config = tmp_path / "given", tmp_path / "config"
    soon = datetime.now(UTC) + timedelta(minutes=5)  # so soon that others are asked for each time
    key = {"Version": 1, "AccessKeyId": "k", "SecretAccessKey": "s", "Expiration": soon.isoformat()}
    config.write_text(f"[default]\ncredential_process = cat {given}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    given.write_text(json.dumps(key))
    bucket.put("a", b"1")
    given.unlink()
    with pytest.raises(StorageUnavailable, match="at the role's service, or at the credential_process"):
        bucket.put("a", b"2")
    given.write_text(json.dumps(key))
    bucket.put("a", b"3")
    assert bucket.get("a") == b"3"


def test_a_file_of_this_machine_that_is_gone_is_no_object_that_is_missing(
    environment: None, server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a program or a token for credentials was gone, "no such object" was said, for which a checkpoint
    is passed over; where the file of the authority was, a job waited for the store without end."""
    run = RunDir(tmp_path / "run", f"s3://{server.bucket()}/run")
    Bucket(run.objects).put("checkpoints/step-00000010/attempt-1.save-1/manifest.json", b"{}")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    (tmp_path / "config").write_text(f"[default]\ncredential_process = {tmp_path}/give\n")

    def gone(said: str) -> None:
        with pytest.raises(
            CheckpointError, match=f"a file of this machine cannot be read .*{said}"
        ) as raised:
            open_store(run, 0).fault(10)
        assert not may_pass(raised.value)

    with monkeypatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"https://localhost:{server.port}")
        patch.setenv("AWS_CA_BUNDLE", str(tmp_path / "authority.pem"))
        gone("AWS_CA_BUNDLE")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    gone(f"{tmp_path}/give")
    with pytest.raises(CheckpointError, match="a file of this machine cannot be read"):
        Bucket(run.objects).get("a")


def test_what_is_said_of_a_name_and_of_a_missing_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOLDFAST_RUN_DIR", raising=False)
    for text, said in {
        "gs://bucket/run": "give a path or s3://BUCKET/PREFIX; other stores are reached by",
        "s3://bucket": "names a whole bucket: give each run a prefix, such as s3://bucket/RUN",
        "s3://Bucket_/x": "names no objects: give s3://BUCKET/PREFIX",
        "s3://b/x": "the bucket's name has 3 to 63 of a-z, 0-9, dots and hyphens",
    }.items():
        with pytest.raises(ConfigError, match=said):
            Place.read(text)
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{os.getpid()}")
    assert "pip install 'holdfast[trainer,s3]'" in refused("s3://bucket/run")
