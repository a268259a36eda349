"""Scalars for TensorBoard, written without TensorBoard.

An event file is a sequence of TFRecords: the length (64 bits, little-endian) and a masked CRC-32C of it,
then the data and a masked CRC-32C of that (tensorflow/core/lib/io/record_writer.h). The data is a
protocol-buffer message, `Event` (tensorflow/core/util/event.proto), of which four fields are needed, and
`Summary.Value` with two; they are encoded here by hand, as the library that does it is larger than the
trainer. Each attempt writes a file of its own and says at its start from which step on it counts, so
TensorBoard drops what an earlier attempt wrote of steps that were done again.
"""

from __future__ import annotations

import logging
import math
import os
import struct
import time
from collections.abc import Mapping
from pathlib import Path

log = logging.getLogger("holdfast")

_POLYNOMIAL = 0x82F63B78  # Castagnoli's, reflected (RFC 3720, appendix B.4)
_VARINT, _DOUBLE, _BYTES, _FLOAT = 0, 1, 2, 5


def _table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (_POLYNOMIAL if byte & 1 else 0)
        table.append(byte)
    return table


_TABLE = _table()


def crc32c(data: bytes) -> int:
    """CRC-32C of a few bytes."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def record(data: bytes) -> bytes:
    """`data` as one TFRecord."""
    length = struct.pack("<Q", len(data))
    return length + _masked(length) + data + _masked(data)


def _masked(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def event(seconds: float, step: int, body: bytes) -> bytes:
    """An `Event`: wall time 1, step 2, and an encoded field that says what happened."""
    return _key(1, _DOUBLE) + struct.pack("<d", seconds) + _key(2, _VARINT) + _varint(step) + body


def summary(scalars: Mapping[str, float]) -> bytes:
    """Field 5 of an `Event`: a `Summary` of values with a tag 1 and a simple_value 2."""
    values = b"".join(
        _message(1, _message(1, tag.encode()) + _key(2, _FLOAT) + _float(value))
        for tag, value in scalars.items()
    )
    return _message(5, values)


def _float(value: float) -> bytes:
    """32 bits; what is larger than they can tell is infinite there."""
    try:
        return struct.pack("<f", value)
    except OverflowError:
        return struct.pack("<f", math.copysign(math.inf, value))


_VERSION = b"brain.Event:2"
_SESSION_START = 1


class TensorBoard:
    """One attempt's event file in `directory`. A disk that fails costs the figures, not the training."""

    def __init__(self, directory: Path, attempt: int, step: int) -> None:
        self._fd: int | None = None
        now = time.time()
        name = f"events.out.tfevents.{int(now)}.attempt-{attempt:04d}"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(directory / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            log.warning("no figures for TensorBoard: %s cannot be written: %s", directory / name, error)
        self._write(event(now, 0, _message(3, _VERSION)))
        self._write(event(now, step, _message(7, _key(1, _VARINT) + _varint(_SESSION_START))))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Figures of the state after `step` steps."""
        if values:
            self._write(event(time.time(), step, summary(values)))

    def _write(self, data: bytes) -> None:
        if self._fd is None:
            return
        try:
            os.write(self._fd, record(data))
        except OSError as error:
            log.warning("no more figures for TensorBoard: %s", error.strerror)
            self.close()

    def close(self) -> None:
        if self._fd is not None:
            fd, self._fd = self._fd, None
            try:
                os.close(fd)
            except OSError as error:  # NFS may tell only now that there is no room
                log.warning("the last figures for TensorBoard are lost: %s", error.strerror)


def _key(field: int, kind: int) -> bytes:
    return _varint(field << 3 | kind)


def _message(field: int, body: bytes) -> bytes:
    return _key(field, _BYTES) + _varint(len(body)) + body


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)
