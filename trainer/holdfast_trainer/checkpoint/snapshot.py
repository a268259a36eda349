"""A copy of the state that is made while the next step computes: the training waits for little of it.

Between two steps of an optimizer nothing writes to its parameters and moments: forward and backward only
read them. So a save copies at once what may change earlier (buffers, random states, all that is small), and
the rest while the training goes on, which waits for the copy before the optimizer's next step, where it
helps with what is left. The method is that of CheckFreq (Mohan, Phanishayee, Chidambaram, FAST 2021), whose
snapshot overlaps forward and backward, and of DataStates-LLM (Maurya et al., HPDC 2024), which copies lazily
until the update.

Other writers than the optimizer must be found out, as a snapshot that they met is of no instant. Two guards:

- PyTorch counts writes to a tensor in `_version`. The counts are taken at the save and compared by the
  training's own thread, between its operations, when all is copied.
- Writes through `.data`, numpy and fused kernels are not counted. So of every page of memory one value is
  kept at the save, at another place in each save, and compared with the copy. What rewrites a page or more
  is found; fewer single values than that may go unseen.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import torch

from .spread import Spread
from .stage import Events, Image, Stage, copied_from, parts_of
from .tensorfile import PAGE, Header

SMALL = 64 << 10
"""Bytes up to which a tensor is copied at once: that costs less than watching over it."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


GpuWait = tuple[torch.cuda.Event, torch.cuda.Event]
"""The training's stream waits, from the one to the other."""


class Snapshot:
    """Of one rank's part of a state; belongs to the thread that trains."""

    def __init__(
        self,
        stage: Stage,
        image: Image,
        header: Header,
        tensors: Mapping[str, torch.Tensor],
        watched: Mapping[str, torch.Tensor],
        seed: int,
    ) -> None:
        """Of `tensors`, for the image. Those named in `watched` are copied late; it has the live tensors that
        count the writes to them. `seed` says which values are kept.
        """
        self._stage, self._image, self._header, self._tensors = stage, image, header, tensors
        self._watched, self._seed = watched, seed
        self._parts = parts_of(header)
        self._versions: dict[str, int] = {}
        self._kept: dict[str, torch.Tensor] = {}
        self._at_once: Events = {}
        self._copied: torch.cuda.Event | None = None
        self._copying: Spread[None] | None = None
        self.held: GpuWait | None = None
        """Of the stream that `settle` lets wait."""

    def begin(self) -> None:
        """Returns when all but the tensors in `watched` may change."""
        if not self._watched:
            self._stage.fill(self._image, self._header, self._tensors)
            return
        try:
            self._versions = {name: live._version for name, live in self._watched.items()}
            self._kept = {name: self._sample(self._tensors[name]).clone() for name in self._watched}
            now = [name for part in self._parts for name in part.names if name not in self._watched]
            self._at_once = self._stage.copy(now, self._tensors)
            if any(self._tensors[name].is_cuda for name in self._watched):
                self._queue()
            else:
                self._copying = Spread(self._copy, len(self._parts), name="checkpoint-copy", alone=True)
        except BaseException:
            self._image.fail()
            raise

    def _copy(self, number: int) -> None:
        begin, end, names = self._parts[number]
        try:
            for name in names:
                if name in self._watched:
                    # With numpy, as PyTorch would start a pool of threads for this one thread.
                    np.copyto(_plain(self._stage.places[name]).numpy(), _plain(self._tensors[name]).numpy())
        except BaseException:
            self._image.fail()
            raise
        self._image.advance(begin, end, self._at_once)

    def _queue(self) -> None:
        """On a stream beside the training's, which begins when that has come here."""
        (self._device,) = {self._tensors[name].device for name in self._watched}
        side = _side_stream(self._device)
        side.wait_stream(torch.cuda.current_stream(self._device))
        # The side stream's events come after that of `_at_once`, and stay the newest of their GPU in parts
        # that have nothing to copy late.
        copied = dict(self._at_once)
        with torch.cuda.stream(side):
            for begin, end, names in self._parts:
                late = [name for name in names if name in self._watched]
                copied |= self._stage.copy(late, self._tensors)
                self._image.advance(begin, end, copied)
            self._on_gpu = self._kept  # their memory must not be given to others before they are copied
            self._kept = {name: kept.to("cpu", non_blocking=True) for name, kept in self._kept.items()}
            self._copied = copied_from(self._device)

    @property
    def copied(self) -> bool:
        """Whether `settle` would not wait."""
        return self._image.whole

    def settle(self) -> str:
        """Returns when the state may change: in words, why the copy is worth nothing, empty where it is good.

        On a GPU it is the training's stream that waits.
        """
        if self._copied is not None:
            stream = torch.cuda.current_stream(self._device)
            began = _passed(stream)
            stream.wait_event(self._copied)
            self.held = began, _passed(stream)
        elif self._copying is not None:
            try:
                self._copying.finish()
            except Exception as error:
                return f"it could not be copied: {type(error).__name__}: {error}"
        return _told(name for name, live in self._watched.items() if live._version != self._versions[name])

    def compare(self) -> str:
        """As `settle`, by the values that were kept. For any thread, when all of the image is there."""
        if self._copied is not None:
            self._copied.synchronize()
        return _told(
            name
            for name, kept in self._kept.items()
            if not np.array_equal(kept.numpy(), self._sample(self._stage.places[name]).numpy())
        )

    def _sample(self, tensor: torch.Tensor) -> torch.Tensor:
        """A value of each page."""
        stride = PAGE // tensor.element_size()
        return _plain(tensor).view(-1)[self._seed * 613 % stride :: stride]


def watch(
    tensors: Mapping[str, torch.Tensor], lasting: Mapping[int, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Which of `tensors` may be copied late, each with the live tensor that counts writes to it.

    `lasting` has live tensors that nothing but an optimizer's step should write to, by address. Small ones
    are not worth it; of several GPUs those of the first have their turn.
    """
    found: dict[str, torch.Tensor] = {}
    device: torch.device | None = None
    for name, tensor in tensors.items():
        large = tensor.numel() * tensor.element_size() > SMALL and tensor.is_contiguous()
        live = lasting.get(tensor.data_ptr()) if large else None
        if live is None or live.is_inference() or tensor.device.type not in ("cpu", "cuda"):
            continue
        device = device or tensor.device
        if tensor.device == device:
            found[name] = live
    return found


_side_streams: dict[torch.device, torch.cuda.Stream] = {}


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    if device not in _side_streams:
        _side_streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return _side_streams[device]


def _passed(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """When the GPU is past what is queued on it now."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers, so that equal means equal bits, and numpy knows the type."""
    return tensor.view(_INTEGERS[tensor.element_size()])


def _told(changed: Iterable[str]) -> str:
    name = next(iter(changed), None)
    return "" if name is None else f"{name!r} was written to while it was copied"
