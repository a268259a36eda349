"""Images made of a few files, written as an OCI layout in a tar archive: no builder, no registry.

One uncompressed layer, no times, sorted entries: the same files always give the same digest, so an image
that containerd has already need not be imported again. Format: OCI image specification 1.1.
"""

from __future__ import annotations

import hashlib
import io
import json
import platform
import tarfile
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LAYER = "application/vnd.oci.image.layer.v1.tar"
CONFIG = "application/vnd.oci.image.config.v1+json"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"

ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


@dataclass(frozen=True)
class Image:
    """A small image. `name` is in full: registry/repository:tag."""

    name: str
    files: dict[str, Path] = field(default_factory=dict)
    """Path in the image, without the leading slash, to the program that goes there (mode 0755)."""
    texts: dict[str, str] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    directories: tuple[str, ...] = ()
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    user: str = "65532:65532"

    def layer(self) -> bytes:
        """The file system as a tar archive."""
        target = io.BytesIO()
        with tarfile.open(fileobj=target, mode="w", format=tarfile.PAX_FORMAT) as archive:
            for name in sorted({*self.directories, *self._parents()}):
                archive.addfile(_entry(name, tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o755))
            for name, link in sorted(self.links.items()):
                entry = _entry(name, tarfile.SYMTYPE, 0o777)
                entry.linkname = link
                archive.addfile(entry)
            for name, text in sorted(self.texts.items()):
                _add(archive, _entry(name, tarfile.REGTYPE, 0o644), text.encode())
            for name, path in sorted(self.files.items()):
                _add(archive, _entry(name, tarfile.REGTYPE, 0o755), path.read_bytes())
        return target.getvalue()

    def _parents(self) -> set[str]:
        names = {*self.files, *self.texts, *self.links}
        return {str(parent) for name in names for parent in Path(name).parents if str(parent) != "."}

    def config(self) -> dict[str, Any]:
        """What runs, as the image's configuration says it; without the root file system."""
        return {
            "Entrypoint": list(self.entrypoint),
            "Cmd": list(self.command),
            "User": self.user,
            "Env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"],
        }


def _entry(name: str, kind: bytes, mode: int) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.type, entry.mode = kind, mode
    return entry


def _add(archive: tarfile.TarFile, entry: tarfile.TarInfo, content: bytes) -> None:
    entry.size = len(content)
    archive.addfile(entry, io.BytesIO(content))


def write_image(image: Image, path: Path) -> str:
    """Write the archive to `path`; the digest that containerd will know the image by."""
    with tempfile.TemporaryDirectory(prefix="holdfast-layer-") as scratch:
        layer = Path(scratch) / "layer.tar"
        layer.write_bytes(image.layer())
        return write_file_layer(image.name, image.config(), layer, path)


def write_file_layer(name: str, config: dict[str, Any], layer: Path, path: Path) -> str:
    """An archive at `path` with the one `layer`, an uncompressed tar archive; the image's digest."""
    with tarfile.open(path, "w") as archive:
        with layer.open("rb") as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
            content.seek(0)
            entry = _entry(f"blobs/sha256/{digest}", tarfile.REGTYPE, 0o644)
            entry.size = layer.stat().st_size
            archive.addfile(entry, content)
        stored = {"mediaType": LAYER, "digest": f"sha256:{digest}", "size": entry.size}

        def blob(value: Any, media_type: str) -> dict[str, Any]:
            text = _json(value)
            digest = hashlib.sha256(text).hexdigest()
            _add(archive, _entry(f"blobs/sha256/{digest}", tarfile.REGTYPE, 0o644), text)
            return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(text)}

        settings = {
            "architecture": ARCHITECTURES[platform.machine()],
            "os": "linux",
            "config": config,
            "rootfs": {"type": "layers", "diff_ids": [stored["digest"]]},
        }
        manifest = {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": blob(settings, CONFIG),
            "layers": [stored],
        }
        described = blob(manifest, MANIFEST)
        described["annotations"] = {"io.containerd.image.name": name}
        index = {"schemaVersion": 2, "mediaType": INDEX, "manifests": [described]}
        _add(archive, _entry("index.json", tarfile.REGTYPE, 0o644), _json(index))
        layout = {"imageLayoutVersion": "1.0.0"}
        _add(archive, _entry("oci-layout", tarfile.REGTYPE, 0o644), _json(layout))
    return str(described["digest"])


def _json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True).encode()
