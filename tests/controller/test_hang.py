"""All ranks stand still at once, so none of them can say it: who asks them finds out, and is never hasty."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from local_world import at_work, local_engine, ranks_up
from waiting import wait_until_async

from holdfast_controller.cluster import AttemptObservation, RankExit, ReplicaObservation, ReplicaState
from holdfast_controller.gang import attempt_uid
from holdfast_controller.heartbeat import Heartbeat, Silence
from holdfast_controller.jobs import AttemptRecord, Metadata, Phase, Spec, Status, TrainingJob, Verdict
from holdfast_controller.local import process
from holdfast_controller.local.store import LocalStore
from holdfast_controller.policy.decide import Evidence, decide
from holdfast_controller.policy.hang import hangs
from holdfast_controller.reconciler import Reconciler
from holdfast_trainer.contract import Progress

TOLD = Progress(1, 7, 100, 5, "training", quiet_seconds=2.0, quiet_limit=60.0)
TAKEN, REFUSED = True, False


def beat(*asks: tuple[float, Progress | bool]) -> Silence | None:
    """After asks at these seconds, each answered by a progress, or not: connection taken, or refused."""
    heart = Heartbeat(0.0)
    for now, answer in asks:
        if isinstance(answer, Progress):
            heart.answered(answer, now)
        else:
            heart.missed(now, taken=answer)
    return heart.silence


STILL = [(10.0 + 20 * n, TAKEN) for n in range(5)]


@pytest.mark.parametrize(
    ("asks", "over"),
    [
        pytest.param([], None, id="nobody was asked yet"),
        pytest.param(STILL, False, id="it never told anything"),
        pytest.param([(1, TOLD)], False, id="it answers"),
        pytest.param([(1, replace(TOLD, quiet_seconds=61.0))], True, id="it answers, and does no step"),
        pytest.param([(1, replace(TOLD, quiet_limit=None)), *STILL], False, id="nobody watches its steps"),
        pytest.param([(1, TOLD), (10, TAKEN), (20, TAKEN), (30, TAKEN)], False, id="for less than the bound"),
        pytest.param([(1, TOLD), *STILL], True, id="for longer than the bound"),
        pytest.param([(1, TOLD), (20, TAKEN), (45, TAKEN), (70, REFUSED)], False, id="too few proofs"),
        pytest.param(
            [(1, TOLD), *STILL[:3], (65, REFUSED), (80, REFUSED)], True, id="then the queue is full"
        ),
        pytest.param(
            [(1, TOLD), *((t, REFUSED) for t in range(10, 999, 10))], False, id="the network is out"
        ),
        pytest.param([(1, TOLD), *STILL, (100, TOLD)], False, id="it is back"),
        pytest.param([(1, TOLD), *((3600.0 + n, TAKEN) for n in range(4))], False, id="the machine slept"),
    ],
)
def test_silence_is_a_proof_only_when_nothing_else_explains_it(
    asks: list[tuple[float, Progress | bool]], over: bool | None
) -> None:
    silence = beat(*asks)
    assert (None if silence is None else silence.over) == over


def test_how_long_nothing_was_heard_is_told_beside_how_long_no_step_was_done() -> None:
    told = replace(TOLD, quiet_seconds=25.0)
    silence = beat((1, told), (11, TAKEN), (21, REFUSED))
    assert silence is not None
    assert (silence.seconds, silence.unheard) == (45.0, 20.0)
    silence = beat((1, told), (11, TAKEN), (12, told))
    assert silence is not None
    assert silence.unheard == 0.0


UP = ReplicaObservation(0, ReplicaState.RUNNING)
LONG, SHORT = Silence(90.0, 60.0, False, 4), Silence(20.0, 60.0, False, 4)


def seen(*replicas: ReplicaObservation, silence: Silence | None = LONG, **more: bool) -> AttemptObservation:
    return AttemptObservation(1, True, False, replicas, silence=silence, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("observation", "said"),
    [
        pytest.param(seen(UP, UP), "rank 0 takes connections and answers none", id="all stand still"),
        pytest.param(seen(UP, silence=Silence(90.0, 60.0)), "rank 0 answers", id="steps stand still"),
        pytest.param(seen(UP, silence=None), "", id="nothing is known"),
        pytest.param(seen(UP, silence=SHORT), "", id="not long enough"),
        pytest.param(seen(UP, stopping=True), "", id="it is being stopped"),
        pytest.param(seen(UP, replace(UP, state=ReplicaState.FAILED)), "", id="one is gone"),
        pytest.param(seen(UP, replace(UP, state=ReplicaState.PENDING)), "", id="one is not up"),
        pytest.param(seen(UP, replace(UP, disrupted=True)), "", id="one has notice"),
        pytest.param(seen(UP, replace(UP, ranks=(RankExit(1, 0),))), "", id="a rank has ended"),
    ],
)
def test_what_is_judged_to_hang(observation: AttemptObservation, said: str) -> None:
    reason = hangs(observation)
    assert said in reason
    assert bool(reason) == bool(said)
    assert not reason or reason.startswith("no step for 90 s, of 60 s that may be: ")


def test_what_an_attempt_is_ended_for_is_told_once_and_stays() -> None:
    """It stands still for ever longer until it has ended."""
    why = "no step for 70 s, of 60 s that may be"
    record = AttemptRecord(number=1, ending=Verdict.HUNG, reason=why)
    status = Status(phase=Phase.RECOVERING, attempt=1, attempts=[record])
    job = TrainingJob(metadata=Metadata(name="a"), spec=Spec(command=["x"]), status=status)
    decision = decide(job, seen(UP), Evidence(), datetime.now(UTC))
    assert (decision.kill, decision.stacks, decision.events) == (1, True, ())
    assert decision.status.attempts[0].reason == why


RANK = """
import faulthandler, http.server, os, sys
from holdfast_trainer.contract import Progress, RunDir
from pathlib import Path
faulthandler.enable()
attempt = int(os.environ["HOLDFAST_ATTEMPT"])
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = Progress(attempt, 7, 100, 5, "training", quiet_seconds=0.0, quiet_limit=2.0).to_json().encode()
        self.send_response(200); self.send_header("Content-Length", str(len(body))); self.end_headers()
        self.wfile.write(body)
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer)
if os.environ["RANK"] == "0":
    address = RunDir(Path(os.environ["HOLDFAST_RUN_DIR"])).progress_address(attempt)
    address.write_text(f"127.0.0.1:{server.server_port}")
print("up", flush=True)
def stand_at_the_gate():
    server.serve_forever()
stand_at_the_gate()
"""


def test_a_gang_that_is_stopped_whole_is_found_hung_and_told_where_it_stood(tmp_path: Path) -> None:
    async def story() -> None:
        engine = local_engine(tmp_path)
        store = await LocalStore.open(tmp_path / "jobs.db")
        spec = {"command": [sys.executable, "-c", RANK], "replicas": 2, "retries": {"failures": 0}}
        job = await store.create(TrainingJob(metadata=Metadata(name="a"), spec=Spec.model_validate(spec)))
        working = asyncio.create_task(Reconciler(store, engine, resync_seconds=1.0).run())
        try:
            async with at_work(engine):
                await ranks_up(engine, tmp_path, job)

                async def heard() -> bool:
                    return (await engine.observe(job, 1)).silence is not None

                await wait_until_async(heard, "rank 0 to be asked")
                ranks = [p for r in (0, 1) for p in process.find(attempt_uid(job, 1), r, r)]
                for rank in ranks:
                    process.send(rank, signal.SIGSTOP)

                async def judged() -> TrainingJob | None:
                    now = await store.get("default", "a")
                    return now if now.status.phase.final else None

                done = await wait_until_async(judged, "the verdict")
                assert done is not None
                (record,) = done.status.attempts
                assert (record.verdict, record.ending) == (Verdict.HUNG, Verdict.HUNG)
                assert "rank 0 takes connections and answers none" in record.reason
                assert done.status.failures == 1
                assert "in stand_at_the_gate" in record.log_tail["0"], "no stacks in the log"
                assert not process.find(attempt_uid(job, 1))
        finally:
            working.cancel()
            with suppress(asyncio.CancelledError):
                await working
            await store.close()
            process.kill_all(attempt_uid(job, 1))

    asyncio.run(story())
    assert not [name for name in os.listdir(tmp_path) if name.startswith("core")]
