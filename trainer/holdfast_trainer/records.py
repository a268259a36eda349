"""Ledger and steps of a run whose checkpoints are objects: on the local disk, and copied beside them.

What is new in the two files since the last copy becomes an object, `attempts/0003/ledger.jsonl.000000001024`,
named after the place in the file where it begins. So nothing is ever written over, and a long run copies each
line once. Rank 0 does that with every line of the ledger that matters to the next attempt, which may start on
another machine. Other ranks' lines and the logs stay on the disk of their machine.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

from .checkpoint.bucket import Bucket
from .checkpoint.errors import ObjectStoreError
from .checkpoint.s3 import CONNECTIONS
from .checkpoint.spread import Spread
from .contract import RunDir, exists, read_lines, replace_durably

log = logging.getLogger("holdfast")

EVENTS = (
    "attempt_start",
    "first_step",
    "checkpoint",
    "checkpoint_failed",
    "differs",
    "failure",
    "hang",
    "validation",
    "stop",
)
"""Of the ledger; after these it is copied."""
FILES = 8
"""That are fetched at a time: after weeks there are those of hundreds of attempts."""
_KEY = re.compile(r"attempts/(\d+)/(ledger|steps)\.jsonl\.(\d+)")


class Records:
    """Of one attempt of a run; does nothing where the run is a directory."""

    def __init__(self, run: RunDir, attempt: int) -> None:
        self._run, self._attempt = run, attempt
        self._bucket = Bucket(run.objects) if run.objects else None
        self._files = {"ledger": run.ledger(attempt), "steps": run.steps(attempt)}
        self._sent = dict.fromkeys(self._files, 0)
        self._lock = threading.Lock()
        self._told = False

    def publish(self) -> None:
        """Copy what is new; where the store does not answer that is told once, and tried again next time."""
        if self._bucket is None:
            return
        with self._lock:
            try:
                for name, path in self._files.items():
                    begin = self._sent[name]
                    data = _from(path, begin) if exists(path) else b""
                    if data:
                        self._bucket.put(f"attempts/{self._attempt:04d}/{name}.jsonl.{begin:012d}", data)
                        self._sent[name] += len(data)
                self._told = False
            except (ObjectStoreError, OSError) as error:
                if not self._told:
                    log.warning(
                        "the ledger's newest lines are in %s alone, until a later one of this attempt can be "
                        "copied: %s",
                        self._run.attempt(self._attempt),
                        error,
                    )
                self._told = True

    def fetch(self) -> None:
        """Get rank 0's records of earlier attempts, where they are not on this disk.

        Raises ObjectStoreError, OSError.
        """
        if self._bucket is None:
            return
        bucket = self._bucket
        pieces: dict[tuple[int, str], list[tuple[int, str]]] = {}
        for key in bucket.keys("attempts/"):
            if (match := _KEY.fullmatch(key)) and int(match[1]) < self._attempt:
                pieces.setdefault((int(match[1]), match[2]), []).append((int(match[3]), key))
        paths = {which: self._run.attempt(which[0]) / f"{which[1]}.jsonl" for which in pieces}
        missing = [
            (paths[which], [key for _, key in sorted(found)])
            for which, found in pieces.items()
            if not _whole(paths[which])
        ]
        Spread(lambda n: _fetch(bucket, *missing[n]), len(missing), name="records", least=FILES).finish()


def _fetch(bucket: Bucket, path: Path, keys: Sequence[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fetched = _all_of(bucket, keys)
    # All at once: what has rank 0's lines is taken for whole by every later attempt.
    replace_durably(path, _joined(fetched, path.read_bytes()) if exists(path) else fetched)


def _joined(fetched: Iterable[bytes], there: bytes) -> bytes:
    """With what else is there."""
    text = b"".join(fetched)
    known = set(text.splitlines())
    return text + b"".join(line for line in there.splitlines(keepends=True) if line.rstrip() not in known)


def _from(path: Path, begin: int) -> bytes:
    """What a file has from a byte on: steps are gigabytes in the end."""
    with open(path, "rb") as file:
        file.seek(begin)
        return file.read()


def _all_of(bucket: Bucket, keys: Sequence[str]) -> Iterator[bytes]:
    """Many at a time, for after weeks there are tens of thousands, and all ranks wait for them; not all at
    once, for they are gigabytes."""
    for begin in range(0, len(keys), CONNECTIONS):
        some = keys[begin : begin + CONNECTIONS]
        yield from Spread(partial(_get, bucket, some), len(some), name="records", least=CONNECTIONS).finish()


def _get(bucket: Bucket, keys: Sequence[str], number: int) -> bytes:
    return bucket.get(keys[number])


def _whole(path: Path) -> bool:
    """Whether rank 0's lines are there. Another rank adds its own to the ledger of its machine."""
    if path.name != "ledger.jsonl":
        return exists(path)
    return any(line.get("event") == "attempt_start" for line in read_lines(path))
