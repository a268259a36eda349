"""What the tests of the controller's way to an apiserver share."""

from __future__ import annotations

from pathlib import Path

import certifi
import pytest


@pytest.fixture(scope="session")
def one_authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first certificate of all those that the world trusts."""
    world = Path(certifi.where()).read_text()
    end = "-----END CERTIFICATE-----\n"
    file = tmp_path_factory.mktemp("authorities") / "one.pem"
    file.write_text(world[world.index("-----BEGIN") : world.index(end) + len(end)])
    return file


@pytest.fixture(autouse=True)
def _no_world_to_trust(one_authority: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers here speak plain HTTP or name their own authority. Each of a connection's clients would read
    all that the machine trusts: with them a test took a sixth of a second, of which this is nine tenths."""
    monkeypatch.setenv("SSL_CERT_FILE", str(one_authority))
