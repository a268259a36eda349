"""The controller's own log: structlog, for people on a terminal and as JSON lines elsewhere.

A traceback has no values of variables: those of a request have its token. And what a text would do to a
terminal is done to nobody's: who has no token, too, has the path of his request in it.
"""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import MutableMapping
from typing import Any, Literal, TextIO

import structlog

from holdfast_trainer.contract import legible


def configure_logging(
    level: str, log_format: Literal["auto", "console", "json"]
) -> structlog.stdlib.BoundLogger:
    """Send all logging of the process, libraries' too, to stderr in one format; returns a logger."""
    console = log_format == "console" or (log_format == "auto" and sys.stderr.isatty())
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="%H:%M:%S" if console else "iso", utc=not console),
    ]
    last: list[structlog.typing.Processor] = (
        [
            _legible,
            structlog.dev.ConsoleRenderer(
                colors=sys.stderr.isatty(),
                pad_event_to=0,
                pad_level=False,
                exception_formatter=_traceback,
            ),
        ]
        if console
        else [
            structlog.processors.ExceptionRenderer(
                structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
            ),
            structlog.processors.JSONRenderer(),
        ]
    )
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    output = logging.StreamHandler(sys.stderr)
    output.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [output]
    root.setLevel(level.upper())
    # What these say at info, the request log says better.
    for chatty in ("uvicorn", "uvicorn.error", "uvicorn.access", "sse_starlette", "aiosqlite", "httpx"):
        logging.getLogger(chatty).setLevel(max(logging.WARNING, logging.getLevelName(level.upper())))
    log: structlog.stdlib.BoundLogger = structlog.get_logger("holdfast_controller")
    return log


def _legible(_: object, __: str, event: MutableMapping[str, Any]) -> dict[str, Any]:
    return {key: legible(value) if isinstance(value, str) else value for key, value in event.items()}


def _traceback(to: TextIO, error: structlog.typing.ExcInfo) -> None:
    told = io.StringIO()
    structlog.dev.plain_traceback(told, error)
    to.write(legible(told.getvalue()))
