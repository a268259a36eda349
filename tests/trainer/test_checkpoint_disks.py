"""Saves on disks that are full, turn read-only and come back: one fails, and none that is durable is lost."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from disks import fill, real_disk, remount
from lone_gang import Alone
from saving import Told, listing, make_saver, save

from holdfast_trainer.checkpoint import CheckpointDirectory, CheckpointError, load_newest
from holdfast_trainer.contract import RunDir, raise_fence


def test_a_full_disk_fails_one_save_and_no_other(small_disk: Path) -> None:
    run = RunDir(small_disk / "run")
    raise_fence(run, 1)
    told = Told()
    saver = make_saver(run, told)
    save(saver, 10, size=200_000)
    filler = small_disk / "filler"
    fill(filler)
    with pytest.raises(CheckpointError, match=r"step 20 could not be saved: No space left on device"):
        save(saver, 20, size=200_000)
    assert listing(run) == ["step-00000010"], "what did not fit was removed again"
    loaded, skipped = load_newest(run, 1, Alone())
    assert loaded is not None
    assert (loaded.manifest.step, skipped) == (10, [])
    filler.unlink()
    save(saver, 30, size=200_000)
    assert ([saved.step for saved in told.saved], len(told.failed)) == ([10, 30], 1)


def test_debris_on_a_full_disk_does_not_stop_the_next_attempt(small_disk: Path) -> None:
    """Attempt 1 was killed while it wrote, and what it wrote fills the disk."""
    run = RunDir(small_disk / "run")
    raise_fence(run, 1)
    save(make_saver(run, keep=1), 10, size=200_000)
    half = CheckpointDirectory(run, 1).begin(20, 2)
    fill(half / "rank-0.safetensors")
    raise_fence(run, 2)
    CheckpointDirectory(run, 2).sweep()
    save(make_saver(run, attempt=2, keep=1), 20, size=200_000)
    assert listing(run) == ["step-00000020"]


def test_a_real_disk_fills_up_and_turns_read_only_and_comes_back(tmp_path: Path) -> None:
    """An ext4, and files that go around the page cache; a save needs a third of it."""
    size = 2_500_000  # eight bytes each
    with real_disk(tmp_path / "disk", 72 << 20) as disk:
        run = RunDir(disk / "run")
        raise_fence(run, 1)
        told = Told()
        saver = make_saver(run, told, keep=1)
        save(saver, 10, size=size)
        filler = disk / "filler"
        with open(filler, "wb") as file:
            room = os.statvfs(disk)
            os.posix_fallocate(file.fileno(), 0, room.f_bavail * room.f_frsize - 4 * size)  # half a save fits
        with pytest.raises(CheckpointError, match="step 20 could not be saved: No space left on device"):
            save(saver, 20, size=size)
        assert listing(run) == ["step-00000010"]
        filler.unlink()
        remount(disk, "ro")
        with pytest.raises(CheckpointError, match="step 30 could not be saved: Read-only file system"):
            save(saver, 30, size=size)
        loaded, skipped = load_newest(run, 1, Alone())
        assert loaded is not None
        assert (loaded.manifest.step, skipped) == (10, []), "what is durable can be read"
        remount(disk, "rw")
        save(saver, 40, size=size)
        assert listing(run) == ["step-00000040"]
        assert [saved.step for saved in told.saved] == [10, 40]
