"""A typed client of the REST API; what the `holdfast` command stands on.

Answers are the domain's own values, errors the domain's own errors (`holdfast_controller.problem`).
Reads are tried again while the controller restarts only where the caller says so; a submission carries
an idempotency key, so a torn connection never makes two jobs.
"""

from __future__ import annotations

import json
import os
import re
import ssl
import uuid
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import httpx
from pydantic import ValidationError

from .cluster import Change, HoldfastError, Invalid, Unavailable
from .jobs import TrainingJob
from .json_values import check_json
from .keepalive import PROBED
from .listeners import HERE
from .problem import error_of
from .spec import JOB_NAME, JOB_NAME_RULE, NAMESPACE, NAMESPACE_RULE

SUBMIT_SECONDS = 20.0
"""For how long a submission is tried again whose answer was lost: as long as a controller takes to start."""
PAGE = 500
RETRY_AFTER_LIMIT = 30.0
"""Seconds; nobody has to believe that a controller stays away for an hour."""
QUIET_SECONDS = 20.0
"""A stream sends a sign of life every 5 s; after this long without one its server is gone."""

_HERE = (
    "start one with `holdfast up`; one of a cluster needs its `kubectl port-forward`, and a pod that is ready"
)
_ELSEWHERE = "look whether that is its address (--server, HOLDFAST_SERVER), and whether it runs and is ready"


class Unreachable(Unavailable):
    """Nothing answers at the server's address."""


class Torn(Unreachable):
    """The connection was lost before the answer: what was asked for may have been done."""


class NotHoldfast(HoldfastError):
    """Something answers, but not what this version of Holdfast speaks."""


def _authorities() -> ssl.SSLContext:
    """Who vouches for a server: the world's, or whom SSL_CERT_FILE or SSL_CERT_DIR names."""
    try:
        return httpx.create_ssl_context()
    except OSError as error:
        named = os.environ.get("SSL_CERT_FILE")
        raise Unreachable(f"SSL_CERT_FILE is {named!r}, with no certificates: {error.strerror}") from error


def _tls_fault(error: BaseException | None) -> str | None:
    """Why a connection that was made could not be made safe; None where it was not made."""
    while error is not None and not isinstance(error, ssl.SSLError):
        error = error.__cause__ or error.__context__
    if isinstance(error, ssl.SSLCertVerificationError):
        return (
            f"its certificate is not trusted ({error.verify_message}): where its authority is one of your "
            "own, name a file with that one's certificate by SSL_CERT_FILE"
        )
    return (
        None
        if error is None
        else f"not by TLS ({error.strerror}): look whether its address starts with http://"
    )


class Client:
    """One connection pool to one controller. Use it as a context manager.

    Every method raises the error that the controller answered, or Unreachable, or NotHoldfast. Unavailable,
    of which Unreachable is one, tells that the same may be asked again.
    """

    def __init__(
        self,
        server: str,
        token: str | None,
        *,
        timeout: float = 10.0,
        warned: Callable[[str], None] = lambda _: None,
        before: Callable[[], None] = lambda: None,
        reread: Callable[[], str | None] | None = None,
        moved: Callable[[], str | None] = lambda: None,
    ):
        """`warned` is told what the controller adds to its answers, each once; `before` is called before the
        token is sent, and what it raises ends the request; `reread` says what the token is by now, and
        `moved` where the controller is by now, None where that is not known: it is asked where nothing
        answers, for what is tried next."""
        self.server = server.rstrip("/")
        self._moved = moved
        self._warned, self._warnings = warned, set[str]()
        # A proxy for the world outside has no business between a machine and itself.
        beyond = urlsplit(self.server).hostname not in HERE
        self._remedy = _ELSEWHERE if beyond else _HERE
        # For https alone: reading the world's certificates takes longer than a call.
        verify = _authorities() if urlsplit(self.server).scheme == "https" else False
        with self._connected():
            try:
                transport = None
                # With one of our own, httpx heeds no proxy.
                if not (beyond and getproxies().keys() & {"http", "https", "all"}):
                    transport = httpx.HTTPTransport(verify, trust_env=beyond, socket_options=PROBED)
                self._http = httpx.Client(
                    base_url=self.server,
                    auth=_Bearer(token, before, reread or (lambda: token)),
                    timeout=timeout,
                    trust_env=beyond,
                    verify=verify,
                    transport=transport,
                )
            except (ImportError, ValueError) as error:
                raise Unreachable(
                    f"no way to {self.server}: the proxy that the environment names (HTTP_PROXY, "
                    f"HTTPS_PROXY, ALL_PROXY) cannot be used: {error}"
                ) from error

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    # ------------------------------------------------------------ one request

    @contextmanager
    def _connected(self) -> Iterator[None]:
        try:
            yield
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            if (fault := _tls_fault(error)) is not None:
                raise Unreachable(f"{self.server} answers, but {fault}") from error
            there = self.server
            if (now := self._moved()) is not None:
                self.server = self._http.base_url = now
            raise Unreachable(f"no controller answers at {there}: {self._remedy}") from error
        except (httpx.InvalidURL, UnicodeError) as error:  # the name of a machine has rules of its own
            raise Unreachable(f"{self.server!r} is no address of a controller: {error}") from error
        except httpx.UnsupportedProtocol as error:
            raise Unreachable(f"{self.server!r} is no address: it should start with http://") from error
        except httpx.TransportError as error:
            what = str(error) or type(error).__name__
            raise Torn(f"lost the controller at {self.server}: {what}; try again") from error

    def _request(self, method: str, path: str, **options: Any) -> Any:
        """The JSON of an answer."""
        with self._connected():
            answer = self._http.request(method, path, **options)
        self._check(answer)
        try:
            return answer.json()
        except ValueError:
            raise NotHoldfast(
                f"{self.server} answered {answer.text[:60]!r}, not JSON: {self._remedy}"
            ) from None

    def _check(self, answer: httpx.Response) -> None:
        said = re.fullmatch(r'110 \S+ "(.*)"', answer.headers.get("Warning", ""))
        if said and said[1] not in self._warnings:
            self._warnings.add(said[1])
            self._warned(said[1])
        if answer.is_success:
            return
        if there := answer.headers.get("Location"):
            raise NotHoldfast(
                f"{self.server} answers that what was asked for is at {there}: give the address at which the "
                "controller itself answers (--server, HOLDFAST_SERVER)"
            )
        try:
            document = answer.json()
        except ValueError:
            document = None
        error = error_of(document, answer.status_code)
        if isinstance(error, Unavailable):
            error.retry_after = _seconds(answer.headers.get("Retry-After", ""))
        elif not isinstance(document, dict) or not {"detail", "title"} & document.keys():
            # Such a 404 does not say that a job is gone.
            raise NotHoldfast(
                f"{self.server} answered {answer.status_code} {answer.reason_phrase}, and not as a "
                "controller does: look whether that is its address (--server, HOLDFAST_SERVER)"
            )
        raise error

    def _items(self, document: Any) -> list[Any]:
        if isinstance(document, dict) and isinstance(document.get("items"), list):
            return list(document["items"])
        raise self._no_list(document)

    def _no_list(self, document: Any) -> NotHoldfast:
        return NotHoldfast(f"{self.server} answered {json.dumps(document)[:60]}, no list: {self._remedy}")

    def _job(self, document: object) -> TrainingJob:
        try:
            # A newer controller may know more than this client: what it adds is no error here.
            return TrainingJob.model_validate(document, extra="ignore")
        except ValidationError as error:
            raise NotHoldfast(
                f"{self.server} answered a job that this version cannot read ({error.error_count()} faults); "
                "use the `holdfast` of the controller's version"
            ) from error

    # ------------------------------------------------------------------- jobs

    def submit(self, document: Mapping[str, Any], namespace: str) -> TrainingJob:
        """Submit a job; sent again with one idempotency key where the connection tears."""
        # No other command has a use for it.
        from tenacity import Retrying, retry_if_exception, stop_after_delay, wait_exponential

        headers = _JSON | {"Idempotency-Key": uuid.uuid4().hex}
        torn = False

        def again(error: BaseException) -> bool:
            """Where the answer was lost, and from then on where there is none: it may have been submitted."""
            nonlocal torn
            torn = torn or isinstance(error, Torn)
            return torn and isinstance(error, Unavailable)

        tries = Retrying(
            retry=retry_if_exception(again),
            stop=stop_after_delay(SUBMIT_SECONDS),
            wait=wait_exponential(multiplier=0.2, max=2.0),
            reraise=True,
        )
        try:
            body = tries(self._request, "POST", _jobs(namespace), content=_json(document), headers=headers)
        except Unavailable as error:
            if not torn:
                raise
            raise Torn(
                f"lost the controller at {self.server} before it answered: whether the job was submitted is "
                "not known; `holdfast get` tells, once a controller answers again"
            ) from error
        return self._job(body)

    def plan(self, document: Mapping[str, Any], namespace: str) -> dict[str, Any]:
        """The dry run of a submission: engine, feasible, manifests, reasons, notes."""
        answer = self._request(
            "POST", _jobs(namespace), params={"dryRun": "true"}, content=_json(document), headers=_JSON
        )
        return dict(answer)

    def list_jobs(
        self, namespace: str | None, *, phases: tuple[str, ...] = (), selector: str = ""
    ) -> list[TrainingJob]:
        """All jobs (of a namespace), oldest first, page by page."""
        found: list[TrainingJob] = []
        query: dict[str, Any] = {"limit": PAGE, "phase": list(phases), "labelSelector": selector}
        while True:
            body = self._request("GET", _jobs(namespace), params=query)
            found += [self._job(item) for item in self._items(body)]
            try:
                query["continue"] = body["metadata"]["continue"]
            except (KeyError, TypeError):  # as of a Kubernetes API server
                raise self._no_list(body) from None
            if not query["continue"]:
                return found

    def get(self, namespace: str, name: str) -> TrainingJob:
        return self._job(self._request("GET", _one(namespace, name)))

    def delete(self, namespace: str, name: str) -> TrainingJob:
        """Ask for deletion; the job is gone once `get` raises NotFound."""
        return self._job(self._request("DELETE", _one(namespace, name)))

    def suspend(self, namespace: str, name: str) -> TrainingJob:
        return self._job(self._request("POST", _one(namespace, name) + "/suspend"))

    def resume(self, namespace: str, name: str) -> TrainingJob:
        return self._job(self._request("POST", _one(namespace, name) + "/resume"))

    def drill(self, namespace: str, name: str, replica: int | None, kind: str) -> dict[str, Any]:
        """Disrupt a replica (None: a random one). Returns attempt, replica and kind."""
        asked = {"replica": replica, "kind": kind}
        return dict(self._request("POST", _one(namespace, name) + "/drill", json=asked))

    # ---------------------------------------------------------------- records

    def events(self, namespace: str, name: str) -> list[dict[str, Any]]:
        return self._items(self._request("GET", _one(namespace, name) + "/events"))

    def ledger(self, namespace: str, name: str) -> dict[str, Any]:
        return dict(self._request("GET", _one(namespace, name) + "/ledger"))

    def steps(self, namespace: str, name: str) -> list[dict[str, Any]]:
        return self._items(self._request("GET", _one(namespace, name) + "/steps"))

    def logs(
        self,
        namespace: str,
        name: str,
        *,
        attempt: int | None = None,
        rank: int = 0,
        tail: int | None = None,
        follow: bool = False,
    ) -> Iterator[str]:
        """Lines of a rank's output, without their ends; with `follow` until the server ends them."""
        query = {"attempt": attempt, "rank": rank, "tail": tail, "follow": str(follow).lower()}
        given = {key: value for key, value in query.items() if value is not None}
        # A log may be silent for hours: only connecting has a bound.
        patience = httpx.Timeout(10.0, read=None) if follow else httpx.Timeout(60.0)
        path = _one(namespace, name) + "/logs"
        with self._connected(), self._http.stream("GET", path, params=given, timeout=patience) as answer:
            if not answer.is_success:
                answer.read()
                self._check(answer)
            yield from _lines(answer)

    def watch(
        self, namespace: str | None, *, selector: str = "", name: str | None = None
    ) -> Iterator[Change]:
        """Jobs as ADDED, then every change, until the connection ends (then Unreachable, or a return)."""
        query = {"watch": "true", "labelSelector": selector} | ({"name": name} if name else {})
        patience = httpx.Timeout(10.0, read=QUIET_SECONDS)
        with (
            self._connected(),
            self._http.stream("GET", _jobs(namespace), params=query, timeout=patience) as answer,
        ):
            if not answer.is_success:
                answer.read()
                self._check(answer)
            for event, data in server_sent(line.removesuffix("\r") for line in _lines(answer)):
                yield Change(event, self._job(json.loads(data)))


class _Bearer(httpx.Auth):
    """Shows the token; where that is refused, what it is by now: whoever stays with a job for days outlives
    the token that he began with."""

    def __init__(self, token: str | None, before: Callable[[], None], reread: Callable[[], str | None]):
        self._token, self._before, self._reread = token, before, reread

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        self._before()
        answer = yield self._shown_in(request)
        if answer.status_code == httpx.codes.UNAUTHORIZED and (token := self._reread()) != self._token:
            self._token = token
            yield self._shown_in(request)

    def _shown_in(self, request: httpx.Request) -> httpx.Request:
        if self._token:
            request.headers["Authorization"] = f"Bearer {self._token}"
        return request


_JSON = {"Content-Type": "application/json"}


def _json(document: Mapping[str, Any]) -> bytes:
    """Raises Invalid where JSON would change it: the server could not know."""
    check_json(document)
    return json.dumps(document).encode()


def _seconds(retry_after: str) -> float:
    """Of the header; 0 where there is none, or a date."""
    return min(RETRY_AFTER_LIMIT, float(retry_after)) if retry_after.isdecimal() else 0.0


def _jobs(namespace: str | None) -> str:
    """The path. Raises Invalid for what is no namespace, and would lead elsewhere: `..`, nothing at all."""
    if namespace is None:
        return "/v1/jobs"
    if len(namespace) > 63 or not re.fullmatch(NAMESPACE, namespace):
        raise Invalid(f"{namespace!r} {NAMESPACE_RULE}")
    return f"/v1/namespaces/{namespace}/jobs"


def _one(namespace: str, name: str) -> str:
    """Likewise, of a job."""
    if len(name) > 50 or not re.fullmatch(JOB_NAME, name):
        raise Invalid(f"{name!r} {JOB_NAME_RULE}")
    return f"{_jobs(namespace)}/{name}"


def _lines(answer: httpx.Response) -> Iterator[str]:
    """Lines at "\\n" alone: a progress bar's "\\r" and exotic separators stay where they are."""
    rest = ""
    for text in answer.iter_text():
        *whole, rest = (rest + text).split("\n")
        yield from whole
    if rest:
        yield rest


def server_sent(lines: Iterator[str]) -> Iterator[tuple[str, str]]:
    """(event, data) of a text/event-stream; comments, the server's signs of life, are left out."""
    event, data = "message", list[str]()
    for line in lines:
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if not line:
            if data:
                yield event, "\n".join(data)
            event, data = "message", []
        elif name == "event":
            event = value
        elif name == "data":
            data.append(value)
