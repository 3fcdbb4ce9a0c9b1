"""How an error looks on the wire: OpenAI's error object, its status and its headers."""

import math
from typing import Final

import msgspec
from aiohttp import web

from runner.errors import (
    BodyTooLarge,
    EngineCrashed,
    Forbidden,
    InternalError,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    RunnerError,
    TimedOut,
    Unauthorized,
)

RETRY_HEADER: Final = "x-should-retry"
_LONGEST_SHOWN: Final = 200


class ErrorDetail(msgspec.Struct, frozen=True):
    """The inside of OpenAI's error object."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(msgspec.Struct, frozen=True):
    """The whole body of an error response, and the data of an error event."""

    error: ErrorDetail


def error_json(error: RunnerError) -> bytes:
    """Encode an error as OpenAI's clients expect it."""
    return msgspec.json.encode(ErrorBody(ErrorDetail(error.message, error.type, error.param, error.code)))


def error_response(error: RunnerError) -> web.Response:
    """A response of its own for an error that was found before the first byte went out."""
    return web.Response(status=error.status, body=error_json(error), content_type="application/json", headers=_headers(error))


def from_http(error: web.HTTPException, request: web.Request) -> RunnerError:
    """Translate what the HTTP library raises for routes, methods and bodies."""
    where = f"{request.method} {shown(request.path)}"
    if isinstance(error, web.HTTPNotFound):
        return NotFound(f"There is no {where} here")
    if isinstance(error, web.HTTPMethodNotAllowed):
        return MethodNotAllowed(f"{where} is not offered; {request.path} takes {', '.join(sorted(error.allowed_methods))}")
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return BodyTooLarge("The request body is over the limit")
    if error.status == 403:
        return Forbidden(f"{where} is refused")
    if 400 <= error.status < 500:
        return InvalidRequest(f"{where} cannot be answered: {error.reason}")
    return InternalError("The server failed to answer this request")


def shown(value: object) -> str:
    """A value from outside as a sentence may quote it: one line, bounded."""
    text = str(value)
    return text if len(text) <= _LONGEST_SHOWN else text[:_LONGEST_SHOWN] + "…"


def _headers(error: RunnerError) -> dict[str, str]:
    headers: dict[str, str] = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    if isinstance(error, EngineCrashed | TimedOut):  # its time is over; OpenAI's clients would ask again at once
        headers[RETRY_HEADER] = "false"
    if isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = 'Bearer realm="slotfile"'
    return headers
