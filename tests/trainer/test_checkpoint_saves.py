"""Saves that meet full disks, late ranks, superseded attempts and damage: nothing durable is lost."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, Event
from typing import Any

import numpy as np
import pytest
import torch
from lone_gang import Alone
from saving import Told, files_left, flip, listing, make_saver, save, state

from holdfast_trainer.checkpoint import (
    CheckpointDirectory,
    CheckpointError,
    Fenced,
    Saved,
    Saver,
    WrongConfiguration,
    load_newest,
)
from holdfast_trainer.checkpoint import manifest as manifests
from holdfast_trainer.checkpoint.flight import Flight
from holdfast_trainer.checkpoint.retention import Retention
from holdfast_trainer.checkpoint.stage import Image, Stage
from holdfast_trainer.checkpoint.storage import Storage
from holdfast_trainer.checkpoint.store import part_record
from holdfast_trainer.checkpoint.stores import admit
from holdfast_trainer.checkpoint.tensorfile import Header, Written, write_image
from holdfast_trainer.checkpoint.writer import Job, Writer
from holdfast_trainer.contract import MANIFEST, RunDir, exists, raise_fence, read_fence
from holdfast_trainer.place import cannot_begin

# ------------------------------------------------------------ commit and prune


def test_a_save_is_loaded_again_and_old_ones_go(run: RunDir) -> None:
    told = Told()
    saver = make_saver(run, told, keep=2)
    for step in (10, 20, 30, 40):
        save(saver, step)
    assert listing(run) == ["step-00000030", "step-00000040"]
    assert [saved.step for saved in told.saved] == [10, 20, 30, 40]
    assert (told.failed, saver.durable_step) == ([], 40)
    loaded, skipped = load_newest(run, 1, Alone())
    assert loaded is not None
    assert (loaded.manifest.step, loaded.own, skipped) == (40, {"rng": 40}, [])
    assert loaded.shared["parts"]["w"].tolist() == [40.0] * 4
    assert told.saved[-1].digest == loaded.manifest.digest


def test_a_save_waits_for_the_one_before_whose_memory_it_takes(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else that would be written of two steps, with checksums by which all is well."""
    told, writing, goes_on = Told(), Event(), Event()
    met: list[bool] = []

    class Looking(Stage):
        def begin(self, header: Header, tensors: Mapping[str, torch.Tensor]) -> Image:
            met.append(writing.is_set())
            if len(met) == 2:
                goes_on.set()
            return super().begin(header, tensors)

    def held(*what: Any, **how: Any) -> Written:
        writing.set()
        assert goes_on.wait(60)
        written = write_image(*what, **how)
        writing.clear()
        return written

    saver = make_saver(run, told, keep=2, stage=Looking(), write_image=held)
    saver.save(10, state(10.0), {"rng": 10})
    assert writing.wait(60)
    join = saver.join

    def joined(timeout: float | None = None) -> None:
        goes_on.set()
        join(timeout)

    monkeypatch.setattr(saver, "join", joined)
    save(saver, 20)
    assert met == [False, False]
    assert ([saved.step for saved in told.saved], told.failed) == ([10, 20], [])


def test_more_old_checkpoints_than_a_process_may_open_files_go_once_fewer_are_kept(run: RunDir) -> None:
    """All of them were opened first, so none was ever removed, and the disk filled."""
    told = Told()
    saver = make_saver(run, told, keep=1000)
    save(saver, 1)
    for step in range(2, 81):
        shutil.copytree(run.checkpoint(1), run.checkpoint(step))
    fewer = make_saver(run, told, keep=3)
    with files_left(60):
        save(fewer, 100)
    assert told.failed == []
    assert listing(run) == ["step-00000079", "step-00000080", "step-00000100"]


def test_debris_of_the_past_goes_and_strangers_stay(run: RunDir) -> None:
    debris = (
        ".step-00000007.attempt-1",
        ".step-00000010.attempt-1.save-3",
        "step-00000005",
    )
    for name in debris:
        (run.checkpoints / name).mkdir(parents=True)
        (run.checkpoints / name / "rank-0.safetensors").write_text("half")
    (run.checkpoints / "notes").mkdir()
    saver = make_saver(run)
    save(saver, 20)
    assert listing(run) == ["notes", "step-00000020"]


def test_sweep_makes_room_before_the_first_save(run: RunDir) -> None:
    raise_fence(run, 2)
    for name in (
        ".step-00000010.attempt-1.save-3",
        ".step-00000010.attempt-2.save-1",
        ".step-00000010.attempt-3.save-1",
    ):
        (run.checkpoints / name).mkdir(parents=True)
    CheckpointDirectory(run, 2).sweep()
    assert listing(run) == [".step-00000010.attempt-3.save-1"]


def test_a_good_checkpoint_is_never_replaced(run: RunDir) -> None:
    told = Told()
    save(make_saver(run, told), 10, value=1.0)
    save(make_saver(run, told), 10, value=2.0)
    loaded, _ = load_newest(run, 1, Alone())
    assert loaded is not None
    assert loaded.shared["parts"]["w"][0] == 1.0
    assert told.saved[1].digest == told.saved[0].digest == loaded.manifest.digest, (
        "what is told is what is there"
    )


def test_a_bad_checkpoint_is_replaced_by_a_good_one_of_its_step(run: RunDir) -> None:
    told = Told()
    save(make_saver(run), 10)
    save(make_saver(run), 20)
    flip(run.checkpoint(20) / "rank-0.safetensors")
    loaded, skipped = load_newest(run, 1, Alone())
    assert loaded is not None
    assert loaded.manifest.step == 10

    saver = make_saver(run, told)
    saver.bad_steps = {skip.step for skip in skipped}
    assert saver.durable_step == 10, "a damaged checkpoint is not durable work"
    save(saver, 20)
    assert listing(run) == ["step-00000010", "step-00000020"]
    assert (saver.durable_step, told.failed) == (20, [])
    loaded, skipped = load_newest(run, 1, Alone())
    assert loaded is not None
    assert (loaded.manifest.step, skipped) == (20, [])


def test_a_bad_checkpoint_is_none_of_those_that_are_kept(run: RunDir) -> None:
    for step in (10, 20):
        save(make_saver(run), step)
    flip(run.checkpoint(20) / "rank-0.safetensors")
    saver = make_saver(run, keep=2)
    saver.bad_steps = {20}
    save(saver, 30)
    assert listing(run) == ["step-00000010", "step-00000030"]


def test_nothing_to_keep_is_refused(run: RunDir) -> None:
    with pytest.raises(ValueError, match="keep=0: at least 1 checkpoint must be kept"):
        make_saver(run, keep=0)


def test_a_listener_that_fails_harms_neither_this_save_nor_the_next(
    run: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    """As where the ledger's disk is full: the checkpoint is there, and old ones still go."""

    def tell(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "ledger.jsonl")

    saver = Saver(run, attempt=1, rank=0, world_size=1, keep=1, on_saved=tell, on_failed=tell)
    with caplog.at_level(logging.WARNING, "holdfast"):
        save(saver, 10)
        save(saver, 20)
        (run.checkpoints / ".step-00000030.attempt-1.save-3").write_text("in the way")
        with pytest.raises(CheckpointError, match="step 30 could not be saved"):
            save(saver, 30)
    assert listing(run)[-1] == "step-00000020"
    assert "step-00000010" not in listing(run)
    told = "telling of it failed: No space left on device (ledger.jsonl)"
    assert caplog.messages[:2] == [f"step {step} is durable, but {told}" for step in (10, 20)]
    assert caplog.messages[2].startswith("step 30 could not be saved: ")
    assert caplog.messages[2].endswith(f"; {told}")


def test_what_the_disk_does_not_explain_is_a_failed_save_too(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Told()
    saver = make_saver(run, told)

    def fail(job: Any, partial: Path) -> Any:
        raise AttributeError("no such thing")

    monkeypatch.setattr(saver._writer, "_commit", fail)
    with pytest.raises(CheckpointError, match="step 10 could not be saved: AttributeError"):
        save(saver, 10)
    assert told.failed[0].startswith("10: step 10 could not be saved: AttributeError")
    assert (listing(run), told.saved, saver.durable_step) == ([], [], 0)


# ---------------------------------------------------------------------- fencing


def test_a_save_is_told_to_be_durable_before_older_ones_go(run: RunDir) -> None:
    """A disk that hangs in a removal held the news of a checkpoint up for as long."""
    seen: list[tuple[list[str], int]] = []

    def note(saved: Saved) -> None:
        assert saver.known is not None
        seen.append((listing(run), saver.known.step))

    saver = Saver(run, attempt=1, rank=0, world_size=1, keep=1, on_saved=note)
    save(saver, 10)
    save(saver, 20)
    assert seen == [(["step-00000010"], 10), (["step-00000010", "step-00000020"], 20)]
    assert listing(run) == ["step-00000020"]


def test_a_part_is_not_reported_before_it_is_known_to_be_of_one_instant(run: RunDir) -> None:
    """Rank 0 would have made it a checkpoint when its rank learns that what was copied had been changed."""
    record, reported, failed = part_record(1), list[bool](), list[str]()

    class Watched(Flight):
        def await_settled(self) -> float:
            reported.append(exists(partial() / record))
            return super().await_settled()

    def partial() -> Path:
        (path,) = run.checkpoints.iterdir()
        return path

    def write(place: Any) -> Written:
        place.write_text("part")
        return Written(4, "0" * 64)

    writer = Writer(
        run,
        attempt=1,
        rank=1,
        world_size=2,
        config_hash="",
        retention=Retention(1),
        earlier={},
        environment={},
        on_saved=lambda saved: None,
        on_failed=lambda step, error: failed.append(str(error)),
        storage=None,
    )
    flight = Watched(4)
    flight.settle("the model was changed")
    writer.write(Job(10, 1, write, flight, 0.0))
    assert reported == [False]
    assert "the model was changed" in json.loads((partial() / record).read_text())["error"]
    assert failed[0].startswith("step 10 could not be saved: the model was changed")


def test_an_attempt_that_was_superseded_does_not_begin_to_write(run: RunDir) -> None:
    """It would take room and bandwidth of the newer one's, for each of its saves until it ends."""
    made: list[str] = []

    class Watched(Storage):
        def make_directory(self, path: Path) -> None:
            made.append(path.name)
            super().make_directory(path)

    saver = Saver(run, attempt=1, rank=0, world_size=1, keep=1, storage=Watched())
    save(saver, 10)
    before = list(made)
    assert before
    raise_fence(run, 2)
    with pytest.raises(Fenced):
        save(saver, 20)
    assert made == before


def test_a_late_writer_is_fenced_and_harms_nothing(run: RunDir) -> None:
    """Attempt 1 is paused with all its parts written; attempt 2 takes over; attempt 1 wakes up."""
    first = make_saver(run)
    save(first, 10)
    late = CheckpointDirectory(run, 1)
    partial = late.begin(20, 9)
    (partial / "rank-0.safetensors").write_text("part")
    late.report_part(partial, 0, Written(4, "0" * 64))

    raise_fence(run, 2)
    manifest = first.newest
    assert manifest is not None
    with pytest.raises(Fenced, match="attempt 1 was superseded by attempt 2: it may no longer write"):
        late.commit(partial, manifest)
    with pytest.raises(Fenced):
        late.prune(set)
    with pytest.raises(Fenced):
        save(first, 30)
    second = make_saver(run, attempt=2)
    save(second, 30)
    assert listing(run) == ["step-00000010", "step-00000030"]


def test_an_attempt_superseded_as_it_removes_old_checkpoints_says_so_and_ends(run: RunDir) -> None:
    """Not that training goes on, with the old ones still there: it does not, and they are not its own."""
    told = Told()
    first = make_saver(run, told)
    save(first, 10)
    raise_fence(run, 2)
    first.prune()
    assert told.failed == [f"10: attempt 1 was superseded by attempt 2: it may no longer write to {run.path}"]
    assert isinstance(first.error, Fenced), "for which the loop ends"


def test_a_newer_attempt_that_comes_while_the_manifest_is_written_gets_no_checkpoint_of_the_older(
    run: RunDir,
) -> None:
    """It may have looked already for what it goes on from; a slow disk takes seconds for the manifest."""

    class Slow(Storage):
        def replace_durably(self, path: Path, text: str) -> None:
            super().replace_durably(path, text)
            if path.name == MANIFEST:
                raise_fence(run, 2)

    with pytest.raises(Fenced, match="attempt 1 was superseded by attempt 2"):
        save(make_saver(run, storage=Slow()), 20)
    assert "step-00000020" not in listing(run)


def test_a_writer_past_its_last_look_at_the_fence_has_nothing_left_to_rename(run: RunDir) -> None:
    late = CheckpointDirectory(run, 1)
    partial = late.begin(20, 1)
    raise_fence(run, 2)
    CheckpointDirectory(run, 2).sweep()
    with pytest.raises(FileNotFoundError):
        os.rename(partial, run.checkpoint(20))


def test_an_attempt_frozen_while_it_prunes_takes_nothing_of_the_newer_one(run: RunDir) -> None:
    """It was about to remove a damaged step 20 when it froze; the newer attempt saved step 20 meanwhile."""

    class Frozen(Storage):
        def unlink(self, path: Path, held: int | None = None) -> None:
            if path == run.checkpoint(20) / "manifest.json":
                raise_fence(run, 2)
                newer = make_saver(run, attempt=2)
                newer.bad_steps = {20}
                save(newer, 20)
            super().unlink(path, held)

    save(make_saver(run), 10)
    save(make_saver(run), 20)
    flip(run.checkpoint(20) / "rank-0.safetensors")
    older = make_saver(run, storage=Frozen(), keep=1)
    older.bad_steps = {20}
    save(older, 15)
    loaded, skipped = load_newest(run, 2, Alone())
    assert loaded is not None
    assert (loaded.manifest.step, loaded.manifest.attempt, skipped) == (20, 2, [])


def test_an_attempt_frozen_while_it_replaces_what_is_damaged_takes_nothing_of_the_newer_one(
    run: RunDir,
) -> None:
    """It had read the fence for the last time when it froze; the newer attempt saved that step meanwhile."""

    class Frozen(Storage):
        def unlink(self, path: Path, held: int | None = None) -> None:
            if path == run.checkpoint(20) / "manifest.json" and read_fence(run) == 1:
                assert admit(run, None) == 2
                save(make_saver(run, attempt=2), 20)
            super().unlink(path, held)

    save(make_saver(run), 20)
    flip(run.checkpoint(20) / "rank-0.safetensors")
    with pytest.raises(Fenced, match="attempt 1 was superseded by attempt 2"):
        save(make_saver(run, storage=Frozen()), 20)
    loaded, skipped = load_newest(run, 2, Alone())
    assert loaded is not None
    assert (loaded.manifest.step, loaded.manifest.attempt, skipped) == (20, 2, [])


def test_debris_of_a_newer_attempt_is_left_to_it(run: RunDir) -> None:
    save(make_saver(run), 20)
    writing = CheckpointDirectory(run, 2).begin(10, 1)
    save(make_saver(run), 30)
    assert writing.exists()


def test_the_directories_above_a_new_run_are_there_after_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By POSIX a new name is durable once the directory that has it is synced, however far above."""
    synced, fsync = set[str](), os.fsync

    def note(fd: int) -> None:
        synced.add(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", note)
    run = RunDir(tmp_path / "team" / "job" / "run")
    admit(run, None)
    assert synced >= {str(path) for path in (tmp_path, tmp_path / "team", run.path.parent, run.path)}


def test_of_starts_at_once_each_is_an_attempt_of_its_own(run: RunDir) -> None:
    """Two with one number would sweep away and write over each other's saves."""
    starts = 8
    together = Barrier(starts)

    def start(_: int) -> int:
        together.wait(300)
        try:
            return admit(run, None)
        except Fenced as error:
            return int(str(error).split()[1])

    with ThreadPoolExecutor(starts) as pool:
        numbers = list(pool.map(start, range(starts)))
    assert sorted(numbers) == list(range(2, starts + 2)), "1 began before"
    assert read_fence(run) == max(numbers)


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK])
def test_a_mount_without_locks_is_told_what_it_lacks(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """As Lustre is mounted unless it is told otherwise: "Function not implemented" was all that was said."""

    def flock(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(OSError, match=r"mount Lustre with the option flock") as raised:
        admit(run, 2)
    told = str(cannot_begin(run, raised.value))
    assert told.startswith(f"run directory {run.path} cannot be used: [Errno {code}] {os.strerror(code)}: ")


def test_an_unreadable_fence_stops_saves_with_a_reason(run: RunDir) -> None:
    run.fence.write_text("soon")
    with pytest.raises(
        CheckpointError, match=r"cannot read the fence: .* holds 'soon', not an attempt number"
    ):
        save(make_saver(run), 10)


# ---------------------------------------------------------------------- loading


def test_a_new_run_has_nothing_to_load(run: RunDir) -> None:
    assert load_newest(run, 1, Alone()) == (None, [])


def test_no_usable_checkpoint_is_refused_loudly(run: RunDir) -> None:
    saver = make_saver(run)
    save(saver, 10)
    save(saver, 20)
    flip(run.checkpoint(10) / "rank-0.safetensors")
    (run.checkpoint(20) / "rank-0.safetensors").unlink()
    with pytest.raises(CheckpointError) as raised:
        load_newest(run, 1, Alone())
    message = str(raised.value)
    assert message.startswith(
        f"none of the 2 checkpoints in {run.checkpoints} can be used (step 20: rank 0: "
    )
    assert "rank-0.safetensors: No such file" in message
    assert "step 10: rank 0: rank-0.safetensors: checksum" in message
    assert message.endswith("Restore one from a backup, or remove the directory to start over")


def test_another_configuration_is_refused(run: RunDir) -> None:
    save(make_saver(run, config_hash="a" * 64), 10)
    with pytest.raises(WrongConfiguration) as raised:
        load_newest(run, 1, Alone(), "b" * 64)
    assert "was written under another configuration (aaaaaaaaaaaa, this is bbbbbbbbbbbb)" in str(raised.value)
    assert load_newest(run, 1, Alone(), "a" * 64)[0] is not None
    assert load_newest(run, 1, Alone())[0] is not None, "who gives no hash is not guarded"


def test_a_checkpoint_under_another_steps_name_is_not_used(run: RunDir) -> None:
    save(make_saver(run), 10)
    os.rename(run.checkpoint(10), run.checkpoint(30))
    with pytest.raises(CheckpointError, match="manifest of step 10 in step-00000030"):
        load_newest(run, 1, Alone())


@pytest.mark.parametrize(
    ("more", "version"),
    [
        ({}, 3),
        ({"gradients": {"optimizer": {0: torch.ones(2)}}}, 4),
        ({"parts": {"meter": {"best": [np.float32(0.1)]}}}, 4),
        ({"gradients": {"optimizer": {0: None}}}, 5),
    ],
    ids=["plain", "gradients that add up", "numpy's number", "gradients that are cleared in place"],
)
def test_a_holdfast_that_would_pass_over_some_of_a_checkpoint_is_told_not_to_read_it(
    run: RunDir, more: dict[str, Any], version: int
) -> None:
    """Before version 4 a resume left out such gradients and made other numbers of such ones, and said
    nothing; with what version 5 has, version 4 ended in a traceback. What has none of them is read by it as
    ever, so that a roll back loses nothing."""
    saver = make_saver(run)
    saver.save(10, {**state(1.0), **more}, {})
    saver.wait()
    assert json.loads((run.checkpoint(10) / MANIFEST).read_text())["version"] == version
    loaded, skipped = load_newest(run, 1, Alone())
    assert loaded is not None
    assert not skipped
    assert loaded.shared.keys() == {*state(1.0), *more}


def test_the_checkpoint_of_a_later_holdfast_is_refused_and_stays(run: RunDir) -> None:
    """Who rolls back: it passed for a damaged one, so the one before was gone on from, and it was removed."""
    saver = make_saver(run)
    save(saver, 10)
    save(saver, 20)
    written = run.checkpoint(20) / MANIFEST
    body = json.loads(written.read_text())
    del body["checksum"]
    body["version"] = 6
    written.write_text(json.dumps({**body, "checksum": manifests._checksum(body)}, indent=1))
    with pytest.raises(WrongConfiguration) as raised:
        load_newest(run, 2, Alone())
    assert str(raised.value).endswith(
        "step-00000020 cannot be read here: manifest.json: version 6 is none of 3 to 5: written by another "
        "Holdfast. Run that one, or remove this checkpoint to go on from the one before it"
    )
    assert listing(run) == ["step-00000010", "step-00000020"]
