"""Checkpoints in an object store: no rename, no directories, no locks.

::

    checkpoints/step-00000812/attempt-3.save-7/rank-N.safetensors   by rank N, in parts; whole or not there
    checkpoints/step-00000812/attempt-3.save-7/rank-N.json          its size and checksums, or its error
    checkpoints/step-00000812/attempt-3.save-7/manifest.json        by rank 0, last: makes it a checkpoint

Every put is whole or not there, what is put is listed at once (Amazon S3 since 2020, and those that follow
it), and no key is ever written twice with another content: names tell attempt and save. So a save of an
attempt that was superseded harms nobody; `object_fence` says which of them count. What counts is found by
listing.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import MappingProxyType

from ..contract import MANIFEST, RunDir
from . import manifest as manifests
from .bucket import Bucket, ObjectPath
from .checksums import Written
from .errors import CheckpointError, ObjectStoreError
from .manifest import Manifest
from .object_fence import ObjectFence
from .store import CheckpointStore, Entry, gone_before, named_part, part_file, part_record, recorded
from .uploads import Uploads

_BELOW = "checkpoints/"
_KEY = re.compile(r"checkpoints/(step-(\d{8,})/attempt-(\d+)\.save-(\d+))/([^/]+)")
_POLL_SECONDS = 0.2
"""How often rank 0 asks for its peers' parts; each time is a request that costs money."""
_FENCE_SECONDS = 2.0
_WRITERS = 8
"""Threads that send a part: they wait for the network more than they compute."""


@dataclass(frozen=True)
class _Save:
    """What one save of one attempt left."""

    name: str
    step: int
    attempt: int
    number: int
    files: frozenset[str]

    @property
    def key(self) -> str:
        return f"{_BELOW}{self.name}"

    @property
    def whole(self) -> bool:
        """Whether its manifest is there."""
        return MANIFEST in self.files

    @property
    def keys(self) -> list[str]:
        return [f"{self.key}/{file}" for file in sorted(self.files)]


class CheckpointObjects(CheckpointStore):
    """`checkpoints/` of a run in a bucket, as attempt `attempt` may use it (0: to look, from outside)."""

    how = MappingProxyType({"padded": False, "writers": _WRITERS})

    def __init__(self, run: RunDir, attempt: int, bucket: Bucket | None = None) -> None:
        self._bucket = bucket or Bucket(run.objects)
        self._attempt = attempt
        self._fence = ObjectFence(self._bucket)
        self.place = f"{self._bucket.url}/{_BELOW.rstrip('/')}"
        self.files = Uploads(self._bucket)
        self._accepted: tuple[int, frozenset[str]] | None = None
        self._manifests: dict[str, Manifest] = {}
        self._newest: Manifest | None = None
        self._offered: set[str] = set()

    @classmethod
    def admit(cls, run: RunDir, attempt: int | None) -> int:
        """Admit an attempt, the next where None is given, and take over what there is; returns its number.

        Raises Fenced, CheckpointError.
        """
        bucket = Bucket(run.objects)
        fence = ObjectFence(bucket)
        number = fence.claim(attempt)
        past = cls(run, number, bucket)  # what the newest list before this one's accepts
        fence.accept(number, lambda: [save.name for save in past._counted() if save.attempt < number])
        cls(run, number, bucket).sweep()
        return number

    def check_fence(self) -> None:
        self._fence.check(self._attempt)

    # ------------------------------------------------------------------- listing

    def _saves(self) -> list[_Save]:
        """Of all attempts, whole or not, in the order of steps, then of time."""
        files: dict[str, set[str]] = {}
        for key in self._bucket.keys(_BELOW):
            if match := _KEY.fullmatch(key):
                files.setdefault(match[0].rpartition("/")[0], set()).add(match[5])
        saves = []
        for key, names in files.items():
            match = _KEY.fullmatch(f"{key}/x")
            assert match is not None
            saves.append(_Save(match[1], int(match[2]), int(match[3]), int(match[4]), frozenset(names)))
        return sorted(saves, key=lambda save: (save.step, save.attempt, save.number))

    def _counts(self, save: _Save) -> bool:
        if self._accepted is None:
            self._accepted = self._fence.accepted()
        attempt, accepted = self._accepted
        return save.whole and (save.attempt >= attempt or save.name in accepted)

    def _counted(self) -> list[_Save]:
        return [save for save in self._saves() if self._counts(save)]

    def steps(self) -> list[int]:
        return sorted({save.step for save in self._counted()}, reverse=True)

    def entries(self) -> Iterable[Entry]:
        saves = self._saves()
        stands = {save.step: save for save in saves if self._counts(save)}
        for save in saves:
            name = f"step-{save.step:08d}"
            if stands.get(save.step) == save:
                yield Entry(name, save.step, save.attempt, ObjectPath(self._bucket, save.key))
            elif not save.whole:
                yield Entry(f"{name} of attempt {save.attempt}", save.step, save.attempt)

    def location(self, step: int) -> ObjectPath:
        """Of several saves of a step, the newest attempt's stands: those before it were found to be bad."""
        for save in reversed(self._counted()):
            if save.step == step:
                return ObjectPath(self._bucket, save.key)
        return ObjectPath(self._bucket, f"{_BELOW}step-{step:08d}")

    def newest(self, besides: Iterable[int] = ()) -> Manifest | None:
        """As far as is known: where the store does not answer now, what it said last."""
        bad = set(besides)
        try:
            good = (self._manifest(save) for save in reversed(self._counted()) if save.step not in bad)
            self._newest = next((manifest for manifest in good if manifest is not None), None)
        except ObjectStoreError:
            return None if self._newest is None or self._newest.step in bad else self._newest
        return self._newest

    def _manifest(self, save: _Save) -> Manifest | None:
        """Read once: it never changes. None where it is unsound."""
        if save.name not in self._manifests:
            try:
                self._manifests[save.name] = manifests.read(ObjectPath(self._bucket, save.key))
            except manifests.BadManifest:
                return None
        return self._manifests[save.name]

    # --------------------------------------------------------------------- parts

    def begin(self, step: int, save: int) -> ObjectPath:
        return ObjectPath(self._bucket, f"{_BELOW}step-{step:08d}/attempt-{self._attempt}.save-{save}")

    def report_part(self, partial: ObjectPath, rank: int, written: Written, division: str = "") -> None:
        self._record(partial, rank, recorded(written, division))

    def report_failure(self, partial: ObjectPath, rank: int, error: str) -> None:
        self._record(partial, rank, {"error": error})

    def _record(self, partial: ObjectPath, rank: int, body: dict[str, object]) -> None:
        self._bucket.put((partial / part_record(rank)).key, json.dumps(body).encode())

    def await_parts(
        self, partial: ObjectPath, world_size: int, late: Callable[[], bool], division: str = ""
    ) -> dict[str, Written]:
        files: dict[str, Written] = {}
        missing = set(range(world_size))
        look = time.monotonic() + _FENCE_SECONDS
        while True:
            there = set(self._bucket.keys(f"{partial.key}/"))
            for rank in sorted(missing):
                record = partial / part_record(rank)
                if record.key in there:
                    files[part_file(rank)] = named_part(rank, json.loads(record.read_text()), division)
                    missing.remove(rank)
            if not missing:
                return files
            if late():
                raise CheckpointError(f"rank {min(missing)} did not write its part in time")
            if time.monotonic() > look:
                self.check_fence()
                look = time.monotonic() + _FENCE_SECONDS
            time.sleep(_POLL_SECONDS)

    # -------------------------------------------------------------------- commit

    def commit(self, partial: ObjectPath, manifest: Manifest) -> Manifest:
        """As the base says. The fence is read after the manifest is there: before that nothing is durable.

        Where this raises once the manifest was offered, it may be there, and may be what a newer attempt
        has taken over: nobody takes it back.
        """
        self.check_fence()
        self._offered.add(partial.key)
        self._bucket.put((partial / MANIFEST).key, manifest.to_json().encode())
        self.check_fence()
        if self._newest is None or self._newest.step <= manifest.step:
            self._newest = manifest
        return manifest

    def abandon(self, partial: ObjectPath) -> None:
        if partial.key in self._offered:
            return
        try:
            self._bucket.delete(self._bucket.keys(f"{partial.key}/"))
        except (ObjectStoreError, OSError):
            pass

    # --------------------------------------------------------------------- prune

    def sweep(self) -> None:
        """As the base says; uploads that nobody will complete go too, as they cost money unseen.

        Only for an attempt that has written down what it accepts: what it does not, no later one will.
        """
        self.check_fence()
        self._remove([save for save in self._saves() if not self._counts(save)])
        self._abort_uploads()
        self._fence.tidy(self._attempt)

    def prune(self, stays: Callable[[list[int]], set[int]], bad: Iterable[int] = ()) -> None:
        bad = set(bad)
        saves = self._saves()
        counted = [save for save in saves if self._counts(save)]
        good = sorted({save.step for save in counted} - bad, reverse=True)
        gone = set(gone_before([*good, *bad], stays(good), bad))
        stands = {save.step: save for save in counted if save.step not in gone}
        newest = max(good, default=0)
        doomed = [
            save
            for save in saves
            if stands.get(save.step) != save
            and save.attempt <= self._attempt
            and (self._counts(save) or save.attempt < self._attempt or save.step <= newest)
        ]
        self.check_fence()
        self._remove(doomed)
        self._abort_uploads(newest)

    def _remove(self, saves: list[_Save]) -> None:
        """Manifests first, so that what is left by a kill in between is debris and no false checkpoint."""
        doomed = [save for save in saves if save.attempt <= self._attempt]
        self._bucket.delete(f"{save.key}/{MANIFEST}" for save in doomed if save.whole)
        self._bucket.delete(key for save in doomed for key in save.keys)
        for save in doomed:
            self._manifests.pop(save.name, None)

    def _abort_uploads(self, done: int = 0) -> None:
        """Those of earlier attempts, whose killed writers cannot do that themselves, and this one's for steps
        up to `done`: when they failed the store may have been away for that too.
        """
        for key, upload in self._bucket.uploads(_BELOW):
            match = _KEY.fullmatch(key)
            if match is None or int(match[3]) > self._attempt:
                continue
            if int(match[3]) < self._attempt or int(match[2]) <= done:
                self._bucket.abort_upload(key, upload)
