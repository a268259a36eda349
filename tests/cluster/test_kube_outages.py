"""What the controller does while parts of the cluster are not there: the apiserver, the Training Operator."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress

import pytest
from tests.cluster import training_operator, trainingjobs
from tests.cluster.component import running
from tests.cluster.control_plane import start_control_plane
from tests.cluster.site import Site
from waiting import wait_until_async

from holdfast_controller.cluster import Change
from holdfast_controller.jobs import Metadata, Spec, TrainingJob
from holdfast_controller.kube.connection import connect
from holdfast_controller.kube.endpoint import Endpoints
from holdfast_controller.kube.engine import KubeEngine
from holdfast_controller.kube.pieces import Pieces
from holdfast_controller.kube.reflector import Reflector, Timing
from holdfast_controller.kube.resource import JOBS
from holdfast_controller.kube.store import KubeStore

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(2400)]
QUICK = Timing(first_retry_seconds=0.05, longest_retry_seconds=0.3)
JOB = """
apiVersion: holdfast.dev/v1alpha1
kind: TrainingJob
metadata: {name: NAME, namespace: default}
spec: {command: ["true"]}
"""


def test_without_the_operator_jobs_wait_with_that_reason_and_go_on_when_it_comes(short_lived: Site) -> None:
    plane = start_control_plane(short_lived)
    job = TrainingJob(metadata=Metadata(name="a"), spec=Spec(command=["true"]))

    async def story() -> None:
        connection = await connect(plane.kubectl.kubeconfig)
        pieces = Pieces(connection, timing=QUICK)
        jobs = Reflector(connection, JOBS, timing=QUICK)
        engine = KubeEngine(connection, pieces, Endpoints(pieces, jobs), jobs)
        keeping = asyncio.create_task(pieces.run())
        try:
            seen = await engine.observe(job, 1)
            assert "the cluster has no CRD pytorchjobs.kubeflow.org; install the operator" in seen.waiting
            assert not seen.gone
            suspended = job.model_copy(update={"spec": job.spec.model_copy(update={"suspend": True})})
            assert (await engine.observe(suspended, 1)).gone  # nothing runs that would have to be stopped
            plane.kubectl.apply(training_operator.crd(plane.kubectl))

            async def known() -> bool:
                return not (await engine.observe(job, 1)).waiting

            await wait_until_async(known, "the operator to be noticed")
            seen = await engine.observe(job, 1)
            assert (seen.exists, seen.gone) == (False, True)
        finally:
            keeping.cancel()
            with suppress(asyncio.CancelledError):
                await keeping
            await connection.close()

    asyncio.run(story())


def test_an_apiserver_that_is_killed_and_comes_back_costs_no_change(short_lived: Site) -> None:
    plane = start_control_plane(short_lived)
    trainingjobs.install(plane.kubectl)
    plane.kubectl.run("apply", "-f", "-", document=JOB.replace("NAME", "before"))

    async def story() -> None:
        connection = await connect(plane.kubectl.kubeconfig)
        reflector = Reflector(connection, JOBS, timing=QUICK)
        store = KubeStore(connection, reflector, cached=True)
        keeping = asyncio.create_task(reflector.run())
        told: list[tuple[str, str]] = []

        def hear(change: Change) -> None:
            told.append((change.type, change.job.metadata.name))

        async def watch() -> None:
            async for change in store.watch():
                hear(change)

        watching = asyncio.create_task(watch())
        try:
            await wait_until_async(lambda: told == [("ADDED", "before")], "the first job")
            [apiserver] = running(short_lived, "kube-apiserver")
            command, environment = apiserver.cmdline(), apiserver.environ()
            os.kill(apiserver.pid, signal.SIGKILL)
            await asyncio.to_thread(apiserver.wait, 300)
            await wait_until_async(
                lambda: "cannot be reached" in str(reflector.fault), "the outage to be said"
            )
            again = await asyncio.create_subprocess_exec(*command, env=environment)
            try:
                await wait_until_async(lambda: reflector.fault is None, "the watch to go on")
                await asyncio.to_thread(
                    plane.kubectl.run, "apply", "-f", "-", document=JOB.replace("NAME", "after")
                )
                await asyncio.to_thread(plane.kubectl.run, "delete", "tj", "before")
                await wait_until_async(lambda: ("DELETED", "before") in told, "what happened after it")
                assert told == [("ADDED", "before"), ("ADDED", "after"), ("DELETED", "before")]
            finally:
                again.kill()
                await again.wait()
        finally:
            for task in (watching, keeping):
                task.cancel()
            await asyncio.gather(watching, keeping, return_exceptions=True)
            await connection.close()

    asyncio.run(story())
