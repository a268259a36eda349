"""Disks that can be filled and made read-only, or do not answer: for tests of what happens then."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.waiting import wait_until


@contextmanager
def small_disk(path: Path) -> Iterator[Path]:
    """A file system of four mebibytes at `path`; skips the test where none can be mounted."""
    with _mounted(path, ["-t", "tmpfs", "-o", "size=4m", "tmpfs"]):
        yield path


@contextmanager
def real_disk(path: Path, size: int) -> Iterator[Path]:
    """An ext4 of `size` bytes in a file, at `path`; skips the test where none can be mounted."""
    image = path.with_name(f"{path.name}.img")
    with open(image, "wb") as file:
        file.truncate(size)
    program = shutil.which("mkfs.ext4", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if program is None:
        pytest.skip("making an ext4 needs mkfs.ext4")
    subprocess.run([program, "-q", "-m", "0", str(image)], check=True)
    with _mounted(path, ["-o", "loop,errors=remount-ro", str(image)]):
        yield path


@contextmanager
def unserved(path: Path) -> Iterator[Path]:
    """A mount at `path` behind which nobody is any more, as when the program of a FUSE file system has died;
    skips the test where none can be."""
    try:
        number = os.open("/dev/fuse", os.O_RDWR)
    except OSError as error:
        pytest.skip(f"cannot mount what nobody serves: {error}")
    what = ["-i", "-t", "fuse", "-o", f"fd={number},rootmode=40000,user_id=0,group_id=0", "nobody"]
    with os.fdopen(number, "r+b", buffering=0) as server, _mounted(path, what, (number,)):
        server.close()
        yield path


@contextmanager
def _mounted(path: Path, what: list[str], inherited: tuple[int, ...] = ()) -> Iterator[None]:
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    path.mkdir()
    done = subprocess.run(
        ["mount", *what, str(path)], check=False, capture_output=True, text=True, pass_fds=inherited
    )
    if done.returncode:
        pytest.skip(f"cannot mount a small file system: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def remount(path: Path, mode: str) -> None:
    """`mode` is ro or rw."""
    subprocess.run(["mount", "-o", f"remount,{mode}", str(path)], check=True)


def break_disk(path: Path) -> None:
    """Have the kernel find an error in the file system of the real disk at `path`, which can then be read
    alone: at once, and whoever has files of it open."""
    mounts = (line.split() for line in Path("/proc/self/mounts").read_text().splitlines())
    (device,) = (Path(of).name for of, where, *_ in mounts if where == str(path))
    break_device(device)


def break_device(device: str) -> None:
    """The same by the name of its block device, for one that is mounted elsewhere."""
    try:
        Path(f"/sys/fs/ext4/{device}/trigger_fs_error").write_text("1")
    except OSError as error:
        pytest.skip(f"cannot have a file system fail: {error}")


def no_more_files(path: Path) -> None:
    """Let no file be made on the small disk at `path`: a tmpfs has room for an empty one when it is full."""

    def taken() -> bool:
        there = os.statvfs(path)
        option = f"remount,nr_inodes={there.f_files - there.f_ffree}"
        return subprocess.run(["mount", "-o", option, str(path)], check=False).returncode == 0

    # It is refused where somebody has made a file since they were counted.
    wait_until(taken, f"{path} to have room for no more files")


def fill(path: Path) -> None:
    """Write until nothing more goes in."""
    with open(path, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(65536)):
            pass


def fill_whole(directory: Path) -> None:
    """Fill it, and take all inodes too: ext4 keeps some blocks back for directories."""
    fill(directory / "filler")
    with contextlib.suppress(OSError):
        for number in itertools.count():
            (directory / f"{number}").touch()
