"""Every error as an RFC 9457 problem document; the statuses are in `holdfast_controller.problem`."""

from __future__ import annotations

import math
from itertools import groupby
from typing import Any, cast

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.routing import compile_path

from ..cluster import HoldfastError, Invalid, Unavailable
from ..problem import MEDIA_TYPE, PROBLEM_TYPES, ServerError, Unauthorized, document_of
from ..spec import JOB_NAME_RULE, NAMESPACE_RULE


class Problem(BaseModel):
    """RFC 9457 problem details."""

    type: str = Field(description="A URN, stable for programs.")
    title: str
    status: int
    detail: str = Field(description="What is wrong here and what to do about it.")
    instance: str = Field(description="The request's path.")
    errors: list[str] = Field(
        default_factory=list,
        description="One line for each fault, the first 100, with the path of the offending key.",
    )


RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {
        "description": " / ".join(kind.title for kind in kinds),
        "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
    }
    for status, kinds in groupby(PROBLEM_TYPES.values(), key=lambda kind: kind.status)
}
"""For OpenAPI: what any route may answer beside its own."""


_RULES = {("path", "namespace"): NAMESPACE_RULE, ("path", "name"): JOB_NAME_RULE}
"""In words: what is given there is refused by no more than a regular expression."""


def problem_response(error: HoldfastError, instance: str) -> Response:
    body = document_of(error, instance)
    headers = {}
    if isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = 'Bearer realm="holdfast"'
    if isinstance(error, Unavailable):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after)))
    return JSONResponse(body, status_code=body["status"], headers=headers, media_type=MEDIA_TYPE)


def install(app: FastAPI) -> None:
    """Map every error that can leave a route."""
    app.add_exception_handler(HoldfastError, _ours)
    app.add_exception_handler(RequestValidationError, _bad_parameters)
    app.add_exception_handler(HTTPException, _of_the_framework)
    app.add_exception_handler(Exception, _unforeseen)


async def _ours(request: Request, error: Exception) -> Response:
    return problem_response(cast(HoldfastError, error), request.url.path)


async def _bad_parameters(request: Request, error: Exception) -> Response:
    faults = []
    for fault in cast(RequestValidationError, error).errors():
        *place, name = fault["loc"] if len(fault["loc"]) > 1 else ("body", fault["loc"][0])
        message = str(fault["msg"])
        value = repr(fault.get("input"))
        if rule := _RULES.get(tuple(fault["loc"])):
            faults.append(f"{value[:80]} {rule}")
            continue
        faults.append(f"{'.'.join(map(str, place))} {name}: {value[:80]}: {message[0].lower()}{message[1:]}")
    return problem_response(Invalid("; ".join(faults), faults), request.url.path)


async def _of_the_framework(request: Request, error: Exception) -> Response:
    """No such route, no such method: no error of ours, so no type but the status's own."""
    error = cast(HTTPException, error)
    details = {
        404: f"there is nothing at {request.url.path}; /openapi.json lists what there is",
        405: f"{request.method} is not possible on {request.url.path}",
    }
    body = {
        "type": "about:blank",
        "title": str(error.detail),
        "status": error.status_code,
        "detail": details.get(error.status_code, str(error.detail)),
        "instance": request.url.path,
    }
    headers = dict(error.headers or {})
    if error.status_code == 405 and (methods := _methods(request)):
        headers["Allow"] = ", ".join(methods)
    return JSONResponse(body, error.status_code, headers=headers, media_type=MEDIA_TYPE)


def _methods(request: Request) -> list[str]:
    """What the document has at this path; the framework names what the first of its routes takes alone."""
    found = {
        method.upper()
        for path, methods in request.app.openapi()["paths"].items()
        if compile_path(path)[0].match(request.url.path)
        for method in methods
    }
    return sorted(found | {"HEAD"} if "GET" in found else found)


async def _unforeseen(request: Request, error: Exception) -> Response:
    # Starlette raises it again once this is sent, so the server's log has the traceback.
    return problem_response(
        ServerError("an unforeseen error; the controller's log has it in full"), request.url.path
    )
