"""A process that writes where Holdfast has threads do it: the other way, to be measured beside.

It maps the memory that states are staged in, is told how far it may read, checksums and writes with
Holdfast's own code in its own interpreter, and sends the checksums back.
"""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path

import numpy as np

from holdfast_trainer.checkpoint.checksums import BLOCK, Written
from holdfast_trainer.checkpoint.spread import step_aside
from holdfast_trainer.checkpoint.stage import Stage
from holdfast_trainer.checkpoint.storage import Storage
from holdfast_trainer.checkpoint.tensorfile import write_image
from holdfast_trainer.memory import advise


class SharedStage(Stage):
    """Staging memory that another process can map."""

    fd = -1
    address = 0

    def _allocate(self, size: int) -> mmap.mmap:
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = os.memfd_create("holdfast-stage")
        os.ftruncate(self.fd, size)
        memory = mmap.mmap(self.fd, size)
        advise(memory, "MADV_HUGEPAGE")
        self.address = int(np.frombuffer(memory, np.uint8).ctypes.data)
        return memory


class WriterProcess:
    """Started at once, ends when this process does."""

    def __init__(self, stage: SharedStage) -> None:
        self._stage = stage
        with Listener(family="AF_UNIX") as listener:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "bench.checkpointing.writer_process", str(listener.address)],
                start_new_session=True,
            )
            self._connection = listener.accept()

    def write_image(
        self,
        path: Path,
        image: memoryview,
        size: int,
        storage: Storage,
        *,
        ready: Callable[[int], None],
        heard: Callable[[int], None],
    ) -> Written:
        """As `tensorfile.write_image`, there."""
        start = int(np.frombuffer(image, np.uint8).ctypes.data) - self._stage.address
        memory = f"/proc/{os.getpid()}/fd/{self._stage.fd}"
        self._connection.send((str(path), memory, start, len(image), size))
        for end in [*range(BLOCK, size, BLOCK), size]:
            ready(end)
            self._connection.send(end)
        written: Written | Exception = self._connection.recv()
        if isinstance(written, Exception):
            raise written
        heard(size)
        return written


class _Progress:
    """How far the other process has come with staging."""

    def __init__(self, connection: Connection, size: int) -> None:
        self._ready, self._changed = 0, threading.Condition()
        self._thread = threading.Thread(target=self._listen, args=(connection, size), daemon=True)
        self._thread.start()

    def _listen(self, connection: Connection, size: int) -> None:
        while self._ready < size:
            end = connection.recv()
            with self._changed:
                self._ready = end
                self._changed.notify_all()

    def wait(self, end: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._ready >= end)

    def finish(self) -> None:
        self._thread.join()


def serve(address: str) -> None:
    connection = Client(address)
    step_aside()
    while True:
        try:
            path, memory, start, length, size = connection.recv()
        except EOFError:
            return
        with open(memory, "r+b") as file:
            mapped = mmap.mmap(file.fileno(), 0)
        progress = _Progress(connection, size)
        answer: Written | Exception
        try:
            view = memoryview(mapped)[start : start + length]
            answer = write_image(Path(path), view, size, Storage(), ready=progress.wait)
        except Exception as error:
            answer = error
        progress.finish()
        connection.send(answer)


if __name__ == "__main__":
    serve(sys.argv[1])
