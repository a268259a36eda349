"""How often the store of jobs asks the apiserver, and how long it keeps the event loop for itself.

A server over HTTP plays the apiserver: it lists jobs and takes patches.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from small_apiserver import connected, meanwhile
from waiting import wait_until_async

from holdfast_controller.cluster import Conflict, Event, Idempotency, NotFound
from holdfast_controller.jobs import Metadata, Phase, Spec, TrainingJob
from holdfast_controller.kube.events import EventLog
from holdfast_controller.kube.reflector import Reflector
from holdfast_controller.kube.resource import FINALIZER, JOBS
from holdfast_controller.kube.store import IN_A_ROW, KubeStore
from holdfast_controller.problem import Forbidden


def made_by_kubectl(name: str = "gpt", namespace: str = "team", version: int = 5) -> dict[str, Any]:
    meta = {
        "name": name,
        "namespace": namespace,
        "uid": f"uid-{name}",
        "resourceVersion": str(version),
        "creationTimestamp": "2026-01-01T00:00:00Z",
    }
    return {"metadata": meta, "spec": {"command": ["true"]}}


class Jobs:
    def __init__(self, *documents: dict[str, Any]) -> None:
        self.items = {one["metadata"]["name"]: one for one in documents}
        self.version = 10
        self.asked: list[str] = []
        """Methods and paths, without lists and watches."""
        self.changed: list[dict[str, Any]] = []
        """By path, of each write but those of finalizers."""
        self._news: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    def replaced_by_kubectl(self, document: dict[str, Any]) -> None:
        """All of it but its status, which is kept from who does not write that."""
        self.version += 1
        name, version = document["metadata"]["name"], str(self.version)
        status = self.items[name].get("status", {})
        new = {**document, "metadata": {**document["metadata"], "resourceVersion": version}, "status": status}
        self.items[name] = new
        self._news.put_nowait(new)

    async def list_or_watch(self, request: web.Request) -> web.StreamResponse:
        if "watch" in request.query:
            answer = web.StreamResponse()
            await answer.prepare(request)
            while True:
                event = {"type": "MODIFIED", "object": await self._news.get()}
                await answer.write(json.dumps(event).encode() + b"\n")
        return web.json_response(
            {"metadata": {"resourceVersion": str(self.version)}, "items": list(self.items.values())}
        )

    async def patch(self, request: web.Request) -> web.Response:
        self.asked.append(f"PATCH {request.path.removeprefix('/apis/holdfast.dev/v1alpha1/namespaces/team')}")
        body, job = await request.json(), copy.deepcopy(self.items[request.match_info["name"]])
        if isinstance(body, list):
            given = {change["path"]: change["value"] for change in body}
            version = given.pop("/metadata/resourceVersion")
            self.changed.append(given)
            for path, value in given.items():
                *outer, last = path.split("/")[1:]
                (job[outer[0]] if outer else job)[last] = value
        else:
            version, job["metadata"]["finalizers"] = (
                body["metadata"]["resourceVersion"],
                body["metadata"]["finalizers"],
            )
        if version != job["metadata"]["resourceVersion"]:
            return web.json_response({"code": 409, "reason": "Conflict", "message": "it changed"}, status=409)
        self.version += 1
        job["metadata"]["resourceVersion"] = str(self.version)
        self.items[request.match_info["name"]] = job
        return web.json_response(job)


@asynccontextmanager
async def store_of(jobs: Jobs, directory: Path, *more: web.RouteDef) -> AsyncIterator[KubeStore]:
    """The reconciler's, which reads the copy."""
    routes = (
        web.get(JOBS, jobs.list_or_watch),
        web.patch("/apis/holdfast.dev/v1alpha1/namespaces/team/trainingjobs/{name}{rest:.*}", jobs.patch),
        *more,
    )
    async with connected(routes, directory) as connection:
        reflector = Reflector(connection, JOBS)
        async with meanwhile(reflector.run()):
            await reflector.synced()
            yield KubeStore(connection, reflector, cached=True)


def test_a_job_of_kubectls_costs_one_request_more_once(tmp_path: Path) -> None:
    """Our finalizer, by what the copy says of its others."""
    document = made_by_kubectl()
    document["metadata"]["finalizers"] = ["example.com/theirs"]
    jobs = Jobs(document)

    async def story() -> None:
        async with store_of(jobs, tmp_path) as store:
            job = await store.get("team", "gpt")
            for phase in (Phase.STARTING, Phase.RUNNING):
                job = await store.replace_status(job, job.status.model_copy(update={"phase": phase}))
        held, *statuses = jobs.asked
        assert (held, statuses) == ("PATCH /trainingjobs/gpt", ["PATCH /trainingjobs/gpt/status"] * 2)
        assert jobs.items["gpt"]["metadata"]["finalizers"] == ["example.com/theirs", FINALIZER]
        assert jobs.items["gpt"]["status"]["phase"] == "Running"

    asyncio.run(story())


def test_a_job_whose_finalizer_kubectl_replace_removed_gets_it_back(tmp_path: Path) -> None:
    """Deleted without it, the job would be gone before its attempt had saved."""
    document = made_by_kubectl()
    jobs = Jobs(document)

    async def story() -> None:
        async with store_of(jobs, tmp_path) as store:
            job = await store.get("team", "gpt")
            await store.replace_status(job, job.status.model_copy(update={"phase": Phase.STARTING}))
            assert jobs.items["gpt"]["metadata"]["finalizers"] == [FINALIZER]

            jobs.replaced_by_kubectl(document)
            version = jobs.items["gpt"]["metadata"]["resourceVersion"]

            async def seen() -> bool:
                return (await store.get("team", "gpt")).metadata.resource_version == version

            await wait_until_async(seen, "the copy to have what kubectl wrote")
            job = await store.get("team", "gpt")
            await store.replace_status(job, job.status.model_copy(update={"phase": Phase.RUNNING}))
        assert jobs.items["gpt"]["metadata"]["finalizers"] == [FINALIZER]
        assert jobs.items["gpt"]["status"]["phase"] == "Running"

    asyncio.run(story())


def test_a_suspension_leaves_a_spec_as_its_user_wrote_it(tmp_path: Path) -> None:
    """Written anew as a whole, gpus: 1 became "1", of the controller, and the user's next server-side apply
    was in conflict with that."""
    document = made_by_kubectl()
    document["spec"] |= {"gpus": 1, "config": {"lr": 1, "seed": 1}, "resources": {"cpu": 8}}
    jobs = Jobs(document)

    async def story() -> None:
        async with store_of(jobs, tmp_path) as store:
            job = await store.get("team", "gpt")
            job = await store.replace_spec(
                job.model_copy(update={"spec": job.spec.model_copy(update={"suspend": True})})
            )
            assert (job.spec.suspend, job.spec.gpus) == (True, "1")
            config = {"lr": 1, "seed": True}  # which is equal to 1, and is another thing
            await store.replace_spec(
                job.model_copy(update={"spec": job.spec.model_copy(update={"config": config})})
            )
        assert jobs.changed == [{"/spec/suspend": True}, {"/spec/config": config}]
        assert jobs.items["gpt"]["spec"]["gpus"] == 1

    asyncio.run(story())


def test_a_job_that_was_edited_unheard_is_read_again_before_it_is_held(tmp_path: Path) -> None:
    """A watch that fell silent may last a minute, in which fifty passes a second would meet a conflict."""
    jobs = Jobs(made_by_kubectl())

    async def there(_: web.Request) -> web.Response:
        return web.json_response(jobs.items["gpt"])

    async def story() -> None:
        get = web.get("/apis/holdfast.dev/v1alpha1/namespaces/team/trainingjobs/gpt", there)
        async with store_of(jobs, tmp_path, get) as store:
            job = await store.get("team", "gpt")
            jobs.items["gpt"] = made_by_kubectl(version=11)
            with pytest.raises(Conflict, match="job team/gpt changed: it is at version 11, not 5"):
                await store.replace_status(job, job.status.model_copy(update={"phase": Phase.STARTING}))
            job = await store.get("team", "gpt")
            await store.replace_status(job, job.status.model_copy(update={"phase": Phase.STARTING}))
        assert jobs.items["gpt"]["status"]["phase"] == "Starting"

    asyncio.run(story())


def test_a_job_whose_time_to_live_was_made_longer_unheard_is_not_removed(tmp_path: Path) -> None:
    """A watch that fell silent may last a minute, and the job was deleted by what it had said before."""
    document = made_by_kubectl()
    document["metadata"]["finalizers"] = [FINALIZER]
    jobs, gone = Jobs(document), list[str]()

    async def there(request: web.Request) -> web.Response:
        return web.json_response(jobs.items[request.match_info["name"]])

    async def delete(request: web.Request) -> web.Response:
        job = jobs.items[request.match_info["name"]]
        asked = (await request.json())["preconditions"]
        if any(job["metadata"][key] != value for key, value in asked.items()):
            return web.json_response({"code": 409, "reason": "Conflict", "message": "it changed"}, status=409)
        gone.append(job["metadata"]["name"])
        return web.json_response(job)

    async def story() -> None:
        path = "/apis/holdfast.dev/v1alpha1/namespaces/team/trainingjobs/{name}"
        async with store_of(jobs, tmp_path, web.get(path, there), web.delete(path, delete)) as store:
            job = await store.get("team", "gpt")
            longer = made_by_kubectl(version=11)
            longer["metadata"]["finalizers"] = [FINALIZER]
            longer["spec"]["ttlSecondsAfterFinished"] = 10**6
            jobs.items["gpt"] = longer
            for end in (store.mark_deleted("team", "gpt", known=job), store.remove(job)):
                with pytest.raises(Conflict, match="job team/gpt changed: it is at version 11, not 5"):
                    await end
            assert (gone, jobs.items["gpt"]["metadata"]["finalizers"]) == ([], [FINALIZER])
            job = await store.get("team", "gpt")
            assert job.spec.ttl_seconds_after_finished == 10**6
            await store.remove(job)
        assert (gone, jobs.items["gpt"]["metadata"]["finalizers"]) == (["gpt"], [])

    asyncio.run(story())


def test_an_event_that_the_apiserver_refuses_keeps_no_other_one_from_being_told(tmp_path: Path) -> None:
    """Nor the status that it comes with from standing."""
    told: list[str] = []

    async def post(request: web.Request) -> web.Response:
        body = await request.json()
        if body["reason"] == "Failed":
            refusal = {"code": 403, "reason": "Forbidden", "message": "events is forbidden: exceeded quota"}
            return web.json_response(refusal, status=403)
        told.append(body["reason"])
        return web.json_response(body, status=201)

    async def story() -> None:
        takes = web.post("/api/v1/namespaces/team/events", post)
        async with store_of(Jobs(made_by_kubectl()), tmp_path, takes) as store:
            job = await store.get("team", "gpt")
            now = datetime.now(UTC)
            events = [Event(now, "Warning", reason, "it ended") for reason in ("Failed", "JobFailed")]
            failed = job.status.model_copy(update={"phase": Phase.FAILED})
            assert (await store.replace_status(job, failed, *events)).status.phase is Phase.FAILED
        assert told == ["JobFailed"]

    asyncio.run(story())


@pytest.mark.parametrize(
    "told", ["x" * 2000, "Прогресс " * 100, "€" * 341 + "xy€"], ids=["ascii", "cyrillic", "euros"]
)
def test_an_event_is_cut_by_its_bytes_as_the_apiserver_counts_them(told: str, tmp_path: Path) -> None:
    """What a program of another language said last is told as well."""
    messages: list[str] = []

    async def post(request: web.Request) -> web.Response:
        body = await request.json()
        if len(body["message"].encode()) > 1024:
            refusal = {"code": 422, "message": "message: Invalid value: can have at most 1024 characters"}
            return web.json_response(refusal, status=422)
        messages.append(body["message"])
        return web.json_response(body, status=201)

    async def story() -> None:
        about = {"namespace": "team", "name": "gpt", "uid": "uid-gpt"}
        async with connected([web.post("/api/v1/namespaces/team/events", post)], tmp_path) as connection:
            await EventLog(connection).record(about, Event(datetime.now(UTC), "Warning", "Failed", told))

    asyncio.run(story())
    (message,) = messages
    assert told.startswith(message)
    assert len(message.encode()) > 1020, "and of its last character nothing, or all"


async def listed(store: KubeStore) -> int:
    return len(await store.list_jobs())


async def watched(store: KubeStore) -> int:
    watch: Any = store.watch()
    async with aclosing(watch) as changes:
        return len([await anext(changes) for _ in range(10 * IN_A_ROW)])


@pytest.mark.parametrize("look", [listed, watched])
def test_whoever_looks_at_all_jobs_lets_others_have_their_turn(
    look: Callable[[KubeStore], Awaitable[int]], tmp_path: Path
) -> None:
    """The lease must be renewed however many jobs there are."""
    jobs = Jobs(*(made_by_kubectl(f"j-{number}") for number in range(10 * IN_A_ROW)))

    async def story() -> None:
        async with store_of(jobs, tmp_path) as store:
            turns = 0

            async def renew() -> None:
                nonlocal turns
                while True:
                    turns += 1
                    await asyncio.sleep(0)

            renewing = asyncio.create_task(renew())
            assert await look(store) == len(jobs.items)
            assert turns >= 9
            renewing.cancel()
            await asyncio.gather(renewing, return_exceptions=True)

    asyncio.run(story())


def test_a_watch_of_a_namespace_tells_of_no_other(tmp_path: Path) -> None:
    places = {"a": "other", "b": "team", "c": "other", "d": "team"}
    jobs = Jobs(*(made_by_kubectl(name, namespace) for name, namespace in places.items()))

    async def story() -> None:
        async with store_of(jobs, tmp_path) as store:
            watch: Any = store.watch("team")
            async with aclosing(watch) as changes:
                assert [(await anext(changes)).job.key for _ in range(2)] == ["team/b", "team/d"]

    asyncio.run(story())


def test_a_definition_that_is_not_there_is_told_once(tmp_path: Path) -> None:
    """The record of the key can be made, and the job cannot."""
    job = TrainingJob(metadata=Metadata(name="gpt", namespace="team"), spec=Spec(command=["true"]))
    events = "/api/v1/namespaces/team/events"

    async def taken(request: web.Request) -> web.Response:
        return web.json_response(await request.json(), status=201)

    async def story() -> str:
        async with store_of(Jobs(), tmp_path, web.post(events, taken)) as store:
            with pytest.raises(NotFound) as caught:
                await store.create(job, idempotency=Idempotency("k", "f"))
        return str(caught.value)

    told = asyncio.run(story())
    assert told.count("the TrainingJob CRD is not installed") == told.count("POST /apis/holdfast.dev") == 1


def test_what_a_policy_of_the_cluster_forbids_is_not_told_to_be_tried_again(tmp_path: Path) -> None:
    """REST answered 503 with Retry-After, and a program that heeds that tried for ever."""
    job = TrainingJob(metadata=Metadata(name="gpt", namespace="team"), spec=Spec(command=["true"]))
    why = 'admission webhook "labels.example.org" denied the request: every job needs the label team'

    async def refuse(_: web.Request) -> web.Response:
        return web.json_response({"code": 403, "reason": "Forbidden", "message": why}, status=403)

    async def story() -> None:
        jobs = "/apis/holdfast.dev/v1alpha1/namespaces/team/trainingjobs"
        routes = (web.post(jobs, refuse), web.delete(f"{jobs}/{{name}}", refuse))
        async with store_of(Jobs(), tmp_path, *routes) as store:
            for ask in (store.create(job), store.mark_deleted("team", "gpt")):
                with pytest.raises(Forbidden, match="every job needs the label team"):
                    await ask

    asyncio.run(story())


def test_a_namespace_that_is_going_is_told_whatever_the_request_has_with_it(tmp_path: Path) -> None:
    """With an Idempotency-Key, as `holdfast submit` sends one, REST answered 503: try again in a second."""
    job = TrainingJob(metadata=Metadata(name="gpt", namespace="team"), spec=Spec(command=["true"]))
    why = "unable to create new content in namespace team because it is being terminated"

    async def refuse(_: web.Request) -> web.Response:
        return web.json_response({"code": 403, "reason": "Forbidden", "message": why}, status=403)

    async def story() -> None:
        jobs = "/apis/holdfast.dev/v1alpha1/namespaces/team/trainingjobs"
        routes = (web.post(jobs, refuse), web.post("/api/v1/namespaces/team/events", refuse))
        async with store_of(Jobs(), tmp_path, *routes) as store:
            for key in (None, Idempotency("k", "f")):
                with pytest.raises(Forbidden, match="it is being terminated"):
                    await store.create(job, idempotency=key)

    asyncio.run(story())


def test_a_job_is_made_where_a_policy_refuses_to_note_its_key(tmp_path: Path) -> None:
    job = TrainingJob(metadata=Metadata(name="gpt", namespace="team"), spec=Spec(command=["true"]))

    async def make(request: web.Request) -> web.Response:
        return web.json_response({**(await request.json()), **made_by_kubectl()})

    async def refuse(_: web.Request) -> web.Response:
        return web.json_response({"code": 403, "reason": "Forbidden", "message": "no changes"}, status=403)

    async def story() -> None:
        jobs = "/apis/holdfast.dev/v1alpha1/namespaces/team/trainingjobs"
        events = "/api/v1/namespaces/team/events"
        routes = (web.post(jobs, make), web.post(events, make), web.patch(f"{events}/{{name}}", refuse))
        async with store_of(Jobs(), tmp_path, *routes) as store:
            assert (await store.create(job, idempotency=Idempotency("k", "f"))).metadata.uid == "uid-gpt"

    asyncio.run(story())
