"""The fence of a run whose checkpoints are objects: who may write, and what of the past counts.

::

    fence/00000003             attempt 3 was admitted; the highest number is the fence
    fence/00000003.accepts     the saves of earlier attempts that count from then on

Nothing is ever written over, so there is no moment between looking and writing that another could use. An
attempt is admitted by its claim, then lists what there is, then writes that down as what it accepts. A
manifest that an older attempt puts later is not on that list, and nobody will ever load it. The other way
round: an attempt calls a save durable when it has put the manifest and then read the fence as its own; the
claim of the next one came after that, and its list later still, so what was called durable is on the list.
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import time
import uuid
from collections.abc import Callable

from .bucket import Bucket
from .errors import CheckpointError, Fenced

log = logging.getLogger("holdfast")

_BELOW = "fence/"
_NAME = re.compile(r"fence/(\d{8,})(\.accepts)?")


class ObjectFence:
    """Of one bucket's prefix, as seen by any attempt."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket

    def _numbers(self, *, sealed: bool) -> list[int]:
        matches = [match for key in self._bucket.keys(_BELOW) if (match := _NAME.fullmatch(key))]
        return sorted(int(match[1]) for match in matches if bool(match[2]) == sealed)

    def read(self) -> int:
        """The highest attempt that may write; 0 where no attempt was ever admitted."""
        return max(self._numbers(sealed=False), default=0)

    def check(self, attempt: int) -> None:
        """Raises Fenced where a newer attempt was admitted."""
        fence = self.read()
        if fence > attempt:
            raise Fenced(
                f"attempt {attempt} was superseded by attempt {fence}: it may no longer write to "
                f"{self._bucket.url}"
            )

    def claim(self, attempt: int | None) -> int:
        """Admit `attempt`, or where an engine numbers none the next one; returns it.

        Raises Fenced, and CheckpointError where that attempt was begun before or, with nobody to number
        attempts, the server cannot tell two that begin at once apart.
        """
        given = attempt is not None
        token = f"{socket.gethostname()} {os.getpid()} {uuid.uuid4().hex}"
        body = json.dumps({"by": token, "time": time.time()}).encode()
        while True:
            number = attempt if attempt is not None else self.read() + 1
            self.check(number)
            if self._put_once(f"{_BELOW}{number:08d}", body):
                break
            if given:
                raise CheckpointError(
                    f"attempt {number} of {self._bucket.url} was begun before, by {self._by(number)}: a "
                    "number is used once. Start with a higher HOLDFAST_ATTEMPT, or without one"
                )
        if self._bucket.create(f"{_BELOW}{number:08d}", body):
            self.check(number)  # a newer attempt, admitted since, has removed the claim
            self._conditions_are_ignored(given)
        return number

    def _put_once(self, key: str, body: bytes) -> bool:
        """False where somebody else did; a request that was made again after its answer was lost is ours."""
        return self._bucket.create(key, body) or self._bucket.get(key) == body

    def _by(self, number: int) -> str:
        try:
            return str(json.loads(self._bucket.get(f"{_BELOW}{number:08d}"))["by"].rpartition(" ")[0])
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return "another process"

    def _conditions_are_ignored(self, given: bool) -> None:
        problem = (
            f"{self._bucket.url}: the server ignores conditional writes (If-None-Match), so two processes "
            "that begin as the same attempt would not notice one another"
        )
        if not given:
            raise CheckpointError(
                f"{problem}. Set HOLDFAST_ATTEMPT to a number higher than all before, for this start alone"
            )
        log.warning("%s; whoever numbers attempts must never use a number twice", problem)

    def accept(self, attempt: int, list_saves: Callable[[], list[str]]) -> None:
        """Write down, once the claim is made, which saves of the past count. Raises Fenced."""
        body = json.dumps({"attempt": attempt, "accepts": sorted(list_saves())}).encode()
        if not self._put_once(f"{_BELOW}{attempt:08d}.accepts", body):
            raise CheckpointError(f"attempt {attempt} of {self._bucket.url} was begun by another process too")
        self.check(attempt)

    def accepted(self) -> tuple[int, frozenset[str]]:
        """(attempt, saves): of attempts before that one these alone count; (0, none) where all do."""
        newest = max(self._numbers(sealed=True), default=0)
        if not newest:
            return 0, frozenset()
        key = f"{_BELOW}{newest:08d}.accepts"
        try:
            body = json.loads(self._bucket.get(key))
            return newest, frozenset(str(name) for name in body["accepts"])
        except FileNotFoundError:  # a newer attempt has tidied up meanwhile
            return self.accepted()
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{self._bucket.url}/{key} cannot be read: {error}") from error

    def tidy(self, attempt: int) -> None:
        """Forget the attempts before `attempt`, which has written down what it accepts.

        The first one has none before it and asks for what never was: where nothing may be deleted, it is
        better told now than by the attempt that would resume.
        """
        keys = self._bucket.keys(_BELOW)
        before = [key for key in keys if (match := _NAME.fullmatch(key)) and int(match[1]) < attempt]
        self._bucket.delete(before or [f"{_BELOW}{0:08d}"])
