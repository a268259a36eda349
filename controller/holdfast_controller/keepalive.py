"""Connections on which nothing may come for hours, as of a log that is followed.

Where the other end is gone without a word, as with its machine, or where a balancer on the way has forgotten
the connection, whoever only listens would do so for ever. It is the kernel that finds out, a minute after the
last byte.
"""

from __future__ import annotations

import socket

_PROBES = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
"""Seconds until the first probe and between two, and how many of them are not answered."""
PROBED = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    *((socket.IPPROTO_TCP, getattr(socket, name), n) for name, n in _PROBES.items() if hasattr(socket, name)),
]
"""Options of a socket. Not every system lets a program say how often."""
