"""While PyTorch is imported, the disk reads the checkpoint that the rank will load."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import wait_until

from holdfast_controller.local.ports import free_port
from holdfast_trainer.checkpoint.checksums import BLOCK
from holdfast_trainer.checkpoint.scan import _File, cached, opened
from holdfast_trainer.contract import ENV_RUN_DIR, MANIFEST, RunDir
from holdfast_trainer.prefetch import Prefetch, files_to_read


def forget(path: Path) -> bool:
    """Let the page cache drop the file; whether it has, which may need a further try."""
    fd = os.open(path, os.O_RDWR)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
    return not cached(path)


def checkpoint(run: RunDir, step: int, *, whole: bool = True, size: int = BLOCK + 1) -> Path:
    """A part of a checkpoint, which is not in the page cache."""
    directory = run.checkpoint(step)
    directory.mkdir(parents=True)
    part = directory / "rank-0.safetensors"
    part.write_bytes(os.urandom(size))
    if whole:
        (directory / MANIFEST).write_text("{}")
    if kind_of(directory) == "tmpfs":
        pytest.skip("this file system keeps its files in memory")
    wait_until(lambda: forget(part), "the page cache to drop the file")
    return part


def kind_of(directory: Path) -> str:
    """Of file system."""
    command = ["stat", "--file-system", "--format=%T", str(directory)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "run")


def test_the_newest_whole_checkpoint_is_read_ahead_and_no_other(run: RunDir) -> None:
    old, newest, debris = (
        checkpoint(run, 90),
        checkpoint(run, 100),
        checkpoint(run, 110, whole=False),
    )
    ahead = Prefetch(run)
    wait_until(lambda: cached(newest), "the checkpoint to be read ahead")
    ahead.stop()
    assert not cached(old)
    assert not cached(debris)


def test_what_was_read_ahead_is_not_read_from_the_disk_again(run: RunDir) -> None:
    part = checkpoint(run, 100)

    def goes_around_the_cache() -> bool:
        with opened(part, direct=True) as file:
            assert isinstance(file, _File)
            return bool(fcntl.fcntl(file.fd, fcntl.F_GETFL) & os.O_DIRECT)

    if not goes_around_the_cache():
        pytest.skip("this file system has no direct I/O")
    ahead = Prefetch(run)
    wait_until(lambda: cached(part), "the checkpoint to be read ahead")
    ahead.stop()
    assert not goes_around_the_cache()


def test_no_more_is_read_than_there_is_room_for(run: RunDir) -> None:
    part = checkpoint(run, 100, size=1000)
    (part.parent / "rank-1.safetensors").write_bytes(bytes(1000))
    names = {room: [path.name for path in files_to_read(run, room)] for room in (0, 1500, 4000)}
    assert names == {
        0: [],
        1500: [MANIFEST, "rank-0.safetensors"],
        4000: [MANIFEST, "rank-0.safetensors", "rank-1.safetensors"],
    }


@pytest.mark.parametrize("there", ["nothing", "no checkpoint", "no directory", "a bucket"])
def test_where_there_is_nothing_to_read_nothing_happens(run: RunDir, there: str) -> None:
    if there == "no checkpoint":
        checkpoint(run, 5, whole=False)
    elif there == "no directory":
        run.path.mkdir()
        run.checkpoints.write_text("")
    elif there == "a bucket":
        checkpoint(run, 5)
        run = RunDir(run.path, "s3://runs/gpt")
    assert files_to_read(run, 1 << 40) == []
    Prefetch(run).stop()


def test_torchrun_reads_it_while_it_imports(run: RunDir, tmp_path: Path) -> None:
    part = checkpoint(run, 100, size=1 << 20)  # asked for at once: a busy disk is given no time here
    command = [sys.executable, "-m", "holdfast_trainer.torchrun", "--nproc-per-node=1"]
    command += ["--rdzv-backend=static", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    command += ["--max-restarts=0", f"--log-dir={tmp_path}", "--", "--tee", "--", "true"]
    environment = {**os.environ, ENV_RUN_DIR: str(run.path)}
    subprocess.run(command, env=environment, cwd=tmp_path, check=True, timeout=600)
    wait_until(lambda: cached(part), "what was asked for to be read")
