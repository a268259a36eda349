"""What makes saves cheap keeps them exact: staging, shared-out writing, blocks, parallel verified reads."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lone_gang import Alone
from saving import files_left, make_saver, save
from thread_gang import ThreadRank, in_gang

from holdfast_trainer import memory as memories
from holdfast_trainer.checkpoint import CheckpointError, Saved, Saver, load_newest, tensorfile
from holdfast_trainer.checkpoint import manifest as manifests
from holdfast_trainer.checkpoint import stage as stages
from holdfast_trainer.checkpoint.checksums import BLOCK, Running, Written, combine, sum_of
from holdfast_trainer.checkpoint.errors import StorageUnavailable
from holdfast_trainer.checkpoint.shares import share_out
from holdfast_trainer.checkpoint.stage import Image, NotEnoughMemory, Stage
from holdfast_trainer.checkpoint.storage import Storage
from holdfast_trainer.checkpoint.tensorfile import PAGE, Header, UnreadableFile
from holdfast_trainer.checkpoint.tree import pack
from holdfast_trainer.contract import RunDir
from holdfast_trainer.memory import free_memory
from holdfast_trainer.place import cannot_begin
from holdfast_trainer.training_state import TrainingState

# --------------------------------------------------------------------- checksums


@settings(max_examples=20)
@given(st.lists(st.integers(0, BLOCK + 7), max_size=4))
def test_a_stream_has_the_checksums_of_its_blocks(pieces: list[int]) -> None:
    whole = memoryview(bytearray(os.urandom(64) * (sum(pieces) // 64 + 1)))[: sum(pieces)]
    running, position = Running(), 0
    for piece in pieces:
        running.update(whole[position : position + piece])
        position += piece
    blocks = [sum_of(whole[start : start + BLOCK]) for start in range(0, len(whole), BLOCK)]
    assert running.finish() == combine(len(whole), blocks)


# ------------------------------------------------------------------------ shares


@given(
    st.dictionaries(st.text(max_size=3), st.integers(0, 1000), max_size=20),
    st.integers(1, 5),
)
def test_every_tensor_has_one_writer_and_none_writes_much_more(
    sizes: dict[str, int], world_size: int
) -> None:
    owners = share_out(sizes, world_size)
    assert owners == share_out(dict(reversed(sizes.items())), world_size), "in any order"
    assert owners.keys() == sizes.keys()
    loads = [sum(sizes[n] for n in sizes if owners[n] == rank) for rank in range(world_size)]
    assert max(loads) <= sum(sizes.values()) / world_size + max(sizes.values(), default=0)


def replicated(step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    shapes = {"a": (300, 40), "b": (7,), "c": (1000,), "d": (), "running": (9,)}
    return {"parts": {"m": {name: torch.rand(shape, generator=generator) for name, shape in shapes.items()}}}


def save_shared_out(run: RunDir, world_size: int, step: int) -> None:
    def work(gang: ThreadRank) -> None:
        saver = Saver(run, attempt=1, rank=gang.rank, world_size=world_size)
        state = replicated(step)
        state["parts"]["m"]["running"] += gang.rank  # differs by rank: rank 0's value counts
        only = frozenset(["shared.parts.m.running"])
        saver.save(step, state, {"rng": torch.tensor(gang.rank)}, rank_0_only=only)
        saver.wait()

    in_gang(world_size, work)


@pytest.mark.parametrize(("written", "loaded"), [(1, 1), (3, 3), (3, 1), (3, 2), (1, 3)])
def test_what_ranks_wrote_together_any_number_of_ranks_load(run: RunDir, written: int, loaded: int) -> None:
    save_shared_out(run, written, 10)
    results = in_gang(loaded, lambda gang: load_newest(run, 1, gang))
    for rank, (found, skipped) in enumerate(results):
        assert skipped == []
        for name, value in replicated(10)["parts"]["m"].items():
            assert torch.equal(found.shared["parts"]["m"][name], value), name
        assert found.own == ({"rng": torch.tensor(rank)} if written == loaded else None)


def test_each_tensor_is_written_once_and_all_ranks_write(run: RunDir) -> None:
    save_shared_out(run, 2, 10)
    names = [
        set(tensorfile.read(run.checkpoint(10) / f"rank-{rank}.safetensors")[1]) - {"own.rng"}
        for rank in range(2)
    ]
    assert not names[0] & names[1]
    assert {name.rpartition(".")[2] for name in names[0] | names[1]} == set("abcd") | {"running"}
    assert "shared.parts.m.running" in names[0]
    assert names[1], "rank 1 does its share"


class Buffered:
    """A data loader that keeps what it has read and not given yet: more on one rank than on another."""

    def __init__(self, count: int) -> None:
        self.kept = torch.arange(count)

    def state_dict(self) -> dict[str, Any]:
        return {"kept": self.kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kept = state["kept"]


def test_parts_of_other_sizes_on_other_ranks_lose_no_tensor_of_the_model(run: RunDir) -> None:
    def tracked(rank: int) -> TrainingState:
        model = torch.nn.ParameterDict({"a": torch.arange(300.0), "b": torch.arange(200.0)})
        return TrainingState({"model": model, "data": Buffered((1000, 10)[rank])}, rank)

    def work(gang: ThreadRank) -> Any:
        shared, own, rank_0_only = tracked(gang.rank).capture(10)
        saver = Saver(run, attempt=1, rank=gang.rank, world_size=2)
        saver.save(10, shared, own, rank_0_only=rank_0_only)
        saver.wait()
        gang.gather(None)  # rank 0's commit is over
        return load_newest(run, 1, gang)

    for rank, (loaded, skipped) in enumerate(in_gang(2, work)):
        assert (loaded.manifest.step, skipped) == (10, [])
        model = tracked(rank).capture(10).shared["parts"]["model"]
        assert all(torch.equal(loaded.shared["parts"]["model"][name], model[name]) for name in "ab")
        assert len((loaded.own if rank else loaded.shared)["parts"]["data"]["kept"]) == (1000, 10)[rank]


def test_ranks_whose_models_are_not_alike_commit_nothing(run: RunDir) -> None:
    """Rank 1 has one tensor more, and takes it for its share: rank 0 would count on it for another."""

    def work(gang: ThreadRank) -> str:
        names = ("a", "b", "c")[: 2 + gang.rank]
        state = {"parts": {"model": {name: torch.rand(300 - 100 * names.index(name)) for name in names}}}
        saver = Saver(run, attempt=1, rank=gang.rank, world_size=2)
        saver.save(10, state, {}, rank_0_only=frozenset())
        saver.join()
        return str(saver.error)

    told, _ = in_gang(2, work)
    assert told == (
        "step 10 could not be saved: rank 1 has other tensors than rank 0, by name or size, where models and "
        "optimizers should be alike: some of them would be in no file"
    )
    assert load_newest(run, 1, Alone()) == (None, [])


# ----------------------------------------------------------------------- staging


def stage_and_write(path: Path, state: Any, stage: Stage | None = None) -> Written:
    skeleton, tensors = pack(state)
    stage, header = stage or Stage(), Header.of(skeleton, tensors)
    image = stage.begin(header, tensors)
    stage.fill(image, header, tensors)
    return tensorfile.write_image(path, image.view, image.size, Storage(), ready=image.wait)


def test_staged_files_are_the_files_written_tensor_by_tensor(tmp_path: Path) -> None:
    """Also larger than a block, so around the page cache, and with a ragged end."""
    stage = Stage()
    for count in (3, BLOCK // 4 + 77, 5):
        state = {"w": torch.rand(count), "n": torch.arange(7), "t": torch.rand(4, 6).t(), "e": torch.empty(0)}
        staged = stage_and_write(tmp_path / "staged", state, stage)
        plain = tensorfile.write(tmp_path / "plain", *pack(state))
        assert staged == plain
        assert (tmp_path / "staged").read_bytes() == (tmp_path / "plain").read_bytes()
        assert staged.size == (tmp_path / "staged").stat().st_size


def test_a_state_that_finds_no_room_to_be_staged_is_copied_a_tensor_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of what lies on a GPU was copied before the first byte was written: memory was short by then."""
    copied, done = tensorfile.bytes_of, list[str]()

    class Disk(Storage):
        def write(self, fd: int, data: memoryview, offset: int) -> None:
            done.append("written")
            super().write(fd, data, offset)

    def heard(tensor: torch.Tensor) -> memoryview:
        done.append("copied")
        return copied(tensor)

    monkeypatch.setattr(tensorfile, "bytes_of", heard)
    tensorfile.write(tmp_path / "file", *pack({"v": torch.rand(4), "w": torch.rand(9)}), Disk())
    assert done == ["written", "copied", "written", "copied", "written"]


def test_what_is_staged_already_is_written_while_the_rest_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four tensors, each a part: the first can be read before the last tensor is there."""
    monkeypatch.setattr(stages, "PART", 1 << 20)
    seen: list[int] = []

    class Watched(dict[str, torch.Tensor]):
        def __getitem__(self, name: str) -> torch.Tensor:
            if len(self) == 4 and name == "d":
                image.wait(stages.PART)  # would not return were nothing ready
                seen.append(image.view[-PAGE])
            return super().__getitem__(name)

    skeleton, tensors = pack({name: torch.full((stages.PART,), 7, dtype=torch.uint8) for name in "abcd"})
    header, stage = Header.of(skeleton, tensors), Stage()
    image = stage.begin(header, tensors)
    stage.fill(image, header, Watched(tensors))
    image.wait(image.size)
    assert (seen, image.view[-PAGE]) == ([0], 7)


def test_a_state_that_cannot_be_copied_fails_its_save_alone(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    saver = Saver(run, attempt=1, rank=0, world_size=1, on_failed=lambda step, error: told.append(str(error)))

    def lost(*_: object) -> None:
        raise RuntimeError("the device is lost")

    with monkeypatch.context() as now:
        now.setattr(Stage, "copy", lost)
        with pytest.raises(RuntimeError, match="the device is lost"):
            saver.save(10, {"parts": {"w": torch.ones(3)}}, {})
    saver.join()
    assert told == ["step 10 could not be saved: StagingFailed: the state could not be staged"]
    saver.save(20, {"parts": {"w": torch.ones(3)}}, {})
    saver.wait()
    assert saver.durable_step == 20


def test_the_state_may_change_once_save_has_returned(run: RunDir) -> None:
    class Slow(Storage):
        go = threading.Event()

        def write(self, fd: int, data: memoryview, offset: int) -> None:
            assert self.go.wait(300)
            super().write(fd, data, offset)

    storage = Slow()
    saver = Saver(run, attempt=1, rank=0, world_size=1, storage=storage)
    weights, seen = torch.arange(1000.0), np.arange(1000.0)
    saver.save(10, {"parts": {"w": weights, "seen": seen}}, {})
    weights.zero_()
    seen.fill(0)
    storage.go.set()
    saver.wait()
    loaded, _ = load_newest(run, 1, Alone())
    assert loaded is not None
    assert torch.equal(loaded.shared["parts"]["w"], torch.arange(1000.0))
    assert np.array_equal(loaded.shared["parts"]["seen"], np.arange(1000.0))


def test_memory_is_taken_once_and_up_front(run: RunDir) -> None:
    saver = Saver(run, attempt=1, rank=0, world_size=1)
    state = {"parts": {"w": torch.rand(100_000)}}
    size = saver.prepare(state, {})
    assert 400_000 < size < 400_000 + (2 << 20)
    saver.save(10, state, {})
    saver.wait()
    assert saver.prepare(state, {}) == size
    saver.wait()


def test_a_header_that_outgrows_its_room_is_no_trouble(tmp_path: Path) -> None:
    stage = Stage()
    for words in (1, 2_000_000, 1):
        state = {"w": torch.ones(3), "text": "x" * words}
        stage_and_write(tmp_path / "staged", state, stage)
        skeleton, tensors = tensorfile.read(tmp_path / "staged")
        assert len(skeleton["text"]) == words
        assert tensors["w"].tolist() == [1, 1, 1]


def test_too_little_memory_makes_saves_slow_and_says_so(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stages, "free_memory", lambda: 10_000_000)
    told: list[Saved] = []
    saver = Saver(run, attempt=1, rank=0, world_size=1, on_saved=told.append)
    state = {"parts": {"w": torch.arange(1000.0)}}
    with caplog.at_level(logging.WARNING, "holdfast"):
        assert saver.prepare(state, {}) == 0
        stall = saver.save(10, state, {})
        saver.save(20, state, {})
    (line,) = caplog.messages
    assert "of memory, and 0.01 GB are free" in line
    assert "every save will hold training up until it is written" in line
    assert stall >= told[0].stall_seconds == told[0].seconds > 0
    loaded, _ = load_newest(run, 1, Alone())
    assert loaded is not None
    assert torch.equal(loaded.shared["parts"]["w"], state["parts"]["w"])


def test_the_container_and_the_machine_both_bound_memory(tmp_path: Path) -> None:
    assert free_memory(tmp_path) is None
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 100 kB\nMemAvailable: 50 kB\n")
    assert free_memory(tmp_path) == 50 * 1024
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    assert free_memory(tmp_path) == 50 * 1024
    (group / "memory.max").write_text("40000\n")
    (group / "memory.current").write_text("35000\n")
    (group / "memory.stat").write_text("anon 5\ninactive_file 1000\nactive_file 500\n")
    assert free_memory(tmp_path) == 6500
    older = group / "memory"  # version 1
    older.mkdir()
    (older / "memory.limit_in_bytes").write_text("9000\n")
    (older / "memory.usage_in_bytes").write_text("5000\n")
    (older / "memory.stat").write_text("cache 9\ntotal_inactive_file 100\ntotal_active_file 20\n")
    assert free_memory(tmp_path) == 4120
    with pytest.raises(NotEnoughMemory, match=r"needs 1000.00 GB of memory"):
        Stage().reserve(10**12, pinned=False)
    assert memories.free_memory() is None or memories.free_memory() > 0


def test_the_limit_of_a_job_on_one_machine_bounds_memory_though_its_group_is_not_the_topmost(
    tmp_path: Path,
) -> None:
    """`resources.memory` on one machine, Slurm and systemd limit a group below others; a container's own may
    have a path that only the machine knows."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemAvailable: 50 kB\n")
    stat = "inactive_file 0\nactive_file 0\ntotal_inactive_file 30\ntotal_active_file 0\n"

    def group(path: str, limit: str, usage: str, bound: int, used: int) -> None:
        directory = tmp_path / "sys/fs/cgroup" / path
        directory.mkdir(parents=True)
        for name, text in ((limit, f"{bound}\n"), (usage, f"{used}\n"), ("memory.stat", stat)):
            (directory / name).write_text(text)

    def is_in(*lines: str) -> None:
        (tmp_path / "proc/self/cgroup").write_text("".join(f"{line}\n" for line in lines))

    group("slurm/job", "memory.max", "memory.current", 9000, 1000)
    group("slurm/job/step:0", "memory.max", "memory.current", 20000, 500)
    group("memory/holdfast/job", "memory.limit_in_bytes", "memory.usage_in_bytes", 7000, 2000)
    is_in("4:memory:/", "1:name=systemd:/slurm/job", "0::/")
    assert free_memory(tmp_path) == 50 * 1024
    is_in("4:memory:/", "1:name=systemd:/", "0::/slurm/job/step:0")
    assert free_memory(tmp_path) == 8000, "of the group above"
    is_in("4:cpu,memory:/holdfast/job", "0::/")
    assert free_memory(tmp_path) == 5030
    is_in("4:memory:/docker/elsewhere", "0::/docker/elsewhere")
    assert free_memory(tmp_path) == 50 * 1024


def test_memory_is_asked_for_all_ranks_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "free_memory", lambda: 1_000_000_000)
    Stage().reserve(400_000_000, pinned=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(NotEnoughMemory) as raised:
        Stage().reserve(400_000_000, pinned=False)
    assert str(raised.value) == (
        "staging a checkpoint needs 0.40 GB of memory for each of 2 ranks here, and 1.00 GB are free, "
        "of which 0.27 GB are left to the training. More memory for the job would help, or more machines, "
        "as ranks share the state"
    )


# --------------------------------------------------------------------- giving up


def test_a_save_that_is_given_up_leaves_nothing_and_the_next_is_made(run: RunDir) -> None:
    """The disk is held up in the first of three blocks."""

    class Held(Storage):
        reached, go = threading.Event(), threading.Event()

        def write(self, fd: int, data: memoryview, offset: int) -> None:
            if len(data) >= BLOCK:
                self.reached.set()
                assert self.go.wait(300)
            super().write(fd, data, offset)

    storage, told = Held(), list[str]()
    saver = Saver(
        run,
        attempt=1,
        rank=0,
        world_size=1,
        storage=storage,
        on_failed=lambda step, error: told.append(str(error)),
    )
    saver.save(10, {"parts": {"w": torch.rand(9)}}, {})
    saver.wait()
    saver.save(20, {"parts": {"w": torch.rand(BLOCK // 4 * 2 + 9)}}, {})
    assert storage.reached.wait(300)
    assert saver.last_saved is not None
    assert not saver.makes_way(1e9), "there is time for both"
    assert saver.makes_way(saver.last_saved.seconds), "there is time for one"
    saver.give_up("no room for two")
    storage.go.set()
    saver.join()
    assert told == ["step 20 could not be saved: no room for two"]
    assert [path.name for path in run.checkpoints.iterdir()] == ["step-00000010"]
    saver.save(21, {"parts": {"w": torch.rand(9)}}, {})
    saver.wait()
    assert saver.durable_step == 21


# ------------------------------------------------------------------------- reading


@settings(max_examples=40)
@given(st.data())
def test_no_flipped_byte_of_a_file_is_read(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("flip") / "rank-0.safetensors"
    written = tensorfile.write(path, *pack({"w": torch.arange(5000.0), "n": [1, 2]}))
    raw = bytearray(path.read_bytes())
    position = data.draw(st.integers(0, 200) | st.integers(0, len(raw) - 1))
    raw[position] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(raw)
    with pytest.raises(UnreadableFile, match=r"rank-0.safetensors: checksum .* its manifest says"):
        tensorfile.read(path, written)


def test_a_block_that_differs_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.safetensors"
    written = tensorfile.write(path, *pack({"w": torch.zeros(BLOCK // 2)}))
    with open(path, "r+b") as file:
        file.seek(BLOCK + 5)
        file.write(b"x")
    with pytest.raises(UnreadableFile, match=r"checksum [0-9a-f]{32} of block 1, its manifest says"):
        tensorfile.read(path, written)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b'{"__metadata__":{},"w":{"dtype":"F32","shape":[9],"data_offsets":[0,8]}}', "8 bytes for F32"),
        (b'{"__metadata__":{},"w":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}', "where 0 is next"),
        (b'{"__metadata__":{},"w":{"dtype":"F3","shape":[2],"data_offsets":[0,8]}}', "F3"),
        (b'{"__metadata__":{},"w":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}', "its header tells of"),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path: Path, header: bytes, message: str) -> None:
    path = tmp_path / "rank-0.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(UnreadableFile, match=message):
        tensorfile.read(path)
    path.write_bytes((1 << 60).to_bytes(8, "little") + header)
    with pytest.raises(UnreadableFile, match=r"a header of \d+ bytes cannot be"):
        tensorfile.read(path)


def test_a_checkpoint_that_nobody_can_look_at_is_not_called_damaged(run: RunDir) -> None:
    """The one before it was gone on from, and it was removed, though nothing was wrong with it."""
    saver = make_saver(run)
    save(saver, 10)
    directory, files = run.checkpoint(10), manifests.read(run.checkpoint(10)).files
    why = r"cannot be looked at \(Too many open files\), which says nothing of what is in it"
    with files_left(0):
        for look in (
            lambda: manifests.read(directory),
            lambda: tensorfile.verify(directory / "rank-0.safetensors", files["rank-0.safetensors"]),
            lambda: tensorfile.read(directory / "rank-0.safetensors", files["rank-0.safetensors"]),
        ):
            with pytest.raises(CheckpointError, match=why):
                look()
        with pytest.raises(CheckpointError, match=r"cannot be listed: .*Too many open files"):
            load_newest(run, 2, Alone())
    assert load_newest(run, 2, Alone())[1] == []


@pytest.mark.parametrize("code", [errno.ENOTCONN, errno.EHOSTDOWN, errno.ESTALE])
def test_a_mount_whose_server_is_gone_is_waited_for_and_has_no_damage(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """Of one whose FUSE program had ended all checkpoints were called damaged, and the message said to remove
    them; where it was back for the next one, that was gone on from."""
    saver = make_saver(run)
    save(saver, 10)
    save(saver, 20)
    whole = os.preadv

    def gone_for_step_20(fd: int, *arguments: Any) -> int:
        if "step-00000020" in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(code, os.strerror(code))
        return whole(fd, *arguments)

    monkeypatch.setattr(os, "preadv", gone_for_step_20)
    with pytest.raises(
        StorageUnavailable, match=r"step 20 cannot be loaded by rank 0: .* cannot be looked at"
    ):
        load_newest(run, 2, Alone())
    assert isinstance(cannot_begin(run, OSError(code, os.strerror(code))), StorageUnavailable)


def of_step(place: Path | int) -> str:
    """The name of the checkpoint that a path or a descriptor is in; empty where it is in none."""
    path = os.readlink(f"/proc/self/fd/{place}") if isinstance(place, int) else str(place)
    return next((part for part in path.split("/") if part.startswith("step-")), "")


def withhold(
    monkeypatch: pytest.MonkeyPatch, withheld: Callable[[list[str]], bool], what: str = "data"
) -> list[str]:
    """Let reads of a checkpoint's `data` or `manifest` fail, as where a soft NFS mount has waited long enough
    for its server, while `withheld` says so of what was asked for. Returns that, as it grows."""
    asked: list[str] = []
    preadv, read_text = os.preadv, Path.read_text

    def ask(step: str) -> None:
        if step and step not in asked[-1:]:
            asked.append(step)
        if step and withheld(asked):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def data(fd: int, *arguments: Any) -> int:
        ask(of_step(fd))
        return preadv(fd, *arguments)

    def manifest(path: Path, *arguments: Any, **named: Any) -> str:
        ask(of_step(path))
        return read_text(path, *arguments, **named)

    if what == "data":
        monkeypatch.setattr(os, "preadv", data)
    else:
        monkeypatch.setattr(Path, "read_text", manifest)
    return asked


@pytest.mark.parametrize("what", ["data", "manifest"])
def test_bytes_that_a_soft_mount_did_not_give_in_time_are_asked_for_again(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """They passed for damage: the step before was gone on from, and the newest was removed once there was a
    newer one. Here the server is back before the older one is read."""
    saver = make_saver(run)
    save(saver, 10)
    save(saver, 20)
    asked = withhold(monkeypatch, lambda asked: len(asked) == 1, what)
    loaded, skipped = load_newest(run, 2, Alone())
    assert loaded is not None
    assert (loaded.manifest.step, skipped) == (20, [])
    assert asked == ["step-00000020", "step-00000010", "step-00000020"]


def test_bytes_that_are_given_at_the_second_look_are_no_fault_of_the_jobs(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = make_saver(run)
    save(saver, 10)
    reads: list[int] = []

    def first_fails(asked: list[str]) -> bool:
        reads.append(len(asked))
        return len(reads) == 1

    withhold(monkeypatch, first_fails)
    with pytest.raises(StorageUnavailable, match=r"as it was written, and cannot be loaded: .*Input/output"):
        load_newest(run, 2, Alone())
    loaded, _ = load_newest(run, 2, Alone())
    assert loaded is not None


def test_a_checkpoint_that_its_disk_has_lost_is_passed_over(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older one could be read between the two looks."""
    saver = make_saver(run)
    save(saver, 10)
    save(saver, 20)
    withhold(monkeypatch, lambda asked: asked[-1] == "step-00000020")
    loaded, (skip,) = load_newest(run, 2, Alone())
    assert loaded is not None
    assert (loaded.manifest.step, skip.step) == (10, 20)
    assert skip.reason == "rank 0: rank-0.safetensors: Input/output error"


def test_where_no_checkpoint_is_given_the_job_waits(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was a failure of the job's, which was told to remove its run directory."""
    saver = make_saver(run)
    save(saver, 10)
    withhold(monkeypatch, lambda asked: True)
    with pytest.raises(StorageUnavailable, match=r"none of the 1 checkpoints .*Input/output error.*server"):
        load_newest(run, 2, Alone())
    assert isinstance(cannot_begin(run, OSError(errno.EIO, os.strerror(errno.EIO))), StorageUnavailable)


def test_a_file_that_is_as_it_was_written_is_not_called_damaged(tmp_path: Path) -> None:
    """Such as one for which there is no memory, or with a type of numbers that only a later Holdfast has."""
    header = b'{"__metadata__":{},"w":{"dtype":"F4","shape":[2],"data_offsets":[0,8]}}'
    path = tmp_path / "rank-0.safetensors"
    path.write_bytes(whole := len(header).to_bytes(8, "little") + header + bytes(8))
    written = combine(len(whole), [sum_of(memoryview(whole))])
    with pytest.raises(
        CheckpointError, match=r"rank-0\.safetensors is as it was written, and cannot be loaded"
    ):
        tensorfile.read(path, written)


def test_a_disk_that_takes_half_a_write_is_told(run: RunDir) -> None:
    class Full(Storage):
        def write(self, fd: int, data: memoryview, offset: int) -> None:
            os.pwrite(fd, data[: len(data) // 2], offset)
            raise OSError(28, "No space left on device")

    saver = Saver(run, attempt=1, rank=0, world_size=1, storage=Full())
    saver.save(10, {"parts": {"w": torch.rand(9)}}, {})
    with pytest.raises(CheckpointError, match="step 10 could not be saved: No space left on device"):
        saver.wait()
    assert list(run.checkpoints.iterdir()) == []


class Passed:
    """In the place of an event: whether its GPU has come to it."""

    def __init__(self) -> None:
        self.waited = False

    def query(self) -> bool:
        return self.waited

    def synchronize(self) -> None:
        self.waited = True


def test_a_state_on_several_gpus_is_there_when_each_of_them_has_copied() -> None:
    """Each queues its copies by itself, and what one is done with says nothing of another's."""
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    events: Any = [Passed() for _ in range(3)]
    image = Image(memoryview(b""), size=30, ready=0)
    image.advance(0, 10, {first: events[0], second: events[1]})
    image.advance(10, 20)
    image.advance(20, 30, {first: events[2]})
    assert not image.whole
    image.wait(30)
    assert image.whole
    assert [event.waited for event in events] == [False, True, True], "the newest of each GPU"
