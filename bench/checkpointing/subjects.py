"""Who is measured: each saves and loads the same model and optimizer its own way.

`save` returns when the training thread may go on, `wait` when the state is durable: written and synced,
file and name. PyTorch's own ways leave part of that to the caller; what a careful user would add (fsync)
is added here, and is in their time.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from holdfast_trainer.checkpoint import Saved, Saver, load_newest
from holdfast_trainer.checkpoint.snapshot import GpuWait
from holdfast_trainer.contract import RunDir, fsync_directory, raise_fence
from holdfast_trainer.parallel import Gang
from holdfast_trainer.training_state import TrainingState

from .writer_process import SharedStage, WriterProcess


class Subject(Protocol):
    asynchronous: bool
    """Whether it may still be writing when `save` has returned."""

    def save(self, step: int) -> None: ...

    def held_up(self) -> float:
        """Seconds that the training thread waited for the newest save after `save` had returned."""

    def wait(self) -> float:
        """Until durable; returns when that was, by `time.perf_counter`."""

    def load(self) -> None:
        """The newest save, into model and optimizer."""

    def files(self) -> list[Path]: ...


class Holdfast:
    """The saver that `Run` uses, with one rank."""

    asynchronous = True
    overlapped = True

    def __init__(self, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._run = RunDir(folder)
        raise_fence(self._run, 1)
        self._state = TrainingState({"model": model, "optimizer": optimizer}, 0)
        self._durable = self._held_up = 0.0
        self._on_gpu: list[GpuWait] = []
        self._saver = self._make_saver()
        optimizer.register_step_pre_hook(self._settle)

    def _make_saver(self, **options: Any) -> Saver:
        return Saver(
            self._run,
            attempt=1,
            rank=0,
            world_size=1,
            keep=1,
            on_saved=self._note,
            on_failed=self._fail,
            **options,
        )

    def _settle(self, *_: object) -> None:
        seconds, waits = self._saver.settle()
        self._held_up += seconds
        if waits is not None:
            self._on_gpu.append(waits)

    def _note(self, saved: Saved) -> None:
        self._durable = time.perf_counter()

    def _fail(self, step: int, error: Exception) -> None:
        raise error

    def save(self, step: int) -> None:
        self._durable = self._held_up = 0.0
        self._on_gpu = []
        shared, own, rank_0_only = self._state.capture(step)
        lasting = self._state.lasting() if self.overlapped else None
        self._saver.save(step, shared, own, rank_0_only=rank_0_only, lasting=lasting)

    def held_up(self) -> float:
        for _, end in self._on_gpu:
            end.synchronize()
        return self._held_up + sum(float(begin.elapsed_time(end)) for begin, end in self._on_gpu) / 1e3

    def wait(self) -> float:
        self._saver.wait()
        return self._durable

    def load(self) -> None:
        loaded, skipped = load_newest(self._run, 1, Gang(0, 1, 0, torch.device("cpu")))
        assert loaded is not None, skipped
        self._state.restore(loaded)

    def files(self) -> list[Path]:
        return list(self._run.checkpoints.rglob("*.safetensors"))


class HoldfastSynchronous(Holdfast):
    """With checkpoint.snapshot=synchronous."""

    overlapped = False


class HoldfastProcess(Holdfast):
    """The state is staged in shared memory, and a process of its own checksums and writes it."""

    def _make_saver(self, **options: Any) -> Saver:
        stage = SharedStage()
        self._process = WriterProcess(stage)
        return super()._make_saver(stage=stage, write_image=self._process.write_image, **options)


class _Peer:
    asynchronous = False

    def __init__(self, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._folder, self._model, self._optimizer = folder, model, optimizer
        self._durable = 0.0
        folder.mkdir()

    def _state(self) -> dict[str, Any]:
        return {"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict()}

    def _restore(self, state: dict[str, Any]) -> None:
        self._model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])

    def held_up(self) -> float:
        return 0.0  # what they copy they copy before `save` returns

    def wait(self) -> float:
        return self._durable

    def files(self) -> list[Path]:
        return [path for path in self._folder.rglob("*") if path.is_file()]


class TorchSave(_Peer):
    """torch.save to a temporary file, fsync, rename, fsync of the directory."""

    def save(self, step: int) -> None:
        temporary = self._folder / "state.tmp"
        with open(temporary, "wb") as file:
            torch.save(self._state(), file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self._folder / "state.pt")
        fsync_directory(self._folder)
        self._durable = time.perf_counter()

    def load(self) -> None:
        self._restore(torch.load(self._folder / "state.pt", weights_only=True))


class _Dcp(_Peer):
    """A directory a save, as DCP must not write twice to one."""

    def __init__(self, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(folder, model, optimizer)
        self._newest = folder
        if not dist.is_initialized():
            dist.init_process_group("gloo", init_method=f"file://{folder}.store", rank=0, world_size=1)

    def _next(self, step: int) -> Path:
        shutil.rmtree(self._folder / f"step-{step - 2}", ignore_errors=True)
        self._newest = self._folder / f"step-{step}"
        return self._newest

    def load(self) -> None:
        state = self._state()
        state_dict_loader.load(state, checkpoint_id=self._newest)
        self._restore(state)


class DcpSave(_Dcp):
    def save(self, step: int) -> None:
        state_dict_saver.save(self._state(), checkpoint_id=self._next(step))
        fsync_directory(self._folder)
        self._durable = time.perf_counter()


class DcpAsync(_Dcp):
    """With the stager that DCP uses by itself; `kind` says where it writes."""

    asynchronous = True
    kind = AsyncCheckpointerType.THREAD
    _future: Future[Any] | None = None

    def save(self, step: int) -> None:
        self._durable = 0.0
        future: Any = state_dict_saver.async_save(
            self._state(), checkpoint_id=self._next(step), async_checkpointer_type=self.kind
        )
        future.add_done_callback(self._note)
        self._future = future

    def _note(self, future: Future[Any]) -> None:
        fsync_directory(self._folder)
        self._durable = time.perf_counter()

    def wait(self) -> float:
        assert self._future is not None
        self._future.result()
        while not self._durable:  # result() may return before the callback has run
            time.sleep(0.001)
        return self._durable


class DcpAsyncProcess(DcpAsync):
    kind = AsyncCheckpointerType.PROCESS


SUBJECTS: dict[str, Callable[[Path, nn.Module, torch.optim.Optimizer], Subject]] = {
    "holdfast": Holdfast,
    "holdfast, synchronous": HoldfastSynchronous,
    "holdfast, process": HoldfastProcess,
    "torch.save": TorchSave,
    "dcp save": DcpSave,
    "dcp async, thread": DcpAsync,
    "dcp async, process": DcpAsyncProcess,
}
