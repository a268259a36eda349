"""A copy of all objects of one kind, kept true by list and watch.

List once, then watch from the list's version. A watch ends all the time: the server ends it after
`watch_seconds`, networks drop it, mid-line or in silence. It is then opened again from the last version
seen (bookmarks keep that fresh), and nothing is missed. Where the server has forgotten that version (410),
or nothing has worked for a while, and every `relist_seconds` in any case, everything is listed again and
compared with the copy: what is not in the list was deleted unheard, and listeners are told so.

What we wrote ourselves is read back at once: `wrote` lays the server's answer over the copy until the
watch has caught up.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass

import structlog

from holdfast_controller.cluster import HoldfastError, NotFound, Unavailable
from holdfast_controller.metrics import WatchMetrics

from .connection import Connection, Document
from .deep_json import parsed
from .errors import Expired, Throttled
from .slim import Keep, slim

log = structlog.get_logger(__name__)

PAGE = 500
TRIES_BEFORE_RELIST = 5
MISSING_RETRY_SECONDS = 5.0
SUDDEN_SECONDS = 1.0
"""A watch that ends sooner without a word is not opened again at once."""


@dataclass(frozen=True)
class Timing:
    """All in seconds."""

    watch_seconds: float = 60.0
    """After which the server ends a watch by itself (`timeoutSeconds`), give or take a quarter."""
    margin_seconds: float = 10.0
    """How much longer silence is taken for a watch; after that the connection counts as dead."""
    relist_seconds: float = 600.0
    first_retry_seconds: float = 0.2
    longest_retry_seconds: float = 30.0


@dataclass(frozen=True)
class Notice:
    """What happened to an object: ADDED, MODIFIED or DELETED; of a deleted one its last known state."""

    type: str
    object: Document


Listener = Callable[[Notice], None]


class Reflector:
    """Objects under `path` (`/apis/GROUP/VERSION/PLURAL`), of all namespaces. `run` keeps them true."""

    def __init__(
        self,
        connection: Connection,
        path: str,
        *,
        selector: str = "",
        keep: Keep | None = None,
        timing: Timing | None = None,
        metrics: WatchMetrics | None = None,
    ):
        """`keep` says what of an object is of use; it may change what it is given."""
        self._connection = connection
        self._path = path
        self._resource = path.rsplit("/", 1)[-1]
        self._selector = {"labelSelector": selector} if selector else {}
        self._keep = keep
        self._timing = timing or Timing()
        self._metrics = metrics
        self._copy: dict[str, Document] = {}
        self._written: dict[str, Document] = {}
        self._version = ""
        self._listeners: dict[Listener, None] = {}  # who came first is told first
        self._synced = asyncio.Event()
        self._answered = asyncio.Event()
        self._heard = time.monotonic()
        self.fault: str | None = "not listed yet"
        """Why the copy may be old, or None while list and watch work."""
        self.missing = False
        """The server does not know this kind: its CRD is not installed."""
        if metrics is not None:
            metrics.follow(self._resource, lambda: self.age)

    # --------------------------------------------------------------- reading

    @property
    def age(self) -> float:
        """Seconds since the server was last heard of."""
        return time.monotonic() - self._heard

    async def synced(self) -> None:
        """Wait until everything was listed once."""
        await self._synced.wait()

    async def answered(self) -> None:
        """Wait until everything was listed once, or the server has said that it does not know the kind."""
        await self._answered.wait()

    def get(self, key: str) -> Document | None:
        """The newest state known of `namespace/name`. Not to be changed."""
        seen, written = self._copy.get(key), self._written.get(key)
        if seen is None or written is None:
            return seen or written
        return written if version_of(written) > version_of(seen) else seen

    def all(self) -> list[Document]:
        """The newest state known of each."""
        return [found for key in {**self._copy, **self._written} if (found := self.get(key)) is not None]

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Be told every notice from now on, in order, at once; call what is returned to end it."""
        self._listeners[listener] = None

        def stop() -> None:
            self._listeners.pop(listener, None)

        return stop

    def wrote(self, document: Document) -> None:
        """Take note of what the server answered to a write of ours."""
        key = key_of(document)
        known = self.get(key)
        if known is None or version_of(document) > version_of(known):
            self._written[key] = slim(document, self._keep)

    # --------------------------------------------------------------- keeping

    async def run(self) -> None:
        """For ever. Whatever the server does, it is asked again, with growing pauses."""
        failures = 0
        while True:
            try:
                await self._list()
                await self._follow()
                failures = 0
            except HoldfastError as error:
                failures += 1
                if isinstance(error, NotFound):
                    self.missing, self._heard = True, time.monotonic()
                    self._answered.set()
                await self._pause(error, failures)

    async def _list(self) -> None:
        listed: dict[str, Document] = {}
        version = ""
        async with aclosing(pages(self._connection, self._path, self._selector)) as documents:
            async for page in documents:
                for document in page["items"]:
                    key = key_of(document)
                    known = self._copy.get(key)
                    same = known is not None and version_of(known) == version_of(document)
                    listed[key] = known if known is not None and same else slim(document, self._keep)
                version = page["metadata"]["resourceVersion"]
                self._alive()
        before, self._version = self._version, version  # not while another page may not come
        self._compare(listed, restored=int(version or 0) < int(before or 0))
        self.missing = False
        self._synced.set()
        self._answered.set()

    def _compare(self, listed: dict[str, Document], *, restored: bool) -> None:
        """Tell the differences between the copy and what is there now; `restored`: the versions are lower
        than they were, as where etcd was restored from a backup, and what is newer has a lower one too.

        Where its revision was raised above all before in that (`--bump-revision`), objects alone have
        lower ones. A list is of now, so what differs from it is the copy's mistake."""
        older = (
            version_of(new) < version_of(self._copy[key]) for key, new in listed.items() if key in self._copy
        )
        if restored or any(older):
            log.warning("the apiserver has the objects of an earlier time", resource=self._resource)
        if restored:
            self._written.clear()
        for key, old in list(self._copy.items()):
            new = listed.get(key)
            if new is None or uid_of(new) != uid_of(old):
                self._take(Notice("DELETED", old))
        for key, new in listed.items():
            known = self._copy.get(key)
            if new is not known:
                self._take(Notice("MODIFIED" if known else "ADDED", new))
        now = int(self._version or 0)
        for key, written in list(self._written.items()):
            if version_of(written) <= now:
                del self._written[key]

    async def _follow(self) -> None:
        """Watch, again and again; returns when it is time to list. Raises Expired where what was just
        listed is forgotten already: to list again at once would be no help, and a load."""
        relist_at = time.monotonic() + self._timing.relist_seconds * random.uniform(0.8, 1.2)
        failures, listed = 0, self._version
        while time.monotonic() < relist_at and failures < TRIES_BEFORE_RELIST:
            before, started = self._version, time.monotonic()
            error: HoldfastError | None = None
            try:
                await self._watch()
            except Expired:
                self._count("expired")
                if self._version == listed:
                    raise
                return
            except HoldfastError as problem:
                error = problem
            if self._version != before:
                failures = 0
            elif error is not None or time.monotonic() - started < SUDDEN_SECONDS:
                failures += 1
            self._count("failed" if error else "ended")
            if failures:
                sudden = Unavailable(f"the watch of {self._resource} ends as soon as it opens")
                await self._pause(error or sudden, failures)

    async def _watch(self) -> None:
        """One watch from the last version, until it ends. Raises Expired, Unavailable."""
        seconds = max(1, round(self._timing.watch_seconds * random.uniform(0.75, 1.25)))
        query: dict[str, str | int | bool] = {
            **self._selector,
            "watch": True,
            "allowWatchBookmarks": True,
            "resourceVersion": self._version,
            "timeoutSeconds": seconds,
        }
        silence = seconds + self._timing.margin_seconds
        # A watch of a quiet resource may say nothing for a minute: that it opened is word of the server.
        chunks = self._connection.stream(self._path, query, silence_seconds=silence, opened=self._alive)
        async with aclosing(lines(chunks)) as whole:
            async for line in whole:
                self._alive()
                self._hear(line)

    def _hear(self, line: bytes) -> None:
        try:
            event = parsed(line)
            kind, document = event["type"], event["object"]
        except (ValueError, KeyError, TypeError):
            raise Unavailable(f"the watch of {self._resource} sends no event but {line[:80]!r}") from None
        if kind == "ERROR":
            if document.get("code") == 410:
                raise Expired(str(document.get("message")))
            raise Unavailable(f"the watch of {self._resource} ends: {document.get('message')}")
        if kind != "BOOKMARK":
            self._take_event(kind, slim(document, self._keep))
        self._version = document["metadata"]["resourceVersion"]

    def _take_event(self, kind: str, document: Document) -> None:
        """Make of an event what it is to the copy: an ADDED may be known, a MODIFIED may be new."""
        known = self._copy.get(key_of(document))
        if known is not None and uid_of(known) != uid_of(document):
            self._take(Notice("DELETED", known))  # its own DELETED was lost
            known = None
        if kind == "DELETED":
            if known is not None:
                self._take(Notice("DELETED", document))
        elif known is None or version_of(document) > version_of(known):
            self._take(Notice("MODIFIED" if known else "ADDED", document))

    def _take(self, notice: Notice) -> None:
        key = key_of(notice.object)
        if notice.type == "DELETED":
            self._copy.pop(key, None)
        else:
            self._copy[key] = notice.object
        written = self._written.get(key)
        if written is not None and (
            version_of(written) <= version_of(notice.object)
            or (notice.type == "DELETED" and uid_of(written) == uid_of(notice.object))
        ):
            del self._written[key]
        for listener in list(self._listeners):
            try:
                listener(notice)
            except Exception:  # what it makes of one object must not end the copy of all
                log.exception("a listener failed", resource=self._resource, object=key)

    def _alive(self) -> None:
        self._heard = time.monotonic()
        self.fault = None

    async def _pause(self, error: HoldfastError, failures: int) -> None:
        self.fault = str(error)
        # That a kind is not there costs the server nothing to say, and jobs wait for it.
        limit = MISSING_RETRY_SECONDS if isinstance(error, NotFound) else self._timing.longest_retry_seconds
        longest = min(limit, self._timing.first_retry_seconds * 2.0 ** min(failures - 1, 20))
        seconds = longest * random.uniform(0.5, 1.0)
        if isinstance(error, Throttled):
            seconds = max(seconds, error.retry_after)
        if failures == 1 or not isinstance(error, NotFound):  # a kind may be missing for good
            log.warning(
                "list or watch failed", resource=self._resource, error=str(error), after=round(seconds, 2)
            )
        await asyncio.sleep(seconds)

    def _count(self, reason: str) -> None:
        if self._metrics is not None:
            self._metrics.restarted(self._resource, reason)


async def pages(
    connection: Connection, path: str, query: dict[str, str] | None = None
) -> AsyncGenerator[Document]:
    """The lists that make up one consistent list. Raises Expired where paging took too long."""
    more = ""
    while True:
        page = await connection.get(path, limit=PAGE, **(query or {}), **({"continue": more} if more else {}))
        page["items"] = page.get("items") or []
        yield page
        more = page["metadata"].get("continue") or ""
        if not more:
            return


async def lines(chunks: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    """Whole lines; what follows the last line's end was cut off and is left out."""
    rest = b""
    async with aclosing(chunks):
        async for chunk in chunks:
            *whole, rest = (rest + chunk).split(b"\n")
            for line in whole:
                if line.strip():
                    yield line


def key_of(document: Document) -> str:
    """`namespace/name`."""
    meta = document["metadata"]
    return f"{meta.get('namespace', '')}/{meta['name']}"


def uid_of(document: Document) -> str:
    return str(document["metadata"]["uid"])


def version_of(document: Document) -> int:
    """The resourceVersion as a number: within one kind a newer one is higher (KEP-5504)."""
    return int(document["metadata"]["resourceVersion"])
