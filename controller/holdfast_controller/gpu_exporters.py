"""Asks the GPU exporters of a cluster's nodes what jobs do with their GPUs.

They stand behind one name, the chart's headless Service, which resolves to all of them. One that does not
answer leaves its node's GPUs without figures; the others' are as true as before.
"""

from __future__ import annotations

import asyncio
import socket

import httpx
import structlog
from pydantic import TypeAdapter, ValidationError

from .cluster import GpuUse, Unavailable

PATH = "/jobs"
TIMEOUT_SECONDS = 5.0
AT_ONCE = 32

USES: TypeAdapter[list[GpuUse]] = TypeAdapter(list[GpuUse])
"""What an exporter answers at PATH, as JSON."""

log = structlog.get_logger(__name__)


class GpuExporters:
    """Those behind `address`, `host:port`."""

    def __init__(self, address: str):
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._turns = asyncio.Semaphore(AT_ONCE)

    async def look(self) -> list[GpuUse]:
        """What all that answer say. Raises Unavailable where there are none, or none answers."""
        try:
            found = await asyncio.get_running_loop().getaddrinfo(
                self._host, self._port, type=socket.SOCK_STREAM
            )
        except OSError as error:
            raise Unavailable(
                f"no GPU exporter is behind {self._host}: {error.strerror or error}; are there nodes with "
                "GPUs, and does the exporter's DaemonSet choose them (exporter.nodeSelector)?"
            ) from error
        hosts = sorted({address[4][0] for address in found})
        # For https alone it would read the world's certificates each time.
        async with httpx.AsyncClient(timeout=TIMEOUT_SECONDS, trust_env=False, verify=False) as client:
            answers = await asyncio.gather(*(self._ask(client, str(host)) for host in hosts))
        if all(answer is None for answer in answers):
            raise Unavailable(
                f"none of the {len(hosts)} GPU exporters behind {self._host} answers on port {self._port}"
            )
        return [use for answer in answers for use in answer or ()]

    async def _ask(self, client: httpx.AsyncClient, host: str) -> list[GpuUse] | None:
        where = f"[{host}]" if ":" in host else host
        async with self._turns:
            try:
                answer = await client.get(f"http://{where}:{self._port}{PATH}")
                answer.raise_for_status()
                return USES.validate_json(answer.content)
            except (httpx.HTTPError, ValidationError) as error:
                log.debug("a GPU exporter does not answer", host=host, error=str(error))
                return None
