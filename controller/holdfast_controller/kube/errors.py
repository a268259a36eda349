"""What an apiserver's refusals mean to us. Pure.

Errors beside those of cluster.py::

    Unavailable
    ├── Expired          410: the resourceVersion is too old to watch or to page from; list again
    ├── Throttled        429: `retry_after` seconds, as the server asks
    ├── NotPermitted     403: the controller's own rights do not reach, and its role must be mended; 401: it
    │   │                is not known who it is
    │   └── Refused      403: a quota, an admission webhook and the like do not take what is asked for
    └── NotLeader        another replica leads; nothing may be written by this one
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from holdfast_controller.cluster import (
    AlreadyExists,
    Conflict,
    HoldfastError,
    Invalid,
    NotFound,
    Unavailable,
)
from holdfast_controller.problem import Forbidden

_RIGHTS = re.compile(r"User \"[^\"]*\" cannot ")
"""How an apiserver says that somebody may not do what others may."""


NOT_SERVED = "the apiserver serves no such kind: its definition (CustomResourceDefinition) is not there"


class Expired(Unavailable):
    pass


class Throttled(Unavailable):
    def __init__(self, message: str, retry_after: float):
        super().__init__(message)
        self.retry_after = retry_after


class NotPermitted(Unavailable):
    pass


class Refused(NotPermitted):
    pass


class NotLeader(Unavailable):
    pass


def error_of(what: str, code: int, status: Mapping[str, Any], retry_after: str | None) -> HoldfastError:
    """The error of an answer. `what` is the request, `status` its `Status` document (or {}).

    See "Response status codes" in Kubernetes' API conventions.
    """
    said = str(status.get("message") or f"HTTP {code}")
    if code == 404:  # of what it does serve, it says what is not found
        return NotFound(f"{what}: {status.get('message') or NOT_SERVED}")
    if code == 409:
        taken = status.get("reason") == "AlreadyExists"
        return AlreadyExists(f"{what}: {said}") if taken else Conflict(f"{what}: {said}; read it again")
    if code == 410:
        return Expired(f"{what}: {said}")
    causes = status.get("details", {}).get("causes") or []
    if code == 429:
        # An eviction is refused like this, too, which Kubernetes' own words put down to the pod.
        budget = [cause.get("message", said) for cause in causes if cause.get("reason") == "DisruptionBudget"]
        why = f"not now: {budget[0]}" if budget else f"the apiserver is busy: {said}"
        return Throttled(f"{what}: {why}", seconds_of(retry_after))
    if code == 401:
        return NotPermitted(
            f"{what}: the apiserver does not know the controller: {said}; its credentials have expired, or "
            "are another cluster's"
        )
    if code == 403:
        if not _RIGHTS.search(said):
            return Refused(f"{what}: the apiserver refuses it: {said}")
        return NotPermitted(
            f"{what}: the apiserver refuses the controller: {said}; give its account the right to do this"
        )
    if 400 <= code < 500:
        lines = [f"{cause.get('field', '')}: {cause.get('message', '')}" for cause in causes]
        return Invalid(f"{what}: {said}", lines or [said])
    return Unavailable(f"{what}: the apiserver failed: {said}")


@contextmanager
def answer_to_who_asks() -> Iterator[None]:
    """What the cluster refuses whoever asks for it, it refuses through us too: to try again is no help."""
    try:
        yield
    except Refused as error:
        raise Forbidden(str(error)) from error


def seconds_of(retry_after: str | None) -> float:
    """Of a Retry-After header, 1 where there is none or it is a date; at most 60."""
    try:
        return min(60.0, max(0.0, float(retry_after or "")))
    except ValueError:
        return 1.0
