"""What a pod said is kept before its container is removed."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from aiohttp import web
from small_apiserver import connected, meanwhile
from structlog.testing import capture_logs
from tests.kube.documents import in_kind
from tests.kube.ended_pods import GOING, JOB, Server, lines_of, pod, running
from waiting import wait_until_async

from holdfast_controller.cluster import NotFound, Unavailable
from holdfast_controller.jobs import AttemptRecord, Metadata, Spec, Status, TrainingJob, Verdict
from holdfast_controller.kube import last_words
from holdfast_controller.kube.connection import CONNECTIONS
from holdfast_controller.kube.endpoint import Endpoints
from holdfast_controller.kube.last_words import LastWords
from holdfast_controller.kube.leader import LeaseTiming
from holdfast_controller.kube.pieces import PODS, Pieces
from holdfast_controller.kube.pod_state import index_of
from holdfast_controller.kube.reflector import Reflector
from holdfast_controller.kube.resource import JOBS
from holdfast_controller.lines import LONGEST_LINE
from holdfast_controller.manifests import config_map
from holdfast_controller.pod_template import attempt_labels
from holdfast_controller.pytorchjobs import PYTORCH_JOB
from holdfast_controller.trainjobs import TRAIN_JOB
from holdfast_trainer.contract import Termination


@pytest.mark.parametrize("deleted", [True, False], ids=["deleted", "its node is shut down"])
def test_the_end_of_a_pod_that_is_taken_outlives_its_container(deleted: bool, tmp_path: Path) -> None:
    async def story() -> None:
        taken = pod(1, deletionTimestamp=GOING, deletionGracePeriodSeconds=30) if deleted else pod(1)
        if not deleted:  # its kubelet tells so much, and is gone before anybody deletes the pod
            said = {"type": "DisruptionTarget", "status": "True", "reason": "TerminationByKubelet"}
            taken["status"]["conditions"] = [said]
        server = Server(pod(0), taken)
        server.said["gpt-1-worker-1"] = [f"step {n}" for n in range(100)]
        server.will_say["gpt-1-worker-1"] = ["notice", "saved at step 100"]
        async with running(server, tmp_path) as (engine, _, _):
            await wait_until_async(lambda: server.tail(1), "what it has said so far")
            assert (server.tail(1) or "").endswith("step 98\nstep 99")
            server.end.set()
            await wait_until_async(lambda: (server.tail(1) or "").endswith("saved at step 100"), "its end")
            assert len((server.tail(1) or "").split("\n")) == last_words.LINES
            assert server.tail(0) is None, "nobody wants the end of the other one"
            server.removed = True
            # The kubelet has removed the container: what was noted takes its place.
            assert (await lines_of(engine, JOB, 1, tail=2)) == ["notice", "saved at step 100"]
            with pytest.raises(NotFound, match=r"run directory: attempts/0001/rank-0.log"):
                await lines_of(engine, JOB, 0)
            record = AttemptRecord(number=1, verdict=Verdict.DISRUPTED, log_tail={"0": "a\nb"})
            told = JOB.model_copy(update={"status": JOB.status.model_copy(update={"attempts": [record]})})
            assert await lines_of(engine, told, 0) == ["a", "b"], "from the attempt's record"

    asyncio.run(story())


def test_a_verdict_waits_for_the_last_lines_of_a_log_that_are_on_their_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kubelet has told that the container ended, and removed it, before its last lines have come."""

    async def story() -> None:
        server = Server(pod(0), pod(1, deletionTimestamp=GOING))
        server.said["gpt-1-worker-1"] = ["goes on at step 0"]
        server.will_say["gpt-1-worker-1"] = ["saved at step 9"]
        ended = pod(1, "terminated", deletionTimestamp=GOING)
        async with running(server, tmp_path) as (engine, words, _):
            await wait_until_async(lambda: server.tail(1), "what it has said so far")
            server.removed = True
            assert await words.tail_of(pod(1)) == ["goes on at step 0"], (
                "of one that runs nobody waits for more"
            )
            asked = asyncio.ensure_future(words.tail_of(ended))
            await asyncio.wait({asked}, timeout=0.2)
            assert not asked.done()
            monkeypatch.setattr(last_words, "READ_SECONDS", 0.1)
            assert await words.tail_of(ended) == ["goes on at step 0"], "though not for as long as it takes"
            server.end.set()
            assert await asked == ["goes on at step 0", "saved at step 9"]
            monkeypatch.setattr(last_words, "READ_SECONDS", 60.0)
            async with asyncio.timeout(10):
                assert await words.tail_of(ended) == ["goes on at step 0", "saved at step 9"], "it has come"
            assert await lines_of(engine, JOB, 1) == ["goes on at step 0", "saved at step 9"]

    asyncio.run(story())


def test_a_pod_whose_deletion_is_heard_together_with_its_end_has_its_last_lines_kept(tmp_path: Path) -> None:
    """It saved at once, on a busy machine; they were read with the verdict, when its node had no log more."""

    async def story() -> None:
        server = Server(pod(0), pod(1, "terminated", deletionTimestamp=GOING))
        server.said["gpt-1-worker-1"] = ["goes on at step 0", "saved at step 9"]
        server.end.set()
        async with running(server, tmp_path) as (engine, _, _):
            await wait_until_async(lambda: server.tail(1), "what it said")
            server.removed = True
            assert await lines_of(engine, JOB, 1) == ["goes on at step 0", "saved at step 9"]

    asyncio.run(story())


@pytest.mark.parametrize(
    ("reason", "message", "told"),
    [
        (
            "Error",
            "goes on at step 0\nTraceback\nMemoryError\n",
            ["goes on at step 0", "Traceback", "MemoryError"],
        ),
        ("OOMKilled", "goes on at step 0", ["goes on at step 0"]),
        ("Error", Termination("failed", 7, 5, "loss is NaN").to_json(), None),
        ("Error", '{"rank": 1, "signal": 9, "ended": 1767225600.0}', None),
        ("ContainerStatusUnknown", "The container could not be located when the pod was deleted", None),
        ("Error", "", None),
    ],
)
def test_of_a_pod_that_went_before_anybody_asked_its_kubelet_has_kept_the_end(
    reason: str, message: str, told: list[str] | None, tmp_path: Path
) -> None:
    """A second of notice, say; its own message, which is no output, is not taken for one."""

    async def story() -> None:
        ended = pod(1, "terminated", deletionTimestamp=GOING)
        ended["status"]["containerStatuses"][0]["state"]["terminated"] = {
            "exitCode": 1, "reason": reason, "message": message,
        }  # fmt: skip
        server = Server(pod(0), ended)
        server.removed = True
        server.end.set()
        record = AttemptRecord(number=1, verdict=Verdict.DISRUPTED, log_tail={"1": "more\nof it"})
        judged = JOB.model_copy(update={"status": JOB.status.model_copy(update={"attempts": [record]})})
        async with running(server, tmp_path) as (engine, words, _):
            if told is None:
                with pytest.raises(NotFound, match=r"rank-1.log"):
                    await lines_of(engine, JOB, 1)
            else:
                assert await lines_of(engine, JOB, 1) == told
            assert await lines_of(engine, judged, 1) == ["more", "of it"], "where more is on record"
            await words.keep_tails(JOB, 1)
            (kept,) = server.config_maps.values()
            assert kept["data"] == ({} if told is None else {"1": "\n".join(told)})

    asyncio.run(story())


def test_what_could_not_be_noted_is_noted_at_the_end_though_nothing_came_to_it(tmp_path: Path) -> None:
    """The apiserver was away for a moment, and whoever leads next finds the last lines on the pod alone."""

    async def story() -> None:
        server = Server(pod(0), pod(1, deletionTimestamp=GOING))
        server.said["gpt-1-worker-1"] = ["step 1"]
        server.refused_notes = 1
        async with running(server, tmp_path):
            await wait_until_async(lambda: not server.refused_notes, "the first try")
            assert server.tail(1) is None
            server.end.set()
            await wait_until_async(lambda: server.tail(1) == "step 1", "the second")

    asyncio.run(story())


def test_the_end_of_a_log_is_kept_though_nobody_heard_its_beginning_in_time(tmp_path: Path) -> None:
    async def story() -> None:
        server = Server(pod(0), pod(1, deletionTimestamp=GOING))
        server.said["gpt-1-worker-1"], server.will_say["gpt-1-worker-1"] = ["step 1"], ["saved at step 2"]
        server.slow = True
        server.end.set()
        async with running(server, tmp_path) as (_, words, _):
            await wait_until_async(lambda: server.tail(1), "its end")
            assert await words.tail_of(pod(1)) == ["step 1", "saved at step 2"]

    asyncio.run(story())


def test_the_log_of_a_rank_that_has_no_pod_yet_is_not_looked_for_in_the_run_directory(
    tmp_path: Path,
) -> None:
    waits = Status(attempt=1, attempts=[AttemptRecord(number=1)], message="waits for a queue")
    told = JOB.model_copy(update={"status": waits})

    async def story() -> None:
        async with running(Server(), tmp_path) as (engine, _, _):
            with pytest.raises(
                NotFound, match=r"rank 0 of attempt 1 of \S+ has no pod yet: waits for a queue"
            ):
                await lines_of(engine, told, 0)

    asyncio.run(story())


def test_the_log_of_a_rank_is_that_of_the_pod_whose_labels_say_so(tmp_path: Path) -> None:
    """Under Jobs the names of pods end at random."""

    async def story() -> None:
        pods = [in_kind(TRAIN_JOB, pod(index)) for index in (0, 1)]
        for one, end in zip(pods, ("x7k2p", "b3q9z"), strict=True):
            one["metadata"]["name"] = f"gpt-1-node-0-{index_of(one)}-{end}"
        server = Server(*pods)
        server.said = {name: [f"{name} speaks"] for name in server.pods}
        async with running(server, tmp_path) as (engine, _, _):
            assert await lines_of(engine, JOB, 1) == ["gpt-1-node-0-1-b3q9z speaks"]
            assert await lines_of(engine, JOB, 0, tail=1) == ["gpt-1-node-0-0-x7k2p speaks"]
        assert server.containers == {"node"}

    asyncio.run(story())


def test_a_progress_bar_that_never_ends_its_line_is_shown_before_it_fills_the_memory(tmp_path: Path) -> None:
    """A notebook's loop, or a file that somebody printed: one line of a pod's log, and it has no end yet."""

    async def story() -> None:
        server = Server(pod(0), pod(1))
        bars = "".join(f"{n:9} \u2588\r" for n in range(8 * LONGEST_LINE // 13))
        server.said["gpt-1-worker-0"] = [f"starts\n{bars}"]
        async with running(server, tmp_path) as (engine, _, _):
            first, *parts = await lines_of(engine, JOB, 0)
        assert first == "starts"
        assert max(map(len, parts)) < 2 * LONGEST_LINE
        assert "".join(parts).replace("\r", "") == bars.replace("\r", ""), "whole characters, and all of them"

    asyncio.run(story())


def test_what_we_end_ourselves_is_read_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        server = Server(pod(0, "terminated"), pod(1))
        server.said = {f"gpt-1-worker-{n}": [f"last line of {n}"] for n in (0, 1)}
        async with running(server, tmp_path) as (_, words, _):
            await words.read(list(server.pods.values()))
            assert [server.tail(0), server.tail(1)] == ["last line of 0", "last line of 1"]
            monkeypatch.setattr(last_words, "READ_SECONDS", 60.0)
            async with asyncio.timeout(10):  # nobody follows it
                assert await words.tail_of(pod(0, "terminated")) == ["last line of 0"]

    asyncio.run(story())


def test_the_last_lines_of_a_large_gang_outlive_its_pods(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One that was used before keeps the configuration of then.
    monkeypatch.setattr("holdfast_controller.kube.engine.log", structlog.get_logger())
    gang = JOB.model_copy(update={"spec": Spec(command=["python"], replicas=12)})

    async def story() -> None:
        server = Server(*(pod(n, "terminated") for n in range(12)))
        server.said = {f"gpt-1-worker-{n}": [f"line {m} of {n}" for m in range(50)] for n in range(11)}
        async with running(server, tmp_path) as (engine, _, _):
            with capture_logs() as said:
                await engine.keep_logs(gang, 1)
                await engine.keep_logs(gang, 1)  # as after a crash between this and the verdict
                await engine.keep_logs(gang, 2)  # whose pods somebody has removed
            assert said == []
        (kept,) = server.config_maps.values()
        assert kept["metadata"]["name"] == "gpt-1-tails"
        assert kept["metadata"]["ownerReferences"][0]["uid"] == "job-1", "it goes with the job"
        server.pods, server.removed = {}, True
        async with running(server, tmp_path) as (engine, _, _):
            assert await lines_of(engine, gang, 10, tail=2) == ["line 48 of 10", "line 49 of 10"]
            assert len(await lines_of(engine, gang, 3)) == last_words.LINES
            with pytest.raises(NotFound, match=r"run directory: attempts/0001/rank-11.log"):
                await lines_of(engine, gang, 11)
        server.pods = {"gpt-1-worker-0": pod(0, "terminated")}
        server.refused = 1
        async with running(server, tmp_path) as (engine, _, _):
            with capture_logs() as said:
                await engine.keep_logs(gang, 1)
        (told,) = [line for line in said if "are not kept" in line["event"]]
        assert "etcdserver: request timed out" in told["error"]

    asyncio.run(story())


@pytest.mark.filterwarnings("ignore:Sending a large body")
def test_last_lines_in_other_letters_are_kept_too(tmp_path: Path) -> None:
    """Each has three bytes here, and of one byte too many the apiserver keeps nothing."""
    spec = Spec(command=["python"], replicas=8, processes=64)
    wide = JOB.model_copy(update={"spec": spec})
    bar = "█" * (last_words.CHARACTERS - 100)

    async def story() -> None:
        server = Server(*(pod(index, "terminated") for index in range(8)))
        server.job = wide
        server.said = {
            f"gpt-1-worker-{index}": [f"[rank {index * 64 + rank}] {bar}" for rank in range(64)]
            for index in range(8)
        }
        async with running(server, tmp_path) as (engine, _, _):
            await engine.keep_logs(wide, 1)
        (kept,) = server.config_maps.values()
        assert 700 * 1024 < sum(len(text.encode()) for text in kept["data"].values()) < 1024 * 1024
        assert all(200_000 < len((server.tail(index) or "").encode()) < 256 * 1024 for index in range(8))
        server.pods = {}
        async with running(server, tmp_path) as (engine, _, _):
            assert await lines_of(engine, wide, 511, tail=1) == [f"[rank 511] {bar}"]

    asyncio.run(story())


@pytest.mark.parametrize("now", [2, 1, 4], ids=["as the job asks", "it asks for fewer now", "for more"])
def test_of_a_pod_with_several_ranks_each_ones_last_lines_are_kept(now: int, tmp_path: Path) -> None:
    """One says much more than the other; what has no mark is torchrun's."""
    status = JOB.status.model_copy(update={"attempts": [AttemptRecord(number=1, processes=2)]})
    spec = Spec(command=["python"], replicas=2, processes=now)
    pair = JOB.model_copy(update={"spec": spec, "status": status})
    loud = [f"[rank 2] line {number}" for number in range(200)]
    said = ["[rank 3] all is well", *loud, "torchrun: a rank has failed"]

    async def story() -> None:
        server = Server(pod(0), pod(1))
        server.job = pair
        server.said = {"gpt-1-worker-1": said}
        async with running(server, tmp_path) as (engine, words, _):
            assert await lines_of(engine, pair, 3) == ["[rank 3] all is well"]
            assert await lines_of(engine, pair, 3, tail=5) == ["[rank 3] all is well"]
            assert await lines_of(engine, pair, 2, tail=2) == [loud[-1], "torchrun: a rank has failed"]
            await words.read(list(server.pods.values()))
            assert (server.tail(1) or "").split("\n") == [
                "[rank 3] all is well", *loud[1 - last_words.LINES :], "torchrun: a rank has failed"
            ]  # fmt: skip
            server.removed = True
            assert await lines_of(engine, pair, 3) == ["[rank 3] all is well"]
            assert await lines_of(engine, pair, 2, tail=1) == ["torchrun: a rank has failed"]
            await engine.keep_logs(pair, 1)
        server.pods = {}
        async with running(server, tmp_path) as (engine, _, _):
            assert await lines_of(engine, pair, 3) == ["[rank 3] all is well"], "from the ConfigMap"
            assert len(await lines_of(engine, pair, 2)) == last_words.LINES

    asyncio.run(story())


def test_lines_of_any_length_do_not_fill_the_controllers_memory_and_stay_their_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A progress bar is one long line, and a program that means harm may write a thousand of them."""
    pair = JOB.model_copy(update={"spec": Spec(command=["python"], processes=2)})
    bar = "[rank 1] " + "".join(f"{n:6}\r" for n in range(2000))

    async def said(*_: Any, **__: Any) -> AsyncIterator[str]:
        for number in range(last_words.LOOKED_AT - 1):
            yield f"[rank 0] {number:100000}"
        yield bar

    async def story() -> None:
        server = Server(pod(0))
        server.job = pair
        monkeypatch.setattr(last_words, "pod_lines", said)
        async with running(server, tmp_path) as (_, words, _):
            tracemalloc.start()
            try:
                await words.read(list(server.pods.values()))
                kept, _ = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
            assert kept < 8 * 2**20, "of a hundred megabytes"
            last = (server.tail(0) or "").split("\n")[-1]
            assert last == "[rank 1] " + bar[-last_words.CHARACTERS :]

    asyncio.run(story())


def test_of_a_log_that_is_long_the_end_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def said(*_: Any, follow: bool, **__: Any) -> AsyncIterator[str]:
        for number in range(200):
            long = number < 100 or number == 199
            yield f"{number:{last_words.CHARACTERS + 5}}" if long else f"step {number}"
            if not follow and number == 2:
                raise ValueError("what nobody has thought of")

    async def story() -> None:
        server = Server(pod(0), pod(1, deletionTimestamp=GOING))
        monkeypatch.setattr(last_words, "pod_lines", said)
        async with running(server, tmp_path) as (_, words, _):
            await wait_until_async(lambda: server.tail(1), "its end")
            assert await words.tail_of(pod(1)) == [f"{199:{last_words.CHARACTERS}}"]
            await words.read([pod(0)])  # which goes wrong, and must end nothing else

    asyncio.run(story())


def test_the_end_of_a_log_that_is_torn_is_no_less_than_what_it_said_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read at once it had come to the newest line; followed, it was torn at its first."""

    async def said(*_: Any, follow: bool, **__: Any) -> AsyncIterator[str]:
        yield "step 1"
        if follow:
            raise Unavailable("the apiserver goes")
        yield "step 2"

    async def story() -> None:
        server = Server(pod(0), pod(1, deletionTimestamp=GOING))
        monkeypatch.setattr(last_words, "pod_lines", said)
        async with running(server, tmp_path) as (_, words, _):
            await wait_until_async(lambda: server.tail(1), "what it has said")
            assert await words.tail_of(pod(1)) == ["step 1", "step 2"]

    asyncio.run(story())


def test_what_an_attempt_left_goes_with_the_next_ones_start_though_its_pytorchjob_went_before(
    tmp_path: Path,
) -> None:
    """As after a back-off: its pods were let go meanwhile, and its PyTorchJob with them."""
    spec = {"command": ["python"], "image": "train:1", "storage": {"claim": "runs"}}
    job = JOB.model_copy(update={"spec": Spec.model_validate(spec)})

    async def story() -> None:
        server = Server()
        there = ("gpt-2", "gpt-2-ledger", "gpt-2-tails", "other")
        server.config_maps = {name: config_map(job, 2, {}, name=name) for name in there}
        for number, one in enumerate(server.config_maps.values()):
            one["metadata"]["uid"] = f"uid-{number}"
        async with running(server, tmp_path) as (engine, _, _):
            await engine.start(job, 3)
        assert sorted(server.config_maps) == ["gpt-2-tails", "gpt-3", "other"]

    asyncio.run(story())


def test_of_a_pod_that_was_made_again_the_first_is_shown_and_kept(tmp_path: Path) -> None:
    """Its end is that of the attempt: what came after it, as where somebody deletes a TrainJob's Job, tells
    nothing of why."""

    async def story() -> None:
        again = pod(0, "terminated", creationTimestamp="2026-01-01T00:01:00Z", uid="another")
        again["metadata"]["name"] = "gpt-1-worker-0-again"
        server = Server(again, pod(0, "terminated", creationTimestamp="2026-01-01T00:00:00Z"))
        server.said = {"gpt-1-worker-0": ["the cause"], "gpt-1-worker-0-again": ["no rendezvous"]}
        async with running(server, tmp_path) as (engine, _, _):
            assert await lines_of(engine, JOB, 0) == ["the cause"]
            await engine.keep_logs(JOB, 1)
        assert server.config_maps["gpt-1-tails"]["data"] == {"0": "the cause"}

    asyncio.run(story())


def test_kept_lines_go_with_the_attempt_that_status_forgets(tmp_path: Path) -> None:
    async def story() -> None:
        late = pod(0, "terminated")
        late["metadata"] |= {
            "name": "gpt-21-worker-0",
            "labels": {**attempt_labels(JOB, 21), PYTORCH_JOB.index_label: "0"},
        }
        server = Server(late)
        server.said = {"gpt-21-worker-0": ["the end"]}
        server.config_maps = {f"gpt-{n}-tails": {"data": {}} for n in (1, 2)}

        def remembers(*numbers: int) -> TrainingJob:
            attempts = [AttemptRecord(number=number) for number in numbers]
            return JOB.model_copy(update={"status": Status(attempt=21, attempts=attempts)})

        async with running(server, tmp_path) as (engine, _, _):
            await engine.keep_logs(remembers(1, *range(3, 22)), 21)
            assert sorted(server.config_maps) == ["gpt-1-tails", "gpt-2-tails", "gpt-21-tails"]
            await engine.keep_logs(remembers(*range(2, 22)), 21)
        assert sorted(server.config_maps) == ["gpt-2-tails", "gpt-21-tails"]

    asyncio.run(story())


def test_a_node_that_does_not_answer_holds_up_no_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(last_words, "READ_SECONDS", 0.2)

    async def story() -> None:
        server = Server(pod(0))

        async def silent(request: web.Request) -> web.StreamResponse:
            await asyncio.Event().wait()
            raise AssertionError

        monkeypatch.setattr(server, "log", silent)
        async with running(server, tmp_path) as (_, words, _):
            await words.read(list(server.pods.values()))
            await words.read(list(server.pods.values()))
            assert server.tail(0) is None

    asyncio.run(story())


def test_many_nodes_that_do_not_answer_leave_a_connection_for_the_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a zone fails: all its pods are to go at once, and each one's log is asked for, by us and by
    whoever follows it."""

    async def story() -> None:
        gone = {"deletionTimestamp": GOING, "deletionGracePeriodSeconds": 30}
        server = Server(*(pod(index, **gone) for index in range(CONNECTIONS + 1)))
        asked = []

        async def silent(request: web.Request) -> web.StreamResponse:
            asked.append(request.match_info["pod"])
            await asyncio.Event().wait()
            raise AssertionError

        monkeypatch.setattr(server, "log", silent)
        async with running(server, tmp_path) as (_, words, _):
            await wait_until_async(lambda: len(asked) > CONNECTIONS, "logs to be asked for")
            async with asyncio.timeout(LeaseTiming().duration / 3):
                assert await words.kept_tail(JOB, 1, 0) is None, "the apiserver is asked, and answers"

    asyncio.run(story())


def test_the_end_of_a_log_is_heard_by_who_leads_again_though_the_lease_was_lost_meanwhile(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        server = Server(pod(0), pod(1, deletionTimestamp=GOING))
        server.said["gpt-1-worker-1"], server.will_say["gpt-1-worker-1"] = ["step 1"], ["saved at step 2"]
        routes = [web.get(path, server.list_or_watch) for path in (PODS, PYTORCH_JOB.resource.path, JOBS)]
        routes.append(web.get("/api/v1/namespaces/team/pods/{pod}/log", server.log))
        routes.append(web.patch("/api/v1/namespaces/team/pods/{pod}", server.patch))
        async with connected(routes, tmp_path) as connection:
            jobs, pieces = Reflector(connection, JOBS), Pieces(connection)
            words = LastWords(connection, pieces, Endpoints(pieces, jobs), jobs)
            async with meanwhile(jobs.run()), meanwhile(pieces.run()):
                async with meanwhile(words.run()):
                    await wait_until_async(lambda: server.tail(1), "what it has said so far")
                assert await words.tail_of(pod(1)) == ["step 1"]
                async with meanwhile(words.run()):
                    server.end.set()
                    await wait_until_async(lambda: "saved" in (server.tail(1) or ""), "its end")
                assert await words.tail_of(pod(1)) == ["step 1", "saved at step 2"]

    asyncio.run(story())


class _Collected(Server):
    """What is in the way is removed once it was met."""

    async def keep(self, request: web.Request) -> web.Response:
        answer = await super().keep(request)
        if answer.status == 409:
            self.config_maps.clear()
        return answer


@pytest.mark.parametrize("goes", [True, False], ids=["and goes", "and stays"])
def test_the_last_lines_of_a_large_gang_wait_for_those_of_an_earlier_job_to_go(
    goes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next attempt waits as well, so not for long; and that they are not kept is told."""
    monkeypatch.setattr("holdfast_controller.kube.engine.log", structlog.get_logger())
    monkeypatch.setattr(last_words, "KEEP_AGAIN_SECONDS", 0.01)
    earlier = JOB.model_copy(update={"metadata": Metadata(name="gpt", namespace="team", uid="job-0")})
    gang = JOB.model_copy(update={"spec": Spec(command=["python"], replicas=12)})

    async def story() -> None:
        server = (_Collected if goes else Server)(*(pod(n, "terminated") for n in range(12)))
        server.said = {f"gpt-1-worker-{n}": [f"line of {n}"] for n in range(12)}
        server.config_maps = {"gpt-1-tails": config_map(earlier, 1, {"11": "another's"}, name="gpt-1-tails")}
        async with running(server, tmp_path) as (engine, _, _):
            with capture_logs() as said:
                await engine.keep_logs(gang, 1)
        assert [line["attempt"] for line in said if "are not kept" in line["event"]] == ([] if goes else [1])
        server.pods = {}
        async with running(server, tmp_path) as (engine, _, _):
            if goes:
                assert await lines_of(engine, gang, 11) == ["line of 11"]
            else:
                with pytest.raises(NotFound, match=r"rank-11.log"):
                    await lines_of(engine, gang, 11)

    asyncio.run(story())
