"""What Prometheus is told of a job, and where it finds the trainer of one that runs on this machine."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from local_world import all_running, at_work, end, local_engine, until, waiting_job
from prometheus_client.parser import text_string_to_metric_families
from scene import Scene, make, play, telling
from series import sample
from structlog.testing import capture_logs
from waiting import wait_until_async

from holdfast_controller.cli.tables import job_columns
from holdfast_controller.heartbeat import Silence
from holdfast_controller.job_series import BATCH, JobFigures, job_series
from holdfast_controller.jobs import AttemptRecord, JobProgress, Phase, Status, TrainingJob
from holdfast_controller.local.launch import run_directory
from holdfast_controller.local.targets import TargetsFile
from holdfast_controller.metrics import Metrics
from holdfast_controller.reconciler import Reconciler
from holdfast_trainer.contract import Progress

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def attempt(number: int, first_step: float | None, ended: float | None) -> AttemptRecord:
    def at(seconds: float | None) -> datetime | None:
        return None if seconds is None else NOON + timedelta(seconds=seconds)

    return AttemptRecord(number=number, started_at=NOON, first_step_at=at(first_step), ended_at=at(ended))


def test_a_job_s_own_bounds_are_series_where_it_has_them() -> None:
    metrics = Metrics()
    spec = {
        "command": ["python"],
        "replicas": 2,
        "gpus": "0.25",
        "checkpoint": {"every": "90s"},
        "retries": {"disruptions": 5},
    }
    job = TrainingJob.model_validate({"metadata": {"name": "gpt"}, "spec": spec})
    job.status = Status(phase=Phase.RUNNING, attempts=[attempt(1, 1, 5), attempt(2, 9, None)])
    plain = TrainingJob.model_validate({"metadata": {"name": "plain"}, "spec": {"command": ["python"]}})
    spec = {"command": ["python"], "gpus": 1, "mig": "1g.10gb"}
    cut = TrainingJob.model_validate({"metadata": {"name": "cut"}, "spec": spec})
    for one in (job, plain, cut):
        metrics.jobs[one.key] = JobFigures.of(one)

    def told(series: str, name: str = "gpt", **labels: str) -> float | None:
        return sample(metrics, series, {"namespace": "default", "job": name, **labels})

    assert told("holdfast_job_phase", phase="Running") == 1
    assert told("holdfast_job_phase", phase="Queued") is None
    assert told("holdfast_job_phase", "plain", phase="Queued") == 1
    assert told("holdfast_job_gpus") == 0.5
    assert told("holdfast_job_gpus", "plain") == 0
    assert told("holdfast_job_gpus", "cut") is None, "a part of a GPU is not one"
    assert told("holdfast_job_disruptions_allowed") == 5
    assert told("holdfast_job_checkpoint_every_seconds") == 90
    assert told("holdfast_job_checkpoint_every_steps") is None
    for absent in ("disruptions_allowed", "checkpoint_every_seconds", "recovery_seconds", "step"):
        assert told(f"holdfast_job_{absent}", "plain") is None


def test_what_a_script_lost_that_tells_nothing_has_no_series_and_a_dash() -> None:
    """One has nothing of Holdfast in it; another tells its steps; a third told them so long ago that of those
    attempts no record is left. A node was taken from each."""
    status = Status(phase=Phase.RUNNING, attempts=[attempt(1, None, 5), attempt(2, None, None)])
    jobs = [
        TrainingJob.model_validate({"metadata": {"name": name}, "spec": {"command": ["python"]}})
        for name in ("silent", "told", "told-once")
    ]
    metrics = Metrics()
    for one in jobs:
        one.status = status.model_copy(deep=True)
    jobs[1].status.attempts[0].last_step, jobs[1].status.lost_steps = 7, 3
    jobs[2].status.progress, jobs[2].status.lost_steps = JobProgress(step=7), 3
    for one in jobs:
        metrics.jobs[one.key] = JobFigures.of(one)
    lost = {
        name: sample(metrics, "holdfast_job_lost_steps", {"namespace": "default", "job": name})
        for name in ("silent", "told", "told-once")
    }
    assert lost == {"silent": None, "told": 3, "told-once": 3}
    (column,) = (one for one in job_columns(jobs) if one.title == "LOST")
    assert [cell.plain for cell in column.cells] == ["-", "3", "3"]


def test_the_goodput_of_a_job_that_does_not_train_sinks_from_scrape_to_scrape() -> None:
    """It trained for 90 of its first 100 seconds; what Prometheus is told 1000 seconds after its start."""

    def told(phase: Phase, **changes: Any) -> str | None:
        job = TrainingJob.model_validate({"metadata": {"name": "gpt"}, "spec": {"command": ["python"]}})
        job.status = Status(phase=phase, goodput=0.9, useful_seconds=90.0, first_started_at=NOON)
        job.status = job.status.model_copy(update=changes)
        text = b"".join(job_series([JobFigures.of(job)], NOON + timedelta(seconds=1000))).decode()
        lines = [line for line in text.splitlines() if line.startswith("holdfast_job_goodput_ratio")]
        return lines[0].split()[-1] if lines else None

    for waits in (Phase.SUSPENDED, Phase.QUEUED, Phase.RECOVERING, Phase.STARTING):
        assert told(waits) == "0.09", waits
    assert told(Phase.RUNNING) == "0.9", "its newest progress is of now"
    hangs = JobProgress(step=9, updated_at=NOON + timedelta(seconds=100))
    assert told(Phase.RUNNING, progress=hangs) == "0.09", "no step has been done since"
    fast = JobProgress(step=9, updated_at=NOON, tokens_per_second=3.0)
    ends = JobProgress(step=9, updated_at=NOON, eta_seconds=9.0)
    short = JobProgress(step=1, updated_at=NOON + timedelta(seconds=980))
    for progress in (fast, ends, short):
        assert told(Phase.RUNNING, progress=progress) == "0.9", "as far as is known, it does steps"
    assert told(Phase.SUCCEEDED, progress=hangs) == "0.9"
    assert told(Phase.SUCCEEDED) == told(Phase.FAILED) == "0.9", "time goes on, the job does not"
    assert told(Phase.SUSPENDED, goodput=None, useful_seconds=None) is None, "it tells nothing of its steps"


def test_how_fast_a_job_is_whose_rank_0_is_not_heard_is_not_told() -> None:
    """Its node was cut off from the controller: for hours it was as fast as in the second before."""

    async def story(scene: Scene) -> None:
        engine, metrics = telling(scene), Metrics()
        scene.reconciler = Reconciler(scene.store, engine, clock=lambda: scene.now, metrics=metrics)

        async def told(progress: Progress | None, silence: Silence | None) -> list[str]:
            job = await scene.look()
            scene.now += timedelta(seconds=2)  # figures are written once a second
            engine.progress, engine.attempts[job.metadata.uid, 1].silence = progress, silence
            metrics.jobs[job.key] = JobFigures.of(await scene.look())
            await scene.look()
            text = b"".join(metrics.text()).decode()
            return [line.split()[-1] for line in text.splitlines() if line.startswith("holdfast_job_tokens")]

        await scene.submit(make(replicas=1))
        fast = Progress(1, 46, 100, 46, "training", resumed_step=0, updated=NOON.timestamp())
        fast = replace(fast, tokens_per_second=1000.0)
        assert await told(fast, Silence(0.0, 300.0)) == ["1000.0"]
        assert await told(fast, Silence(50.0, 300.0, False, 0, unheard=10.0)) == ["1000.0"], "long steps"
        assert await told(fast, Silence(70.0, 300.0, False, 0, unheard=40.0)) == []
        assert await told(fast, Silence(0.0, 300.0)) == ["1000.0"]
        assert await told(None, None) == [], "a controller that has just begun to lead and hears nothing"

    play(story)


def test_every_series_of_many_jobs_is_one_group_however_many_pieces_it_takes() -> None:
    metrics = Metrics()
    for number in range(2 * BATCH + 1):
        job = TrainingJob.model_validate(
            {"metadata": {"name": f"job-{number}"}, "spec": {"command": ["python"]}}
        )
        metrics.jobs[job.key] = JobFigures.of(job)
    pieces = list(metrics.text())
    assert max(piece.count(b"\n") for piece in pieces) <= max(BATCH, pieces[0].count(b"\n"))
    families = list(text_string_to_metric_families(b"".join(pieces).decode()))
    names = [family.name for family in families]
    assert len(names) == len(set(names)), "Prometheus takes a series that comes back for another one"
    samples = {family.name: len(family.samples) for family in families}
    assert samples["holdfast_job_phase"] == samples["holdfast_job_attempts"] == 2 * BATCH + 1
    assert samples["holdfast_job_step"] == 0, "not known is not zero"


def test_prometheus_is_told_where_a_running_trainer_listens(tmp_path: Path) -> None:
    """From the moment that rank 0 has said its address until the attempt is gone."""
    file = tmp_path / "prometheus-targets.json"

    def told() -> list[dict[str, object]]:
        found: list[dict[str, object]] = json.loads(file.read_text())
        return found

    async def story() -> None:
        job = waiting_job("gpt", replicas=1)
        async with at_work(local_engine(tmp_path, cores=1)) as engine:
            await wait_until_async(file.exists, "the file")
            assert told() == [], "nothing runs yet, and Prometheus finds a file all the same"
            await engine.start(job, 1)
            await until(engine, job, 1, "the start", all_running)
            run_directory(tmp_path, job).progress_address(1).write_text("127.0.0.1:1\n")
            await wait_until_async(told, "the address to be told")
            assert told() == [
                {
                    "targets": ["127.0.0.1:1"],
                    "labels": {
                        "namespace": "default",
                        "holdfast_dev_job": "gpt",
                        "holdfast_dev_attempt": "1",
                    },
                }
            ]
            end(tmp_path, job, 1, 0)
            await until(engine, job, 1, "the end", lambda seen: seen.gone)
            await wait_until_async(lambda: not told(), "the address to be forgotten")

    asyncio.run(story())


def test_a_file_that_cannot_be_written_is_told_once_and_ends_nothing(tmp_path: Path) -> None:
    file = TargetsFile(tmp_path / "missing")
    with capture_logs() as lines:
        file.write([])
        file.write([])
    (line,) = lines
    assert line["event"] == "Prometheus will not find the jobs"
    assert "missing/prometheus-targets.json" in line["file"]
    (tmp_path / "missing").mkdir()
    file.write([])
    assert json.loads((tmp_path / "missing/prometheus-targets.json").read_text()) == []


def test_a_pass_that_waits_for_an_apiserver_is_told_with_its_length() -> None:
    """Prometheus knows a quantile only within the buckets: of half a minute it was told that it took ten
    seconds at most."""
    metrics = Metrics()
    metrics.reconcile_seconds.observe(40.0)
    found = {le: sample(metrics, "holdfast_reconcile_seconds_bucket", {"le": le}) for le in ("30.0", "100.0")}
    assert found == {"30.0": 0, "100.0": 1}
