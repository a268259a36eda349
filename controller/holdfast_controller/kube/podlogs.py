"""A pod's output as lines, as `kubectl logs` gives it; one that is followed is followed to its end.

A kubelet that is started again ends the log of a container that runs on as if that had ended, and an
apiserver that goes tears it: `kubectl logs -f` stops there. So such a log comes with the time of each line,
and where it stops before its container has, it is asked for again from the time of the last line on. That is
by whole seconds, so lines that were shown come again, and are known by their times, in which the node writes
all nine digits. Where the last of them does not, the kubelet has begun another file meanwhile, and reads the
one before no more: what it holds beyond that line is not to be had, which is said in its place.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from contextlib import aclosing

from holdfast_controller.cluster import Invalid, NotFound, Unavailable
from holdfast_controller.lines import Lines

from .connection import Connection, Document
from .pieces import pod_path
from .pod_state import kind_of_pod

FIRST_LINE_SECONDS = 0.5
MISSING = "holdfast: lines may be missing here: the log was torn, and its node began another file meanwhile"
LONGEST_PAUSE_SECONDS = 5.0
"""Between two tries to follow a log that was torn."""
_LOST = re.compile(
    rb"unable to retrieve container logs for [\w-]+://[0-9a-f]+\s*"
    rb'|failed to (?:try resolving symlinks in path|open log file) ".*: no such file or directory\s*'
)
"""What a kubelet sends, as if it were the log, once it has removed the container of a pod that is going, or
its file alone so far."""
_UNREAD = re.compile(
    rb"failed to (?:create fsnotify watcher|watch directory|try resolving symlinks|tail \d+ lines of log file"
    rb"|(?:open|read|seek \d+ in|reset seek in) log file|get parse function).*"
)
"""What it sends likewise where it cannot read on, as where too many logs are followed on its node."""
_TIMED = re.compile(r"(\d{4}-\d\d-\d\dT[\d:.]+(?:Z|[+-]\d\d:\d\d)) ?(.*)", re.DOTALL)


async def pod_lines(
    connection: Connection, pod: Document, *, tail: int | None, follow: bool, over: Callable[[], bool]
) -> AsyncGenerator[str]:
    """Lines without their ends; with `follow` until `over`, which says that no more will come. Raises
    NotFound, also where the node has the log no more, and Unavailable where it cannot be read at all.

    A container that has not started has no lines; with `follow` they are waited for.
    """
    path = pod_path(pod)
    query: dict[str, str | int | bool] = {"container": kind_of_pod(pod).container}
    if tail is not None:
        query["tailLines"] = tail
    times, pause = _Times(), FIRST_LINE_SECONDS
    shown: Callable[[Iterable[str]], Iterable[str]] = iter
    if follow:
        query |= {"follow": True, "timestamps": True}
        shown = times.new
    while True:
        before = times.last
        times.begin()
        try:
            async with aclosing(connection.log(f"{path}/log", query)) as chunks:
                lines = Lines()
                async for chunk in chunks:
                    for line in shown(lines.take(chunk)):
                        yield line
                if _LOST.fullmatch(lines.rest):
                    raise NotFound(f"{path}: the node has removed its container, and the log with it")
                if _UNREAD.fullmatch(lines.rest):
                    raise Unavailable(f"{path}: its node says: {lines.rest.decode(errors='replace').strip()}")
                if not follow or over():
                    for line in shown(lines.end()):
                        yield line
                    return
        except Invalid:  # 400: it is waiting to start
            if not follow or over():
                return
        except NotFound:
            if not times.last:
                raise
            return
        except Unavailable:
            if not times.last or over():
                raise
        if times.last:
            query.pop("tailLines", None)
            query["sinceTime"] = times.last
        pause = FIRST_LINE_SECONDS if times.last != before else min(2 * pause, LONGEST_PAUSE_SECONDS)
        await asyncio.sleep(pause if times.last else FIRST_LINE_SECONDS)


class _Times:
    """Of the lines of one log, of which the newest come again where it is asked for anew."""

    def __init__(self) -> None:
        self.last = ""
        self._known = ""
        """Up to here the lines have come before; empty where no more of them will. Else times are not
        compared: a node's clock may be set back."""
        self._joins = True
        """Whether what comes goes on from the line at `last`."""

    def begin(self) -> None:
        """The log is asked for from `last` on."""
        self._known, self._joins = self.last, not self.last

    def new(self, lines: Iterable[str]) -> Iterator[str]:
        """Those that have not come before, without their times. What has none goes on the one before it, or
        is the kubelet's own."""
        for line in lines:
            timed = _TIMED.fullmatch(line)
            time, text = timed.groups() if timed else ("", line)
            if self._known and time <= self._known:
                self._joins |= time == self._known
                continue
            if timed and not self._joins:
                self._joins = True
                yield MISSING
            if timed:
                self._known, self.last = "", time
            yield text
