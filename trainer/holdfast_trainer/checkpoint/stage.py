"""The staging buffer: one stretch of memory in which a rank's file takes shape while training waits.

It is allocated and touched once, before the first save needs it: a first touch makes the kernel find and
clear pages and costs many times the copy. Tensors are copied to where they stand in the file, so what is
staged is the file, and can be written from a page on without another copy. They are copied in the order of
the file, a part at a time: what lies there already can be written while the rest is still being copied.
Who copies, and when, is the matter of `snapshot`.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from ..memory import advise, free_memory, huge_pages, ranks_here
from .checksums import BLOCK
from .tensorfile import PAGE, Header

HEADER_ROOM = 1 << 20
"""Bytes kept before the tensors; the header ends where they begin, and may grow into it."""
PART = 4 * BLOCK
"""Bytes copied before they may be written."""
RESERVE = 256 << 20
"""Bytes that staging leaves free for the training itself."""


Events = Mapping[torch.device, torch.cuda.Event]
"""An event on each GPU that something is copied from."""


class NotEnoughMemory(Exception):
    """Staging would leave too little for the training."""


class StagingFailed(Exception):
    """The state could not be copied, so there is nothing to write."""


class Image:
    """A file as it takes shape in memory: `size` bytes from a page on, and the rest of the last page."""

    def __init__(self, view: memoryview, size: int, ready: int) -> None:
        """Its first `ready` bytes, the header, are there."""
        self.view, self.size = view, size
        self._ready, self._failed = ready, False
        self._pieces: dict[int, int] = {}
        self._copied: Events = {}
        self._changed = threading.Condition()

    def advance(self, begin: int, end: int, copied: Events = MappingProxyType({})) -> None:
        """The bytes from `begin` to `end` are there, or will be when each GPU has come to its event.

        Pieces may come in any order; events in the order in which their GPU will come to them.
        """
        with self._changed:
            self._pieces[begin] = end
            self._copied = {**self._copied, **copied}
            while self._ready in self._pieces:
                self._ready = self._pieces.pop(self._ready)
            self._changed.notify_all()

    def fail(self) -> None:
        """What is not there yet will not come."""
        with self._changed:
            self._failed = True
            self._changed.notify_all()

    @property
    def whole(self) -> bool:
        """Whether nothing is missing by now."""
        with self._changed:
            there, copied = self._ready >= self.size, self._copied
        return there and all(event.query() for event in copied.values())  # type: ignore[no-untyped-call]

    def wait(self, end: int) -> None:
        """Until the first `end` bytes are there. Raises StagingFailed."""
        with self._changed:
            self._changed.wait_for(lambda: self._failed or self._ready >= end)
            if self._ready < end:
                raise StagingFailed("the state could not be staged")
            copied = self._copied
        for event in copied.values():
            event.synchronize()


class Part(NamedTuple):
    """Tensors that are copied together: where they stand in the file, and what they are called."""

    begin: int
    end: int
    names: list[str]


class Stage:
    """Of one rank; not for two saves at once."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._bytes = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._layout: dict[str, tuple[int, torch.Size, torch.dtype]] = {}
        self.places: dict[str, torch.Tensor] = {}
        """Where each tensor stands in the newest image."""
        self._head = HEADER_ROOM
        self._for_gpu = False
        self._registered = 0
        self._touched = 0

    @property
    def size(self) -> int:
        """Bytes it holds."""
        return self._bytes.numel()

    def reserve(self, size: int, *, pinned: bool) -> None:
        """Memory for `size` bytes of tensors, not touched yet. Raises NotEnoughMemory, with figures."""
        wanted = self._head + -(-size // PAGE) * PAGE + PAGE
        if wanted <= self.size and (self._for_gpu or not pinned):
            return
        free, ranks = free_memory(), ranks_here()
        if free is not None and ranks * (wanted - self.size) + RESERVE > free:
            each = f" for each of {ranks} ranks here" if ranks > 1 else ""
            raise NotEnoughMemory(
                f"staging a checkpoint needs {wanted / 1e9:.2f} GB of memory{each}, and {free / 1e9:.2f} GB "
                f"are free, of which {RESERVE / 1e9:.2f} GB are left to the training. More memory for the "
                "job would help, or more machines, as ranks share the state"
            )
        self._release()
        self._memory = memory = self._allocate(wanted)
        advise(memory, "MADV_DONTFORK")  # a fork would make every page be copied again
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self._for_gpu = pinned
        if pinned:
            self._pin()

    def _allocate(self, size: int) -> mmap.mmap:
        return huge_pages(size)

    def _pin(self) -> None:
        # Where this fails the copies are slower, and the call waits for them.
        cuda: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        done = cuda.cudaHostRegister(self._bytes.data_ptr(), self.size, 0)
        if int(done) == 0:
            self._registered = self._bytes.data_ptr()
            return
        # The error stays CUDA's last one until it is asked for, as it is after each launch of a kernel: then
        # it would be the training's. So one is launched here, which takes it (C10_CUDA_KERNEL_LAUNCH_CHECK).
        with suppress(torch.AcceleratorError):
            torch.ones(1, device="cuda")

    def _release(self) -> None:
        if self._registered:
            cuda: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            cuda.cudaHostUnregister(self._registered)
        self._registered = self._touched = 0
        self._layout, self.places = {}, {}
        self._bytes, self._memory = torch.empty(0, dtype=torch.uint8, device="cpu"), None

    def touch(self) -> None:
        """Make the kernel give all pages now; for a thread that nobody waits for."""
        while self._touched < self.size:
            self._bytes[self._touched : self._touched + BLOCK].fill_(0)
            self._touched += BLOCK

    def begin(self, header: Header, tensors: Mapping[str, torch.Tensor]) -> Image:
        """The file that `tensors` will be copied to, with its header. Raises NotEnoughMemory."""
        on_gpu = any(tensor.is_cuda for tensor in tensors.values())
        if len(header.text) > self._head:
            self._head = -(-2 * len(header.text) // PAGE) * PAGE
            self._release()
        self.reserve(header.size - len(header.text), pinned=on_gpu)
        layout = {
            name: (begin, tensors[name].shape, tensors[name].dtype)
            for name, (begin, _) in header.offsets.items()
        }
        if layout != self._layout:
            self.places = {name: self._place(*where) for name, where in layout.items()}
            self._layout = layout
        start = self._head - len(header.text)
        self._bytes[start : self._head] = torch.frombuffer(bytearray(header.text), dtype=torch.uint8)
        whole = -(-header.size // PAGE) * PAGE
        view = memoryview(self._bytes.numpy().data)[start : start + whole]
        return Image(view, header.size, len(header.text))

    def copy(self, names: Sequence[str], tensors: Mapping[str, torch.Tensor]) -> Events:
        """Copy those to their places; from a GPU when its current stream comes to it, done at its event."""
        places, sources = [self.places[name] for name in names], [tensors[name] for name in names]
        if sources:
            torch._foreach_copy_(places, sources, non_blocking=True)
        return {
            device: copied_from(device) for device in {source.device for source in sources if source.is_cuda}
        }

    def fill(self, image: Image, header: Header, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy all `tensors` to where `header` has them in the image that `begin` gave.

        From a GPU the copies are queued on the training's own stream: what the training queues next runs
        after them, whatever it does to the state. The call returns when they are queued.
        """
        try:
            for part in parts_of(header):
                image.advance(part.begin, part.end, self.copy(part.names, tensors))
        except BaseException:
            image.fail()
            raise

    def _place(self, begin: int, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        start = self._head + begin
        return self._bytes[start : start + shape.numel() * dtype.itemsize].view(dtype).view(shape)


def copied_from(device: torch.device) -> torch.cuda.Event:
    """An event that this GPU's current stream comes to after all that is queued on it now.

    Threads of low priority wait for it, and sleep meanwhile: by itself such a wait keeps a core busy.
    """
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def parts_of(header: Header) -> list[Part]:
    """All tensors in the order of the file, in parts of `PART` bytes or little more each."""
    parts, names = list[Part](), list[str]()
    begin = len(header.text)
    for name, (_, tensor_end) in header.offsets.items():
        names.append(name)
        end = len(header.text) + tensor_end
        if end - begin >= PART:
            parts.append(Part(begin, end, names))
            begin, names = end, []
    if begin < header.size:
        parts.append(Part(begin, header.size, names))
    return parts  # tensors of no bytes at the end need no copy
