"""Pods that answer with what they like: the honest one is heard, nobody's answer ends the others', and what
was heard is forgotten when nobody needs it."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from misbehaving_apiserver import Server, misbehaving
from small_apiserver import connected_to
from waiting import wait_until_async

from holdfast_controller import heartbeat
from holdfast_controller.cluster import NotReady
from holdfast_controller.gang import attempt_uid
from holdfast_controller.jobs import Metadata, Phase, Spec, TrainingJob
from holdfast_controller.kube import endpoint, steps
from holdfast_controller.kube.endpoint import Endpoints
from holdfast_controller.kube.pieces import Pieces
from holdfast_controller.kube.reflector import Reflector
from holdfast_controller.kube.resource import JOBS
from holdfast_controller.pod_template import attempt_labels
from holdfast_trainer.contract import ATTEMPT_HEADER, Progress

Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


def job(name: str, namespace: str = "team-a") -> TrainingJob:
    return TrainingJob(
        metadata=Metadata(name=name, namespace=namespace, uid=f"uid-{name}"), spec=Spec(command=["true"])
    )


def document(of: TrainingJob, version: int, phase: Phase = Phase.RUNNING, attempt: int = 1) -> dict[str, Any]:
    """The job as its controller has written it."""
    meta = {"name": of.metadata.name, "namespace": of.metadata.namespace, "uid": of.metadata.uid}
    status = {"phase": phase.value, "attempt": attempt}
    return {"metadata": {**meta, "resourceVersion": str(version)}, "spec": {}, "status": status}


def pod(of: TrainingJob, address: str, version: int, attempt: int = 1, **labels: str) -> dict[str, Any]:
    return {
        "metadata": {
            "name": f"{of.metadata.name}-{attempt}-worker-0",
            "namespace": of.metadata.namespace,
            "uid": f"pod-{version}",
            "resourceVersion": str(version),
            "labels": {**attempt_labels(of, attempt), "training.kubeflow.org/replica-index": "0", **labels},
        },
        "status": {
            "podIP": address,
            "containerStatuses": [{"name": "pytorch", "state": {"running": {}}}],
        },
    }


def says(text: str, status: str = "200 OK", *headers: str) -> Answer:
    async def answer(writer: asyncio.StreamWriter) -> None:
        lines = "\r\n".join([f"HTTP/1.1 {status}", *headers, f"Content-Length: {len(text)}", "", text])
        writer.write(lines.encode())

    return answer


def training(step: int, attempt: int = 1, *headers: str) -> Answer:
    """One step further each time it is asked."""
    steps = itertools.count(step)

    async def answer(writer: asyncio.StreamWriter) -> None:
        now = Progress(attempt=attempt, step=next(steps), total_steps=99, durable_step=0, phase="training")
        await says(now.to_json(), "200 OK", *headers)(writer)

    return answer


async def endless(writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + b"\r\n")
    while not writer.is_closing():
        writer.write(b"[" * 65536)
        await writer.drain()


async def dripping(writer: asyncio.StreamWriter) -> None:
    """Always in time for the next byte, never at the end."""
    writer.write(HEAD + b"\r\n")
    while not writer.is_closing():
        writer.write(b" ")
        await writer.drain()
        await asyncio.sleep(0.05)


@asynccontextmanager
async def answering(
    ledger: str = "", *headers: str, **answers: Answer
) -> AsyncIterator[tuple[dict[str, str], int]]:
    """A server for each, on an address of its own and one port, as pods have; its name to its address. All of
    them have this ledger, told with these headers."""
    servers, places, port = [], {}, 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answer: Answer) -> None:
        try:
            asked = await reader.readuntil(b"\r\n\r\n")
            await (says(ledger, "200 OK", *headers) if asked.startswith(b"GET /ledger ") else answer)(writer)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    for number, (name, answer) in enumerate(answers.items(), start=1):
        address = f"127.77.0.{number}"
        server = await asyncio.start_server(
            lambda reader, writer, answer=answer: serve(reader, writer, answer), address, port
        )
        port = server.sockets[0].getsockname()[1]
        servers.append(server)
        places[name] = address
    try:
        yield places, port
    finally:
        for server in servers:
            server.close()


@asynccontextmanager
async def controller(directory: Path) -> AsyncIterator[tuple[Server, Pieces, Reflector, Endpoints]]:
    """One replica of it, whether it leads or not, on an apiserver that has the jobs that are put there."""
    async with misbehaving() as server, connected_to(server.port, directory) as connection:
        pieces, jobs = Pieces(connection), Reflector(connection, JOBS)
        endpoints = Endpoints(pieces, jobs)
        working = [asyncio.create_task(work) for work in (jobs.run(), endpoints.run())]
        try:
            await jobs.synced()
            yield server, pieces, jobs, endpoints
            assert not any(task.done() for task in working)
        finally:
            for task in working:
                task.cancel()
            await asyncio.gather(*working, return_exceptions=True)


def test_whatever_a_pod_answers_the_others_are_heard(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(endpoint, "WHOLE_SECONDS", 0.5)
    hostile = {
        "endless": endless,
        "dripping": dripping,
        "deep": says("[" * 60_000),
        "redirecting": says("", "302 Found", "Location: http://127.77.0.1/"),
        "wordy": says(json.dumps({"attempt": 1, "step": "many", "phase": []})),
        "listing": says("[1, 2]"),
        "silent": says(""),
        "broken": says("no", "200 OK", "Content-Encoding: gzip"),
    }

    async def story() -> None:
        honest = job("honest")
        async with (
            answering(honest=training(1), liar=training(50), **hostile) as (places, port),
            controller(tmp_path) as (_, pieces, jobs, endpoints),
        ):
            monkeypatch.setattr(endpoint, "DEFAULT_PORT", port)
            for number, name in enumerate(("honest", "odd", "nameless", *hostile), start=1):
                jobs.wrote(document(job(name), number))
            pods = [pod(job(name), places[name], number) for number, name in enumerate(hostile, start=1)]
            # One of another namespace has the labels of the honest one, others have labels of no sense.
            liar = pod(honest, places["liar"], 50)
            liar["metadata"]["namespace"] = "team-b"
            pods += [liar, pod(honest, places["honest"], 51)]
            pods += [pod(job("odd"), places["liar"], 52, **{"training.kubeflow.org/replica-index": "first"})]
            nameless = pod(job("nameless"), places["liar"], 53)
            del nameless["metadata"]["labels"]["holdfast.dev/job"]
            for one in [*pods, nameless]:
                pieces.pods.wrote(one)

            def heard(name: str) -> int:
                known = endpoints.progress_of(job(name), 1)
                return known.step if known else 0

            await wait_until_async(lambda: heard("honest") >= 3, "three rounds")
            assert heard("honest") < 50
            assert not any(heard(name) for name in (*hostile, "odd", "nameless") if name != "wordy")

    asyncio.run(story())


def test_a_ledger_that_did_not_come_is_asked_for_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What was in it was shown only once another checkpoint was durable, hours later perhaps."""
    asked, rounds = 0, 0

    async def torn_at_first(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked, rounds
        if (await reader.readuntil(b"\r\n\r\n")).startswith(b"GET /ledger "):
            asked += 1
            if asked > 2:  # the client itself tries twice
                await says('{"event": "checkpoint", "step": 10}')(writer)
        else:
            rounds += 1
            await says(Progress(1, 12, 99, 10, "training").to_json())(writer)
        await writer.drain()
        writer.close()

    async def story() -> None:
        gpt = job("gpt")
        server = await asyncio.start_server(torn_at_first, "127.77.0.1", 0)
        monkeypatch.setattr(endpoint, "DEFAULT_PORT", server.sockets[0].getsockname()[1])
        async with server, controller(tmp_path) as (_, pieces, jobs, endpoints):
            jobs.wrote(document(gpt, 1))
            pieces.pods.wrote(pod(gpt, "127.77.0.1", 2))

            async def comes() -> bool:
                return bool(await endpoints.ledger_of(gpt))

            await wait_until_async(comes, "the ledger")
            heard = endpoints.progress_of(gpt, 1)
            assert heard is not None
            assert heard.step == 12
            seen = rounds
            await wait_until_async(lambda: rounds > seen + 1, "another round")
            assert asked == 3, "it is there, and nothing new is durable"

    asyncio.run(story())


def test_an_address_that_another_attempt_has_by_now_tells_nothing_of_the_one_before(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As where a node is lost: Kubernetes says for minutes that its pods run, at addresses given away."""
    lost, new = job("lost"), job("new")
    marked = f"{ATTEMPT_HEADER}: {attempt_uid(new, 1)}"
    line = json.dumps({"event": "checkpoint", "attempt": 1, "step": 7})

    async def story() -> None:
        async with (
            answering(line, marked, there=training(1, 1, marked)) as (places, port),
            controller(tmp_path) as (_, pieces, jobs, endpoints),
        ):
            monkeypatch.setattr(endpoint, "DEFAULT_PORT", port)
            monkeypatch.setattr(steps, "DEFAULT_PORT", port)
            pods = {one.key: pod(one, places["there"], number) for number, one in enumerate((lost, new), 1)}
            for number, one in enumerate((lost, new), start=1):
                jobs.wrote(document(one, number))
                pieces.pods.wrote(pods[one.key])

            def told() -> int:
                known = endpoints.progress_of(new, 1)
                return known.step if known else 0

            await wait_until_async(lambda: told() >= 5, "three rounds, in which both are asked")
            assert [line["step"] for line in await endpoints.ledger_of(new)] == [7]
            lost.status.attempt = 1
            with pytest.raises(NotReady, match="rank 0 of team-a/lost serves no steps"):
                await steps.read_steps(lost, [pods[lost.key]], asyncio.Lock())
            assert endpoints.progress_of(lost, 1) is None
            assert await endpoints.ledger_of(lost) == []

    asyncio.run(story())


def test_a_network_that_keeps_the_controller_out_is_told_and_not_the_program_blamed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A namespace whose NetworkPolicy lets nobody in: packets to its pods are dropped. Here the queue of who
    wants a connection is full. A program without `Run` refuses, and nothing is said of the network."""

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await training(1)(writer)
        writer.close()
        await writer.wait_closed()

    async def story() -> None:
        shut, plain = job("shut"), job("plain")
        with socket.create_server(("127.77.1.1", 0), backlog=0) as full, ExitStack() as waiting:
            port = full.getsockname()[1]
            for _ in range(2):
                one = waiting.enter_context(socket.socket())
                one.setblocking(False)
                one.connect_ex(full.getsockname())
            monkeypatch.setattr(endpoint, "DEFAULT_PORT", port)
            async with controller(tmp_path) as (_, pieces, jobs, endpoints):
                for number, (of, place) in enumerate(((shut, "127.77.1.1"), (plain, "127.77.1.2")), start=1):
                    jobs.wrote(document(of, number))
                    pieces.pods.wrote(pod(of, place, number))
                await wait_until_async(lambda: endpoints.kept_out_of(shut, 1) != "", "it to be told")
                said = f"no connection to rank 0 at 127.77.1.1:{port} (no answer in time): see whether a Netw"
                assert said in endpoints.kept_out_of(shut, 1)
                assert endpoints.kept_out_of(plain, 1) == ""
                waiting.close()
                full.close()
                server = await asyncio.start_server(serve, "127.77.1.1", port)
                async with server:
                    await wait_until_async(lambda: endpoints.kept_out_of(shut, 1) == "", "it to be let in")
                    await wait_until_async(lambda: endpoints.progress_of(shut, 1) is not None, "its figures")

    monkeypatch.setattr(endpoint, "TIMEOUT_SECONDS", 0.2)
    asyncio.run(story())


def test_of_a_rank_0_that_stands_still_the_network_is_not_blamed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its kernel takes connections for it, until the queue of them is full: then it looks as if somebody kept
    the controller out. Who then does so in words is heard."""

    def takes_none(address: tuple[str, int]) -> bool:
        try:
            socket.create_connection(address, 0.1).close()
        except TimeoutError:
            return True
        return False

    async def story() -> None:
        frozen = job("frozen")
        denies = says("RBAC: access denied", "403 Forbidden")
        async with (
            answering(denied=denies) as (places, port),
            controller(tmp_path) as (_, pieces, jobs, endpoints),
        ):
            monkeypatch.setattr(endpoint, "DEFAULT_PORT", port)
            with socket.create_server(("127.77.1.1", port), backlog=1) as stopped:

                def unheard() -> float:
                    silence = endpoints.silence_of(frozen, 1)
                    return 0.0 if silence is None or not silence.unanswered else silence.unheard

                jobs.wrote(document(frozen, 1))
                pieces.pods.wrote(pod(frozen, "127.77.1.1", 1))
                await wait_until_async(lambda: unheard() > 0, "a connection to be taken, and not answered")
                await wait_until_async(lambda: takes_none(stopped.getsockname()), "its queue to be full")
                since = unheard()
                more = endpoint.KEPT_OUT_TRIES + 1
                await wait_until_async(lambda: unheard() > since + more, "it to be asked again and again")
                assert endpoints.kept_out_of(frozen, 1) == ""

            pieces.pods.wrote(pod(frozen, places["denied"], 2))
            await wait_until_async(lambda: endpoints.kept_out_of(frozen, 1) != "", "it to be told")
            assert "answers the controller 403 Forbidden" in endpoints.kept_out_of(frozen, 1)

    monkeypatch.setattr(endpoint, "TIMEOUT_SECONDS", 0.2)
    asyncio.run(story())


@pytest.mark.parametrize("reset", [True, False])
def test_a_mesh_that_keeps_the_controller_out_is_told_and_not_the_program_blamed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, reset: bool
) -> None:
    """The proxy in a pod of a mesh takes every connection, and ends those that are not of the mesh, or says
    what its policy is."""
    denies = says("RBAC: access denied", "403 Forbidden")

    async def ends(writer: asyncio.StreamWriter) -> None:
        if reset:
            writer.get_extra_info("socket").setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, b"\x01" + b"\0" * 7
            )

    async def story() -> None:
        async with (
            answering(meshed=ends, denied=denies, heard=training(1)) as (places, port),
            controller(tmp_path) as (_, pieces, jobs, endpoints),
        ):
            monkeypatch.setattr(endpoint, "DEFAULT_PORT", port)
            for number, name in enumerate(places, start=1):
                jobs.wrote(document(job(name), number))
                pieces.pods.wrote(pod(job(name), places[name], number))
            await wait_until_async(lambda: endpoints.kept_out_of(job("meshed"), 1) != "", "it to be told")
            said = (
                f"listens for rank 0 at {places['meshed']}:{port} ends the controller's connections without"
            )
            assert said in endpoints.kept_out_of(job("meshed"), 1)
            await wait_until_async(
                lambda: endpoints.kept_out_of(job("denied"), 1) != "", "that one to be told"
            )
            said = (
                f"rank 0 at {places['denied']}:{port} answers the controller 403 Forbidden: see whether a po"
            )
            assert said in endpoints.kept_out_of(job("denied"), 1)
            assert endpoints.kept_out_of(job("heard"), 1) == ""

    asyncio.run(story())


@pytest.mark.parametrize("limit", [600.0, None], ids=["hangs are looked for", "they are not"])
def test_a_job_whose_rank_0_is_heard_no_more_is_looked_at_for_that(
    limit: float | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Once: nothing else of it changes, and how fast it is would be told for minutes as if it were so. With
    hangSeconds: 0 nothing that it might be too long for is told, and it was."""
    answers = [True]

    async def there(writer: asyncio.StreamWriter) -> None:
        if answers[0]:
            now = Progress(1, 7, 99, 0, "training", quiet_seconds=0.0, quiet_limit=limit)
            await says(now.to_json())(writer)

    async def story() -> None:
        gone = job("gone")
        async with (
            answering(gone=there) as (places, port),
            controller(tmp_path) as (_, pieces, jobs, endpoints),
        ):
            monkeypatch.setattr(endpoint, "DEFAULT_PORT", port)
            jobs.wrote(document(gone, 1))
            pieces.pods.wrote(pod(gone, places["gone"], 1))
            await wait_until_async(lambda: endpoints.silence_of(gone, 1) is not None, "it to be heard")
            answers[0] = False
            woken: list[float] = []

            def unheard() -> float:
                silence = endpoints.silence_of(gone, 1)
                return silence.unheard if silence else 0.0

            monkeypatch.setattr(pieces, "wake", lambda key: woken.append(unheard()))
            await wait_until_async(lambda: unheard() > 3.0, "some rounds without an answer")
            (seconds,) = (one for one in woken if one)  # at nought it was heard
            assert 0.5 < seconds < 3.0
            woken.clear()
            answers[0] = True
            await wait_until_async(lambda: woken, "it to be looked at, for it is heard again")
            assert woken == [0.0]

    monkeypatch.setattr(heartbeat, "STILL_SECONDS", 0.5)
    monkeypatch.setattr(endpoint, "KEPT_OUT_TRIES", 100)  # that is told of too, and is not the subject
    asyncio.run(story())


async def silent(writer: asyncio.StreamWriter) -> None:
    writer.close()


@pytest.mark.parametrize(
    "instead",
    [
        pytest.param(silent, id="nobody"),
        pytest.param(says("upstream connect error", "503 Service Unavailable"), id="its mesh"),
        pytest.param(training(1, 7), id="an attempt of another job"),
        pytest.param(says("<html>"), id="no progress"),
    ],
)
def test_a_job_whose_rank_0_only_a_controller_before_this_one_has_heard_is_looked_at_for_that(
    instead: Answer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nor is it heard where something else answers in its place, as the service mesh of its pod."""

    async def story() -> None:
        gone = job("gone")
        async with (
            answering(gone=instead) as (places, port),
            controller(tmp_path) as (_, pieces, jobs, endpoints),
        ):
            monkeypatch.setattr(endpoint, "DEFAULT_PORT", port)
            woken: list[str] = []
            monkeypatch.setattr(pieces, "wake", woken.append)
            jobs.wrote(document(gone, 1))
            pieces.pods.wrote(pod(gone, places["gone"], 1))
            await wait_until_async(lambda: gone.key in woken, "it to be looked at")
            silence = endpoints.silence_of(gone, 1)
            assert silence is not None
            assert silence.outdates
            assert not silence.over

    monkeypatch.setattr(heartbeat, "STILL_SECONDS", 0.5)
    monkeypatch.setattr(endpoint, "KEPT_OUT_TRIES", 100)  # that is told of too, and is not the subject
    asyncio.run(story())


def test_every_replica_of_the_controller_forgets_what_nobody_needs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also one that only stands by, which is asked for nothing and deletes nothing."""
    ledger = json.dumps({"event": "attempt_start", "attempt": 1, "time": 1_777_636_800.0})

    async def story() -> None:
        over, deleted, again, steady = (job(name) for name in ("over", "deleted", "again", "steady"))
        answers = {name: training(1) for name in ("over", "deleted", "again", "steady")}
        async with (
            answering(ledger, again_2=training(1, attempt=2), **answers) as (places, port),
            controller(tmp_path) as (_, pieces, jobs, endpoints),
        ):
            monkeypatch.setattr(endpoint, "DEFAULT_PORT", port)
            all_of_them = (over, deleted, again, steady)
            for number, one in enumerate(all_of_them, start=1):
                jobs.wrote(document(one, number))
                pieces.pods.wrote(pod(one, places[one.metadata.name], number))
            await wait_until_async(
                lambda: all(endpoints.progress_of(one, 1) is not None for one in all_of_them), "all are heard"
            )
            assert await endpoints.ledger_of(over) == [json.loads(ledger)]

            ended = {"containerStatuses": [{"name": "pytorch", "state": {"terminated": {}}}]}
            for number, one in enumerate((over, deleted, again), start=11):
                pieces.pods.wrote({**pod(one, places[one.metadata.name], number), "status": ended})
            jobs.wrote(document(over, 21, Phase.SUCCEEDED))
            jobs.wrote(document(job("deleted").model_copy(update={"metadata": deleted.metadata.model_copy(
                update={"uid": "its-successor"})}), 22))  # fmt: skip
            jobs.wrote(document(again, 23, Phase.RECOVERING, attempt=2))
            pieces.pods.wrote(pod(again, places["again_2"], 24, attempt=2))
            await wait_until_async(
                lambda: not any(endpoints.progress_of(one, 1) for one in (over, deleted, again)),
                "nothing is left of what is over",
            )
            assert not any(endpoints.silence_of(one, 1) for one in (over, deleted, again))
            assert [await endpoints.ledger_of(one) for one in (over, deleted)] == [[], []]
            assert await endpoints.ledger_of(again) == [json.loads(ledger)], "it goes on"
            await wait_until_async(lambda: endpoints.progress_of(again, 2) is not None, "the next is heard")
            assert endpoints.progress_of(steady, 1) is not None

    asyncio.run(story())


def test_a_long_ledger_takes_less_memory_than_its_text(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    line = {"event": "checkpoint", "attempt": 1, "bytes": 1 << 30, "seconds": 1.5, "stall_seconds": 0.01}
    lines = [{**line, "step": 50 * n, "time": 1_777_636_800.0 + 60 * n} for n in range(20_000)]
    text = "\n".join(map(json.dumps, lines))

    async def story() -> None:
        one = job("long")
        async with (
            answering(text, long=training(1)) as (places, port),
            controller(tmp_path) as (_, pieces, jobs, endpoints),
        ):
            monkeypatch.setattr(endpoint, "DEFAULT_PORT", port)
            jobs.wrote(document(one, 1))
            tracemalloc.start()
            try:
                pieces.pods.wrote(pod(one, places["long"], 1))

                def steps() -> int:
                    known = endpoints.progress_of(one, 1)
                    return known.step if known is not None else 0

                await wait_until_async(lambda: steps() >= 2, "the next round")
                taken, _ = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
            assert await endpoints.ledger_of(one) == lines
            assert taken < len(text) / 2

    asyncio.run(story())
