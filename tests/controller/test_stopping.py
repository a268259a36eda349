"""What becomes of the jobs where the controller suspends them before it ends (`holdfast up --stop-jobs`)."""

from __future__ import annotations

import asyncio

import pytest
from fakes import MemoryStore

from holdfast_controller import stopping
from holdfast_controller.jobs import Metadata, Phase, Spec, Status, TrainingJob
from holdfast_controller.stopping import suspend_all


def submitted(name: str, phase: Phase) -> TrainingJob:
    metadata = Metadata(name=name, namespace="team", uid=f"uid-{name}")
    return TrainingJob(metadata=metadata, spec=Spec(command=["true"]), status=Status(phase=phase))


class Busy(MemoryStore):
    """Of which somebody edits one job, and deletes another, as soon as they are listed."""

    async def list_jobs(self, namespace: str | None = None) -> list[TrainingJob]:
        jobs = await super().list_jobs(namespace)
        for job in jobs:
            if job.metadata.name == "edited" and job.spec.replicas == 1:
                spec = job.spec.model_copy(update={"replicas": 2})
                await self.replace_spec(job.model_copy(update={"spec": spec}))
            if job.metadata.name == "deleted":
                await self.remove(job)
        return jobs


@pytest.mark.parametrize("ends", [True, False], ids=["they end", "one does not"])
def test_all_jobs_that_are_not_over_are_suspended_whoever_else_writes_them(
    ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And waited for: as long as the longest grace, and no longer."""
    monkeypatch.setattr(stopping, "MARGIN_SECONDS", 30.0 if ends else -29.9)  # of a grace of 30

    async def end(store: Busy) -> None:
        async for change in store.watch():
            job = change.job
            if job.spec.suspend and job.status.phase is Phase.RUNNING:
                await store.replace_status(job, job.status.model_copy(update={"phase": Phase.SUSPENDED}))

    async def story() -> tuple[list[str], dict[str, bool], int]:
        store = Busy()
        for name in ("edited", "deleted", "runs"):
            await store.create(submitted(name, Phase.RUNNING))
        await store.create(submitted("waits", Phase.QUEUED))
        await store.create(submitted("done", Phase.SUCCEEDED))
        reconciler = asyncio.create_task(end(store)) if ends else None
        async with asyncio.timeout(10):
            left = [job.metadata.name for job in await suspend_all(store)]
        if reconciler is not None:
            reconciler.cancel()
        jobs = await store.list_jobs()
        edited = await store.get("team", "edited")
        return left, {job.metadata.name: job.spec.suspend for job in jobs}, edited.spec.replicas

    left, suspended, kept = asyncio.run(story())
    assert sorted(left) == ([] if ends else ["edited", "runs"])
    assert suspended == {"edited": True, "runs": True, "waits": True, "done": False}
    assert kept == 2, "what somebody asked for meanwhile"
