"""Objects of an S3-compatible store: the requests that checkpoints are made of, over s3fs.

Requests that fail for a reason that passes (a lost connection, also in the middle of an object, a timeout,
503 SlowDown) are made again, with growing pauses of random length, `AWS_MAX_ATTEMPTS` times in all. Not by
botocore: it ends once the headers are there, and draws its pauses from `random`, as a training script may,
which would then not repeat its bits.
"""

from __future__ import annotations

import errno
import random
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import s3, s3_errors
from .errors import ObjectStoreAway, ObjectStoreError
from .s3 import SCHEME
from .s3_errors import MISMATCH, OtherAnswer

_DELETED_AT_ONCE = 1000
"""Keys in one request; the protocol's own bound."""
_URL = re.compile(r"s3://([a-z0-9][a-z0-9.\-]{1,61}[a-z0-9])(?:/+(.*))?")
_LONGEST_PAUSE = 20.0
_random = random.Random()  # not the training's own


def is_bucket(text: str) -> bool:
    """Whether `text` names objects, and not a directory."""
    return text.startswith(SCHEME)


class Bucket:
    """The objects below `url`, s3://BUCKET/PREFIX; keys are told without the prefix. For any thread."""

    def __init__(self, url: str) -> None:
        """Asks for nothing yet. Raises ObjectStoreError where `url` is no such name."""
        match = _URL.fullmatch(url)
        if match is None:
            raise ObjectStoreError(
                f"{url!r} names no objects: give s3://BUCKET/PREFIX; the bucket's name has 3 to 63 of a-z, "
                "0-9, dots and hyphens"
            )
        self.name, self._prefix = match[1], (match[2] or "").strip("/")
        self.url = f"{SCHEME}{self.name}/{self._prefix}".rstrip("/")
        if not self._prefix:
            raise ObjectStoreError(
                f"{url!r} names a whole bucket: give each run a prefix, such as {self.url}/RUN"
            )

    # ------------------------------------------------------------------- objects

    def put(self, key: str, data: bytes) -> None:
        """All of it or nothing, whatever was there before."""
        self._call("put_object", key, Body=data)

    def create(self, key: str, data: bytes) -> bool:
        """As `put`, but false where there is one already. A server may ignore that condition."""
        try:
            self._call("put_object", key, Body=data, IfNoneMatch="*")
        except FileExistsError:
            return False
        return True

    def get(self, key: str) -> bytes:
        """Raises FileNotFoundError, OSError where its bytes are not those of its checksum."""
        return self._cat(key)

    def read(self, key: str, begin: int, end: int) -> bytes:
        """The bytes from `begin` up to `end`. Raises as `get`."""
        return self._cat(key, Range=f"bytes={begin}-{end - 1}", count=end - begin)

    def size(self, key: str) -> int:
        """Bytes. Raises FileNotFoundError."""
        return int(self._call("head_object", key)["ContentLength"])

    def keys(self, below: str) -> list[str]:
        """Of all objects whose key begins with `below`."""
        found: list[str] = []
        more: dict[str, Any] = {}
        while True:
            page = self._call("list_objects_v2", None, Prefix=self._key(below), **more)
            found += [item["Key"] for item in page.get("Contents", [])]
            if not page.get("IsTruncated"):
                break
            more = {"ContinuationToken": page["NextContinuationToken"]}
        return [key.removeprefix(self._key("")) for key in found]

    def delete(self, keys: Iterable[str]) -> None:
        """Nothing where they are gone already."""
        doomed = [{"Key": self._key(key)} for key in keys]
        for start in range(0, len(doomed), _DELETED_AT_ONCE):
            self._call("delete_objects", None, Delete={"Objects": doomed[start : start + _DELETED_AT_ONCE]})

    # ----------------------------------------------------------- uploads in parts

    def begin_upload(self, key: str) -> str:
        """The upload's name; there is no object before `complete_upload`."""
        return str(self._call("create_multipart_upload", key)["UploadId"])

    def upload_part(self, key: str, upload: str, number: int, data: bytes) -> str:
        """Part `number`, from 1; returns what `complete_upload` wants to know of it."""
        answer = self._call("upload_part", key, UploadId=upload, PartNumber=number, Body=data)
        return str(answer["ETag"])

    def complete_upload(self, key: str, upload: str, parts: dict[int, str]) -> None:
        told = [{"PartNumber": number, "ETag": parts[number]} for number in sorted(parts)]
        self._call("complete_multipart_upload", key, UploadId=upload, MultipartUpload={"Parts": told})

    def abort_upload(self, key: str, upload: str) -> None:
        """Its parts cost money until then. Nothing where it is gone already."""
        try:
            self._call("abort_multipart_upload", key, UploadId=upload)
        except FileNotFoundError:
            pass

    def uploads(self, below: str) -> list[tuple[str, str]]:
        """(key, upload) of what was begun and neither completed nor aborted."""
        found: list[tuple[str, str]] = []
        more: dict[str, Any] = {}
        while True:
            page = self._call("list_multipart_uploads", None, Prefix=self._key(below), **more)
            found += [(item["Key"], item["UploadId"]) for item in page.get("Uploads", [])]
            if not page.get("IsTruncated"):
                break
            more = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}
        return [(key.removeprefix(self._key("")), upload) for key, upload in found]

    # ------------------------------------------------------------------- requests

    def _key(self, key: str) -> str:
        return f"{self._prefix}/{key}"

    @property
    def _client(self) -> Any:
        return s3.client()  # made once, and anew with other credentials

    def _call(self, operation: str, key: str | None, **fields: Any) -> Any:
        return self._asked(lambda: self._answer(operation, key, **fields), operation, key)

    def _cat(self, key: str, *, count: int | None = None, **limits: str) -> bytes:
        """What the object has, or of that the `limits`, which are `count` bytes."""

        def ask() -> bytes:
            from fsspec.asyn import sync

            body = self._answer("get_object", key, **limits)["Body"]
            try:
                data: bytes = sync(self._client.loop, body.read)
            finally:
                self._close(body)
            if count is not None and len(data) != count:
                raise OtherAnswer(f"{len(data)} bytes where {count} were asked for")
            return data

        try:
            got: bytes = self._asked(ask, "get_object", key)
        except ObjectStoreAway as error:
            if type(error.__cause__).__name__ == MISMATCH:  # it came each time: so it lies there
                raise OSError(errno.EBADMSG, "its bytes are not those of its checksum", key) from error
            raise
        return got

    def _answer(self, operation: str, key: str | None, **fields: Any) -> Any:
        """What the store says to one request."""
        if key is not None:
            fields["Key"] = self._key(key)
        answer = self._client.call_s3(operation, Bucket=self.name, **fields)
        try:
            s3_errors.check(operation, answer, self.url)
        except OtherAnswer:
            if "Body" in answer:
                self._close(answer["Body"])
            raise
        return answer

    def _close(self, body: Any) -> None:
        """The connection is not used again, where not all of it was read."""
        self._client.loop.call_soon_threadsafe(body.close)

    def _asked(self, ask: Callable[[], Any], operation: str, key: str | None) -> Any:
        """What the store answers, asked again where it does not say all that it has to."""
        what = f"{operation} of {'a list' if key is None else key}"
        for number in range(1, s3.tries() + 1):
            try:
                return ask()
            except Exception as error:
                told = s3_errors.told(error, what, self.url)
                if number == s3.tries() or not isinstance(told, ObjectStoreAway):
                    raise told from (None if told is error else error)
            time.sleep(_random.uniform(0, min(_LONGEST_PAUSE, 2 ** (number - 1))))
        raise AssertionError("there is one try at least")


@dataclass(frozen=True)
class ObjectPath:
    """An object, or what the keys of several begin with, used as a `Path` is by those who only read."""

    bucket: Bucket
    key: str

    @property
    def name(self) -> str:
        return self.key.rpartition("/")[2]

    def __truediv__(self, name: str) -> ObjectPath:
        return ObjectPath(self.bucket, f"{self.key}/{name}")

    def __str__(self) -> str:
        return f"{self.bucket.url}/{self.key}"

    def read_text(self, encoding: str = "utf-8") -> str:
        """Raises FileNotFoundError, ObjectStoreError."""
        return self.bucket.get(self.key).decode(encoding)


Location = Path | ObjectPath
"""Where a file lies, or several."""
