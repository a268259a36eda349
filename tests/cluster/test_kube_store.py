"""Jobs in a real apiserver: the contract of every job store, and what only Kubernetes can do to them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any

import pytest
from fakes import MemoryEngine
from tests.cluster import trainingjobs
from tests.cluster.control_plane import ControlPlane
from tests.controller import test_store_contract as contract
from waiting import wait_until_async

from holdfast_controller.cluster import Conflict, Idempotency, Invalid, JobStore, NotFound
from holdfast_controller.jobs import Phase, Status, Verdict
from holdfast_controller.kube.connection import Connection, connect
from holdfast_controller.kube.errors import NotLeader
from holdfast_controller.kube.idempotency import KEY_DIGEST, KeyRecords, digest_of
from holdfast_controller.kube.reflector import Reflector, Timing
from holdfast_controller.kube.resource import FINALIZER, JOBS, jobs_path, new_document
from holdfast_controller.kube.store import KubeStore
from holdfast_controller.reconciler import Reconciler

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(2400)]
globals().update({name: story for name, story in vars(contract).items() if name.startswith("test_")})


@dataclass
class World:
    connection: Connection
    reflector: Reflector
    plane: ControlPlane

    def store(self, *, cached: bool = True) -> KubeStore:
        return KubeStore(self.connection, self.reflector, cached=cached)

    def kubectl(self, *arguments: str, document: str | None = None) -> str:
        return self.plane.kubectl.run(*arguments, document=document)


Tell = Callable[[Callable[[World], Coroutine[Any, Any, None]]], None]


@pytest.fixture
def world(control_plane: ControlPlane) -> Iterator[Tell]:
    """Run a story on an apiserver without jobs."""
    trainingjobs.install(control_plane.kubectl, namespaces=("team", "other"))
    trainingjobs.clear(control_plane.kubectl)

    def run(story: Callable[[World], Coroutine[Any, Any, None]]) -> None:
        async def told() -> None:
            connection = await connect(control_plane.kubectl.kubeconfig)
            reflector = Reflector(connection, JOBS, timing=Timing(first_retry_seconds=0.05))
            keeping = asyncio.create_task(reflector.run())
            try:
                await story(World(connection, reflector, control_plane))
            finally:
                keeping.cancel()
                with suppress(asyncio.CancelledError):
                    await keeping
                await connection.close()

        asyncio.run(told())

    yield run
    trainingjobs.clear(control_plane.kubectl)


@pytest.fixture(params=["asking the server", "reading the copy"])
def tell(request: pytest.FixtureRequest, world: Tell) -> Callable[[contract.Story], None]:
    """For the contract's stories."""
    cached = request.param == "reading the copy"
    return lambda story: world(lambda there: story(there.store(cached=cached)))


JOB = """
apiVersion: holdfast.dev/v1alpha1
kind: TrainingJob
metadata: {name: by-hand, namespace: team}
spec: {command: [python, train.py], replicas: 2}
"""


async def appears(store: JobStore, name: str) -> None:
    async def there() -> bool:
        with suppress(NotFound):
            return (await store.get("team", name)) is not None
        return False

    await wait_until_async(there, f"job {name} to appear")


def test_whoever_looks_at_a_job_finds_who_wrote_what(world: Tell) -> None:
    """`kubectl get --show-managed-fields`, and the conflict of whoever applies over it."""

    async def story(there: World) -> None:
        made = await there.store(cached=False).create(contract.job("mine", "team"))
        await there.store(cached=False).replace_status(made, Status(phase=Phase.QUEUED))
        path = f"{JOBS.removesuffix('/trainingjobs')}/namespaces/team/trainingjobs/mine"
        written = (await there.connection.get(path))["metadata"]["managedFields"]
        assert {(one["manager"], one.get("subresource", "")) for one in written} == {
            ("holdfast-controller", ""),
            ("holdfast-controller", "status"),
        }

    world(story)


def test_what_kubectl_made_is_held_before_its_first_status(world: Tell) -> None:
    async def story(there: World) -> None:
        there.kubectl("apply", "-f", "-", document=JOB)
        store = there.store()
        await appears(store, "by-hand")
        job = await store.get("team", "by-hand")
        await store.replace_status(job, Status(phase=Phase.STARTING, attempt=1))
        assert there.kubectl("get", "tj", "-n=team", "by-hand", "-o=jsonpath={.metadata.finalizers[*]}") == (
            FINALIZER
        )
        there.kubectl("delete", "tj", "-n=team", "by-hand", "--wait=false")
        job = await there.store(cached=False).get("team", "by-hand")
        assert job.metadata.deletion_timestamp is not None
        assert job.status.attempt == 1
        await store.remove(job)
        assert there.kubectl("get", "tj", "-A", "-o=name") == ""

    world(story)


def test_others_finalizers_and_fields_are_left_alone(world: Tell) -> None:
    async def story(there: World) -> None:
        theirs = JOB.replace("namespace: team", "namespace: team, finalizers: [example.com/theirs]")
        there.kubectl("apply", "-f", "-", document=theirs)
        store = there.store()
        await appears(store, "by-hand")
        job = await store.replace_status(await store.get("team", "by-hand"), Status(message="seen"))
        job.spec.suspend = True
        job = await store.replace_spec(job)
        assert (job.spec.suspend, job.status.message, job.metadata.generation) == (True, "seen", 2)
        await store.remove(await store.mark_deleted("team", "by-hand"))
        left = there.kubectl("get", "tj", "-n=team", "by-hand", "-o=jsonpath={.metadata.finalizers[*]}")
        assert left == "example.com/theirs"

    world(story)


def test_a_deleted_job_that_only_somebody_elses_finalizer_keeps_does_not_seem_to_run(world: Tell) -> None:
    """For as long as that is on: `kubectl get tj`, alerts and quotas that people keep by hand go by it."""

    async def story(there: World) -> None:
        theirs = JOB.replace("namespace: team", "namespace: team, finalizers: [example.com/theirs]")
        there.kubectl("apply", "-f", "-", document=theirs)
        store, engine = there.store(), MemoryEngine(clock=time.time)
        await appears(store, "by-hand")
        reconciler = Reconciler(store, engine)
        for _ in range(3):
            await reconciler.reconcile("team/by-hand")
        assert engine.running((await store.get("team", "by-hand")).metadata.uid)
        await store.mark_deleted("team", "by-hand")
        for _ in range(6):
            await reconciler.reconcile("team/by-hand")
        job = await there.store(cached=False).get("team", "by-hand")
        assert not engine.running(job.metadata.uid)
        assert job.status.phase is Phase.SUSPENDED
        assert job.status.message.startswith("deleted, and nothing of it runs any more; it stays until its ")
        assert "finalizer example.com/theirs, which is not Holdfast's, is taken off" in job.status.message
        assert [record.verdict for record in job.status.attempts] == [Verdict.SUSPENDED]
        before = job.metadata.resource_version
        await reconciler.reconcile("team/by-hand")
        job = await there.store(cached=False).get("team", "by-hand")
        assert job.metadata.resource_version == before, "it is told once"

    world(story)


def test_a_job_that_the_schema_let_through_but_we_cannot_read_is_shown_with_its_faults(world: Tell) -> None:
    async def story(there: World) -> None:
        there.kubectl("apply", "-f", "-", document=JOB.replace("replicas: 2", "replicas: many"))
        there.kubectl("apply", "-f", "-", document=JOB.replace("by-hand", "good"))
        store = there.store(cached=False)
        listed = {job.metadata.name: job.faults for job in await store.list_jobs()}
        assert listed["good"] == ()
        (fault,) = listed["by-hand"]
        assert fault.startswith("spec.replicas: ")
        assert "integer" in fault
        assert (await store.get("team", "by-hand")).faults == (fault,)
        watch: Any = there.store().watch()
        async with aclosing(watch) as changes:
            told = [(await anext(changes)).job for _ in range(2)]
        assert {job.metadata.name: job.faults for job in told} == listed

        # What means nothing at all is left out, and hides no other.
        where = ("tj", "by-hand", "-n=team", "--subresource=status", "--type=merge")
        there.kubectl("patch", *where, '-p={"status":{"phase":7}}')
        assert [job.metadata.name for job in await store.list_jobs()] == ["good"]
        with pytest.raises(Invalid, match=r"TrainingJob team/by-hand: status\.phase: .*Queued") as caught:
            await store.get("team", "by-hand")
        assert len(caught.value.errors) == 1

    world(story)


def test_a_namespace_that_is_not_there(world: Tell) -> None:
    async def story(there: World) -> None:
        with pytest.raises(NotFound, match=r"namespace 'nowhere' is not there, .*kubectl create namespace"):
            await there.store().create(contract.job("a", "nowhere"))
        once = Idempotency("key", "print")
        with pytest.raises(NotFound, match="namespace 'nowhere' is not there"):
            await there.store().create(contract.job("a", "nowhere"), idempotency=once)

    world(story)


def test_a_key_is_free_again_where_its_request_was_refused(world: Tell) -> None:
    async def story(there: World) -> None:
        store = there.store()
        await store.create(contract.job("a"))
        from holdfast_controller.cluster import AlreadyExists

        with pytest.raises(AlreadyExists, match="default/a exists already"):
            await store.create(contract.job("a"), idempotency=Idempotency("key", "one"))
        made = await store.create(contract.job("b"), idempotency=Idempotency("key", "other"))
        assert made.metadata.name == "b"

    world(story)


def test_a_request_that_died_halfway_is_finished_by_its_repeat(world: Tell) -> None:
    async def story(there: World) -> None:
        once = Idempotency("key", "print")
        dying = there.connection.guarded(lambda: bool(left and left.pop()))
        left = [True]  # one write goes through: the record, not the job
        with pytest.raises(NotLeader):
            await KubeStore(dying, there.reflector, cached=False).create(contract.job("a"), idempotency=once)
        left = [True, True]  # the record is there; the job is made, the note about it is not
        with pytest.raises(NotLeader):
            await KubeStore(dying, there.reflector, cached=False).create(contract.job("a"), idempotency=once)
        made = await there.store(cached=False).create(contract.job("a"), idempotency=once)
        assert made == await there.store(cached=False).get("default", "a")
        assert len(await there.store(cached=False).list_jobs()) == 1

    world(story)


def test_two_requests_with_one_key_at_the_same_time_make_one_job_and_both_have_it(world: Tell) -> None:
    async def story(there: World) -> None:
        once = Idempotency("key", "print")
        document = new_document(contract.job("a"))
        document["metadata"]["annotations"] = {KEY_DIGEST: digest_of(once.key)}
        both = asyncio.Barrier(2)

        async def create() -> dict[str, Any]:
            await both.wait()  # by then each has looked for the job, and found none
            return await there.connection.post(jobs_path("default"), document)

        keys = KeyRecords(there.connection)
        one, other = await asyncio.gather(
            keys.create_once(contract.job("a"), once, create),
            keys.create_once(contract.job("a"), once, create),
        )
        assert one["metadata"]["uid"] == other["metadata"]["uid"]
        store = there.store(cached=False)
        repeated = await store.create(contract.job("a"), idempotency=once)
        assert repeated.metadata.uid == one["metadata"]["uid"]
        await store.remove(repeated)
        with pytest.raises(Conflict, match="made a job that was deleted since"):
            await store.create(contract.job("a"), idempotency=once)

    world(story)


def test_who_does_not_lead_writes_nothing(world: Tell) -> None:
    async def story(there: World) -> None:
        job = await there.store().create(contract.job("a"))
        follower = KubeStore(there.connection.guarded(lambda: False), there.reflector, cached=True)
        with pytest.raises(NotLeader, match="does not lead any more"):
            await follower.replace_status(job, Status(phase=Phase.RUNNING))
        assert (await follower.get("default", "a")).status.phase is Phase.QUEUED

    world(story)
