"""Who may call REST on a cluster: whoever could do the same with kubectl.

The caller's token goes to the apiserver for review (TokenReview), then the apiserver is asked whether that
user may do this to TrainingJobs in that namespace (SubjectAccessReview): for every route, logs, dry runs and
drills too. Answers are kept for some seconds, tokens as digests alone. A path that `ROUTES` does not know
is refused, so that a new route is closed until somebody has said whose right it needs.

Whoever reaches the port can make us ask, also with tokens that are none. So reviews have budgets of their
own, of which at most `UNDER_WAY` wait at a time: strangers can keep each other waiting, but neither the
reconciler nor the lease, nor whose token was somebody's a while ago.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar
from urllib.parse import parse_qsl

from holdfast_controller.cluster import HoldfastError, Unavailable
from holdfast_controller.problem import Forbidden, Unauthorized

from .connection import Connection, Document

REVIEWS_PER_SECOND = 100.0
REVIEWS_BURST = 200
UNDER_WAY = 64
KEPT_SECONDS = 10.0
KEPT_MOST = 10_000
KNOWN_SECONDS = 3600.0
"""For so long whose token was somebody's is no stranger, and does not wait among them to be asked about."""
LONGEST_TOKEN = 16 * 1024
_NO_ANSWER = re.compile(
    r"\b(?:Get|Post) \"https?://|authenticator not initialized|prevented the request from succeeding"
    r"|unable to handle the request|deadline exceeded|timeout"
)
"""How an apiserver says in a review that a webhook or an OIDC issuer which it asks has not answered it. Of
other errors, as of a token that has expired, its no is the answer."""

_CANNOT_TELL = (
    "the cluster cannot tell at the moment {}: a webhook or an issuer that its apiserver asks does not "
    "answer; try again"
)
"""What exactly does not answer is not for strangers."""

_NAME = r"[^/]+"
_JOB = rf"/v1/namespaces/(?P<namespace>{_NAME})/jobs/(?P<name>{_NAME})"
ROUTES: tuple[tuple[str, str, str], ...] = (
    ("GET", r"/v1/jobs", "list"),
    ("GET", rf"/v1/namespaces/(?P<namespace>{_NAME})/jobs", "list"),
    ("POST", rf"/v1/namespaces/(?P<namespace>{_NAME})/jobs", "create"),
    ("GET", _JOB, "get"),
    ("DELETE", _JOB, "delete"),
    ("POST", rf"{_JOB}/(suspend|resume|drill)", "update"),
    ("GET", rf"{_JOB}/(logs|events|ledger|steps)", "get"),
)
"""Method, path, and the verb on trainingjobs that it needs; a list that is asked to go on needs `watch`."""
_NO = ("false", "0", "off", "no", "n", "f")
"""Of `?watch=`: everything else is taken for yes here, whatever the route makes of it."""
DESCRIPTIONS = ("/openapi.json", "/docs", "/docs/oauth2-redirect")
"""What any user of the cluster may read: it says nothing of any job."""
NON_RESOURCES = ("/metrics",)


@dataclass(frozen=True)
class User:
    name: str
    uid: str
    groups: tuple[str, ...]
    extra: tuple[tuple[str, tuple[str, ...]], ...]


@dataclass(frozen=True)
class Right:
    """What a request needs: attributes of a SubjectAccessReview, and in words."""

    attributes: tuple[tuple[str, str], ...]
    resource: bool
    words: str


def right_for(method: str, path: str, query: str = "") -> Right | None:
    """The right that a request needs; None for what every user of the cluster may read. Pure.

    Raises Forbidden for a path nobody has decided about.
    """
    method = "GET" if method == "HEAD" else method
    path = path.rstrip("/") or "/"
    for wanted, pattern, verb in ROUTES:
        match = re.fullmatch(pattern, path)
        if match is None or wanted != method:
            continue
        found = match.groupdict()
        if verb == "list" and _asks_to_watch(query):
            verb = "watch"
        place = f" in namespace {found['namespace']}" if "namespace" in found else " in all namespaces"
        attributes = {"group": "holdfast.dev", "resource": "trainingjobs", "verb": verb, **found}
        return Right(tuple(sorted(attributes.items())), True, f"{verb} trainingjobs{place}")
    if method == "GET" and path in NON_RESOURCES:
        return Right((("path", path), ("verb", "get")), False, f"get {path}")
    if method == "GET" and path in DESCRIPTIONS:
        return None
    raise Forbidden(f"{method} {path}: there is no such route, or no rule says who may use it")


def _asks_to_watch(query: str) -> bool:
    given = parse_qsl(query, keep_blank_values=True)
    return any(name == "watch" and value.lower() not in _NO for name, value in given)


class ClusterAccess:
    """Refuses requests by the cluster's own rules."""

    def __init__(self, connection: Connection, *, kept_seconds: float = KEPT_SECONDS):
        self._of_strangers, self._of_users = _Reviews(connection), _Reviews(connection)
        self._known: _Kept[str, None] = _Kept(KNOWN_SECONDS)
        self._users: _Kept[str, User | None] = _Kept(kept_seconds)
        self._answers: _Kept[tuple[User, Right], str | None] = _Kept(kept_seconds)

    async def refuse(
        self, method: str, path: str, query: str, headers: Mapping[str, str]
    ) -> HoldfastError | None:
        """Why this request may not pass, or None where it may."""
        scheme, _, token = headers.get("authorization", "").partition(" ")
        token = token.strip()
        if scheme.lower() != "bearer" or not token or len(token) > LONGEST_TOKEN:
            return Unauthorized(
                "send the header `Authorization: Bearer TOKEN`, as `holdfast` does with --token-file or "
                "HOLDFAST_TOKEN, with a token of this cluster, such as `kubectl create token ACCOUNT` prints"
            )
        try:
            user = await self._user(token)
            if user is None:
                return Unauthorized("the cluster does not know this token, or it has expired")
            right = right_for(method, path, query)
            denied = None if right is None else await self._denied(user, right)
        except HoldfastError as error:
            return error
        if right is not None and denied is not None:
            return Forbidden(f"{user.name} may not {right.words}{f': {denied}' if denied else ''}")
        return None

    async def _user(self, token: str) -> User | None:
        digest = hashlib.sha256(token.encode()).hexdigest()
        found, user = self._users.get(digest)
        if found:
            return user
        reviews = self._of_users if self._known.get(digest)[0] else self._of_strangers
        review = await reviews.ask(
            "/apis/authentication.k8s.io/v1/tokenreviews",
            {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": {"token": token}},
        )
        status = review.get("status") or {}
        user = _user_of(status)
        if user is None and _NO_ANSWER.search(str(status.get("error") or "")):
            raise Unavailable(_CANNOT_TELL.format("whose token this is"))
        self._users.put(digest, user)
        if user is not None:
            self._known.put(digest, None)
        return user

    async def _denied(self, user: User, right: Right) -> str | None:
        """The authorizer's reason, "" where it gives none; None where it allows it."""
        found, answer = self._answers.get((user, right))
        if found:
            return answer
        which = "resourceAttributes" if right.resource else "nonResourceAttributes"
        review = await self._of_users.ask(
            "/apis/authorization.k8s.io/v1/subjectaccessreviews",
            {
                "apiVersion": "authorization.k8s.io/v1",
                "kind": "SubjectAccessReview",
                "spec": {
                    "user": user.name,
                    "uid": user.uid,
                    "groups": list(user.groups),
                    "extra": {key: list(values) for key, values in user.extra},
                    which: dict(right.attributes),
                },
            },
        )
        status = review.get("status") or {}
        answer = None if status.get("allowed") is True else str(status.get("reason") or "")
        if answer is not None and _NO_ANSWER.search(str(status.get("evaluationError") or "")):
            raise Unavailable(_CANNOT_TELL.format(f"whether {user.name} may {right.words}"))
        self._answers.put((user, right), answer)
        return answer


class _Reviews:
    """Questions to the apiserver with a budget of their own."""

    def __init__(self, connection: Connection):
        self._connection = connection.apart(REVIEWS_PER_SECOND, REVIEWS_BURST)
        self._under_way = 0

    async def ask(self, path: str, document: Document) -> Document:
        """Ask the apiserver. Raises Unavailable at once where too many are waiting for it."""
        if self._under_way >= UNDER_WAY:
            raise Unavailable("too many tokens are being reviewed at the moment; try again in a second")
        self._under_way += 1
        try:
            return await self._connection.post(path, document)
        finally:
            self._under_way -= 1


def _user_of(status: Mapping[str, Any]) -> User | None:
    if status.get("authenticated") is not True:
        return None
    user = status.get("user") or {}
    return User(
        str(user.get("username", "")),
        str(user.get("uid", "")),
        tuple(user.get("groups") or ()),
        tuple(sorted((key, tuple(values)) for key, values in (user.get("extra") or {}).items())),
    )


K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class _Kept(Generic[K, V]):
    """Answers, for some seconds; the oldest give way."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic):
        self._seconds = seconds
        self._clock = clock
        self._answers: dict[K, tuple[float, V]] = {}

    def get(self, key: K) -> tuple[bool, V | None]:
        """Whether it is known, and the answer."""
        if (known := self._answers.get(key)) is not None and known[0] > self._clock():
            return True, known[1]
        return False, None

    def put(self, key: K, answer: V) -> None:
        self._answers.pop(key, None)
        while len(self._answers) >= KEPT_MOST:
            del self._answers[next(iter(self._answers))]
        self._answers[key] = (self._clock() + self._seconds, answer)
