"""What the engine sees and ends of attempts that a small apiserver has, as a controller decides on them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from small_apiserver import connected, meanwhile
from tests.kube.documents import (
    FINISHED,
    NOON,
    RUNNING,
    SAVED,
    disruption,
    ended,
    in_kind,
    of_attempt,
    pod,
)
from waiting import wait_until_async

from holdfast_controller.cluster import Unavailable
from holdfast_controller.jobs import AttemptRecord, Metadata, Phase, Retries, Spec, TrainingJob, Verdict
from holdfast_controller.kube import nodes
from holdfast_controller.kube.endpoint import Endpoints
from holdfast_controller.kube.engine import KubeEngine
from holdfast_controller.kube.observation import STOPPED
from holdfast_controller.kube.pieces import PODS, Pieces
from holdfast_controller.kube.reflector import Reflector
from holdfast_controller.kube.resource import JOBS
from holdfast_controller.pod_settings import JobsKind, PodSettings
from holdfast_controller.policy.decide import Evidence, decide
from holdfast_controller.prices import NodePrice, Prices
from holdfast_controller.pytorchjobs import PYTORCH_JOB
from holdfast_controller.trainjobs import TRAIN_JOB

NOW = datetime(2026, 5, 1, 12, 10, tzinfo=UTC)


def submitted(**spec: Any) -> TrainingJob:
    return TrainingJob(
        metadata=Metadata(name="gpt", namespace="team", uid="job-1"),
        spec=Spec(command=["python"], image="a:1", **spec),
    )


def opened(job: TrainingJob) -> TrainingJob:
    """With the attempt that the controller opens next."""
    return job.model_copy(update={"status": decide(job, None, Evidence(), NOW).status})


def edited(job: TrainingJob, **spec: Any) -> TrainingJob:
    return job.model_copy(update={"spec": job.spec.model_copy(update=spec)})


class Cluster:
    """Holds an attempt of a job."""

    def __init__(self, job: TrainingJob, *pods: dict[str, Any]) -> None:
        made = {"metadata": {"name": "gpt-1"}, "spec": {}}
        self.objects = {
            PODS: [of_attempt(job, one) for one in pods],
            PYTORCH_JOB.resource.path: [of_attempt(job, made)],
        }

        self.keep: Callable[[web.Request], Awaitable[web.Response]] | None = None
        """Answers whoever deletes a pod, in the apiserver's place."""
        self.nodes_answer = True
        self.allocatable = {"cpu": "1"}
        self.operator = True
        self.deleted: list[str] = []
        self.graces: list[int | None] = []
        self.ahead = timedelta(0)
        """Of its clock, of ours."""
        self.noted: list[str] = []
        """Pods on which the engine wrote who took them, once for each time."""

    async def note(self, request: web.Request) -> web.Response:
        name, told = request.match_info["name"], (await request.json())["metadata"]["annotations"]
        (pod,) = (one for one in self.objects[PODS] if one["metadata"]["name"] == name)
        pod["metadata"]["annotations"] = {**pod["metadata"]["annotations"], **told}
        self.noted.append(name)
        return web.json_response(pod)

    async def node(self, request: web.Request) -> web.Response:
        if not self.nodes_answer and request.match_info["name"] != "n0":
            return web.json_response({"code": 500, "message": "etcdserver: request timed out"}, status=500)
        meta = {"name": request.match_info["name"]}
        return web.json_response({"metadata": meta, "status": {"allocatable": self.allocatable}})

    async def delete(self, request: web.Request) -> web.Response:
        if self.keep is not None and "/pods/" in request.path:
            return await self.keep(request)
        self.deleted.append(request.match_info["name"])
        self.graces.append((await request.json()).get("gracePeriodSeconds"))
        return web.json_response({})

    async def mark(self, _: web.Request) -> web.Response:
        """As an apiserver answers whose operator is down."""
        refusal = {
            "code": 500,
            "message": 'failed calling webhook "validator.pytorchjob": connection refused',
        }
        return web.json_response(refusal, status=500)

    async def list_or_watch(self, request: web.Request) -> web.Response:
        if "watch" in request.query:
            await asyncio.Event().wait()
        if request.path not in (PODS, JOBS) and not self.operator:
            return web.json_response({"code": 404}, status=404)
        items = self.objects.get(request.path, [])
        return web.json_response({"metadata": {"resourceVersion": "9"}, "items": items})

    def has(self, known: Sequence[tuple[TrainingJob, dict[str, Any]]]) -> None:
        """These jobs, each with its first attempt's object and a pod of it."""
        self.objects[PODS] = [one for _, one in known]
        self.objects[PYTORCH_JOB.resource.path] = [
            of_attempt(job, {"metadata": {"name": f"{job.metadata.name}-1"}, "spec": {}}) for job, _ in known
        ]
        self.objects[JOBS] = [
            {
                **job.to_dict(),
                "metadata": {
                    "name": job.metadata.name,
                    "namespace": "team",
                    "uid": job.metadata.uid,
                    "resourceVersion": "5",
                },
            }
            for job, _ in known
        ]


@asynccontextmanager
async def engine_of(
    cluster: Cluster, directory: Path, settings: PodSettings | None = None, *more: web.RouteDef
) -> AsyncIterator[KubeEngine]:
    paths = (PODS, PYTORCH_JOB.resource.path, TRAIN_JOB.resource.path, JOBS)
    routes = [web.get(path, cluster.list_or_watch) for path in paths]
    routes.append(web.get("/api/v1/nodes/{name}", cluster.node))
    routes.append(web.delete("/api/v1/namespaces/team/pods/{name}", cluster.delete))
    routes.append(web.patch("/api/v1/namespaces/team/pods/{name}", cluster.note))
    routes.append(web.delete(f"{PYTORCH_JOB.resource.within('team')}/{{name}}", cluster.delete))
    routes.append(web.patch(f"{PYTORCH_JOB.resource.within('team')}/{{name}}", cluster.mark))
    async with connected([*routes, *more], directory, cluster.ahead) as connection:
        jobs, pieces = Reflector(connection, JOBS), Pieces(connection)
        async with meanwhile(pieces.run()), meanwhile(jobs.run()):
            yield KubeEngine(connection, pieces, Endpoints(pieces, jobs), jobs, settings)


def has_finished(index: int) -> Any:
    return pod(index, "Succeeded", ended(0, FINISHED, "Completed"))


@pytest.mark.parametrize(
    ("pods", "asked", "then", "phase"),
    [
        pytest.param([has_finished(0), has_finished(1)], 2, 4, Phase.SUCCEEDED, id="more: all have finished"),
        pytest.param([has_finished(0), pod(1, state=RUNNING)], 2, 1, Phase.STARTING, id="fewer: one runs"),
    ],
)
def test_an_attempt_that_runs_keeps_its_size_whatever_the_job_asks_for_meanwhile(
    pods: list[Any], asked: int, then: int, phase: Phase, tmp_path: Path
) -> None:
    """Of one that all replicas have finished no more were to come; one of which a replica runs goes on."""

    async def story() -> None:
        job = edited(opened(submitted(replicas=asked)), replicas=then)
        async with engine_of(Cluster(job, *pods), tmp_path) as engine:
            seen = await engine.observe(job, 1)
        assert len(seen.replicas) == asked
        assert decide(job, seen, Evidence(), NOW).status.phase is phase

    asyncio.run(story())


def test_a_job_can_be_deleted_while_its_operator_is_down_and_one_to_be_suspended_waits(
    tmp_path: Path,
) -> None:
    """Every change of an attempt object goes through the operator's webhook; that of a job which is to go on
    must say who ended it, or the next controller takes its end for a loss."""

    async def story() -> None:
        job = opened(submitted(replicas=2))
        cluster = Cluster(job, pod(0, state=RUNNING), pod(1, state=RUNNING))
        async with engine_of(cluster, tmp_path) as engine:
            with pytest.raises(Unavailable, match="failed calling webhook"):
                await engine.stop(edited(job, suspend=True), 1)
            assert cluster.deleted == []
            meta = job.metadata.model_copy(update={"deletion_timestamp": NOW})
            await engine.stop(job.model_copy(update={"metadata": meta}), 1)
        assert sorted(cluster.deleted) == ["gpt-1", "gpt-1-worker-0", "gpt-1-worker-1"]

    asyncio.run(story())


@pytest.mark.parametrize("end", [KubeEngine.stop, KubeEngine.kill])
def test_all_replicas_get_their_notice_at_once_though_one_cannot_be_had(
    end: Callable[[KubeEngine, TrainingJob, int], Awaitable[None]], tmp_path: Path
) -> None:
    """One after the other the last of 256 got it seconds later, and none did after one that was refused."""
    asked, all_there = list[str](), asyncio.Event()

    async def refuse_one(request: web.Request) -> web.Response:
        asked.append(request.match_info["name"])
        if len(asked) == 3:
            all_there.set()
        await all_there.wait()
        refused = request.match_info["name"] == "gpt-1-worker-0"
        return web.json_response({"code": 500, "message": "not this one"}, status=500 if refused else 200)

    async def mark(request: web.Request) -> web.Response:
        return web.json_response({**cluster.objects[PYTORCH_JOB.resource.path][0], "kind": "PyTorchJob"})

    job = opened(submitted(replicas=3))
    cluster = Cluster(job, *(pod(index, state=RUNNING) for index in range(3)))
    cluster.keep = refuse_one
    cluster.mark = mark  # type: ignore[method-assign]

    async def story() -> None:
        async with engine_of(cluster, tmp_path) as engine, asyncio.timeout(10):
            with pytest.raises(Unavailable, match="not this one"):
                await end(engine, job, 1)
        assert sorted(asked) == [f"gpt-1-worker-{index}" for index in range(3)]

    asyncio.run(story())


def test_a_job_that_its_queue_took_back_can_be_deleted_while_kueue_is_down(tmp_path: Path) -> None:
    """Its API fails with it, for it converts its own objects. What the queue wants next, nobody asks."""

    async def versions(_: web.Request) -> web.Response:
        return web.json_response({"preferredVersion": {"version": "v1beta2"}})

    async def workloads(_: web.Request) -> web.Response:
        said = "conversion webhook for kueue.x-k8s.io/v1beta1, Kind=Workload failed: connection refused"
        return web.json_response({"code": 500, "message": said}, status=500)

    async def story() -> None:
        job = opened(submitted(queue="training"))
        taken = pod(0, "Failed", ended(143, SAVED), deleted=("2026-05-01T12:10:00Z", 0))
        cluster = Cluster(job, taken)
        (attempt,) = cluster.objects[PYTORCH_JOB.resource.path]
        attempt["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = "training"
        attempt["spec"] = {"runPolicy": {"suspend": True}}
        path = "/apis/kueue.x-k8s.io"
        more = (web.get(path, versions), web.get(f"{path}/v1beta2/namespaces/team/workloads", workloads))
        async with engine_of(cluster, tmp_path, None, *more) as engine:
            with pytest.raises(Unavailable, match="conversion webhook"):
                await engine.observe(job, 1)
            meta = job.metadata.model_copy(update={"deletion_timestamp": NOW})
            job = job.model_copy(update={"metadata": meta})
            assert decide(job, await engine.observe(job, 1), Evidence(), NOW).remove

    asyncio.run(story())


def test_who_took_a_pod_is_written_down_once_while_the_operator_is_down(tmp_path: Path) -> None:
    """The attempt cannot be marked, so that comes again in every pass; each change of a pod wakes its job:
    written again, it had the next pass follow at once, ten a second until the operator was back."""

    async def story() -> None:
        job = opened(submitted(replicas=2))
        taken = pod(1, "Failed", ended(143), deleted=(NOON, 10))
        cluster = Cluster(job, pod(0, state=RUNNING), taken)
        for _ in range(2):
            async with engine_of(cluster, tmp_path) as engine:  # anew: it sees what it has written
                with pytest.raises(Unavailable, match="failed calling webhook"):
                    await engine.kill(job, 1)
        assert cluster.noted == ["gpt-1-worker-1"]

    asyncio.run(story())


def test_the_mark_of_a_stop_that_nobody_carries_out_goes_with_the_wish(tmp_path: Path) -> None:
    """A controller died between the mark and the first pod. Left there, it would have whatever ends the
    resumed attempt booked as a stop on request, at no cost; that of a job to be suspended stays, and one that
    has reached a pod. What somebody labels so in another namespace is none, and a job that only another
    version can read keeps none of the others from it."""

    def named(name: str, suspend: bool) -> TrainingJob:
        metadata = Metadata(name=name, namespace="team", uid=f"uid-of-{name}")
        return opened(submitted(suspend=suspend).model_copy(update={"metadata": metadata}))

    def stored(job: TrainingJob) -> dict[str, Any]:
        metadata = {"name": job.metadata.name, "namespace": "team", "uid": job.metadata.uid}
        return {**job.to_dict(), "metadata": {**metadata, "resourceVersion": "5"}}

    def marked(job: TrainingJob) -> dict[str, Any]:
        metadata = {"name": f"{job.metadata.name}-1", "annotations": {STOPPED: "2026-05-01T12:00:00Z"}}
        return of_attempt(job, {"metadata": metadata, "spec": {}})

    def going(job: TrainingJob, **metadata: str) -> dict[str, Any]:
        one = of_attempt(job, pod(0, "Failed", ended(143), deleted=(NOON, 10)))
        one["metadata"] |= {"name": f"{job.metadata.name}-1-worker-0", **metadata}
        return one

    async def story() -> None:
        jobs = [
            named("unread", False),
            named("reached", False),
            named("stays", suspend=True),
            named("goes-on", suspend=False),
        ]
        cluster = Cluster(jobs[-1], pod(0, state=RUNNING))
        cluster.objects[PYTORCH_JOB.resource.path] = [marked(job) for job in jobs]
        cluster.objects[JOBS] = [stored(job) for job in jobs]
        cluster.objects[JOBS][0]["status"]["attempt"] = "as a later version counts"
        cluster.objects[PODS] += [going(jobs[1]), going(jobs[-1], namespace="another")]
        changes: list[tuple[str, Any]] = []

        async def mark(request: web.Request) -> web.Response:
            changes.append((request.match_info["name"], (await request.json())["metadata"]))
            return web.json_response({**marked(jobs[-1]), "kind": "PyTorchJob"})

        cluster.mark = mark  # type: ignore[method-assign]
        async with engine_of(cluster, tmp_path) as engine, meanwhile(engine.sweep()):
            await wait_until_async(lambda: changes, "the mark to go")
        unless_marked_anew = {"annotations": {STOPPED: None}, "resourceVersion": "5"}
        assert changes == [("goes-on-1", unless_marked_anew)]

    asyncio.run(story())


def test_a_sidecar_that_does_not_end_holds_no_gpus_once_its_attempt_is_judged(tmp_path: Path) -> None:
    """A mesh's webhook has put a proxy into each pod, which would run on until somebody deletes the job."""
    proxy = {"name": "istio-proxy", "state": RUNNING}

    def named(
        name: str, verdict: Verdict | None, *later: AttemptRecord, sidecar: bool = True
    ) -> tuple[TrainingJob, dict[str, Any]]:
        metadata = Metadata(name=name, namespace="team", uid=f"uid-of-{name}")
        job = opened(submitted().model_copy(update={"metadata": metadata}))
        job.status.attempts[0].verdict = verdict
        job.status.attempts.extend(later)
        one = has_finished(0)
        one["metadata"]["name"] = f"{name}-1-worker-0"
        one["status"]["phase"] = "Running"  # as kubelets tell it at first without a sidecar, too
        if sidecar:
            one["status"]["containerStatuses"].append(proxy)
        return job, of_attempt(job, one)

    async def story() -> None:
        known = [
            named("refused", Verdict.FINISHED),
            named("not-judged", None),
            named("no-sidecar", Verdict.FINISHED, sidecar=False),
            named("finished", Verdict.FINISHED),
            named("goes-on", Verdict.DISRUPTED, AttemptRecord(number=2)),
        ]
        cluster = Cluster(known[0][0])
        accept = cluster.delete

        async def delete(request: web.Request) -> web.Response:
            if request.match_info["name"] == "refused-1":
                return web.json_response({"code": 403, "message": "a webhook says no"}, status=403)
            return await accept(request)

        cluster.delete = delete  # type: ignore[method-assign]
        cluster.has(known)
        async with engine_of(cluster, tmp_path) as engine, meanwhile(engine.sweep()):
            await wait_until_async(lambda: len(cluster.deleted) == 2, "the attempts to be removed")
        assert cluster.deleted == ["finished-1", "goes-on-1"]

    asyncio.run(story())


def test_an_attempt_that_is_made_late_does_not_run_beside_the_next_one(tmp_path: Path) -> None:
    """A request to make it that nobody waits for any more may be carried out after the attempt that another
    one made was judged and cleared away; it held the GPUs that the next one waited for."""

    def named(name: str, *later: AttemptRecord) -> tuple[TrainingJob, dict[str, Any]]:
        metadata = Metadata(name=name, namespace="team", uid=f"uid-of-{name}")
        job = opened(submitted().model_copy(update={"metadata": metadata}))
        job.status.attempts.extend(later)
        if later:
            job.status.attempt, job.status.attempts[0].verdict = later[-1].number, Verdict.DISRUPTED
        one = pod(0, state=RUNNING)
        one["metadata"]["name"] = f"{name}-1-worker-0"
        return job, of_attempt(job, one)

    async def story() -> None:
        known = [named("runs"), named("late", AttemptRecord(number=2))]
        cluster = Cluster(known[0][0])
        cluster.has(known)
        async with engine_of(cluster, tmp_path) as engine, meanwhile(engine.sweep()):
            await wait_until_async(lambda: cluster.deleted, "the late one to be removed")
        assert cluster.deleted == ["late-1"]

    asyncio.run(story())


def test_peers_that_save_after_a_notice_have_the_grace_that_their_attempt_was_opened_with(
    tmp_path: Path,
) -> None:
    """Their pods have it, whatever the job asks for meanwhile."""

    async def story() -> None:
        job = edited(opened(submitted(replicas=2)), grace_seconds=1)
        noticed = pod(0, "Failed", ended(1, SAVED))
        async with engine_of(Cluster(job, noticed, pod(1, state=RUNNING)), tmp_path) as engine:
            seen = await engine.observe(job, 1)
        decision = decide(job, seen, Evidence(), NOW)
        assert (decision.kill, decision.requeue_after) == (None, 30)

    asyncio.run(story())


def test_a_job_has_a_cost_though_the_apiserver_could_not_tell_of_its_node_at_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "UNREAD_SECONDS", 0.0)

    async def story() -> None:
        job = opened(submitted(replicas=2))
        pods = [pod(index, state=RUNNING) for index in (0, 1)]
        for index, one in enumerate(pods):
            one["spec"] = {"nodeName": f"n{index}"}
        cluster = Cluster(job, *pods)
        settings = PodSettings(prices=Prices(per_hour=(NodePrice(price=0.5),)))
        async with engine_of(cluster, tmp_path, settings) as engine:
            for answers in (False, True):
                cluster.nodes_answer = answers
                seen = await engine.observe(job, 1)
                job = job.model_copy(update={"status": decide(job, seen, Evidence(), NOW).status})
                if not answers:
                    assert job.status.attempts[0].whereabouts is None, "not what a part of it costs"
        (record,) = job.status.attempts
        assert record.whereabouts is not None
        assert (record.whereabouts.nodes, record.whereabouts.price_per_hour) == (["n0", "n1"], 1.0)

    asyncio.run(story())


def test_a_job_has_a_cost_on_a_node_that_was_read_before_its_gpus_came(tmp_path: Path) -> None:
    """A job on its CPU was there before its device plugin was: nobody could tell which part of the node a
    GPU is, and so it stayed for as long as there was the job."""

    async def story() -> None:
        jobs = [opened(submitted(gpus=gpus)) for gpus in ("0", "1")]
        one = pod(0, state=RUNNING)
        one["spec"] = {"nodeName": "n0"}
        cluster = Cluster(jobs[0], one)
        settings = PodSettings(prices=Prices(per_hour=(NodePrice(price=8.0),)))
        prices = []
        async with engine_of(cluster, tmp_path, settings) as engine:
            for job in jobs:
                seen = await engine.observe(job, 1)
                prices += [place.price_per_hour for place in seen.places]
                cluster.allocatable = {"cpu": "1", "nvidia.com/gpu": "8"}
        assert prices == [8.0, 1.0]

    asyncio.run(story())


def test_pods_that_are_made_again_cost_nothing_more(tmp_path: Path) -> None:
    """Somebody deletes the JobSet of a TrainJob, and its Job makes others until they are killed: the attempt
    would have had their price too, for all of its time."""

    async def story() -> None:
        job = opened(submitted(replicas=2))
        pods = [pod(index % 2, state=RUNNING) for index in range(4)]
        for index, one in enumerate(pods):
            one["spec"] = {"nodeName": f"n{index}"}
            one["metadata"] |= {"name": f"pod-{index}", "creationTimestamp": f"2026-05-01T12:0{index}:00Z"}
        settings = PodSettings(prices=Prices(per_hour=(NodePrice(price=0.5),)))
        async with engine_of(Cluster(job, *pods), tmp_path, settings) as engine:
            seen = await engine.observe(job, 1)
        assert [place.node for place in seen.places] == ["n0", "n1"]

    asyncio.run(story())


@pytest.mark.parametrize("suspended", [True, False], ids=["suspended", "goes on"])
def test_an_attempt_whose_operator_was_uninstalled_is_over_when_its_pods_have_saved(
    suspended: bool, tmp_path: Path
) -> None:
    """With its CRD went the PyTorchJob, and the garbage collector deletes the pods: with their grace."""

    async def story() -> None:
        job = opened(submitted(suspend=False))
        job.status.attempts[0].started_at = NOW
        saves = pod(0, state=RUNNING, deleted=("2026-05-01T12:10:30Z", 30))
        cluster = Cluster(job, saves)
        cluster.operator = False
        job = edited(job, suspend=suspended)
        async with engine_of(cluster, tmp_path) as engine:
            seen = await engine.observe(job, 1)
        assert not seen.gone
        (record,) = decide(job, seen, Evidence(), NOW).status.attempts
        assert record.verdict is None

        cluster.objects[PODS] = [of_attempt(job, pod(0, "Failed", ended(1, SAVED), deleted=(NOON, 30)))]
        async with engine_of(cluster, tmp_path) as engine:
            seen = await engine.observe(job, 1)
        record = decide(job, seen, Evidence(), NOW).status.attempts[0]
        assert record.verdict is Verdict.DISRUPTED
        assert record.reason == "replica 0: Deleted: somebody deleted the PyTorchJob that it belongs to"

    asyncio.run(story())


@pytest.mark.parametrize("suspended", [True, False], ids=["suspended", "taken"])
@pytest.mark.parametrize("behind", [-90, 0, 90], ids=["ahead", "right", "behind"])
def test_peers_that_save_after_a_notice_have_their_grace_whatever_time_a_node_has(
    behind: int, suspended: bool, tmp_path: Path
) -> None:
    async def story() -> None:
        job = edited(opened(submitted(replicas=2)), suspend=suspended)
        at = (NOW - timedelta(seconds=behind)).isoformat()
        noticed, saves = pod(0, "Failed", ended(1, SAVED, at=at)), pod(1, state=RUNNING)
        async with engine_of(Cluster(job, noticed, saves), tmp_path) as engine:
            seen = await engine.observe(job, 1)
        killed = []
        for seconds in (0, 29, 30):
            decision = decide(job, seen, Evidence(), NOW + timedelta(seconds=seconds))
            killed.append(decision.kill)
            job = job.model_copy(update={"status": decision.status})
        assert killed == [None, None, 1]

    asyncio.run(story())


@pytest.mark.parametrize("ahead", [-600, 0, 600])
def test_a_pod_that_was_given_notice_has_its_grace_whatever_time_the_controller_has(
    ahead: int, tmp_path: Path
) -> None:
    """A controller that is ten minutes ahead of the apiserver took it for one of a lost node, and deleted it
    by force while it saved; one that is behind would wait ten minutes for a node that is lost."""

    async def story() -> None:
        job, now = opened(submitted(replicas=2)), datetime.now(UTC)
        there = now + timedelta(seconds=ahead)
        due = f"{there + timedelta(seconds=45):%Y-%m-%dT%H:%M:%SZ}"
        evicted = pod(0, state=RUNNING, conditions=[disruption("EvictionByEvictionAPI")], deleted=(due, 45))
        cluster = Cluster(job, evicted, pod(1, state=RUNNING))
        cluster.ahead = timedelta(seconds=ahead)
        async with engine_of(cluster, tmp_path) as engine:
            seen = await engine.observe(job, 1)
            assert decide(job, seen, Evidence(), now).kill is None
            assert decide(job, seen, Evidence(), now + timedelta(seconds=100)).kill is None
            assert decide(job, seen, Evidence(), now + timedelta(seconds=110)).kill == 1
            deleted = job.metadata.model_copy(update={"deletion_timestamp": now})
            await engine.kill(job.model_copy(update={"metadata": deleted}), 1)
        assert cluster.graces[:2] == [1, 1], "no pod of it is deleted by force"

    asyncio.run(story())


def test_a_replica_whose_node_fell_silent_while_it_was_being_made_holds_up_no_job(tmp_path: Path) -> None:
    """Its image was being pulled: nobody tells how it ended, and its job was Queued for ever."""

    async def story() -> None:
        job, now = opened(submitted()), datetime.now(UTC)
        due = f"{now + timedelta(seconds=30):%Y-%m-%dT%H:%M:%SZ}"
        made = {"waiting": {"reason": "ContainerCreating"}}
        silent = disruption("DeletionByTaintManager", "its node is silent")
        cluster = Cluster(job, pod(0, "Pending", made, conditions=[silent], deleted=(due, 30)))
        async with engine_of(cluster, tmp_path) as engine:
            seen = await engine.observe(job, 1)
        killed = []
        for seconds in (0, 85, 95):
            decision = decide(job, seen, Evidence(), now + timedelta(seconds=seconds))
            killed.append((decision.status.phase, decision.kill))
        assert killed == [(Phase.QUEUED, None), (Phase.QUEUED, None), (Phase.RECOVERING, 1)]

    asyncio.run(story())


@pytest.mark.parametrize(
    ("going", "stopped", "killed"),
    [
        pytest.param(None, [None], [1], id="nobody asked it to go"),
        pytest.param((30, 30), [], [1], id="it has its grace"),
        pytest.param((1, 1), [], [], id="no more than a kill leaves it"),
        pytest.param((-300, 30), [0], [0], id="its node is lost"),
        pytest.param((-300, 0), [], [], id="and it was deleted by force"),
    ],
)
def test_a_pod_is_asked_to_go_once_and_sooner_where_that_is_wanted(
    going: tuple[int, int] | None, stopped: list[int | None], killed: list[int | None], tmp_path: Path
) -> None:
    """Each pass asks again; `going`: seconds until the grace that it has is over."""

    async def story() -> list[list[int | None]]:
        job = opened(submitted())
        meta = job.metadata.model_copy(update={"deletion_timestamp": NOW})
        job = job.model_copy(update={"metadata": meta})
        more = {}
        if going is not None:
            due = datetime.now(UTC) + timedelta(seconds=going[0])
            more = {"deleted": (f"{due:%Y-%m-%dT%H:%M:%SZ}", going[1])}
        found = []
        for kill in (False, True):
            cluster = Cluster(job, pod(0, state=RUNNING, **more))
            async with engine_of(cluster, tmp_path) as engine:
                await (engine.kill(job, 1) if kill else engine.stop(job, 1))
            asked = zip(cluster.deleted, cluster.graces, strict=True)
            found.append([grace for name, grace in asked if name == "gpt-1-worker-0"])
        return found

    assert asyncio.run(story()) == [stopped, killed]


def test_an_attempt_that_was_made_has_started_whatever_keeps_the_pods_of_the_one_before(
    tmp_path: Path,
) -> None:
    """It was told that it could not be started, and is tried again, of one that was there."""
    refused: list[str] = []

    async def keep(request: web.Request) -> web.Response:
        refused.append(request.match_info["name"])
        said = 'admission webhook "keep.example.org" denied the request: pods are not to be deleted'
        return web.json_response({"code": 403, "message": said}, status=403)

    async def make(request: web.Request) -> web.Response:
        body = await request.json()
        body["metadata"] |= {"uid": "made", "resourceVersion": "10"}
        return web.json_response(body, status=201)

    async def nothing(_: web.Request) -> web.Response:
        return web.json_response({"code": 404}, status=404)

    async def story() -> None:
        job = opened(submitted())
        cluster = Cluster(job, pod(0, "Failed", ended(1)))
        cluster.keep = keep
        more = web.post("/{path:.*}", make), web.get("/{path:.*}", nothing)
        settings = PodSettings(default_claim="runs")
        async with engine_of(cluster, tmp_path, settings, *more) as engine:
            await engine.observe(job, 1)
            status = job.status.model_copy(update={"attempt": 2, "attempts": [AttemptRecord(number=2)]})
            job = job.model_copy(update={"status": status})
            await engine.start(job, 2)
            assert (await engine.observe(job, 2)).exists
        assert refused == ["gpt-1-worker-0"]

    asyncio.run(story())


def test_an_attempt_that_was_made_before_the_kind_was_changed_is_not_made_a_second_time(
    tmp_path: Path,
) -> None:
    """Its answer was lost, and the controller that comes next makes TrainJobs: two gangs would run."""

    async def story() -> list[str]:
        job = opened(submitted())
        cluster = Cluster(job)
        made: list[str] = []

        async def make(request: web.Request) -> web.Response:
            body = await request.json()
            made.append(body["kind"])
            body["metadata"] |= {"uid": body["kind"], "resourceVersion": "5"}
            return web.json_response(body, status=201)

        settings = PodSettings(kind=JobsKind.TRAIN_JOB, default_claim="runs")
        async with engine_of(cluster, tmp_path, settings, web.post("/{path:.*}", make)) as engine:
            await engine.observe(job, 1)
            await engine.start(job, 1)
        return made

    assert asyncio.run(story()) == []


@pytest.mark.parametrize("stop", [True, False], ids=["suspended", "given up"])
def test_a_train_job_that_is_ended_before_all_its_pods_are_made_was_taken_by_nobody(
    stop: bool, tmp_path: Path
) -> None:
    """As where a quota has no room for one. It has to go at once, or it would make more; that we asked for it
    went with it, and a job that may not be disrupted had failed for that it was suspended."""

    async def story() -> None:
        job = opened(submitted(replicas=2, retries=Retries(disruptions=0)))
        (record,) = job.status.attempts
        record.started_at = NOW
        cluster = Cluster(job, in_kind(TRAIN_JOB, pod(0, state=RUNNING)))
        made = cluster.objects.pop(PYTORCH_JOB.resource.path)
        cluster.objects[TRAIN_JOB.resource.path] = made
        gone: list[str] = []

        async def mark(request: web.Request) -> web.Response:
            made[0]["metadata"]["annotations"] = (await request.json())["metadata"]["annotations"]
            return web.json_response({**made[0], "kind": "TrainJob"})

        async def delete(request: web.Request) -> web.Response:
            gone.append((await request.json())["propagationPolicy"])
            return web.json_response({})

        path = f"{TRAIN_JOB.resource.within('team')}/{{name}}"
        settings = PodSettings(kind=JobsKind.TRAIN_JOB)
        more = (web.patch(path, mark), web.delete(path, delete))
        async with engine_of(cluster, tmp_path, settings, *more) as engine:
            await (engine.stop(job, 1) if stop else engine.kill(job, 1))
        assert (gone, cluster.deleted) == (["Background"], ["gpt-1-worker-0"])

        made.clear()
        (left,) = cluster.objects[PODS]
        left["metadata"] |= {"deletionTimestamp": "2026-05-01T12:09:00Z", "deletionGracePeriodSeconds": 1}
        left["status"] = {**left["status"], **in_kind(TRAIN_JOB, pod(0, state=ended(143)))["status"]}
        job = edited(job, suspend=stop)
        if not stop:
            record.ending, record.reason = Verdict.UNSCHEDULABLE, "1 of 2 replicas ran"
        async with engine_of(cluster, tmp_path, settings) as engine:
            status = decide(job, await engine.observe(job, 1), Evidence(), NOW).status
        assert status.attempts[0].verdict is (Verdict.SUSPENDED if stop else Verdict.UNSCHEDULABLE)
        assert (status.disruptions, status.phase) == (0, Phase.SUSPENDED if stop else Phase.RECOVERING)

    asyncio.run(story())


class _Behind(Cluster):
    """Whose lists are of before the attempt was made: the watches that go on from them died in silence."""

    def __init__(self, job: TrainingJob, *pods: dict[str, Any]) -> None:
        super().__init__(job, *pods)
        (self.made,) = self.objects.pop(PYTORCH_JOB.resource.path)
        self.is_there = True

    async def read(self, request: web.Request) -> web.Response:
        if not self.is_there or request.match_info["name"] != "gpt-1":
            return web.json_response({"code": 404}, status=404)
        return web.json_response({**self.made, "kind": "PyTorchJob"})

    @property
    def route(self) -> web.RouteDef:
        return web.get(f"{PYTORCH_JOB.resource.within('team')}/{{name}}", self.read)


@pytest.mark.parametrize("is_there", [True, False], ids=["runs", "gone"])
def test_an_attempt_of_which_a_dead_watch_told_nothing_does_not_pass_for_gone(
    is_there: bool, tmp_path: Path
) -> None:
    """Another controller has started it and died. Who leads next would open another beside it, and book steps
    as lost that are being done."""

    async def story() -> None:
        job = opened(submitted(replicas=2))
        job.status.attempts[0].started_at = NOW
        cluster = _Behind(job)
        cluster.is_there = is_there
        async with engine_of(cluster, tmp_path, None, cluster.route) as engine:
            if is_there:
                with pytest.raises(Unavailable, match="attempt 1 of team/gpt has started, and no watch"):
                    await engine.observe(job, 1)
                return
            seen = await engine.observe(job, 1)
        assert decide(job, seen, Evidence(), NOW).status.disruptions == 1

    asyncio.run(story())


def test_a_gang_is_not_ended_for_a_pod_to_be_made_where_a_dead_watch_hides_its_attempt_object(
    tmp_path: Path,
) -> None:
    """Without one nobody would make the pod any more."""

    async def story() -> None:
        job = opened(submitted(replicas=2))
        job.status.attempts[0].started_at = NOW
        cluster = _Behind(job, pod(0, state=RUNNING))
        async with engine_of(cluster, tmp_path, None, cluster.route) as engine:
            seen = await engine.observe(job, 1)
        decision = decide(job, seen, Evidence(), NOW + timedelta(minutes=1))
        assert decision.kill is None
        assert decision.status.message == "1 of 2 replicas are up"

    asyncio.run(story())
