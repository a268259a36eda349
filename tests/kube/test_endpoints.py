"""Pods that answer with what they like: the honest one is heard, and nobody's answer ends the others'."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from waiting import wait_until_async

from holdfast_controller.jobs import Metadata, Spec, TrainingJob
from holdfast_controller.kube import endpoint
from holdfast_controller.kube.connection import connect
from holdfast_controller.kube.endpoint import Endpoints
from holdfast_controller.kube.pieces import Pieces
from holdfast_controller.pod_template import attempt_labels
from holdfast_trainer.contract import Progress

Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


def job(name: str, namespace: str = "team-a") -> TrainingJob:
    return TrainingJob(
        metadata=Metadata(name=name, namespace=namespace, uid=f"uid-{name}"), spec=Spec(command=["true"])
    )


def pod(of: TrainingJob, address: str, version: int, **labels: str) -> dict[str, Any]:
    return {
        "metadata": {
            "name": f"{of.metadata.name}-1-worker-0",
            "namespace": of.metadata.namespace,
            "uid": f"pod-{version}",
            "resourceVersion": str(version),
            "labels": {**attempt_labels(of, 1), "training.kubeflow.org/replica-index": "0", **labels},
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


def training(step: int) -> Answer:
    """One step further each time it is asked."""
    steps = itertools.count(step)

    async def answer(writer: asyncio.StreamWriter) -> None:
        now = Progress(attempt=1, step=next(steps), total_steps=99, durable_step=0, phase="training")
        await says(now.to_json())(writer)

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
async def answering(**answers: Answer) -> AsyncIterator[tuple[dict[str, str], int]]:
    """A server for each, on an address of its own and one port, as pods have; its name to its address."""
    servers, places, port = [], {}, 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answer: Answer) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            await answer(writer)
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


def test_whatever_a_pod_answers_the_others_are_heard(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setattr(endpoint, "WHOLE_SECONDS", 0.5)
    kubeconfig = tmp_path_factory.mktemp("none") / "config"
    kubeconfig.write_text(json.dumps(NOWHERE))
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
        connection = await connect(kubeconfig)
        pieces = Pieces(connection)
        endpoints = Endpoints(pieces)
        honest = job("honest")
        async with answering(honest=training(1), liar=training(50), **hostile) as (places, port):
            monkeypatch.setattr(endpoint, "DEFAULT_PORT", port)
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
            asking = asyncio.create_task(endpoints.run())

            def heard(name: str) -> int:
                known = endpoints.progress_of(job(name), 1)
                return known.step if known else 0

            try:
                await wait_until_async(lambda: heard("honest") >= 3 or asking.done(), "three rounds")
                assert not asking.done()
                assert heard("honest") < 50
                assert not any(heard(name) for name in (*hostile, "odd", "nameless") if name != "wordy")
            finally:
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
                await connection.close()

    asyncio.run(story())


NOWHERE = {
    "apiVersion": "v1",
    "kind": "Config",
    "current-context": "none",
    "contexts": [{"name": "none", "context": {"cluster": "none", "user": "none"}}],
    "clusters": [{"name": "none", "cluster": {"server": "http://127.0.0.1:9"}}],
    "users": [{"name": "none", "user": {}}],
}
