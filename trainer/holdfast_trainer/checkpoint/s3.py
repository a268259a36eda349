"""The client of an S3-compatible object store: where it is, how patient one is with it, and the connection.

Where it is and who asks comes from the usual environment (`AWS_ENDPOINT_URL`, `AWS_ACCESS_KEY_ID`,
`AWS_PROFILE`, the role of a pod or a machine). A role's credentials are renewed by botocore; a file of them
it reads once, so a client that was made from an older file is not used again.
"""

from __future__ import annotations

import asyncio
import functools
import os
import socket
import threading
from typing import Any

from ..contract import ENV_STORAGE_TIMEOUT
from .errors import ObjectStoreError

SCHEME = "s3://"
TIMEOUT_SECONDS = 30.0
"""How long a request may stand still before it counts as lost, unless the environment says."""
TRIES = 6
"""Of each request, unless AWS_MAX_ATTEMPTS is set."""
CONNECTIONS = 32


def endpoint() -> str:
    """Where requests go, in words."""
    env = os.environ
    return env.get("AWS_ENDPOINT_URL_S3") or env.get("AWS_ENDPOINT_URL") or "Amazon S3"


def timeout() -> float:
    """Seconds. Raises ObjectStoreError where the environment gives no such number."""
    text = os.environ.get(ENV_STORAGE_TIMEOUT) or str(TIMEOUT_SECONDS)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise ObjectStoreError(
            f"environment {ENV_STORAGE_TIMEOUT}={text!r} is not a number of seconds above 0"
        )
    return seconds


def tries() -> int:
    """How often a request is made in all."""
    told = os.environ.get("AWS_MAX_ATTEMPTS", "")
    return int(told) if told.isdigit() and int(told) else TRIES


def client() -> Any:
    """Of this process and what its environment and files say now, an s3fs.S3FileSystem.

    Raises ObjectStoreError.
    """
    who = os.environ.get("AWS_ACCESS_KEY_ID"), os.environ.get("AWS_SECRET_ACCESS_KEY")
    return _connect(os.getpid(), endpoint(), (*who, *_files()), timeout())


def _files() -> list[object]:
    """Of the files that credentials may come from, what is another once they are written anew."""
    stamps: list[object] = []
    for variable, usual in (("AWS_SHARED_CREDENTIALS_FILE", "credentials"), ("AWS_CONFIG_FILE", "config")):
        try:
            found = os.stat(os.path.expanduser(os.environ.get(variable) or f"~/.aws/{usual}"))
            stamps.append((found.st_ino, found.st_mtime_ns, found.st_size))
        except OSError:
            stamps.append(None)
    return stamps


@functools.lru_cache(maxsize=8)
def _connect(pid: int, where: str, who: object, patience: float) -> Any:
    """It takes half a second to make. Raises ObjectStoreError without s3fs."""
    try:
        import s3fs
    except ImportError as error:
        raise ObjectStoreError(
            f"s3:// needs s3fs, which is not installed ({error}): pip install 'holdfast[trainer,s3]'"
        ) from error
    config = {
        "connect_timeout": min(10.0, patience),
        "read_timeout": patience,
        "max_pool_connections": CONNECTIONS,
        "retries": {"mode": "standard", "total_max_attempts": 1},
        "connector_args": {"resolver": _resolver()},
    }
    system = s3fs.S3FileSystem(
        anon=False, config_kwargs=config, skip_instance_cache=True, use_listings_cache=False
    )
    system.retries = 1  # requests are made again by bucket.py
    return system


def _resolver() -> Any:
    """Looks names up in a thread of its own.

    The usual one uses an executor of the standard library, and those refuse work once the interpreter is
    ending, which is when a program that left its loop early makes its last save.
    """
    from aiohttp.abc import AbstractResolver, ResolveResult

    class Resolver(AbstractResolver):
        async def resolve(
            self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
        ) -> list[ResolveResult]:
            loop = asyncio.get_running_loop()
            answer: asyncio.Future[list[Any]] = loop.create_future()

            def settle(found: list[Any] | OSError) -> None:
                if not answer.done():
                    answer.set_exception(found) if isinstance(found, OSError) else answer.set_result(found)

            def look_up() -> None:
                found: list[Any] | OSError
                try:
                    found = socket.getaddrinfo(host, port, family=family, type=socket.SOCK_STREAM)
                except OSError as error:
                    found = error
                loop.call_soon_threadsafe(settle, found)

            try:
                threading.Thread(target=look_up, name="look-up", daemon=True).start()
            except RuntimeError:  # no more threads, as when the interpreter is ending
                look_up()
            return [
                ResolveResult(
                    hostname=host,
                    host=str(address[0]),
                    port=int(address[1]),
                    family=kind,
                    proto=proto,
                    flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
                )
                for kind, _, proto, _, address in await answer
            ]

        async def close(self) -> None:
            pass

    return Resolver()
