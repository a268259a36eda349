"""The ledger that rank 0 served is kept when that has ended, and so is found when its pod is gone."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from small_apiserver import connected, meanwhile
from tests.kube.ended_pods import GOING, JOB, EndingServer, Server, lines_of, pod, running
from waiting import wait_until_async

from holdfast_controller.cluster import NotFound
from holdfast_controller.jobs import Metadata, Phase, TrainingJob, Verdict
from holdfast_controller.kube import last_words
from holdfast_controller.kube.endpoint import Endpoints
from holdfast_controller.kube.last_words import LEDGER_FILE, LastWords
from holdfast_controller.kube.pieces import PODS, Pieces
from holdfast_controller.kube.reflector import Reflector
from holdfast_controller.kube.resource import JOBS
from holdfast_controller.manifests import config_map
from holdfast_controller.pytorchjobs import PYTORCH_JOB


def test_the_ledger_of_a_job_that_is_over_or_rests_outlives_the_controller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(last_words, "KEEP_AGAIN_SECONDS", 0.01)
    lines = [{"event": "attempt_start", "attempt": 1}, {"event": "stop", "attempt": 1, "outcome": "finished"}]
    done = JOB.model_copy(update={"status": JOB.status.model_copy(update={"phase": Phase.SUCCEEDED})})

    async def story() -> None:
        rank_0 = pod(0, "terminated")
        rank_0["status"]["phase"] = "Running"  # as kubelets tell it first
        server = Server(rank_0)
        server.refused = 3

        async def heard(self: Endpoints, job: TrainingJob) -> list[dict[str, Any]]:
            return list(lines)  # what rank 0 told while it ran

        with monkeypatch.context() as patch:
            patch.setattr(Endpoints, "ledger_of", heard)
            async with running(server, tmp_path):
                await wait_until_async(lambda: server.config_maps, "the ledger to be kept")
        (kept,) = server.config_maps.values()
        assert kept["metadata"]["name"] == "gpt-1-ledger"
        assert kept["metadata"]["ownerReferences"][0]["uid"] == "job-1", "it goes with the job"
        # Another controller, which never heard rank 0.
        async with running(server, tmp_path) as (engine, _, _):
            assert await engine.ledger(done) == lines
            assert await engine.ledger(JOB) == lines, "rank 0 has ended, though nobody has judged it yet"
            cancelled = done.model_copy(update={"status": done.status.model_copy(update={"attempt": 2})})
            assert await engine.ledger(cancelled) == lines, "before its next attempt was started"
            # Once it was stopped and judged, its pods have gone.
            server.pods.clear()
            rests = JOB.model_copy(deep=True)
            rests.status.phase, rests.status.attempts[0].verdict = Phase.SUSPENDED, Verdict.SUSPENDED
        async with running(server, tmp_path) as (engine, _, _):
            assert await engine.ledger(rests) == lines

    asyncio.run(story())


@pytest.mark.parametrize(("count", "size"), [(2000, 1000), (5, 200_000)], ids=["many lines", "long ones"])
def test_of_a_ledger_that_kubernetes_cannot_keep_the_newest_lines_are_kept(
    count: int, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [{"event": "note", "attempt": 1, "number": number, "text": "x" * size} for number in range(count)]

    async def heard(self: Endpoints, job: TrainingJob) -> list[dict[str, Any]]:
        return lines

    monkeypatch.setattr(Endpoints, "ledger_of", heard)

    async def story() -> None:
        server = Server(pod(0, "terminated"))
        async with running(server, tmp_path) as (_, words, _):
            await wait_until_async(lambda: server.config_maps, "the ledger to be kept")
            kept = await words.ledger(JOB)
        assert kept == lines[-len(kept) :]
        assert 400_000 <= len(server.config_maps["gpt-1-ledger"]["data"][LEDGER_FILE]) <= 512 * 1024

    asyncio.run(story())


def test_the_ledger_is_kept_when_rank_0_has_ended_and_not_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is written once: with another rank's end, what rank 0 tells of its own would be missing."""

    async def heard(self: Endpoints, job: TrainingJob) -> list[dict[str, Any]]:
        return [{"event": "attempt_start", "attempt": 1}]

    monkeypatch.setattr(Endpoints, "ledger_of", heard)

    async def story() -> None:
        server = Server(pod(0), pod(1, "terminated"))
        server.said = {"gpt-1-worker-1": ["the end"]}
        async with running(server, tmp_path) as (engine, _, _):
            await engine.keep_logs(JOB, 1)
            assert list(server.config_maps) == ["gpt-1-tails"]

    asyncio.run(story())


def test_the_ledger_is_kept_by_who_leads_again_though_rank_0_ended_as_the_lease_was_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A leader that was frozen sees what it missed, and that it leads no more, in one moment."""
    line = {"event": "stop", "attempt": 1, "outcome": "finished"}

    async def heard(self: Endpoints, job: TrainingJob) -> list[dict[str, Any]]:
        return [line]

    monkeypatch.setattr(Endpoints, "ledger_of", heard)

    async def story() -> None:
        server = EndingServer(pod(0))
        routes = [web.get(path, server.list_or_watch) for path in (PODS, PYTORCH_JOB.resource.path, JOBS)]
        routes.append(web.post("/api/v1/namespaces/team/configmaps", server.keep))
        async with connected(routes, tmp_path) as connection:
            jobs, pieces = Reflector(connection, JOBS), Pieces(connection)
            words = LastWords(connection, pieces, Endpoints(pieces, jobs), jobs)
            leads: list[asyncio.Task[None]] = []
            async with meanwhile(jobs.run()), meanwhile(pieces.run()):
                await jobs.synced()
                await pieces.synced()
                pieces.pods.listen(lambda _: leads[0].cancel())
                leads.append(asyncio.create_task(words.run()))
                await asyncio.sleep(0)
                server.over.set()
                with pytest.raises(asyncio.CancelledError):
                    await leads[0]
                assert not server.config_maps
                async with meanwhile(words.run()):
                    await wait_until_async(lambda: server.config_maps, "the ledger to be kept")

    asyncio.run(story())


def test_what_is_kept_of_an_earlier_job_of_the_name_is_not_taken_for_this_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deleted and submitted again, before the garbage collector came by."""
    monkeypatch.setattr(last_words, "KEEP_AGAIN_SECONDS", 0.01)
    lines = [{"event": "attempt_start", "attempt": 1}]

    async def heard(self: Endpoints, job: TrainingJob) -> list[dict[str, Any]]:
        return list(lines)

    def kept(name: str, data: dict[str, str]) -> dict[str, Any]:
        earlier = JOB.model_copy(update={"metadata": Metadata(name="gpt", namespace="team", uid="job-0")})
        return config_map(earlier, 1, data, name=name)

    async def story() -> None:
        server = Server()
        server.config_maps = {
            "gpt-1-ledger": kept("gpt-1-ledger", {LEDGER_FILE: '{"event": "stop", "attempt": 1}'}),
            "gpt-1-tails": kept("gpt-1-tails", {"0": "its last words"}),
        }
        async with running(server, tmp_path) as (engine, words, _):
            assert await words.ledger(JOB) == []
            with pytest.raises(NotFound, match=r"rank-0.log"):
                await lines_of(engine, JOB, 0)
        server.pods = {"gpt-1-worker-0": pod(0, "terminated")}
        with monkeypatch.context() as patch:
            patch.setattr(Endpoints, "ledger_of", heard)
            async with running(server, tmp_path) as (_, words, _):
                await wait_until_async(lambda: server.clashes > 1, "the ledger to be written")
                server.config_maps.clear()
                await wait_until_async(lambda: server.config_maps, "the ledger to be kept")
                assert await words.ledger(JOB) == lines

    asyncio.run(story())


def test_the_ledger_of_an_attempt_whose_node_was_lost_is_kept_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody will ever say that its rank 0 has ended."""
    lines = [{"event": "attempt_start", "attempt": 1}, {"event": "checkpoint", "attempt": 1, "step": 50}]

    async def heard(self: Endpoints, job: TrainingJob) -> list[dict[str, Any]]:
        return list(lines)

    monkeypatch.setattr(Endpoints, "ledger_of", heard)

    async def story() -> None:
        server = Server(pod(0, deletionTimestamp=GOING, deletionGracePeriodSeconds=0))
        async with running(server, tmp_path) as (_, words, _):
            await wait_until_async(lambda: server.config_maps, "the ledger to be kept")
            assert await words.ledger(JOB) == lines

    asyncio.run(story())
