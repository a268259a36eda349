"""`holdfast logs -f`: a rank's output while it comes, through restarts of the controller.

Jobs run on without it, so a log that is torn is asked for again, for as long as it takes. It begins anew
then: how much of it was shown is found by its last lines, and what came meanwhile follows from there,
attempts that began and ended unseen too. Where those lines are in it no more, as where a node has begun
another file, that is said in their place. A log may have a GB: it is read line by line, and never kept.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING

import typer

from ..lines import attempt_of, head_of
from .connection import JobAddress
from .watching import POLL_SECONDS

if TYPE_CHECKING:
    from ..client import Client
    from ..jobs import TrainingJob

KNOWN_LINES = 1000
"""Of those that were shown last."""
VERDICT_SECONDS = 10.0
TORN = "holdfast: the log was torn here: lines may be missing, or come again"


class Followed:
    """A rank's log: of all attempts from the newest on, or of the one that is named."""

    def __init__(self, client: Client, place: JobAddress, rank: int, attempt: int | None, tail: int | None):
        self._client = client
        self._place = place
        self._rank = rank
        self._alone = attempt
        self._tail = tail
        self._shown = Shown(attempt or 0, tail)

    def lines(self) -> Iterator[str]:
        """Until the job, or the attempt, ends or is gone. Raises what is answered at first; a controller that
        is gone later is waited for."""
        from ..cluster import NotFound, Unavailable

        uid = self._job().metadata.uid
        again, told = False, False
        while True:
            pause = POLL_SECONDS
            try:
                for line in self._rest() if again else self._log(self._alone, follow=True, tail=self._tail):
                    told = False
                    self._note(line)
                    yield line
                if self._is_over(uid):
                    return
                typer.echo("the controller ended the log; following it again", err=True)
            except NotFound:
                if not again:
                    raise
                return
            except Unavailable as error:
                if not told:
                    typer.echo(f"{error}; waiting for it", err=True)
                told = True
                pause = max(pause, error.retry_after)
            again = True
            time.sleep(pause)

    def _job(self) -> TrainingJob:
        return self._client.get(self._place.namespace, self._place.name)

    def _is_over(self, uid: str) -> bool:
        """Whether no more is to come of a log that has ended; an attempt's verdict comes a moment later."""
        from ..cluster import NotFound

        end = time.monotonic() + VERDICT_SECONDS
        while True:
            try:
                job = self._job()
            except NotFound:
                return True
            if job.metadata.uid != uid or job.metadata.deletion_timestamp or job.status.phase.final:
                return True
            if self._alone is None:
                return False
            record = job.status.record(self._alone)
            if record is None or record.verdict is not None:
                return True
            if time.monotonic() > end:
                return False
            time.sleep(POLL_SECONDS)

    def _log(self, attempt: int | None, *, follow: bool = False, tail: int | None = None) -> Iterator[str]:
        where = self._place.namespace, self._place.name
        return self._client.logs(*where, attempt=attempt, rank=self._rank, follow=follow, tail=tail)

    def _there(self, attempt: int) -> Iterator[str]:
        """All that there is of an attempt's log."""
        from ..cluster import NotFound

        with suppress(NotFound):
            yield from self._log(attempt)

    def _note(self, line: str) -> None:
        begins = attempt_of(line) if self._alone is None else None
        if begins is not None and begins > self._shown.attempt:
            self._shown.begin(begins)
        elif line is TORN:
            self._shown.tear()
        else:
            self._shown.add(line)

    def _rest(self) -> Iterator[str]:
        """What was not shown yet, of a log that begins anew, with the newest attempt."""
        lines, before = self._log(self._alone, follow=True), self._shown.attempt
        newest = before
        if self._alone is None:
            head = attempt_of(next(lines, ""))
            if head is None:  # it has had no attempt
                return
            newest = head
        first, whole = self._shown.goes_on_in(self._there(before)) if before else (0, True)
        if not whole:
            yield TORN
        if newest == before:
            yield from islice(lines, first, None)
            return
        yield from islice(self._there(before) if before else (), first, None)
        for number in range(before + 1, newest):
            yield head_of(number)
            yield from self._there(number)
        yield head_of(newest)
        yield from lines


class Shown:
    """What was shown of an attempt's log."""

    def __init__(self, attempt: int, tail: int | None):
        """`tail`: how many of its lines there were to be at first, of the first attempt that is shown."""
        self.attempt = attempt
        self._tail = tail
        self._next_tail = None if attempt else tail
        self._count = 0
        self._last: deque[str] = deque(maxlen=KNOWN_LINES)

    def begin(self, attempt: int) -> None:
        self.attempt = attempt
        self._tail, self._next_tail = self._next_tail, None
        self._count = 0
        self._last.clear()

    def add(self, line: str) -> None:
        self._count += 1
        self._last.append(line)

    def tear(self) -> None:
        """It comes again from its beginning; where none of it was shown, from where it is now."""
        if self._count:
            self.begin(self.attempt)

    def goes_on_in(self, log: Iterable[str]) -> tuple[int, bool]:
        """How many lines of the log, from its beginning on, are not to be shown, and whether that is sure."""
        if not self._count:
            # There was none. With --tail 0 there may have been, and nobody counted them.
            return (sum(1 for _ in log), False) if self._tail == 0 else (0, True)
        last = list(self._last)
        window: deque[str] = deque(maxlen=len(last))
        agreed, where = 0, 0
        for end, line in enumerate(log, 1):
            window.append(line)
            if not all(
                there == shown for there, shown in zip(reversed(window), reversed(last), strict=False)
            ):
                continue
            if self._tail is None and end == self._count:
                return end, True
            if len(window) > agreed:
                agreed, where = len(window), end
        return where, agreed > 0
