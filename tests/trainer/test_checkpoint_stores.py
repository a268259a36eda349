"""What every place for checkpoints keeps to: a directory, and objects on an S3-compatible server."""

from __future__ import annotations

import os
import re
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lone_gang import Alone
from object_stores import ObjectServer, server

from holdfast_trainer.checkpoint import CheckpointError, Fenced, load_newest, tensorfile, uploads
from holdfast_trainer.checkpoint.bucket import Bucket, ObjectPath
from holdfast_trainer.checkpoint.checksums import BLOCK
from holdfast_trainer.checkpoint.errors import may_pass
from holdfast_trainer.checkpoint.manifest import Manifest
from holdfast_trainer.checkpoint.object_fence import ObjectFence
from holdfast_trainer.checkpoint.retention import Retention
from holdfast_trainer.checkpoint.store import CheckpointStore, part_file
from holdfast_trainer.checkpoint.stores import admit, open_store
from holdfast_trainer.checkpoint.tree import pack
from holdfast_trainer.checkpoint.uploads import Uploads
from holdfast_trainer.contract import RunDir
from holdfast_trainer.memory import huge_pages

__all__ = ["server"]

pytestmark = pytest.mark.long


@pytest.fixture(params=["directory", "objects"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> RunDir:
    if request.param == "directory":
        return RunDir(tmp_path / "run")
    return _in_bucket(request, tmp_path)


@pytest.fixture
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> RunDir:
    """A run whose checkpoints are objects."""
    return _in_bucket(request, tmp_path)


def _in_bucket(request: pytest.FixtureRequest, tmp_path: Path) -> RunDir:
    server: ObjectServer = request.getfixturevalue("server")
    patch: pytest.MonkeyPatch = request.getfixturevalue("monkeypatch")
    server.fail()
    for name, value in server.environment.items():
        patch.setenv(name, value)
    return RunDir(tmp_path / "run", f"s3://{server.bucket()}/team/run")


def begin(
    store: CheckpointStore, step: int, save: int, rank: int = 0, world: int = 1, size: int = 500
) -> Any:
    """This rank's part of a save, reported."""
    partial = store.begin(step, save)
    shared = {"step": step, "parts": {"w": torch.arange(float(size)) + step}}
    skeleton, tensors = pack({"own": {"rank": rank}, **({"shared": shared} if rank == 0 else {})})
    written = tensorfile.write(partial / part_file(rank), skeleton, tensors, store.files)
    store.report_part(partial, rank, written)
    return partial


def commit(store: CheckpointStore, step: int, partial: Any, attempt: int = 1, world: int = 1) -> Manifest:
    files = store.await_parts(partial, world, lambda: False)
    return store.commit(partial, Manifest(step, attempt, world, "", files, time.time()))


def save(store: CheckpointStore, step: int, number: int, attempt: int = 1, **size: int) -> Manifest:
    return commit(store, step, begin(store, step, number, **size), attempt)


def keep(count: int) -> Any:
    return lambda steps: Retention(count).stays(steps, {})


def left(run: RunDir) -> list[str]:
    """All that saves left, by name."""
    return sorted(entry.name for entry in open_store(run, 0).entries())


def test_a_save_is_loaded_again_bit_by_bit(run: RunDir) -> None:
    assert admit(run, None) == 1
    store = open_store(run, 1)
    assert (store.steps(), store.newest()) == ([], None)
    assert load_newest(run, 1, Alone()) == (None, [])
    manifest = save(store, 10, 1)
    assert store.steps() == [10]
    assert store.newest() == manifest
    loaded, skipped = load_newest(run, 2, Alone())
    assert loaded is not None
    assert (loaded.manifest, loaded.own, skipped) == (manifest, {"rank": 0}, [])
    assert loaded.shared["parts"]["w"].tolist() == [10.0 + i for i in range(500)]
    assert store.fault(10) is None


def test_a_file_of_many_blocks_is_written_by_many_threads_and_read_likewise(run: RunDir) -> None:
    admit(run, 1)
    store = open_store(run, 1)
    size = 2 * BLOCK + 4 * 4096 - 100  # the last page is not full
    image = memoryview(huge_pages(3 * BLOCK))
    image[:] = torch.randint(256, (3 * BLOCK,), dtype=torch.uint8).numpy().data
    partial = store.begin(1, 1)
    for number, length in enumerate((size, BLOCK - 100, 2 * BLOCK, 100)):
        path = partial / f"{number}"
        written = tensorfile.write_image(path, image, length, store.files, **store.how)
        tensorfile.verify(path, written)
        with pytest.raises(tensorfile.UnreadableFile, match=f"{number} has {length} bytes, its manifest"):
            tensorfile.verify(path, tensorfile.Written(length + 1, written.sums))
    tensors = {"large": torch.randn(5_000_000), "small": torch.randn(7)}
    written = tensorfile.write(partial / "state", {}, tensors, store.files)
    _, found = tensorfile.read(partial / "state", written)
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)


def test_what_was_not_committed_is_no_checkpoint_and_goes_with_the_next_attempt(run: RunDir) -> None:
    admit(run, 1)
    store = open_store(run, 1)
    save(store, 10, 1)
    begin(store, 20, 2)
    fd = store.files.create(store.begin(30, 3) / part_file(0))
    store.files.write(fd, memoryview(bytes(BLOCK)), 0)  # and is killed here
    assert store.steps() == [10]
    assert len(left(run)) >= 2
    admit(run, 2)
    assert left(run) == ["step-00000010"]
    loaded, _ = load_newest(run, 2, Alone())
    assert loaded is not None
    assert loaded.manifest.step == 10


def test_retention_keeps_the_newest_and_removes_what_failed(run: RunDir) -> None:
    admit(run, 1)
    store = open_store(run, 1)
    begin(store, 5, 1)  # its gang never came together
    for number, step in enumerate((10, 20, 30), 2):
        save(store, step, number)
    store.prune(keep(2))
    assert store.steps() == [30, 20]
    assert left(run) == ["step-00000020", "step-00000030"]
    store.prune(keep(2), bad=[30])
    assert store.steps() == [20]


def test_what_a_rank_that_is_further_has_written_stays_when_old_checkpoints_go(run: RunDir) -> None:
    """Rank 0 still commits a save and removes old ones: the next one would have the other's part in it."""
    admit(run, 1)
    store = open_store(run, 1)
    for number, step in enumerate((10, 20), 1):
        save(store, step, number)
    begin(store, 30, 3, rank=1, world=2)
    store.prune(keep(1))
    assert store.steps() == [20]
    partial = begin(store, 30, 3, world=2)
    files = store.await_parts(partial, 2, lambda: True)
    store.commit(partial, Manifest(30, 1, 2, "", files, time.time()))
    assert store.fault(30) is None


def test_rank_0_learns_which_rank_could_not_write_and_which_is_late(run: RunDir) -> None:
    admit(run, 1)
    store = open_store(run, 1)
    partial = begin(store, 10, 1, world=2)
    store.report_failure(partial, 1, "its disk is full")
    with pytest.raises(CheckpointError, match="rank 1 could not write its part: its disk is full"):
        store.await_parts(partial, 2, lambda: False)
    partial = begin(store, 20, 2, world=2)
    with pytest.raises(CheckpointError, match="rank 1 did not write its part in time"):
        store.await_parts(partial, 2, lambda: True)
    store.abandon(partial)
    begin(store, 30, 3, rank=1, world=2)
    manifest = commit(store, 30, begin(store, 30, 3, world=2), world=2)
    assert sorted(manifest.files) == [part_file(0), part_file(1)]


def test_damage_is_found_and_the_checkpoint_before_is_taken(run: RunDir) -> None:
    admit(run, 1)
    store = open_store(run, 1)
    save(store, 10, 1)
    save(store, 20, 2)
    damage(store.location(20) / part_file(0))
    assert "checksum" in str(store.fault(20))
    loaded, skipped = load_newest(run, 1, Alone())
    assert loaded is not None
    assert (loaded.manifest.step, [s.step for s in skipped]) == (10, [20])
    assert "rank-0.safetensors: checksum" in skipped[0].reason
    admit(run, 2)
    newer = open_store(run, 2)
    again = save(newer, 20, 1, attempt=2)  # it comes to that step again, and replaces what is bad
    assert again.attempt == 2
    loaded, skipped = load_newest(run, 2, Alone())
    assert loaded is not None
    assert (loaded.manifest.attempt, skipped) == (2, [])


def damage(path: Path | ObjectPath) -> None:
    if isinstance(path, Path):
        raw = bytearray(path.read_bytes())
        raw[-5] ^= 4
        path.write_bytes(raw)
    else:
        raw = bytearray(path.bucket.get(path.key))
        raw[-5] ^= 4
        path.bucket.put(path.key, bytes(raw))


def test_a_connection_that_is_lost_in_the_middle_of_an_answer_is_made_again(
    objects: RunDir, server: ObjectServer
) -> None:
    """A request has three tries; where all are lost, the store is away, and nobody's checkpoint is bad."""
    admit(objects, 1)
    save(open_store(objects, 1), 10, 1)
    file = {"method": "GET", "path": "rank-0.safetensors", "answer": "cut"}
    listing = {"method": "GET", "query": "list-type=2", "answer": "cut"}
    server.fail(file | {"times": 2}, listing | {"times": 2})
    loaded, skipped = load_newest(objects, 1, Alone())
    assert loaded is not None
    assert (loaded.manifest.step, skipped) == (10, [])
    for fault in (file, listing):
        server.fail(fault | {"times": 99})
        with pytest.raises(CheckpointError, match=r"no answer from \S+ in 3 tries") as raised:
            load_newest(objects, 1, Alone())
        assert may_pass(raised.value)
    server.fail()


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (
            {"query": "list-type=2", "answer": "page"},
            "without IsTruncated, is not what an object store sends",
        ),
        ({"method": "PUT", "answer": "page"}, "without ETag, is not what an object store sends"),
        ({"method": "GET", "path": "manifest.json", "answer": "page"}, "without ETag"),
        ({"method": "GET", "path": "rank-0.safetensors", "answer": "page"}, "without ETag"),
        ({"method": "GET", "path": "rank-0.safetensors", "answer": "short"}, "bytes where .* were asked for"),
    ],
)
def test_what_no_store_answers_does_not_pass_for_an_empty_run_or_a_damaged_checkpoint(
    objects: RunDir, server: ObjectServer, rule: dict[str, Any], said: str
) -> None:
    """A proxy says for a while, with status 200, that it will be back soon. An attempt that begins meanwhile
    found no checkpoints, or bad ones: it began anew, and removed those that were there."""
    admit(objects, 1)
    save(open_store(objects, 1), 10, 1)

    def resume() -> Any:
        admit(objects, None)
        return load_newest(objects, 0, Alone())

    server.fail(rule | {"times": 99})
    with pytest.raises(
        CheckpointError, match=rf"no answer from \S+ in 3 tries \(OtherAnswer: .*{said}"
    ) as told:
        resume()
    assert may_pass(told.value)
    server.fail(rule | {"times": 1})
    loaded, skipped = resume()
    assert (loaded.manifest.step, skipped) == (10, [])
    server.fail()


def test_a_request_that_may_do_better_another_time_is_made_again(
    objects: RunDir, server: ObjectServer
) -> None:
    """MinIO has codes of its own where it is too busy: they passed for a refusal, which costs the job."""
    bucket = Bucket(objects.objects)
    bucket.put("k", b"there")
    requests = {
        "slow-down-write": lambda: bucket.put("k", b"there"),
        "conflict": lambda: bucket.create("new", b""),
        "bad-digest": lambda: bucket.put("k", b"there"),
        "not-deleted": lambda: bucket.delete(["k"]),
        "page": lambda: bucket.delete(["k"]),  # a proxy's, with status 200: nothing was deleted
    }
    for answer, request in requests.items():
        server.fail({"answer": answer, "times": 99})
        with pytest.raises(CheckpointError, match=r"(answered \S+ \(.*\)|in) 3 t(imes|ries)") as raised:
            request()
        assert may_pass(raised.value), answer
        server.fail({"answer": answer, "times": 2})
        request()
    assert bucket.keys("") == ["new"]
    server.fail()


def test_what_is_durable_is_known_while_the_store_is_away(
    objects: RunDir, server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a run would tell that all of its work is to be done again."""
    admit(objects, 1)
    store = open_store(objects, 1)
    manifest = save(store, 10, 1)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    server.fail({"answer": "slow-down", "times": 99})
    assert store.newest() == manifest
    assert store.newest(besides=[10]) is None, "it is known to be damaged"
    server.fail()


@pytest.mark.parametrize("file", ["rank-0.safetensors", "manifest.json"])
def test_bytes_that_were_damaged_on_their_way_are_read_again(
    objects: RunDir, server: ObjectServer, file: str
) -> None:
    """The checkpoint was passed over, and removed once a newer one was there; nothing was wrong with it.
    What is damaged each time it is read is damaged where it lies: the one before is taken."""
    admit(objects, 1)
    store = open_store(objects, 1)
    for number, step in enumerate((10, 20)):
        save(store, step, number, size=1_500_000)  # the file is read in two pieces
    header = {"method": "GET", "path": "safetensors", "answer": "unconditional", "times": 2}
    flipped = {"method": "GET", "path": f"step-00000020/.*{file}", "answer": "flipped"}
    for times, wanted in ((1, (20, [])), (99, (10, [20]))):
        server.fail(header, flipped | {"times": times})
        loaded, skipped = load_newest(objects, 1, Alone())
        assert loaded is not None
        assert (loaded.manifest.step, [skip.step for skip in skipped]) == wanted
    server.fail()


class Kept(Bucket):
    """What was put, by key, and nothing of an upload before it is complete."""

    def __init__(self) -> None:
        super().__init__("s3://none/run")
        self.there: dict[str, bytes] = {}
        self.parts: dict[int, bytes] = {}

    def put(self, key: str, data: bytes) -> None:
        self.there[key] = data

    def create(self, key: str, data: bytes) -> bool:
        if key in self.there:
            return False
        self.put(key, data)
        return True

    def get(self, key: str) -> bytes:
        if key not in self.there:
            raise FileNotFoundError(key)
        return self.there[key]

    def keys(self, below: str) -> list[str]:
        return sorted(key for key in self.there if key.startswith(below))

    def size(self, key: str) -> int:
        if key not in self.there:
            raise FileNotFoundError(key)
        return len(self.there[key])

    def begin_upload(self, key: str) -> str:
        assert not self.parts, "of one file there is one"
        return "upload"

    def upload_part(self, key: str, upload: str, number: int, data: bytes) -> str:
        assert data
        self.parts[number] = data
        return str(number)

    def complete_upload(self, key: str, upload: str, parts: dict[int, str]) -> None:
        assert list(map(str, parts)) == list(parts.values())
        self.there[key] = b"".join(self.parts[number] for number in sorted(parts))

    def abort_upload(self, key: str, upload: str) -> None:
        assert key not in self.there


FILE = bytes(range(30))
"""Of four parts of 8 bytes, the last of which is shorter."""


@pytest.mark.parametrize(
    ("writes", "size", "parts"),
    [
        pytest.param([(8, 16), (0, 8), (16, 24), (24, 30)], 30, [8, 8, 8, 6], id="blocks in any order"),
        pytest.param([(0, 3), (3, 11), (11, 19), (19, 20)], 20, [8, 8, 4], id="pieces that gather"),
        pytest.param([(0, 8), (8, 16)], 16, [8, 8], id="nothing is left over"),
        pytest.param([(0, 8), (8, 14)], 11, [8, 3], id="of the last bytes some do not count"),
        pytest.param([(0, 3), (3, 8)], 8, [8], id="one part"),
        pytest.param([(0, 3), (3, 5)], 5, [], id="too short for a part"),
        pytest.param([(0, 5)], 0, [], id="none counts"),
    ],
)
def test_an_object_has_the_bytes_that_were_written(
    writes: list[tuple[int, int]], size: int, parts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "BLOCK", 8)
    bucket = Kept()
    files = Uploads(bucket)
    fd = files.create(ObjectPath(bucket, "file"))
    for begin, end in writes:
        files.write(fd, memoryview(FILE)[begin:end], begin)
    files.truncate(fd, size)
    assert bucket.there == {}, "no object before the last is there"
    files.sync(fd)
    files.close(fd)
    assert bucket.there == {"file": FILE[:size]}
    assert [len(bucket.parts[number]) for number in sorted(bucket.parts)] == parts


def test_an_object_is_not_made_of_what_cannot_be_put_together() -> None:
    """A hole would be closed up by the store, and a part too many refused by it when all others are there."""
    bucket = Kept()
    files = Uploads(bucket)
    fd = files.create(ObjectPath(bucket, "file"))
    files.write(fd, memoryview(b"abc"), 0)
    with pytest.raises(OSError, match="1 bytes at 4 do not follow what is there"):
        files.write(fd, memoryview(b"e"), 4)
    with pytest.raises(CheckpointError, match=r"file: a rank's file may have 168 GB .* the job more ranks"):
        files.write(fd, memoryview(bytes(BLOCK)), 10_000 * BLOCK)
    assert bucket.parts == {}


@pytest.mark.parametrize("done", [True, False])
def test_an_upload_that_was_completed_before_its_answer_was_lost_is_there(done: bool) -> None:
    """Asked again, the store knows no such upload; nor does it where somebody has aborted it."""

    class Answer(Kept):
        def complete_upload(self, key: str, upload: str, parts: dict[int, str]) -> None:
            if done:
                super().complete_upload(key, upload, parts)
            raise FileNotFoundError(upload)

    bucket = Answer()
    files = Uploads(bucket)
    fd = files.create(ObjectPath(bucket, "file"))
    files.write(fd, memoryview(bytes(BLOCK)), 0)
    if done:
        files.sync(fd)
        assert bucket.there == {"file": bytes(BLOCK)}
    else:
        with pytest.raises(FileNotFoundError):
            files.sync(fd)


# -------------------------------------------------------------------------- fence


def test_an_attempt_that_was_superseded_can_do_nothing(run: RunDir) -> None:
    admit(run, 1)
    old = open_store(run, 1)
    save(old, 10, 1)
    partial = begin(old, 20, 2)
    admit(run, 2)
    with pytest.raises((CheckpointError, OSError)):  # whose debris was swept away
        commit(old, 20, partial)
    with pytest.raises(Fenced, match="attempt 1 was superseded by attempt 2: it may no longer write to"):
        old.check_fence()
    with pytest.raises(Fenced):
        old.prune(keep(1))
    with pytest.raises(Fenced):
        admit(run, 1)
    assert open_store(run, 2).steps() == [10]


def test_a_manifest_that_is_put_after_the_last_look_at_the_fence_is_never_loaded(objects: RunDir) -> None:
    admit(objects, 1)
    old = open_store(objects, 1)
    save(old, 10, 1)
    partial = begin(old, 40, 2)
    files = old.await_parts(partial, 1, lambda: False)
    late = Manifest(40, 1, 1, "", files, time.time())
    parts = {key: Bucket(objects.objects).get(key) for key in Bucket(objects.objects).keys(f"{partial.key}/")}

    admit(objects, 2)
    new = open_store(objects, 2)
    save(new, 20, 1, attempt=2)
    for key, data in parts.items():  # even where all of its parts survive
        partial.bucket.put(key, data)
    partial.bucket.put((partial / "manifest.json").key, late.to_json().encode())

    assert new.steps() == [20, 10]
    assert open_store(objects, 0).steps() == [20, 10]
    assert left(objects) == ["step-00000010", "step-00000020"], "nor is it told of as a checkpoint"
    assert admit(objects, None) == 3
    assert open_store(objects, 3).steps() == [20, 10]
    assert not Bucket(objects.objects).keys(f"{partial.key}/")


def test_what_was_called_durable_counts_for_every_later_attempt(objects: RunDir) -> None:
    """The claim of the next attempt falls between a manifest's put and its writer's look at the fence."""
    admit(objects, 1)
    old = open_store(objects, 1)
    put = Bucket.put

    def put_then_admit(self: Bucket, key: str, data: bytes) -> None:
        put(self, key, data)
        if key.endswith("manifest.json"):
            admit(objects, 2)

    partial = begin(old, 10, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Bucket, "put", put_then_admit)
        with pytest.raises(Fenced):
            commit(old, 10, partial)
    old.abandon(partial)  # as the saver does: what the newer attempt may have taken over stays
    assert open_store(objects, 2).steps() == [10]
    assert open_store(objects, 2).fault(10) is None


def test_a_number_is_used_once(objects: RunDir) -> None:
    admit(objects, 4)
    with pytest.raises(
        CheckpointError, match=r"attempt 4 of s3://\S+ was begun before, by .*: a number is used once"
    ):
        admit(objects, 4)
    assert admit(objects, None) == 5


def test_a_server_that_ignores_conditions_is_told_of_or_refused(
    objects: RunDir, server: ObjectServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.fail({"method": "PUT", "path": "fence", "answer": "unconditional", "times": 100})
    with pytest.raises(CheckpointError, match=r"ignores conditional writes.*Set HOLDFAST_ATTEMPT"):
        admit(objects, None)
    assert admit(objects, 2) == 2
    assert "whoever numbers attempts must never use a number twice" in caplog.text
    server.fail()


def test_a_claim_whose_answer_was_lost_is_the_attempt_s_own() -> None:
    """The request is made again, and finds that the object is there: the attempt was refused by itself."""

    class Answer(Kept):
        def create(self, key: str, data: bytes) -> bool:
            return super().create(key, data) and False

    fence = ObjectFence(Answer())
    assert fence.claim(3) == 3
    fence.accept(3, lambda: ["b", "a"])
    assert fence.accepted() == (3, {"a", "b"})


def test_of_two_attempts_that_number_themselves_at_once_the_second_takes_the_next_number() -> None:
    class Together(Kept):
        def create(self, key: str, data: bytes) -> bool:
            if not self.there:
                self.put("fence/00000001", b"the other's")
            return super().create(key, data)

    bucket = Together()
    assert ObjectFence(bucket).claim(None) == 2
    assert bucket.keys("") == ["fence/00000001", "fence/00000002"]


def test_an_attempt_that_is_refused_leaves_nothing_and_learns_who_was_there_before() -> None:
    bucket = Kept()
    fence = ObjectFence(bucket)
    fence.claim(2)
    before = dict(bucket.there)
    with pytest.raises(Fenced, match="attempt 1 was superseded by attempt 2"):
        fence.claim(1)
    by = re.escape(f"was begun before, by {socket.gethostname()} {os.getpid()}: a number is used once")
    with pytest.raises(CheckpointError, match=by):
        fence.claim(2)
    assert bucket.there == before
    bucket.there["fence/00000002"] = b"what an older version wrote"
    with pytest.raises(CheckpointError, match="was begun before, by another process: a number is"):
        fence.claim(2)


def test_what_of_the_past_counts_is_written_once_and_read_whole() -> None:
    class Tidied(Kept):
        """The newer attempt tidies up between the list of keys and the look at one of them."""

        def get(self, key: str) -> bytes:
            if key == "fence/00000002.accepts" and self.there.pop(key, None):
                self.there["fence/00000003.accepts"] = b'{"attempt": 3, "accepts": ["c"]}'
            return super().get(key)

    bucket = Tidied()
    fence = ObjectFence(bucket)
    assert fence.accepted() == (0, frozenset()), "of a run that nobody has begun"
    bucket.there["fence/00000002.accepts"] = b'{"attempt": 2, "accepts": ["b"]}'
    assert fence.accepted() == (3, {"c"})
    with pytest.raises(CheckpointError, match=r"attempt 3 of \S+ was begun by another process too"):
        fence.accept(3, lambda: ["d"])
    for body in (b"not JSON", b'{"attempt": 4}', b"[]"):
        bucket.there["fence/00000004.accepts"] = body
        with pytest.raises(CheckpointError, match=r"s3://none/run/fence/00000004\.accepts cannot be read: "):
            fence.accepted()


@pytest.mark.parametrize("number", [1, None], ids=["numbered", "by itself"])
def test_who_is_overtaken_while_it_begins_is_told_so_and_nothing_of_the_server(
    objects: RunDir, number: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    """It was frozen, or slow, once its claim was made; the newer attempt has tidied that away."""
    create, overtaken = Bucket.create, []

    def create_and_stand_still(self: Bucket, key: str, data: bytes) -> bool:
        made = create(self, key, data)
        if not overtaken:
            overtaken.append(key)
            assert admit(objects, 2) == 2
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Bucket, "create", create_and_stand_still)
        with pytest.raises(Fenced, match="attempt 1 was superseded by attempt 2"):
            admit(objects, number)
    assert overtaken == ["fence/00000001"]
    assert "conditional" not in caplog.text


def test_uploads_that_killed_writers_left_are_aborted(objects: RunDir) -> None:
    admit(objects, 1)
    bucket = Bucket(objects.objects)
    old = open_store(objects, 1)
    for step in (10, 20):
        fd = old.files.create(old.begin(step, step) / part_file(0))
        old.files.write(fd, memoryview(bytes(BLOCK)), 0)
    bucket.begin_upload("checkpoints/of-somebody-else")
    assert len(bucket.uploads("")) == 3
    admit(objects, 2)
    assert [key for key, _ in bucket.uploads("")] == ["checkpoints/of-somebody-else"]


def test_an_attempt_frozen_while_it_prunes_ends_no_upload_of_the_newer_one(objects: RunDir) -> None:
    admit(objects, 1)
    old = open_store(objects, 1)
    for number, step in enumerate((10, 20), 1):
        save(old, step, number)
    delete, newer = Bucket.delete, []

    def delete_later(self: Bucket, keys: Any) -> None:
        if not newer:
            newer.append(2)
            admit(objects, 2)
            new = open_store(objects, 2)
            fd = new.files.create(new.begin(15, 1) / part_file(0))
            new.files.write(fd, memoryview(bytes(BLOCK)), 0)
        delete(self, keys)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Bucket, "delete", delete_later)
        old.prune(keep(1))
    assert [key for key, _ in Bucket(objects.objects).uploads("")] == [
        "checkpoints/step-00000015/attempt-2.save-1/rank-0.safetensors"
    ]


def test_an_upload_whose_writer_fails_is_aborted_at_once(objects: RunDir) -> None:
    admit(objects, 1)
    store = open_store(objects, 1)
    fd = store.files.create(store.begin(10, 1) / part_file(0))
    store.files.write(fd, memoryview(bytes(BLOCK)), 0)
    store.files.close(fd)
    assert Bucket(objects.objects).uploads("") == []
    assert left(objects) == []


def test_an_upload_that_could_not_be_aborted_goes_with_the_next_save(
    objects: RunDir, server: ObjectServer
) -> None:
    """The store was away when the upload failed, and when it was to be aborted: its parts cost money until
    the attempt after this one, which a run that ends well never has."""
    admit(objects, 1)
    store = open_store(objects, 1)
    fd = store.files.create(store.begin(10, 1) / part_file(0))
    store.files.write(fd, memoryview(bytes(BLOCK)), 0)
    server.fail({"method": "DELETE", "answer": "slow-down", "times": 99})
    store.files.close(fd)
    server.fail()
    ahead = store.files.create(store.begin(30, 3) / part_file(1))  # of a rank that is further
    store.files.write(ahead, memoryview(bytes(BLOCK)), 0)
    assert len(Bucket(objects.objects).uploads("")) == 2
    save(store, 20, 2)
    store.prune(keep(3))
    assert [key for key, _ in Bucket(objects.objects).uploads("")] == [
        "checkpoints/step-00000030/attempt-1.save-3/rank-1.safetensors"
    ]
