"""A pod's output as lines, as `kubectl logs` gives it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from holdfast_controller.cluster import Invalid, NotFound
from holdfast_controller.lines import Lines

from .connection import Connection, Document
from .pieces import pod_path
from .pod_state import kind_of_pod

FIRST_LINE_SECONDS = 0.5
_LOST = re.compile(rb"unable to retrieve container logs for [\w-]+://[0-9a-f]+\s*")
"""What a kubelet sends, as if it were the log, once it has removed the container of a pod that is going."""


async def pod_lines(
    connection: Connection, pod: Document, *, tail: int | None, follow: bool, over: Callable[[], bool]
) -> AsyncGenerator[str]:
    """Lines without their ends; with `follow` until the container ends. Raises NotFound, also where the node
    has the log no more.

    A container that has not started has no lines; with `follow` they are waited for until `over`.
    """
    path = pod_path(pod)
    query: dict[str, str | int | bool] = {"container": kind_of_pod(pod).container}
    if tail is not None:
        query["tailLines"] = tail
    if follow:
        query["follow"] = True
    while True:
        try:
            async with aclosing(connection.stream(f"{path}/log", query, silence_seconds=None)) as chunks:
                lines = Lines()
                async for chunk in chunks:
                    for line in lines.take(chunk):
                        yield line
                if _LOST.fullmatch(lines.rest):
                    raise NotFound(f"{path}: the node has removed its container, and the log with it")
                for line in lines.end():
                    yield line
                return
        except Invalid:  # 400: it is waiting to start
            if not follow or over():
                return
        await asyncio.sleep(FIRST_LINE_SECONDS)
