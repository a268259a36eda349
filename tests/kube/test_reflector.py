"""A copy of what the apiserver has stays true, whatever happens to the watch."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from misbehaving_apiserver import PATH, Response, Server, misbehaving, thing
from prometheus_client import CollectorRegistry
from small_apiserver import connected_to
from structlog.testing import capture_logs
from waiting import wait_until_async

from holdfast_controller.cluster import Invalid, NotFound, Unavailable
from holdfast_controller.kube import reflector as reflectors
from holdfast_controller.kube.connection import KubeconfigError, connect
from holdfast_controller.kube.errors import Expired, NotPermitted, Throttled, error_of
from holdfast_controller.kube.rate import RateLimit
from holdfast_controller.kube.reflector import Notice, Reflector, Timing
from holdfast_controller.kube.resource import decode
from holdfast_controller.metrics import WatchMetrics

QUICK = Timing(watch_seconds=30, margin_seconds=1, first_retry_seconds=0.01, longest_retry_seconds=0.05)


@dataclass
class World:
    server: Server
    reflector: Reflector
    registry: CollectorRegistry
    heard: list[tuple[str, str, int]] = field(default_factory=list)

    def hear(self, notice: Notice) -> None:
        meta = notice.object["metadata"]
        self.heard.append((notice.type, meta["name"], int(meta["resourceVersion"])))

    async def until(self, condition: Callable[[], object], what: str) -> None:
        await wait_until_async(lambda: bool(condition()), what)

    def restarts(self, reason: str) -> float:
        labels = {"resource": "trainingjobs", "reason": reason}
        return self.registry.get_sample_value("holdfast_watch_restarts_total", labels) or 0


Story = Callable[[World], Coroutine[Any, Any, None]]
Tell = Callable[..., None]


@pytest.fixture
def tell(tmp_path: Path) -> Tell:
    """Run a story with a reflector at work on a server that the story has set up."""

    def run(before: Callable[[Server], None], story: Story, timing: Timing = QUICK) -> None:
        async def told() -> None:
            async with misbehaving() as server, connected_to(server.port, tmp_path) as connection:
                before(server)
                registry = CollectorRegistry()
                reflector = Reflector(connection, PATH, timing=timing, metrics=WatchMetrics(registry))
                world = World(server, reflector, registry)
                reflector.listen(world.hear)
                task = asyncio.create_task(reflector.run())
                try:
                    await story(world)
                finally:
                    task.cancel()
                    with suppress(asyncio.CancelledError):
                        await task

        asyncio.run(told())

    return run


def script(*steps: Any, things: tuple[dict[str, Any], ...] = ()) -> Callable[[Server], None]:
    def before(server: Server) -> None:
        server.put(*things)
        server.script.extend(steps)

    return before


async def stay(_: Response) -> None:
    await asyncio.Event().wait()


def test_list_then_watch_and_the_next_watch_goes_on_where_a_bookmark_was(tell: Tell) -> None:
    async def first(response: Response) -> None:
        await response.start()
        await response.event("MODIFIED", thing("a", 11))
        await response.event("BOOKMARK", {"metadata": {"resourceVersion": "44"}})
        await response.end()

    async def story(world: World) -> None:
        await world.until(lambda: len(world.server.watches) == 2, "a second watch")
        assert world.heard == [("ADDED", "a", 5), ("MODIFIED", "a", 11)]
        assert [w["resourceVersion"] for w in world.server.watches] == ["10", "44"]
        assert world.server.watches[0]["allowWatchBookmarks"] == "true"
        assert world.server.lists == 1
        assert world.restarts("ended") == 1

    tell(script(first, stay, things=(thing("a", 5),)), story)


def test_a_watch_that_opens_on_a_quiet_resource_ends_the_outage(tell: Tell) -> None:
    """No event need come for a minute: that the server accepts the watch is word of it."""

    async def busy(response: Response) -> None:
        await response.start("429 Too Many Requests", "Content-Length: 0", "Retry-After: 0")

    said = asyncio.Event()

    async def quiet(response: Response) -> None:
        await said.wait()
        await response.start()
        await asyncio.Event().wait()

    async def story(world: World) -> None:
        await world.until(lambda: "busy" in str(world.reflector.fault), "the outage to be said")
        said.set()
        await world.until(lambda: world.reflector.fault is None, "the outage to be over")
        assert world.server.lists == 1

    tell(script(busy, quiet, things=(thing("a", 5),)), story)


def test_a_kind_that_is_not_installed_is_told_of_once_and_asked_for_until_it_comes(tell: Tell) -> None:
    """It may never come, as that of the operator which a cluster does without."""

    def before(server: Server) -> None:
        server.refusals = [("404 Not Found", ())] * 3
        server.put(thing("a", 5))

    async def story(world: World) -> None:
        with capture_logs() as said:
            await world.until(lambda: world.heard == [("ADDED", "a", 5)], "the kind to come")
        assert not world.reflector.missing
        assert len([line for line in said if line["event"] == "list or watch failed"]) <= 1
        assert world.server.lists == 4

    tell(before, story)


@pytest.mark.parametrize("how", ["status", "event"])
def test_after_410_what_vanished_unheard_is_told_as_deleted(tell: Tell, how: str) -> None:
    async def gone(response: Response) -> None:
        world_server[0].remove("b")
        world_server[0].put(thing("a", 30), thing("c", 31), thing("d", 32, uid="another d"))
        if how == "status":
            await response.start("410 Gone", "Content-Length: 0")
            return
        await response.start()
        await response.event("ERROR", {"kind": "Status", "code": 410, "message": "too old resource version"})
        await response.end()

    world_server: list[Server] = []

    def before(server: Server) -> None:
        world_server.append(server)
        server.put(thing("a", 5), thing("b", 6), thing("d", 7))
        server.script.extend([gone, stay])

    async def story(world: World) -> None:
        await world.until(lambda: len(world.server.watches) == 2, "a watch after the second list")
        assert set(world.heard[:3]) == {("ADDED", "a", 5), ("ADDED", "b", 6), ("ADDED", "d", 7)}
        assert set(world.heard[3:]) == {
            ("DELETED", "b", 6),
            ("DELETED", "d", 7),  # one of the same name was made after it
            ("MODIFIED", "a", 30),
            ("ADDED", "c", 31),
            ("ADDED", "d", 32),
        }
        assert world.server.watches[1]["resourceVersion"] == "32"
        assert world.restarts("expired") == 1
        assert sorted(o["metadata"]["name"] for o in world.reflector.all()) == ["a", "c", "d"]

    tell(before, story)


def test_a_server_that_never_knows_the_version_of_its_own_list_is_not_listed_all_the_time(
    tell: Tell,
) -> None:
    """As where so much changes that a version is forgotten while thousands of objects are listed: that was
    done again at once each time, by every replica of the controller, of a server with enough to do."""

    async def gone(response: Response) -> None:
        await response.start("410 Gone", "Content-Length: 0")

    async def story(world: World) -> None:
        with capture_logs() as said:
            await world.until(lambda: world.server.lists >= 6, "further lists")
            pauses = [one["after"] for one in said if one["event"] == "list or watch failed"]
            assert len(pauses) >= 4
            assert pauses[-1] > pauses[0]
        # After each list there is no fault either, until its version is unknown too.
        await world.until(lambda: world.restarts("expired") == 8, "the last version that is unknown")
        await world.until(lambda: world.reflector.fault is None, "the outage to be over")
        assert world.restarts("expired") == 8

    tell(script(*[gone] * 8, stay, things=(thing("a", 5),)), story, replace(QUICK, longest_retry_seconds=2))


@pytest.mark.parametrize("bumped", [0, 10**9])
@pytest.mark.parametrize("breaks_off", [False, True])
def test_after_etcd_was_restored_from_a_backup_what_is_there_now_counts(
    tell: Tell, monkeypatch: pytest.MonkeyPatch, breaks_off: bool, bumped: int
) -> None:
    """Its versions are lower than those of what was there before, which were passed for newer until they had
    caught up: each write was in conflict, fifty times a second. Also where the first list of several pages
    breaks off, and where the revision was bumped (`etcdutl snapshot restore --bump-revision`): then new
    versions are higher, and those of what has not changed since are lower."""
    pages, left = reflectors.pages, list[str]()

    async def some(*arguments: Any) -> AsyncIterator[dict[str, Any]]:
        async for page in pages(*arguments):
            yield page
            if left:
                raise Unavailable(left.pop())

    monkeypatch.setattr(reflectors, "pages", some)

    async def restored(response: Response) -> None:
        await response.start()
        left.extend(["etcd has no leader"] if breaks_off else [])
        world.reflector.wrote(thing("c", 61))
        world.server.things, world.server.version = {"a": thing("a", 5)}, bumped + 7
        gone = {"kind": "Status", "code": 410, "message": "too old resource version"}
        await response.event("ERROR", gone)

    async def since(response: Response) -> None:
        await response.start()
        await response.event("MODIFIED", thing("a", bumped + 8))
        await stay(response)

    async def story(now: World) -> None:
        nonlocal world
        world = now
        world.server.script.extend((restored, since))
        world.server.put(thing("a", 50), thing("b", 60))
        await world.until(lambda: ("MODIFIED", "a", bumped + 8) in world.heard, "what happens after it")
        added, (deleted, changed) = world.heard[:2], world.heard[2:4]
        assert added == [("ADDED", "a", 50), ("ADDED", "b", 60)]
        assert (deleted, changed) == (("DELETED", "b", 60), ("MODIFIED", "a", 5))
        assert [one["metadata"]["resourceVersion"] for one in world.reflector.all()] == [str(bumped + 8)]

    world: World
    tell(script(), story)


def test_a_stream_that_ends_in_the_middle_of_a_line_loses_nothing(tell: Tell) -> None:
    async def torn(response: Response) -> None:
        await response.start()
        await response.event("ADDED", thing("a", 11))
        await response.send('{"type": "ADDED", "object": {"metadata": {"na')

    async def again(response: Response) -> None:
        await response.start()
        await response.event("ADDED", thing("b", 12))
        await stay(response)

    async def story(world: World) -> None:
        await world.until(lambda: len(world.heard) == 2, "the event that was torn")
        assert world.heard == [("ADDED", "a", 11), ("ADDED", "b", 12)]
        assert world.server.watches[1]["resourceVersion"] == "11"
        assert world.server.lists == 1

    tell(script(torn, again), story)


def test_a_server_that_falls_silent_is_left_for_a_new_connection(tell: Tell) -> None:
    async def silent(response: Response) -> None:
        await response.start()
        await stay(response)

    async def again(response: Response) -> None:
        await response.start()
        await response.event("ADDED", thing("a", 11))
        await stay(response)

    async def story(world: World) -> None:
        await world.until(lambda: world.heard, "the watch after the silence")
        assert world.restarts("failed") >= 1  # and again, a second after its event

    quick = Timing(watch_seconds=1, margin_seconds=0.05, first_retry_seconds=0.01)
    tell(script(silent, again), story, quick)


def test_a_busy_server_is_asked_again_when_it_says(tell: Tell) -> None:
    async def busy(response: Response) -> None:
        await response.start("429 Too Many Requests", "Retry-After: 0", "Content-Length: 0")

    def before(server: Server) -> None:
        server.put(thing("a", 5))
        server.refusals = [("429 Too Many Requests", ("Retry-After: 0",))] * 4
        server.script.extend([busy, stay])

    async def story(world: World) -> None:
        await world.until(lambda: len(world.server.watches) == 2, "a watch that is let in")
        assert world.heard == [("ADDED", "a", 5)]
        assert world.server.lists == 5

    tell(before, story)


def test_a_delete_that_was_never_sent_is_found_by_the_next_list(tell: Tell) -> None:
    async def forgetful(response: Response) -> None:
        await response.start()
        await response.event("BOOKMARK", {"metadata": {"resourceVersion": "20"}})
        servers[0].remove("a")
        await response.end()

    servers: list[Server] = []

    def before(server: Server) -> None:
        servers.append(server)
        server.put(thing("a", 5), thing("b", 6))
        server.script.extend([forgetful] + [forgetful_after] * 50)

    async def forgetful_after(response: Response) -> None:
        await response.start()
        await response.end()

    async def story(world: World) -> None:
        await world.until(lambda: ("DELETED", "a", 5) in world.heard, "the delete to be found out")
        assert [o["metadata"]["name"] for o in world.reflector.all()] == ["b"]

    tell(before, story)


def test_a_recreated_object_is_a_deleted_and_a_new_one(tell: Tell) -> None:
    async def recreated(response: Response) -> None:
        await response.start()
        await response.event("MODIFIED", thing("a", 11, uid="second"))
        await response.event("MODIFIED", thing("a", 8, uid="second"))  # a stale repetition changes nothing
        await response.event("DELETED", thing("a", 12, uid="second"))
        await stay(response)

    async def story(world: World) -> None:
        await world.until(lambda: len(world.heard) == 4, "all events")
        assert world.heard == [
            ("ADDED", "a", 5),
            ("DELETED", "a", 5),
            ("ADDED", "a", 11),
            ("DELETED", "a", 12),
        ]
        assert world.reflector.all() == []

    tell(script(recreated, things=(thing("a", 5, uid="first"),)), story)


def test_noise_and_a_server_that_is_down_are_said_and_got_over(tell: Tell) -> None:
    async def noise(response: Response) -> None:
        await response.start()
        await response.send("<html>proxy error</html>\n")
        await response.end()

    async def story(world: World) -> None:
        """Each goes on until it was seen: what is said of it is said for a moment only."""

        def said() -> str:
            return str(world.reflector.fault)

        await world.until(lambda: "HTTP 503" in said() or "Service Unavailable" in said(), "the refusal")
        lists = world.server.lists
        world.server.refusals.clear()
        await world.until(lambda: "no event but b'<html>proxy" in said(), "the noise")
        # After some failures in a row all is listed again.
        await world.until(lambda: world.server.lists >= lists + 2, "another list")
        world.server.script[:] = [stay]
        await world.until(lambda: [h[:2] for h in world.heard] == [("ADDED", "a")], "the truth")

    def before(server: Server) -> None:
        server.put(thing("a", 5))
        server.refusals = [("503 Service Unavailable", ())] * 10_000
        server.script.extend([noise] * 10_000)

    tell(before, story)


def test_a_job_that_is_nested_without_end_ends_neither_the_copy_nor_the_others(tell: Tell) -> None:
    """The apiserver takes thousands of levels in a job's config; Python's parser ends at a thousand."""

    def nested(levels: int) -> str:
        return '{"a\\"]": [1, ' * levels + "2" + "]}" * levels

    deep = thing("deep", 6, config=json.loads(nested(220)))

    async def tells(response: Response) -> None:
        await response.start()
        event = json.dumps({"type": "MODIFIED", "object": thing("deep", 11, config=0, image="x")})
        await response.send(event.replace('"config": 0', f'"config": {nested(2500)}') + "\n")
        await response.event("MODIFIED", thing("other", 12))
        await stay(response)

    async def story(world: World) -> None:
        await world.until(lambda: ("MODIFIED", "other", 12) in world.heard, "the job beside it")
        assert ("ADDED", "deep", 6) in world.heard
        job = decode(world.reflector.get("team/deep") or {})
        assert job.faults[-1] == "spec.config: nested deeper than 100 levels"
        assert job.spec.image == "x", "what stands behind it is read"

    tell(script(tells, stay, things=(thing("other", 5), deep)), story)


def test_what_we_wrote_is_read_back_before_the_watch_tells_it(tell: Tell) -> None:
    async def story(world: World) -> None:
        await world.reflector.synced()
        world.reflector.wrote(thing("a", 40, step=1))
        world.reflector.wrote(thing("a", 39, step=0))  # an answer that was overtaken
        world.reflector.wrote(thing("new", 41))
        found = world.reflector.get("team/a")
        assert found is not None
        assert found["spec"] == {"step": 1}
        assert len(world.reflector.all()) == 2
        release.set()
        await world.until(lambda: ("DELETED", "new", 43) in world.heard, "the watch to catch up")
        assert world.reflector.get("team/new") is None

    async def late(response: Response) -> None:
        await release.wait()
        await response.start()
        await response.event("MODIFIED", thing("a", 42, step=2))
        await response.event("ADDED", thing("new", 41))
        await response.event("DELETED", thing("new", 43))
        await stay(response)

    release = asyncio.Event()
    tell(script(late, things=(thing("a", 5),)), story)


def test_a_server_nobody_reaches_and_a_kubeconfig_that_is_none(tmp_path: Path) -> None:
    async def story() -> None:
        with pytest.raises(KubeconfigError, match=r"no-such-file cannot be used: there is no such file"):
            await connect(tmp_path / "no-such-file")
        (tmp_path / "empty").write_text("")
        with pytest.raises(KubeconfigError, match=r"empty cannot be used: it is no kubeconfig"):
            await connect(tmp_path / "empty")
        with pytest.raises(KubeconfigError, match=r"no pod with a service account .*KUBECONFIG"):
            await connect()
        async with connected_to(9, tmp_path) as connection:  # discard: nobody listens there
            with pytest.raises(Unavailable, match=r"GET /api: the apiserver at http://127.0.0.1:9 cannot be"):
                await connection.get("/api")

    asyncio.run(story())


def test_each_refusal_has_its_error() -> None:
    gone = error_of("GET /x", 404, {"message": 'pods "a" not found'}, None)
    assert (type(gone), str(gone)) == (NotFound, 'GET /x: pods "a" not found')
    # Where somebody has removed the operator's definitions there is no `Status`, only "404 page not found".
    gone = error_of("POST /apis/kubeflow.org/v1/pytorchjobs", 404, {}, None)
    assert isinstance(gone, NotFound)
    assert "serves no such kind: its definition (CustomResourceDefinition) is not there" in str(gone)
    assert isinstance(error_of("GET /x", 410, {}, None), Expired)
    throttled = error_of("GET /x", 429, {}, "7")
    assert isinstance(throttled, Throttled)
    assert throttled.retry_after == 7
    assert str(throttled) == "GET /x: the apiserver is busy: HTTP 429"
    needs = "The disruption budget keep needs 2 healthy pods and has 2 currently"
    budget = {"causes": [{"reason": "DisruptionBudget", "message": needs}]}
    kept = error_of("POST /x/eviction", 429, {"message": "Cannot evict pod", "details": budget}, "7")
    assert isinstance(kept, Throttled)
    assert str(kept) == f"POST /x/eviction: not now: {needs}", "nothing is busy"
    said = 'pods is forbidden: User "system:serviceaccount:h:h" cannot list resource "pods" in API group ""'
    forbidden = error_of("GET /x", 403, {"message": said}, None)
    assert isinstance(forbidden, NotPermitted)
    assert "give its account the right" in str(forbidden)
    said = 'pytorchjobs.kubeflow.org "a-1" is forbidden: exceeded quota: jobs'
    forbidden = error_of("POST /x", 403, {"message": said}, None)
    assert isinstance(forbidden, NotPermitted)
    assert str(forbidden) == f"POST /x: the apiserver refuses it: {said}", "no right of ours would help"
    unknown = error_of("GET /x", 401, {"message": "Unauthorized"}, None)
    assert isinstance(unknown, NotPermitted)
    assert "its credentials have expired" in str(unknown), "no right would help one who is not known"
    causes = {"details": {"causes": [{"field": "spec.gpus", "message": "must be a string"}]}}
    invalid = error_of("POST /x", 422, {"message": "is invalid", **causes}, None)
    assert isinstance(invalid, Invalid)
    assert invalid.errors == ["spec.gpus: must be a string"]


def test_a_burst_is_let_through_and_what_follows_waits_its_turn() -> None:
    now = [0.0]
    limit = RateLimit(10, 3, clock=lambda: now[0])
    assert [limit.reserve() for _ in range(5)] == pytest.approx([0, 0, 0, 0.1, 0.2])
    now[0] = 10.0
    assert [limit.reserve() for _ in range(4)] == pytest.approx([0, 0, 0, 0.1])
    with pytest.raises(ValueError, match="lets nothing through"):
        RateLimit(0, 3)
