"""The cluster's own certificate authority, and who each component is to the apiserver.

Keys are P-256; everything is valid for a year from now and lies in `<state>/pki`, readable by its owner
alone. A component's name and groups are its certificate's CN and O, which is how Kubernetes' built-in
roles know it.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from pathlib import Path

from tests.cluster.system import run

DAYS = 365


class Authority:
    """Signs for one cluster. All files are in `directory`."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.certificate = directory / "ca.crt"
        self._key = directory / "ca.key"
        directory.mkdir(parents=True, mode=0o700, exist_ok=True)
        if not self.certificate.exists():
            self._make_key(self._key)
            _openssl(
                *("req", "-x509", "-new", "-sha256", "-days", DAYS, "-subj", "/CN=holdfast-test-ca"),
                *("-addext", "keyUsage=critical,keyCertSign,digitalSignature,cRLSign"),
                *("-key", self._key, "-out", self.certificate),
            )

    def issue(
        self, name: str, common_name: str, *, group: str = "", hosts: Sequence[str] = ()
    ) -> tuple[Path, Path]:
        """(certificate, key) for `common_name`; a server's where `hosts` are given (names or addresses)."""
        certificate, key = self.directory / f"{name}.crt", self.directory / f"{name}.key"
        if certificate.exists():
            return certificate, key
        self._make_key(key)
        request = self.directory / f"{name}.csr"
        subject = (f"/O={group}" if group else "") + f"/CN={common_name}"
        _openssl("req", "-new", "-key", key, "-subj", subject, "-out", request)
        extensions = self.directory / f"{name}.ext"
        lines = [
            "keyUsage=critical,digitalSignature",
            f"extendedKeyUsage={'serverAuth,' if hosts else ''}clientAuth",
        ]
        if hosts:
            lines.append("subjectAltName=" + ",".join(_alternative(host) for host in hosts))
        extensions.write_text("\n".join(lines))
        _openssl(
            *("x509", "-req", "-sha256", "-days", DAYS, "-set_serial", secrets.randbits(120)),
            *("-in", request, "-CA", self.certificate, "-CAkey", self._key),
            *("-extfile", extensions, "-out", certificate),
        )
        return certificate, key

    def key_pair(self, name: str) -> tuple[Path, Path]:
        """(public, private) key, for signing service accounts' tokens."""
        public, private = self.directory / f"{name}.pub", self.directory / f"{name}.key"
        if not public.exists():
            self._make_key(private)
            _openssl("pkey", "-in", private, "-pubout", "-out", public)
        return public, private

    def kubeconfig(self, path: Path, server: str, name: str, common_name: str, *, group: str = "") -> Path:
        """Write a kubeconfig, mode 0600, with which `common_name` talks to `server`."""
        certificate, key = self.issue(name, common_name, group=group)
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [
                {"name": "it", "cluster": {"server": server, "certificate-authority": str(self.certificate)}}
            ],
            "users": [
                {"name": name, "user": {"client-certificate": str(certificate), "client-key": str(key)}}
            ],
            "contexts": [{"name": "it", "context": {"cluster": "it", "user": name}}],
            "current-context": "it",
        }
        path.touch(mode=0o600)
        path.write_text(json.dumps(config, indent=1))  # JSON is YAML
        return path

    def _make_key(self, path: Path) -> None:
        path.touch(mode=0o600)
        _openssl("genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256", "-out", path)


def _openssl(*words: str | int | Path) -> None:
    run(["openssl", *map(str, words)], "making certificates")


def _alternative(host: str) -> str:
    return f"IP:{host}" if host.replace(".", "").isdigit() else f"DNS:{host}"
