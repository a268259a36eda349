"""What an attempt is made of is made in its order, and again where an operator is a moment behind."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from small_apiserver import connected

from holdfast_controller.attempt_kind import CONFIG_MAPS, AttemptKind
from holdfast_controller.cluster import NotReady
from holdfast_controller.jobs import Metadata, Spec, TrainingJob
from holdfast_controller.kube import objects
from holdfast_controller.kube.errors import NotPermitted
from holdfast_controller.kube.objects import Objects
from holdfast_controller.kube.observation import STOPPED
from holdfast_controller.kube.pieces import Pieces
from holdfast_controller.manifests import KINDS, Manifests, attempt_manifests
from holdfast_controller.pod_settings import JobsKind, PodSettings
from holdfast_controller.pod_template import CONFIG_FILE, UID_LABEL
from holdfast_controller.pytorchjobs import PYTORCH_JOB
from holdfast_controller.trainjobs import TRAIN_JOB

JOB = TrainingJob(
    metadata=Metadata(name="gpt", namespace="team", uid="job-1"), spec=Spec(command=["python"], image="a:1")
)
LATE = (
    'admission webhook "validator.trainjob.trainer.kubeflow.org" denied the request: spec.runtimeRef: '
    'TrainingRuntime.trainer.kubeflow.org "gpt-1" not found: specified trainingRuntime must be created '
    "before the TrainJob is created"
)
OTHER = 'admission webhook "policy.example.org" denied the request: no TrainJobs on Sundays'


def made(refuse: Callable[[int], str], directory: Path) -> list[str]:
    """The kinds that were asked for, in order; `refuse` says why the n-th TrainJob is not taken."""
    asked: list[str] = []

    async def post(request: web.Request) -> web.Response:
        body: dict[str, Any] = await request.json()
        asked.append(body["kind"])
        refusal = refuse(asked.count("TrainJob")) if body["kind"] == "TrainJob" else ""
        if refusal:
            return web.json_response({"code": 403, "message": refusal}, status=403)
        body["metadata"] |= {"uid": body["kind"], "resourceVersion": "5"}
        return web.json_response(body, status=201)

    async def story() -> None:
        settings = PodSettings(kind=JobsKind.TRAIN_JOB, default_claim="runs")
        manifests = attempt_manifests(JOB, 1, settings)
        async with connected([web.post("/{path:.*}", post)], directory) as connection:
            pieces = Pieces(connection)
            await Objects(connection, pieces).create(JOB, 1, TRAIN_JOB, manifests)
            assert pieces.object_of(JOB, 1) is not None, "known at once"

    asyncio.run(story())
    return asked


def test_a_train_job_is_asked_for_until_trainer_has_seen_its_runtime(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "LATE_SECONDS", 0.0)
    asked = made(lambda time: LATE if time < 3 else "", tmp_path)
    assert asked == ["ConfigMap", "TrainingRuntime", "TrainJob", "TrainJob", "TrainJob"]


@pytest.mark.parametrize(
    ("refusal", "times"), [(LATE, objects.LATE_TRIES), (OTHER, 1)], ids=["late", "other"]
)
def test_what_does_not_pass_is_told(
    refusal: str, times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "LATE_SECONDS", 0.0)
    tries: list[int] = []

    def refuse(time: int) -> str:
        tries.append(time)
        return refusal

    with pytest.raises(NotPermitted, match=r"denied the request"):
        made(refuse, tmp_path)
    assert len(tries) == times


class Server:
    """Keeps what is made, and refuses attempt objects where a quota is used up."""

    def __init__(self) -> None:
        self.documents: dict[str, dict[str, Any]] = {}
        self.quota = True
        self.made = 0
        self.refusal = ""
        """Of every change."""
        self.deleted: list[str | None] = []
        """What was to become of that which they own."""

    def of_kind(self, kind: str) -> dict[str, Any]:
        (found,) = (one for one in self.documents.values() if one["kind"] == kind)
        return found

    async def post(self, request: web.Request) -> web.Response:
        body: dict[str, Any] = await request.json()
        path = f"{request.path}/{body['metadata']['name']}"
        if path in self.documents:
            exists = {"code": 409, "reason": "AlreadyExists", "message": "it exists"}
            return web.json_response(exists, status=409)
        if self.quota and body["kind"] in KINDS:
            return web.json_response({"code": 403, "message": "exceeded quota"}, status=403)
        self.made += 1
        body["metadata"] |= {"uid": f"uid-{self.made}", "resourceVersion": "5"}
        for container in _containers(body):
            container["imagePullPolicy"] = "IfNotPresent"  # the apiserver's default
        self.documents[path] = body
        return web.json_response(body, status=201)

    async def get(self, request: web.Request) -> web.Response:
        found = self.documents.get(request.path)
        return web.json_response(found or {"code": 404}, status=200 if found else 404)

    async def delete(self, request: web.Request) -> web.Response:
        if request.path not in self.documents:
            return web.json_response({"code": 404}, status=404)
        options = await request.json()
        assert options["preconditions"]["uid"] == self.documents[request.path]["metadata"]["uid"]
        self.deleted.append(options.get("propagationPolicy"))
        return web.json_response(self.documents.pop(request.path))

    async def patch(self, request: web.Request) -> web.Response:
        return web.json_response({"code": 403, "message": self.refusal}, status=403)

    @asynccontextmanager
    async def objects(self, directory: Path) -> AsyncIterator[Objects]:
        path = "/{path:.*}"
        routes = [web.post(path, self.post), web.get(path, self.get)]
        routes += [web.delete(path, self.delete), web.patch(path, self.patch)]
        async with connected(routes, directory) as connection:
            yield Objects(connection, Pieces(connection))


def _containers(body: dict[str, Any]) -> list[dict[str, Any]]:
    if body["kind"] != "TrainingRuntime":
        return []
    (pods,) = body["spec"]["template"]["spec"]["replicatedJobs"]
    found: list[dict[str, Any]] = pods["template"]["spec"]["template"]["spec"]["containers"]
    return found


def asked(kind: AttemptKind, **spec: Any) -> tuple[TrainingJob, int, AttemptKind, Manifests]:
    job = JOB.model_copy(update={"spec": JOB.spec.model_copy(update=spec)})
    settings = PodSettings(kind=JobsKind(kind.resource.kind), default_claim="runs")
    return job, 1, kind, attempt_manifests(job, 1, settings)


@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
def test_an_attempt_that_was_refused_starts_with_what_was_corrected_meanwhile(
    kind: AttemptKind, tmp_path: Path
) -> None:
    async def story() -> None:
        server = Server()
        async with server.objects(tmp_path) as objects:
            for _ in range(2):
                with pytest.raises(NotPermitted, match="exceeded quota"):
                    await objects.create(*asked(kind, config={"lr": 1}))
            assert server.made == len(kind.beside) + 1, "what is as it should be is not made again"
            server.quota = False
            await objects.create(*asked(kind, config={"lr": 2}, image="a:2"))
        assert server.of_kind("ConfigMap")["data"] == {CONFIG_FILE: "lr: 2\n"}
        assert server.of_kind(kind.resource.kind)
        if kind.beside:
            (container,) = _containers(server.of_kind("TrainingRuntime"))
            assert container["image"] == "a:2"

    asyncio.run(story())


@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
def test_what_an_attempt_has_begun_with_is_not_changed_under_it(kind: AttemptKind, tmp_path: Path) -> None:
    """It was made, and nobody heard of it: its answer was lost."""

    async def story() -> None:
        server = Server()
        server.quota = False
        async with server.objects(tmp_path) as objects:
            await objects.create(*asked(kind, config={"lr": 1}))
            before = copy.deepcopy(server.documents)
            await objects.create(*asked(kind, config={"lr": 2}, image="a:2"))
        assert server.documents == before

    asyncio.run(story())


@pytest.mark.parametrize(
    ("whose", "going", "said"),
    [
        ({}, False, "is somebody else's, not Holdfast's, and the attempt needs its name"),
        ({"uid": "earlier"}, False, "of an earlier job is still there; the attempt starts when it is gone"),
        ({"uid": "earlier"}, True, "of before is still going; the attempt starts when it is gone"),
        ({"uid": "job-1"}, True, "of before is still going; the attempt starts when it is gone"),
    ],
)
def test_who_has_the_name_of_an_attempt_is_told_as_it_is(
    whose: dict[str, str], going: bool, said: str, tmp_path: Path
) -> None:
    """What goes is worth waiting for; of what stays, somebody has to do something."""

    async def story() -> None:
        server = Server()
        server.quota = False
        async with server.objects(tmp_path) as objects:
            job, attempt, kind, manifests = asked(PYTORCH_JOB)
            found = copy.deepcopy(manifests.attempt_object)
            labels = {**found["metadata"]["labels"], UID_LABEL: whose["uid"]} if whose else {"owner": "bob"}
            found["metadata"] = {"name": found["metadata"]["name"], "labels": labels}
            if going:
                found["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
            namespace = job.metadata.namespace
            path = f"{kind.resource.within(namespace)}/{found['metadata']['name']}"
            server.documents[path] = found
            with pytest.raises(NotReady, match=f"^PyTorchJob {namespace}/{found['metadata']['name']} {said}"):
                await objects.create(job, attempt, kind, manifests)
            assert server.documents[path] == found, "it is nobody's to change"

    asyncio.run(story())


@pytest.mark.parametrize("whose", ["nobody's", "an earlier job's", "ours"])
def test_what_had_the_name_of_an_attempt_that_could_not_be_made_is_not_cleared_away_with_it(
    whose: str, tmp_path: Path
) -> None:
    """Somebody's ConfigMap has the name: the job waits, is suspended and resumed, and its next attempt clears
    away what the one before was made of. A TrainingRuntime, too, of whoever uses Trainer beside us."""

    async def story() -> None:
        server = Server()
        job, attempt, _, manifests = asked(TRAIN_JOB)
        labels = {"owner": "bob"} if whose == "nobody's" else dict(manifests.beside[0]["metadata"]["labels"])
        if whose == "an earlier job's":
            labels[UID_LABEL] = "earlier"
        for body, resource in zip(manifests.beside, (CONFIG_MAPS, *TRAIN_JOB.beside), strict=True):
            meta = {"name": body["metadata"]["name"], "uid": f"uid-{body['kind']}", "labels": labels}
            server.documents[f"{resource.within('team')}/{meta['name']}"] = {**body, "metadata": meta}
        before = copy.deepcopy(server.documents)
        async with server.objects(tmp_path) as objects:
            gone = copy.deepcopy(manifests.attempt_object)
            gone["metadata"]["uid"] = "job-1-1"
            await objects.clear(job, attempt, gone)
        assert server.documents == ({} if whose == "ours" else before)

    asyncio.run(story())


@pytest.mark.parametrize(
    ("kind", "all_made", "deleted"),
    [
        (PYTORCH_JOB, True, ["Foreground"]),
        (PYTORCH_JOB, False, ["Foreground"]),
        (TRAIN_JOB, True, []),
        (TRAIN_JOB, False, ["Background"]),
    ],
)
def test_what_would_make_more_pods_goes_with_those_that_are_ended(
    kind: AttemptKind, all_made: bool, deleted: list[str], tmp_path: Path
) -> None:
    """A TrainJob makes none again, and has what is marked on it, until all have ended; but one of which pods
    are still to come would make them."""

    async def story() -> None:
        server = Server()
        server.quota = False
        async with server.objects(tmp_path) as objects:
            await objects.create(*asked(kind))
            await objects.end(server.of_kind(kind.resource.kind), all_made=all_made)
        assert server.deleted == deleted

    asyncio.run(story())


def test_an_attempt_can_be_ended_though_somebody_has_deleted_its_runtime(tmp_path: Path) -> None:
    """Trainer's webhook takes no change of it any more. What else refuses the mark is told: unmarked, the end
    of a job that is to go on would pass for a loss."""

    async def story() -> None:
        server = Server()
        _, _, _, manifests = asked(TRAIN_JOB)
        async with server.objects(tmp_path) as objects:
            server.refusal = LATE
            await objects.mark(manifests.attempt_object, STOPPED, needed=True)
            server.refusal = OTHER
            with pytest.raises(NotPermitted, match="no TrainJobs on Sundays"):
                await objects.mark(manifests.attempt_object, STOPPED, needed=True)
            await objects.mark(manifests.attempt_object, STOPPED, needed=False)
            marked = copy.deepcopy(manifests.attempt_object)
            marked["metadata"]["annotations"] = {STOPPED: "2026-05-01T12:00:00Z"}
            await objects.mark(marked, STOPPED, needed=True)  # once: who asks again changes nothing

    asyncio.run(story())
