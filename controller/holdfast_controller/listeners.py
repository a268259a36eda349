"""Which users listen on a port of this machine, as the kernel says (/proc/net/tcp, proc_net_tcp(5)).

A port above 1023 is anybody's: where a controller is not there, whoever shares its machine may listen in its
place, and a token sent there is his.
"""

from __future__ import annotations

import ipaddress
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
"""Of this machine itself, as an address names it."""
WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Who listens on all addresses, and how this machine reaches him."""
HERE = (*LOOPBACK_NAMES, *WILDCARDS)
"""What leads to this machine and to no other; by the last two a controller says where it listens."""
TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
LISTENS = "0A"
WORD = 4


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`. A name other than localhost is taken to be wide."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listenable(host: str) -> str:
    """`host`, but where this machine has no IPv6, its `::` (all addresses, of IPv4 too) is `0.0.0.0`."""
    return "0.0.0.0" if host == "::" and not socket.has_dualstack_ipv6() else host


def hear_ipv4_too(bound: socket.socket) -> None:
    """With one of IPv6, whatever is the system's own choice; before it is bound."""
    if bound.family == socket.AF_INET6:
        bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)


def users_listening(host: str, port: int) -> set[int]:
    """The user ids of those that `host`, an address of this machine or `localhost`, leads to; empty where
    nobody listens, or where the kernel does not say."""
    reached = ("127.0.0.1", "::1") if host == "localhost" else (WILDCARDS.get(host, host),)
    found = {ipaddress.ip_address(address) for address in reached}
    anywhere = {ipaddress.ip_address("::")}  # takes IPv4 as well, unless it says otherwise
    anywhere |= {ipaddress.ip_address("0.0.0.0")} if any(one.version == 4 for one in found) else set()
    return {user for address, of, user in _listeners() if of == port and address in found | anywhere}


def _listeners() -> Iterator[tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int, int]]:
    for table in TABLES:
        try:
            lines = table.read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            _, local, _, state, _, _, _, user, *_ = line.split()
            if state == LISTENS:
                address, port = local.split(":")
                yield _address(address), int(port, 16), int(user)


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Words of four bytes, each in the order of this machine."""
    raw = bytes.fromhex(text)
    if sys.byteorder == "little":
        raw = b"".join(raw[at : at + WORD][::-1] for at in range(0, len(raw), WORD))
    address = ipaddress.ip_address(raw)
    return getattr(address, "ipv4_mapped", None) or address
