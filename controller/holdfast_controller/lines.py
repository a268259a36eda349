"""A log as lines, from the pieces in which it comes."""

from __future__ import annotations

import codecs
import re

LONGEST_LINE = 256 * 1024
"""Bytes. A line that is longer so far (a progress bar that never ends it, a file that somebody printed) is
handed out in parts, whole characters each. What the trainer itself shows of a line without an end, with the
mark of its rank, is less (holdfast_trainer/tee.py), so no part of that is taken for another rank's."""


_HEAD = re.compile(r"==> attempt ([0-9]{1,9}) <==")


def head_of(attempt: int) -> str:
    """The line that stands before an attempt's own, in a log of several."""
    return f"==> attempt {attempt} <=="


def attempt_of(line: str) -> int | None:
    """Whose lines begin after this one; None where it is no head."""
    found = _HEAD.fullmatch(line)
    return None if found is None else int(found[1])


class Lines:
    """Lines without their ends; never keeps more than the longest one and the piece that came last."""

    def __init__(self) -> None:
        self.rest = b""
        """What came after the last line's end."""

    def take(self, piece: bytes) -> list[str]:
        """What can be handed out with this piece."""
        *whole, self.rest = (self.rest + piece).split(b"\n")
        lines = [_text(line) for line in whole]
        if len(self.rest) > LONGEST_LINE:
            text, used = codecs.utf_8_decode(self.rest, "replace")
            lines.append(text.rstrip("\r"))
            self.rest = self.rest[used:]
        return lines

    def end(self) -> list[str]:
        """What was said last, though it is no whole line."""
        return [_text(self.rest)] if self.rest else []


def _text(line: bytes) -> str:
    return line.decode("utf-8", errors="replace").rstrip("\r")
