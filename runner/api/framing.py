"""What the HTTP library would answer by itself, before our own steps: bytes that are no request, and `Expect: 100-continue`."""

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from aiohttp import hdrs, web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import HttpVersion11, RawRequestMessage
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong
from aiohttp.streams import StreamReader

from runner.api.access import AccessEntry
from runner.api.errors import error_response, shown
from runner.api.front import Front
from runner.errors import InternalError, InvalidRequest, RunnerError

# A client that waits for `100 Continue` before it sends its body, and has not been told to.
WAITS: Final = web.RequestKey("waits", bool)

MakeRequest = Callable[[RawRequestMessage, StreamReader, web.RequestHandler, AbstractStreamWriter, "asyncio.Task[None]"], web.BaseRequest]


def with_waiting(make: MakeRequest) -> MakeRequest:
    """Requests without their `Expect`, which the library would answer before the guard has seen them, marked with `WAITS`."""

    def make_request(
        message: RawRequestMessage,
        payload: StreamReader,
        protocol: web.RequestHandler,
        writer: AbstractStreamWriter,
        task: "asyncio.Task[None]",
    ) -> web.BaseRequest:
        expected = message.headers.get(hdrs.EXPECT)
        if expected is None:
            return make(message, payload, protocol, writer, task)
        headers = message.headers.copy()
        headers.popall(hdrs.EXPECT)
        request = make(message._replace(headers=type(message.headers)(headers)), payload, protocol, writer, task)
        request[WAITS] = expected.lower() == "100-continue" and message.version >= HttpVersion11
        return request

    return make_request


async def ask_for_body(request: web.BaseRequest) -> None:
    """Let a client that waits send its body."""
    if request.pop(WAITS, False):
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # none of the answer is out


class Protocol(web.RequestHandler):
    """The library's, but what is no request is answered as every other error is: OpenAI's object, an id, a log line, a count."""

    __slots__ = ("_front",)

    def __init__(self, server: web.Server, front: Front, *, log: logging.Logger, keep_alive_s: float) -> None:
        super().__init__(server, loop=asyncio.get_running_loop(), logger=log, keepalive_timeout=keep_alive_s, access_log=None)  # type: ignore[arg-type]
        self._front = front

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """The answer; the connection ends with it. Raises ConnectionError where another one has begun, or the client has left."""
        if isinstance(exc, ConnectionError):
            raise exc
        if request.writer.output_size > 0:
            raise ConnectionError("An answer has begun: no other one can follow")
        now = asyncio.get_running_loop().time()
        entry = AccessEntry(request, self._front.identities.address(request.remote or "", []), now)
        entry.error = error = _told(exc)
        if isinstance(error, InternalError):
            self.log_exception("id=%s a request failed", entry.request_id, exc_info=exc)
        entry.status = error.status
        response = error_response(error)
        response.headers.update(self._front.headers(entry.request_id))
        response.headers[hdrs.CONNECTION] = "close"
        response.force_close()
        self._front.metrics.http_request(request.method, "other", error.status)
        entry.finish(now)
        return response


def _told(fault: BaseException | None) -> RunnerError:
    """The fault in a sentence: the first line of the parser's, whose others show the bytes that came."""
    if isinstance(fault, LineTooLong):
        return InvalidRequest("The request line or a header is too long; the limit is 8,190 bytes")
    if isinstance(fault, HttpProcessingError):
        reason = fault.message.strip().partition("\n")[0].rstrip(": ")
        return InvalidRequest(f"This is no HTTP request: {shown(reason)}")
    return InternalError("The server failed to answer this request")
