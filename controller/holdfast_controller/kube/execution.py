"""Run something of ours inside a replica's container, as `kubectl exec` does.

The program (../inside.py) goes by standard input to the container's `python`, which every replica has, for
torchrun runs by it; so neither its image nor its disk need anything for it. The stream is the apiserver's
websocket, `v4.channel.k8s.io`: the first byte of a message is its channel.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from kubernetes.aio.stream import ws_client

from holdfast_controller.cluster import HoldfastError, Invalid, NotReady, Unavailable

from .connection import Connection, Document
from .pieces import pod_path
from .pod_state import kind_of_pod

PROGRAM = (Path(__file__).parents[1] / "inside.py").read_text(encoding="utf-8")
COMMAND = (
    "python",
    "-I",
    "-c",
    f"import sys; exec(compile(sys.stdin.read({len(PROGRAM)}), 'holdfast', 'exec'))",
)
"""Its standard input stays open: the protocol cannot end it."""
ENOUGH = 256 * 1024
"""Characters of its output that are read: whoever runs in the container could say more."""


@dataclass
class Output:
    """What came over the stream so far."""

    said: str = ""
    complained: str = ""
    status: Mapping[str, Any] = field(default_factory=dict)
    """How the command ended, a `Status` document; empty until it has."""

    def take(self, message: bytes) -> None:
        channel, text = message[:1], message[1:].decode("utf-8", errors="replace")
        if channel == bytes([ws_client.STDOUT_CHANNEL]):
            self.said = (self.said + text)[-ENOUGH:]
        elif channel == bytes([ws_client.STDERR_CHANNEL]):
            self.complained = (self.complained + text)[-ENOUGH:]
        elif channel == bytes([ws_client.ERROR_CHANNEL]) and text:
            self.status = json.loads(text)


async def inside(connection: Connection, pod: Document, action: str, word: str) -> Document:
    """What the program says of an action of its in this pod.

    Raises NotReady where the action says that it cannot be done yet, Invalid where the container cannot run
    it, Unavailable where the stream ends early. It may take as long as the container takes.
    """
    command = (*COMMAND, action, word)
    output = Output()
    async with connection.command(f"{pod_path(pod)}/exec", kind_of_pod(pod).container, command) as socket:
        await socket.send_bytes(bytes([ws_client.STDIN_CHANNEL]) + PROGRAM.encode())
        async for message in socket:
            if message.type not in (aiohttp.WSMsgType.BINARY, aiohttp.WSMsgType.TEXT):
                break
            data = message.data
            output.take(data if isinstance(data, bytes) else data.encode())
            if output.status:
                break
    return outcome(pod["metadata"]["name"], output)


def outcome(name: str, output: Output) -> Document:
    """What the program said in pod `name`; raises as `inside` does. Pure."""
    if not output.status:
        raise Unavailable(f"{name}: the stream to its container ended early; try again")
    if output.status.get("status") != "Success":
        raise _failure(name, output)
    try:
        told = json.loads(output.said.strip().rpartition("\n")[2])
        if not isinstance(told, dict):
            raise TypeError(f"{told!r} is no object")
    except (ValueError, TypeError, RecursionError) as error:
        raise Invalid(
            f"{name}: `python` in its image is no Python 3.9 or newer: it answers {output.said[-80:]!r} to a "
            "program; drills freeze and oom, and stacks, need one"
        ) from error
    if "error" in told:
        raise NotReady(f"{name}: {told['error']}")
    return told


def _failure(name: str, output: Output) -> HoldfastError:
    said = (output.complained.strip() or str(output.status.get("message", ""))).rpartition("\n")[2]
    causes = (output.status.get("details") or {}).get("causes") or []
    if output.status.get("reason") == "NonZeroExitCode" and any(
        one.get("message") == "137" for one in causes
    ):
        return NotReady(f"{name}: its container ended meanwhile; try again")
    return Invalid(
        f"{name}: its container cannot run a program of Holdfast's, which needs `python`, 3.9 or newer, in "
        f"the image: {said[:300]}"
    )
