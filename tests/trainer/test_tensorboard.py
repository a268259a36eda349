"""Event files are read back here as the format's own description says, byte by byte."""

from __future__ import annotations

import errno
import math
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast_trainer.contract import Progress
from holdfast_trainer.steplog import figures_of
from holdfast_trainer.telemetry import Telemetry
from holdfast_trainer.tensorboard import TensorBoard, crc32c


def test_the_checksum_is_crc32c() -> None:
    """The check values of RFC 3720, appendix B.4."""
    assert crc32c(b"\0" * 32) == 0x8A9136AA
    assert crc32c(b"\xff" * 32) == 0x62A8AB43
    assert crc32c(bytes(range(32))) == 0x46DD794E
    assert crc32c(b"123456789") == 0xE3069283


def records(data: bytes) -> Iterator[bytes]:
    while data:
        (size,) = struct.unpack("<Q", data[:8])
        assert struct.unpack("<I", data[8:12])[0] == masked(data[:8])
        yield data[12 : 12 + size]
        assert struct.unpack("<I", data[12 + size : 16 + size])[0] == masked(data[12 : 12 + size])
        data = data[16 + size :]


def masked(data: bytes) -> int:
    crc = crc32c(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) % 2**32


def varint(data: bytes) -> tuple[int, bytes]:
    value = 0
    for place, byte in enumerate(data):
        value |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return value, data[place + 1 :]
    raise AssertionError("cut short")


def fields(data: bytes) -> dict[int, list[object]]:
    """A protocol-buffer message: its values by field number."""
    found: dict[int, list[object]] = {}
    while data:
        key, data = varint(data)
        value: object
        if key & 7 == 0:
            value, data = varint(data)
        elif key & 7 == 1:
            value, data = struct.unpack("<d", data[:8])[0], data[8:]
        elif key & 7 == 2:
            size, data = varint(data)
            value, data = data[:size], data[size:]
        else:
            assert key & 7 == 5
            value, data = struct.unpack("<f", data[:4])[0], data[4:]
        found.setdefault(key >> 3, []).append(value)
    return found


def test_an_attempt_says_from_where_it_counts_and_then_its_figures(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path / "tensorboard", attempt=2, step=300)
    board.scalars(301, {"loss": 2.5, "tokens per second": 1e6})
    board.scalars(302, {})
    board.close()
    (path,) = (tmp_path / "tensorboard").iterdir()
    version, start, figures = map(fields, records(path.read_bytes()))
    assert version[3] == [b"brain.Event:2"]
    assert start[2] == [300]
    assert start[7] == [b"\x08\x01"], "a session starts: what earlier ones wrote from here on is void"
    assert figures[2] == [301]
    (summary,) = figures[5]
    assert isinstance(summary, bytes)
    values = [fields(value) for value in fields(summary)[1]]  # type: ignore[arg-type]
    assert [(value[1], value[2]) for value in values] == [
        ([b"loss"], [2.5]),
        ([b"tokens per second"], [1e6]),
    ]


def test_what_32_bits_cannot_tell_is_infinite_and_ends_no_training(tmp_path: Path) -> None:
    """A loss in float64 that runs away ended its run with an OverflowError, by way of a chart."""
    board = TensorBoard(tmp_path, attempt=1, step=0)
    board.scalars(1, {"loss": 1e39, "gradient norm": -1e300})
    board.close()
    (path,) = tmp_path.iterdir()
    *_, figures = map(fields, records(path.read_bytes()))
    (summary,) = figures[5]
    assert isinstance(summary, bytes)
    values = [fields(value)[2] for value in fields(summary)[1]]  # type: ignore[arg-type]
    assert values == [[math.inf], [-math.inf]]


def test_a_disk_that_fails_costs_the_figures_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    TensorBoard(tmp_path / "file" / "tensorboard", 1, 0).scalars(1, {"loss": 1.0})
    assert "no figures for TensorBoard: " in caplog.text


def test_a_network_disk_that_is_full_at_the_end_costs_the_last_figures_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS says so when the file is closed. A training that had finished ended with status 1."""
    board = TensorBoard(tmp_path, 1, 0)
    close = os.close

    def full(fd: int) -> None:
        close(fd)
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    with monkeypatch.context() as patch:
        patch.setattr(os, "close", full)
        board.close()
    board.scalars(1, {"loss": 1.0})
    assert "the last figures for TensorBoard are lost: Disk quota exceeded" in caplog.text


def test_only_what_is_known_is_drawn() -> None:
    progress = Progress(1, 1, None, 0, "training", loss=2.0)
    assert figures_of(progress) == {"loss": 2.0}


def test_the_smoothed_loss_has_no_bias_to_its_beginning() -> None:
    telemetry = Telemetry(1, 1)
    telemetry.loss(8.0)
    assert telemetry.progress.loss_ema == pytest.approx(8.0)
    telemetry.loss(4.0)
    assert telemetry.progress.loss_ema == pytest.approx((0.98 * 8.0 + 4.0) / 1.98)
    for _ in range(1000):
        telemetry.loss(1.0)
    assert telemetry.progress.loss_ema == pytest.approx(1.0)
