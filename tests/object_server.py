"""An S3-compatible server for tests: moto's, in a process of its own, that fails where a file tells it to.

`python object_server.py PORT FAULTS`: FAULTS is a JSON list of rules, read anew with each request:
`{"method": "PUT", "path": regular expression, "query": likewise, "key": the access key's, "answer": ...,
"times": how often}`; what is left out fits everything. Answers: `slow-down`, `forbidden`, `expired`,
`other-region`, `other-time`, `conflict`, `bad-digest`, `not-deleted` as Amazon's; `slow-down-write` as
MinIO's; `page` is a web server's in its place; `stall` answers when FAULTS changes; `cut` loses the
connection in the middle of what is answered; `short` has only half of it; `flipped` has one bit of it
otherwise; `unconditional` forgets If-None-Match, as servers do that do not know it.
"""

from __future__ import annotations

import json
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, run_simple

ERROR = "<?xml version='1.0'?><Error><Code>{}</Code><Message>{}</Message></Error>"
ERRORS = {
    "slow-down": ("503 Slow Down", ERROR.format("SlowDown", "Please reduce your request rate.")),
    "forbidden": ("403 Forbidden", ERROR.format("AccessDenied", "Access Denied")),
    "expired": ("400 Bad Request", ERROR.format("ExpiredToken", "The provided token has expired.")),
    "other-region": (
        "400 Bad Request",
        ERROR.format("AuthorizationHeaderMalformed", "us-east-1 is wrong; expecting 'eu-west-1'"),
    ),
    "other-time": ("403 Forbidden", ERROR.format("RequestTimeTooSkewed", "The difference is too large.")),
    "conflict": ("409 Conflict", ERROR.format("ConditionalRequestConflict", "A conflicting operation.")),
    "bad-digest": ("400 Bad Request", ERROR.format("BadDigest", "The checksum did not match.")),
    "slow-down-write": ("503 Slow Down", ERROR.format("SlowDownWrite", "Resource requested is unwritable.")),
    "not-deleted": (
        "200 OK",
        "<DeleteResult><Error><Key>k</Key><Code>SlowDown</Code><Message>Slow.</Message></Error></DeleteResult>",
    ),
    "page": ("200 OK", "<html><body>We will be back soon.</body></html>"),
}


class Faulty:
    """The server behind, but for what the rules say."""

    def __init__(self, behind: Any, faults: Path) -> None:
        self._behind, self._faults = behind, faults
        self._lock, self._text, self._rules = threading.Lock(), "", []

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        answer = self._answer(environ)
        if answer == "stall":
            text = self._text
            while self._read() == text:
                time.sleep(0.01)
        elif answer == "unconditional":
            environ.pop("HTTP_IF_NONE_MATCH", None)
        elif answer == "cut":
            return self._half(environ, start)
        elif answer in ("short", "flipped"):
            return self._spoilt(answer, environ, start)
        elif answer is not None:
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            status, body = ERRORS[answer]
            start(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
            return [] if environ["REQUEST_METHOD"] == "HEAD" else [body.encode()]
        return self._behind(environ, start)

    def _half(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        whole = b"".join(self._behind(environ, start))
        yield whole[: len(whole) // 2]
        environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)

    def _spoilt(self, how: str, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        begun: list[Any] = []
        data = bytearray(b"".join(self._behind(environ, lambda *told: begun.extend(told))))
        if how == "short":
            del data[len(data) // 2 :]
        else:
            data[len(data) // 2] ^= 4
        status, headers = begun[:2]
        kept = [(name, value) for name, value in headers if name.lower() != "content-length"]
        start(status, [*kept, ("Content-Length", str(len(data)))])
        return [bytes(data)]

    def _read(self) -> str:
        return self._faults.read_text() if self._faults.exists() else "[]"

    def _answer(self, environ: dict[str, Any]) -> str | None:
        with self._lock:
            text = self._read()
            if text != self._text:
                self._text, self._rules = text, json.loads(text)
            for rule in self._rules:
                if (
                    re.fullmatch(rule.get("method", ".*"), environ["REQUEST_METHOD"])
                    and re.search(rule.get("path", ""), environ["PATH_INFO"])
                    and re.search(rule.get("query", ""), environ.get("QUERY_STRING", ""))
                    and re.search(rule.get("key", ""), environ.get("HTTP_AUTHORIZATION", ""))
                    and rule.get("times", 1) > 0
                ):
                    rule["times"] = rule.get("times", 1) - 1
                    return str(rule["answer"])
            return None


if __name__ == "__main__":
    WSGIRequestHandler.protocol_version = "HTTP/1.1"
    app = Faulty(DomainDispatcherApplication(create_backend_app), Path(sys.argv[2]))
    run_simple("127.0.0.1", int(sys.argv[1]), app, threaded=True)
