"""Between the choice of a port and the server that listens on it, seconds pass and others ask for ports."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from holdfast_controller.local import ports
from holdfast_controller.local.ports import HIGHEST, LOWEST, free_port


def test_a_port_is_kept_for_the_server_that_names_it() -> None:
    given = [free_port() for _ in range(20)]
    assert len(set(given)) == 20, "each is given once"
    for port in given:
        with socket.socket() as passer_by, pytest.raises(OSError, match="Address already in use"):
            passer_by.bind(("127.0.0.1", port))
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=60)
        for host in ("127.0.0.1", ""):
            with socket.create_server((host, port)) as server:  # it sets SO_REUSEADDR, as servers do
                assert server.getsockname()[1] == port


def test_it_is_none_that_the_kernel_gives_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert LOWEST <= free_port() <= HIGHEST
    given = tmp_path / "ip_local_port_range"
    monkeypatch.setattr(ports, "_GIVEN", given)
    monkeypatch.setattr(ports, "LOWEST", 17_000)  # where no other test chooses
    given.write_text("17002\t60999\n")
    assert {free_port(), free_port()} == {17_000, 17_001}, "both that are left"
    assert free_port() not in (17_000, 17_001), "one of the kernel's, as none is left"
    given.write_text("1024\t65535\n")
    assert free_port() >= 1024, "where it gives away all, it chooses"


def test_a_host_of_another_machine_is_refused() -> None:
    with pytest.raises(OSError, match="Cannot assign requested address"):
        free_port("203.0.113.7")


def test_an_address_that_is_not_here_is_named() -> None:
    """A job stayed Queued with that it could not be assigned, and nothing said which."""
    with pytest.raises(OSError, match=r"Cannot assign requested address \(192\.0\.2\.1\)"):
        free_port("192.0.2.1")
