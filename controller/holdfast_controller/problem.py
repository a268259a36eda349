"""Errors on the wire: our error tree as RFC 9457 problem details, and back.

The one place that knows which error is which HTTP status. The API turns an error into a document
with `document_of`, the client turns the document into the same error with `error_of`.

Errors that only a request can have::

    HoldfastError
    ├── Unauthorized      no token, or not this one
    ├── Forbidden         not from there
    ├── TooLarge          more bytes than the API reads
    ├── UnsupportedMedia  a body in a format that is not read here
    └── ServerError       the controller failed; its log says why
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .cluster import AlreadyExists, Conflict, HoldfastError, Invalid, NotFound, NotReady, Unavailable

MEDIA_TYPE = "application/problem+json"
TYPE_PREFIX = "urn:holdfast:problem:"


class Unauthorized(HoldfastError):
    pass


class Forbidden(HoldfastError):
    pass


class TooLarge(HoldfastError):
    pass


class UnsupportedMedia(HoldfastError):
    pass


class ServerError(HoldfastError):
    pass


@dataclass(frozen=True)
class ProblemType:
    slug: str
    status: int
    title: str


GATEWAY_STATUSES = (502, 504)
"""What an ingress answers while the controller behind it is replaced; 503 too."""
PROBLEM_TYPES: Mapping[type[HoldfastError], ProblemType] = {
    Unauthorized: ProblemType("unauthorized", 401, "A valid bearer token is needed"),
    Forbidden: ProblemType("forbidden", 403, "Not allowed"),
    NotFound: ProblemType("not-found", 404, "Not found"),
    AlreadyExists: ProblemType("already-exists", 409, "The name is taken"),
    Conflict: ProblemType("conflict", 409, "In conflict with an earlier write"),
    NotReady: ProblemType("not-ready", 409, "Not possible now"),
    TooLarge: ProblemType("too-large", 413, "The body is too large"),
    UnsupportedMedia: ProblemType("unsupported-media", 415, "The body's format is not read here"),
    Invalid: ProblemType("invalid", 422, "The request can never be carried out as it is"),
    Unavailable: ProblemType("unavailable", 503, "Try again"),
    ServerError: ProblemType("internal", 500, "The controller failed"),
}


def problem_type(error: HoldfastError) -> ProblemType:
    """By the nearest class in the error's ancestry that has one."""
    for cls in type(error).__mro__:
        if cls in PROBLEM_TYPES:
            return PROBLEM_TYPES[cls]
    return PROBLEM_TYPES[ServerError]


def document_of(error: HoldfastError, instance: str) -> dict[str, Any]:
    """The problem document; `instance` is the request's path."""
    kind = problem_type(error)
    body: dict[str, Any] = {
        "type": TYPE_PREFIX + kind.slug,
        "title": kind.title,
        "status": kind.status,
        "detail": str(error),
        "instance": instance,
    }
    if isinstance(error, Invalid):
        body["errors"] = error.errors or [body["detail"]]
    return body


def error_of(document: object, status: int) -> HoldfastError:
    """The error that a problem document tells; also of an answer that is no problem document."""
    body: Mapping[str, Any] = document if isinstance(document, Mapping) else {}
    detail = str(body.get("detail") or body.get("title") or f"the server answered {status} without a reason")
    slug = str(body.get("type", "")).removeprefix(TYPE_PREFIX)
    by_status: type[HoldfastError] | None = Unavailable if status in GATEWAY_STATUSES else None
    for cls, kind in PROBLEM_TYPES.items():
        if kind.slug == slug:
            by_status = cls
            break
        if kind.status == status and by_status is None:
            by_status = cls
    if by_status is Invalid:
        return Invalid(detail, [str(line) for line in body.get("errors", [])])
    return (by_status or ServerError)(detail)
