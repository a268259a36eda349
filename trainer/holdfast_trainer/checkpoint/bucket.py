"""An S3-compatible object store: the requests that checkpoints are made of, over s3fs, with errors in words.

Where it is and who asks comes from the usual environment (`AWS_ENDPOINT_URL`, `AWS_ACCESS_KEY_ID`,
`AWS_PROFILE`, the role of a pod or a machine). Requests that fail for a reason that passes (a lost
connection, also in the middle of an object, a timeout, 503 SlowDown) are made again, with growing pauses of
random length, `AWS_MAX_ATTEMPTS` times in all. Not by botocore: it ends once the headers are there, and draws
its pauses from `random`, as a training script may, which would then not repeat its bits.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import os
import random
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import ObjectStoreAway, ObjectStoreError

SCHEME = "s3://"
ENV_TIMEOUT = "HOLDFAST_STORAGE_TIMEOUT_SECONDS"
"""How long a request may stand still before it counts as lost."""
TIMEOUT_SECONDS = 30.0
TRIES = 6
"""Of each request, unless AWS_MAX_ATTEMPTS is set."""
CONNECTIONS = 32
_DELETED_AT_ONCE = 1000
"""Keys in one request; the protocol's own bound."""
_URL = re.compile(r"s3://([a-z0-9][a-z0-9.\-]{1,61}[a-z0-9])(?:/+(.*))?")

_REFUSED = {
    "InvalidAccessKeyId", "InvalidClientTokenId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken",
    "AuthFailure", "TokenRefreshRequired", "UnrecognizedClientException",
}  # fmt: skip
_FORBIDDEN = {"AccessDenied", "AllAccessDisabled", "AccountProblem", "403"}
_REMEDIES = dict.fromkeys(
    ("AuthorizationHeaderMalformed", "IllegalLocationConstraintException", "PermanentRedirect", "301"),
    "Name the region of the bucket in AWS_DEFAULT_REGION",
) | {"RequestTimeTooSkewed": "Set the clock of this machine, which differs from the store's"}
_NO_ENDPOINT = "AWS_ENDPOINT_URL has to begin with http:// or https://"
_TOO_FAST = {
    "SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded", "TooManyRequests", "429",
    "RequestThrottled", "BandwidthLimitExceeded",
}  # fmt: skip
_UNAVAILABLE = {
    "500", "502", "503", "504", "ServiceUnavailable", "InternalError", "InternalServerError",
    "RequestTimeout", "RequestTimeoutException", "PriorRequestNotComplete",
}  # fmt: skip
_MEANWHILE = {"ConditionalRequestConflict", "OperationAborted"}
"""Another request for the same key was under way."""
_SPOILT = {
    "BadDigest", "IncompleteBody", "XAmzContentSHA256Mismatch", "XAmzContentChecksumMismatch",
}  # fmt: skip
"""What was sent came otherwise than it went."""
_BUSY = _TOO_FAST | _UNAVAILABLE | _MEANWHILE | _SPOILT
_NEVER = 501
"""The one status from 500 on that no later time changes."""
_MISSING = {"NoSuchKey", "404"}
_MISMATCH = "FlexibleChecksumError"
"""An object's bytes are not those of which the store tells the checksum."""
_CUT_SHORT = {
    "ClientPayloadError", "ResponseStreamingError", "IncompleteReadError", "AioReadTimeoutError", _MISMATCH,
}  # fmt: skip
"""Errors of an object that began to come."""
_PROMISED = {
    "list_objects_v2": "IsTruncated",
    "list_multipart_uploads": "IsTruncated",
    "put_object": "ETag",
    "get_object": "ETag",
    "head_object": "ETag",
    "create_multipart_upload": "UploadId",
    "upload_part": "ETag",
    "complete_multipart_upload": "ETag",
    "delete_objects": "Deleted",
}
"""What an answer has in any case, if it is the store's. A proxy's page, or a web server's at a wrong
address, has it not, and would pass for an empty list or for a put that was done."""
_LONGEST_PAUSE = 20.0
_random = random.Random()  # not the training's own


class OtherAnswer(Exception):
    """Success, it says, but it is not what an object store answers."""


def is_bucket(text: str) -> bool:
    """Whether `text` names objects, and not a directory."""
    return text.startswith(SCHEME)


class Bucket:
    """The objects below `url`, s3://BUCKET/PREFIX; keys are told without the prefix. For any thread."""

    def __init__(self, url: str) -> None:
        """Asks for nothing yet. Raises ObjectStoreError where `url` is no such name."""
        match = _URL.fullmatch(url)
        if match is None:
            raise ObjectStoreError(f"{url!r} names no objects: give s3://BUCKET/PREFIX")
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

    @functools.cached_property
    def _system(self) -> Any:
        who = os.environ.get("AWS_ACCESS_KEY_ID"), os.environ.get("AWS_SECRET_ACCESS_KEY")
        return _connect(os.getpid(), endpoint(), who, timeout())

    def _call(self, operation: str, key: str | None, **fields: Any) -> Any:
        return self._asked(lambda: self._answer(operation, key, **fields), operation, key)

    def _cat(self, key: str, *, count: int | None = None, **limits: str) -> bytes:
        """What the object has, or of that the `limits`, which are `count` bytes."""

        def ask() -> bytes:
            from fsspec.asyn import sync

            body = self._answer("get_object", key, **limits)["Body"]
            try:
                data: bytes = sync(self._system.loop, body.read)
            finally:
                self._system.loop.call_soon_threadsafe(body.close)
            if count is not None and len(data) != count:
                raise OtherAnswer(f"{len(data)} bytes where {count} were asked for")
            return data

        try:
            got: bytes = self._asked(ask, "get_object", key)
        except ObjectStoreAway as error:
            if type(error.__cause__).__name__ == _MISMATCH:  # it came each time: so it lies there
                raise OSError(errno.EIO, "its bytes are not those of its checksum", key) from error
            raise
        return got

    def _answer(self, operation: str, key: str | None, **fields: Any) -> Any:
        """What the store says to one request."""
        if key is not None:
            fields["Key"] = self._key(key)
        answer = self._system.call_s3(operation, Bucket=self.name, **fields)
        promised = _PROMISED.get(operation)
        if promised is not None and promised not in answer and not answer.get("Errors"):
            if "Body" in answer:
                self._system.loop.call_soon_threadsafe(answer["Body"].close)
            kind = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("content-type", "no type")
            raise OtherAnswer(f"a page of {kind}, without {promised}, is not what an object store sends")
        for error in answer.get("Errors", []):  # of single keys, in an answer that is a success
            if error.get("Code") not in _MISSING:
                raise self._said(error.get("Code", ""), error.get("Message", ""), error.get("Key", ""))
        return answer

    def _asked(self, ask: Callable[[], Any], operation: str, key: str | None) -> Any:
        """What the store answers, asked again where it does not say all that it has to."""
        for number in range(1, tries() + 1):
            try:
                return ask()
            except Exception as error:
                told = self._told(error, operation, key)
                if number == tries() or not isinstance(told, ObjectStoreAway):
                    raise told from (None if told is error else error)
            time.sleep(_random.uniform(0, min(_LONGEST_PAUSE, 2 ** (number - 1))))
        raise AssertionError("there is one try at least")

    def _told(self, error: Exception, operation: str, key: str | None) -> Exception:
        """What is raised for `error`: a missing object, one that exists already, or an ObjectStoreError."""
        if isinstance(error, FileExistsError | ObjectStoreError):
            return error
        answer = getattr(error.__cause__ or error, "response", None)
        code, message, status = "", f"{type(error).__name__}: {error}", 0
        if isinstance(answer, dict):
            told = answer.get("Error", {})
            code, message = str(told.get("Code", "")), str(told.get("Message", ""))
            status = int(answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        what = f"{operation} of {'a list' if key is None else key}"
        return self._said(code, message, what, error, busy=status >= 500 and status != _NEVER)

    def _said(
        self, code: str, message: str, what: str, error: Exception | None = None, *, busy: bool = False
    ) -> Exception:
        """`busy`: its status says so, whatever the code; MinIO has codes of its own."""
        if code in _MISSING or (code == "" and isinstance(error, FileNotFoundError)):
            return FileNotFoundError(2, "no such object", what)
        if code == "NoSuchUpload":
            return FileNotFoundError(2, "no such upload: somebody aborted it", what)
        busy = busy or code in _BUSY
        kind = ObjectStoreAway if busy or _no_answer(code, error) else ObjectStoreError
        return kind(f"{self.url}: {_in_words(code, message, what, self.name, error, busy=busy)}")


def _in_words(code: str, message: str, what: str, bucket: str, error: Exception | None, *, busy: bool) -> str:
    kind = "" if error is None else type(error).__name__
    if code == "NoSuchBucket":
        return f"there is no bucket {bucket!r} at {endpoint()}. Create it, or name another one"
    if kind in ("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError"):
        return (
            "there are no credentials. Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or AWS_PROFILE, or "
            "give the machine or pod a role"
        )
    if code in _REFUSED:
        return (
            f"{endpoint()} does not accept the credentials ({code}). Check AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY (where they are for a time only, AWS_SESSION_TOKEN too), AWS_PROFILE, or "
            "the role"
        )
    if code in _FORBIDDEN:
        return (
            f"{what} is not permitted ({code}: {message}). Needed are s3:GetObject, s3:PutObject, "
            "s3:DeleteObject, s3:AbortMultipartUpload, s3:ListBucket and s3:ListBucketMultipartUploads"
        )
    if busy:
        return f"{what}: {endpoint()} answered {code} ({message}) {tries()} times"
    if _untrusted(error):
        return (
            f"{endpoint()} shows a certificate that is not trusted here ({message}). Name the file of the "
            "authority that signed it in AWS_CA_BUNDLE, or have the certificate renewed"
        )
    if _no_answer(code, error):
        return (
            f"{what}: no answer from {endpoint()} in {tries()} tries ({message}). Check AWS_ENDPOINT_URL and "
            f"the network; {ENV_TIMEOUT} is how long a request may stand still (now {timeout():g})"
        )
    remedy = _REMEDIES.get(code) or (_NO_ENDPOINT if "Invalid endpoint" in message else "")
    return f"{what} failed: {code} {message.rstrip('. ')}{remedy and f'. {remedy}'}".replace("  ", " ")


def _no_answer(code: str, error: Exception | None) -> bool:
    """Whether the store did not say all it had to, nor what is wrong."""
    if code or _untrusted(error):
        return False
    kind = "" if error is None else type(error).__name__
    named = kind in _CUT_SHORT or any(word in kind for word in ("Connect", "Timeout", "HTTP"))
    return named or isinstance(error, OSError | OtherAnswer)


def _untrusted(error: Exception | None) -> bool:
    """Whether the server is not known to be who it says it is: no later time changes that."""
    return "CERTIFICATE_VERIFY_FAILED" in str(error)


def endpoint() -> str:
    """Where requests go, in words."""
    env = os.environ
    return env.get("AWS_ENDPOINT_URL_S3") or env.get("AWS_ENDPOINT_URL") or "Amazon S3"


def timeout() -> float:
    """Seconds. Raises ObjectStoreError where the environment gives no such number."""
    text = os.environ.get(ENV_TIMEOUT) or str(TIMEOUT_SECONDS)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise ObjectStoreError(f"environment {ENV_TIMEOUT}={text!r} is not a number of seconds above 0")
    return seconds


def tries() -> int:
    """How often a request is made in all."""
    told = os.environ.get("AWS_MAX_ATTEMPTS", "")
    return int(told) if told.isdigit() and int(told) else TRIES


@functools.lru_cache(maxsize=8)
def _connect(pid: int, where: str, who: object, patience: float) -> Any:
    """The client of a process, which takes half a second to make. Raises ObjectStoreError without s3fs."""
    try:
        import s3fs
    except ImportError as error:
        raise ObjectStoreError(
            f"s3:// needs s3fs, which is not installed ({error}): pip install 'holdfast[trainer,s3]'"
        ) from error
    config = {
        "connect_timeout": min(10.0, patience),
        "read_timeout": patience,
        "max_pool_connections": CONNECTIONS,
        "retries": {"mode": "standard", "total_max_attempts": 1},
        "connector_args": {"resolver": _resolver()},
    }
    system = s3fs.S3FileSystem(
        anon=False, config_kwargs=config, skip_instance_cache=True, use_listings_cache=False
    )
    system.retries = 1  # requests are made again by `Bucket`
    return system


def _resolver() -> Any:
    """Looks names up in a thread of its own.

    The usual one uses an executor of the standard library, and those refuse work once the interpreter is
    ending, which is when a program that left its loop early makes its last save.
    """
    from aiohttp.abc import AbstractResolver, ResolveResult

    class Resolver(AbstractResolver):
        async def resolve(
            self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
        ) -> list[ResolveResult]:
            loop = asyncio.get_running_loop()
            answer: asyncio.Future[list[Any]] = loop.create_future()

            def settle(found: list[Any] | OSError) -> None:
                if not answer.done():
                    answer.set_exception(found) if isinstance(found, OSError) else answer.set_result(found)

            def look_up() -> None:
                found: list[Any] | OSError
                try:
                    found = socket.getaddrinfo(host, port, family=family, type=socket.SOCK_STREAM)
                except OSError as error:
                    found = error
                loop.call_soon_threadsafe(settle, found)

            try:
                threading.Thread(target=look_up, name="look-up", daemon=True).start()
            except RuntimeError:  # no more threads, as when the interpreter is ending
                look_up()
            return [
                ResolveResult(
                    hostname=host,
                    host=str(address[0]),
                    port=int(address[1]),
                    family=kind,
                    proto=proto,
                    flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
                )
                for kind, _, proto, _, address in await answer
            ]

        async def close(self) -> None:
            pass

    return Resolver()


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
