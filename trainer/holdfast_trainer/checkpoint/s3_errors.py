"""What an object store's answer means: a missing object, one that exists already, or an error in words.

Codes are those of Amazon S3 and of others that speak its protocol (MinIO has some of its own). The kind of
error says whether a later time may change it: ObjectStoreAway where it may.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..contract import ENV_STORAGE_TIMEOUT
from .errors import ObjectStoreAway, ObjectStoreError
from .s3 import SCHEME, endpoint, timeout, tries

_EXPIRED = {"ExpiredToken", "TokenRefreshRequired", "400"}
"""Of credentials that were good once: whoever gave them may have new ones soon. What answers HEAD has no room
for a code, and nothing else in ours is refused with 400."""
_NOT_GIVEN = "CredentialRetrievalError"
"""Of who gives credentials for a time, as a role's service or a credential_process: it may answer soon."""
_REFUSED = _EXPIRED | {
    "InvalidAccessKeyId", "InvalidClientTokenId", "SignatureDoesNotMatch", "InvalidToken", "AuthFailure",
    "UnrecognizedClientException",
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
MISMATCH = "FlexibleChecksumError"
"""An object's bytes are not those of which the store tells the checksum."""
_CUT_SHORT = {
    "ClientPayloadError", "ResponseStreamingError", "IncompleteReadError", "AioReadTimeoutError", MISMATCH,
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
"""What an answer has in any case, if it is the store's."""


class OtherAnswer(Exception):
    """Success, it says, but it is not what an object store answers."""


def check(operation: str, answer: Mapping[str, Any], url: str) -> None:
    """Raises what an answer that is a success still says: OtherAnswer, or the error of a single key.

    A proxy's page, or a web server's at a wrong address, would pass for an empty list or for a put that was
    done.
    """
    errors = answer.get("Errors", [])
    promised = _PROMISED.get(operation)
    if promised is not None and promised not in answer and not errors:
        kind = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("content-type", "no type")
        raise OtherAnswer(f"a page of {kind}, without {promised}, is not what an object store sends")
    for error in errors:
        if error.get("Code") not in _MISSING:
            raise _said(error.get("Code", ""), error.get("Message", ""), error.get("Key", ""), url)


def told(error: Exception, what: str, url: str) -> Exception:
    """What is raised for `error`, with which the request `what` ended: FileNotFoundError, FileExistsError, or
    an ObjectStoreError."""
    if isinstance(error, FileExistsError | ObjectStoreError):
        return error
    answer = getattr(error.__cause__ or error, "response", None)
    code, message, status = "", f"{type(error).__name__}: {error}", 0
    if isinstance(answer, dict):
        said = answer.get("Error", {})
        code, message = str(said.get("Code", "")), str(said.get("Message", ""))
        status = int(answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    return _said(code, message, what, url, error, busy=status >= 500 and status != _NEVER)


def _said(
    code: str, message: str, what: str, url: str, error: Exception | None = None, *, busy: bool = False
) -> Exception:
    """`busy`: its status says so, whatever the code."""
    if code in _MISSING:
        return FileNotFoundError(2, "no such object", what)
    if code == "NoSuchUpload":
        return FileNotFoundError(2, "no such upload: somebody aborted it", what)
    busy = busy or code in _BUSY
    passes = busy or code in _EXPIRED or type(error).__name__ == _NOT_GIVEN or _no_answer(code, error)
    kind = ObjectStoreAway if passes else ObjectStoreError
    return kind(f"{url}: {_in_words(code, message, what, url, error, busy=busy)}")


def _in_words(code: str, message: str, what: str, url: str, error: Exception | None, *, busy: bool) -> str:
    kind = "" if error is None else type(error).__name__
    if code == "NoSuchBucket":
        name = url.removeprefix(SCHEME).partition("/")[0]
        return f"there is no bucket {name!r} at {endpoint()}. Create it, or name another one"
    if kind == _NOT_GIVEN:
        return (
            f"{what}: there are no credentials now, as who gives them for a time did not ({message}). Look "
            "at the role's service, or at the credential_process"
        )
    if kind in ("NoCredentialsError", "PartialCredentialsError"):
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
    if not code and (file := _own_file(error)) is not None:
        return (
            f"{what} was not asked for: a file of this machine cannot be read ({file}). It is what "
            "AWS_CA_BUNDLE, AWS_WEB_IDENTITY_TOKEN_FILE or AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE names, or "
            "a credential_process"
        )
    if _untrusted(error):
        return (
            f"{endpoint()} shows a certificate that is not trusted here ({message}). Name the file of the "
            "authority that signed it in AWS_CA_BUNDLE, or have the certificate renewed"
        )
    if _no_answer(code, error):
        return (
            f"{what}: no answer from {endpoint()} in {tries()} tries ({message}). Check AWS_ENDPOINT_URL and "
            f"the network; {ENV_STORAGE_TIMEOUT} is how long a request may stand still (now {timeout():g})"
        )
    remedy = _REMEDIES.get(code) or (_NO_ENDPOINT if "Invalid endpoint" in message else "")
    return f"{what} failed: {code} {message.rstrip('. ')}{remedy and f'. {remedy}'}".replace("  ", " ")


def _no_answer(code: str, error: Exception | None) -> bool:
    """Whether the store did not say all it had to, nor what is wrong."""
    if code or _untrusted(error) or _own_file(error) is not None:
        return False
    kind = "" if error is None else type(error).__name__
    named = kind in _CUT_SHORT or any(word in kind for word in ("Connect", "Timeout", "HTTP"))
    return named or isinstance(error, OSError | OtherAnswer)


def _untrusted(error: Exception | None) -> bool:
    """Whether the server is not known to be who it says it is: no later time changes that."""
    return "CERTIFICATE_VERIFY_FAILED" in str(error)


def _own_file(error: Exception | None) -> str | None:
    """In words what is wrong with a file of this machine that the connection or the credentials need; None
    where it is no such thing. The store was not asked then, so nothing is known to be missing from it."""
    inner = getattr(error, "kwargs", {}).get("error", error)
    unread = FileNotFoundError | PermissionError | IsADirectoryError | NotADirectoryError
    return str(inner) if isinstance(inner, unread) else None
