"""Tokens as an attacker would try them: made by hand, with the cluster's own key and with another.

A real token lives for ten minutes at least, so an expired one is forged: a real one's claims, moved into the
past and signed again by the key that the apiserver trusts. That the same forgery with its times left alone is
accepted shows that nothing but the time is wrong with it.
"""

from __future__ import annotations

import base64
import json
import subprocess
from pathlib import Path
from typing import Any


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def claims_of(token: str) -> dict[str, Any]:
    part = token.split(".")[1]
    found: dict[str, Any] = json.loads(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)))
    return found


def signed(claims: dict[str, Any], key: Path, algorithm: str = "ES256") -> str:
    """A JSON web token (RFC 7519), signed by openssl with a P-256 key; without `kid`, so any key may fit."""
    head = {"alg": algorithm, "typ": "JWT"}
    text = f"{_encode(json.dumps(head).encode())}.{_encode(json.dumps(claims).encode())}"
    if algorithm == "none":
        return f"{text}."
    made = subprocess.run(
        ["openssl", "dgst", "-sha256", "-sign", str(key)],
        input=text.encode(),
        capture_output=True,
        check=True,
    )
    return f"{text}.{_encode(_raw(made.stdout))}"


def _raw(der: bytes) -> bytes:
    """The two numbers of an ECDSA signature, 32 bytes each (RFC 7518), from their DER form."""
    numbers = []
    at = 2
    for _ in range(2):
        length = der[at + 1]
        numbers.append(int.from_bytes(der[at + 2 : at + 2 + length], "big").to_bytes(32, "big"))
        at += 2 + length
    return b"".join(numbers)


def moved(claims: dict[str, Any], seconds: float) -> dict[str, Any]:
    """The same claims, all their times moved."""
    times = {name: int(claims[name] + seconds) for name in ("exp", "iat", "nbf")}
    return {**claims, **times}


def new_key(directory: Path) -> Path:
    path = directory / "another.key"
    command = [
        "openssl",
        "genpkey",
        "-algorithm",
        "EC",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-out",
        str(path),
    ]
    subprocess.run(command, check=True, capture_output=True)
    return path


def forgeries(real: str, trusted: Path, directory: Path) -> dict[str, str]:
    """Name to token; none of them may open anything."""
    claims = claims_of(real)
    head, body, signature = real.split(".")
    greedy = _encode(json.dumps({**claims, "sub": "system:admin"}).encode())
    return {
        "expired": signed(moved(claims, claims["iat"] - claims["exp"] - 60), trusted),
        "not yet valid": signed(moved(claims, 24 * 3600), trusted),
        "signed by a stranger": signed(claims, new_key(directory)),
        "not signed": signed(claims, trusted, "none"),
        "of another account": f"{head}.{greedy}.{signature}",
        "cut off": f"{head}.{body}",
        "for another audience": signed({**claims, "aud": ["vault"]}, trusted),
    }
