"""A port that is still free when a process that has yet to start listens on it.

Whoever opens a connection, or listens on any port, is given one of the kernel's range for that: so ports are
chosen below it. (A client that keeps asking for a port of that range, while nobody listens there, may even
be given it as its own, meet itself, and hold it.) And who chooses likewise meanwhile is kept off: a port that
has had a connection which this end closed first stays in TIME_WAIT for a minute, and can then only be bound
with SO_REUSEADDR, as servers do: torchrun, uvicorn and whatever is written in Go among them.
"""

from __future__ import annotations

import errno
import random
import socket
from pathlib import Path

LOWEST, HIGHEST = 20_000, 29_999
"""Above what services are known by, below Kubernetes' node ports and Linux' usual range."""
_GIVEN = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port of `host` that nobody has. Raises OSError for a host that is not here."""
    given = int(_GIVEN.read_text(encoding="ascii").split()[0])
    below = list(range(LOWEST, min(HIGHEST + 1, given)))
    chance = random.SystemRandom()
    while below:
        try:
            return _held(host, below.pop(chance.randrange(len(below))))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise OSError(error.errno, f"{error.strerror} ({host})") from error
    return _held(host, 0)  # the kernel gives away even those: it may choose


def _held(host: str, port: int) -> int:
    with socket.socket() as probe:
        probe.bind((host, port))  # without SO_REUSEADDR: not one that somebody holds
        address: tuple[str, int] = probe.getsockname()
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(1)
        with socket.create_connection(address) as other:
            listening.accept()[0].close()
            other.recv(1)  # the end of stream: this end has closed first
    return address[1]
