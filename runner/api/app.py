"""The routes, and what every request passes on its way to one.

1. `_observe`   gives it an id and, at its end, an access-log line and a count
2. `_translate` turns every error into OpenAI's error object
3. `_check`     refuses foreign hosts, origins, keys and content types; answers preflights; says "loading" until the model is
4. the handler

Headers that belong on every response, streams included, are set just before its headers are sent.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from aiohttp import hdrs, web
from aiohttp.typedefs import Middleware

from runner.api import chat_completions, completions, live, status
from runner.api.access import AccessEntry
from runner.api.answer import ENTRY
from runner.api.errors import error_response, from_http
from runner.api.framing import WAITS, ask_for_body
from runner.api.front import Front
from runner.api.guard import Guard
from runner.api.identity import CLIENT
from runner.errors import InternalError, RunnerError

_LOG: Final = logging.getLogger("slotfile.api")

Handler = Callable[[Front, web.Request], Awaitable[web.StreamResponse]]
_Next = Callable[[web.Request], Awaitable[web.StreamResponse]]
_Step = Callable[[web.Request, _Next], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Route:
    """One endpoint. `needs_key`: where keys are set; `needs_model`: 503 until it is loaded."""

    method: str
    path: str
    handler: Handler
    needs_key: bool = True
    needs_model: bool = True


ROUTES: Final = (
    Route("POST", "/v1/chat/completions", chat_completions.chat_completions),
    Route("POST", "/v1/completions", completions.completions),
    Route("GET", "/v1/models", status.models),
    Route("GET", "/v1/models/{id:.+}", status.model),
    Route("GET", "/v1/queue", live.queue),
    Route("GET", "/v1/requests", live.requests),
    Route("DELETE", "/v1/requests/{id:.+}", live.cancel),
    Route("GET", "/slots", status.slots),
    Route("GET", "/metrics", status.metrics, needs_model=False),
    Route("GET", "/health", status.health, needs_key=False, needs_model=False),
    Route("GET", "/", status.index, needs_model=False),
)


def build_app(front: Front, guard: Guard, routes: tuple[Route, ...] = ROUTES) -> web.Application:
    """Assemble the application of one server."""
    edge = _Edge(front, guard, routes)
    app = web.Application(middlewares=[_middleware(step) for step in edge.steps], client_max_size=front.config.max_body_bytes)
    for route in routes:
        app.router.add_route(route.method, route.path, partial(route.handler, front))
        if route.method == "GET":
            app.router.add_route("HEAD", route.path, partial(route.handler, front))
    app.on_response_prepare.append(edge.complete)
    return app


class _Edge:
    """The steps around the handlers."""

    def __init__(self, front: Front, guard: Guard, routes: tuple[Route, ...]) -> None:
        self._front = front
        self._guard = guard
        self._routes = {_canonical(route.path): route for route in routes}
        self.steps: tuple[_Step, ...] = (self._observe, self._translate, self._check)

    async def _observe(self, request: web.Request, handler: _Next) -> web.StreamResponse:
        clock = asyncio.get_running_loop().time
        identities = self._front.identities
        entry = AccessEntry(request, identities.address_of(request), clock())
        request[ENTRY] = entry
        self._front.on_request(request)
        try:
            response = await handler(request)
            entry.status = response.status
            if request.get(WAITS):  # it may send its body all the same, or the next request: nobody can tell them apart
                response.force_close()
            return response
        finally:  # a client that left cancels this task: status 499
            route = self._route(request)
            self._front.metrics.http_request(request.method, _canonical(route.path) if route is not None else "other", entry.status)
            entry.finish(clock())

    async def _translate(self, request: web.Request, handler: _Next) -> web.StreamResponse:
        try:
            return await handler(request)
        except RunnerError as error:
            return self._refuse(request, error)
        except web.HTTPException as error:
            response = self._refuse(request, from_http(error, request))
            if hdrs.ALLOW in error.headers:
                response.headers[hdrs.ALLOW] = error.headers[hdrs.ALLOW]
            return response
        except ConnectionError:
            raise  # the client has left while we were writing to it
        except Exception:  # noqa: BLE001 - the last edge before the HTTP library: a bug of ours costs one request
            _LOG.exception("id=%s a handler failed", request[ENTRY].request_id)
            return self._refuse(request, InternalError("The server failed to answer this request"))

    async def _check(self, request: web.Request, handler: _Next) -> web.StreamResponse:
        self._guard.check_host(request)
        self._guard.check_origin(request)
        if request.method == "OPTIONS":
            return await self._preflight(request, handler)
        route = self._route(request)
        if route is None or route.needs_key:
            request[CLIENT] = self._front.identities.client(self._guard.check_key(request), request)
        if route is not None:
            self._guard.check_body(request)
            if route.needs_model:
                self._front.model()
            await ask_for_body(request)
        return await handler(request)

    async def _preflight(self, request: web.Request, handler: _Next) -> web.StreamResponse:
        """Answer OPTIONS for paths that exist; the router's own error says which methods they take."""
        try:
            return await handler(request)
        except web.HTTPMethodNotAllowed as error:
            return web.Response(status=204, headers=self._guard.preflight_headers(request, frozenset(error.allowed_methods)))

    async def complete(self, request: web.Request, response: web.StreamResponse) -> None:
        """Set what belongs on every response, just before its headers go out."""
        headers = response.headers
        headers.update(self._front.headers(request[ENTRY].request_id))
        headers.update(self._guard.response_headers(request))
        if request.method == "POST" and (client := request.get(CLIENT)) is not None:
            headers.update(self._front.bounds.headers(client.name))

    def _refuse(self, request: web.Request, error: RunnerError) -> web.Response:
        request[ENTRY].error = error
        return error_response(error)

    def _route(self, request: web.Request) -> Route | None:
        resource = request.match_info.route.resource
        return self._routes.get(resource.canonical) if resource is not None else None


def _middleware(step: _Step) -> Middleware:
    """Mark a step as the library wants it, which cannot mark methods."""

    @web.middleware
    async def run(request: web.Request, handler: _Next) -> web.StreamResponse:
        return await step(request, handler)

    return run


def _canonical(path: str) -> str:
    """The router's name for a path pattern: its variables without their expressions."""
    return path.replace("{id:.+}", "{id}")
