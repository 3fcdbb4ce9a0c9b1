"""Asks a server how it stands: a few GETs on one connection."""

import asyncio
import os
from collections.abc import Callable
from typing import Final, TypeVar
from urllib.parse import urlsplit

import aiohttp
import msgspec

from runner.errors import ConfigError, NotFound, RunnerError, Unauthorized, error_for_code
from runner.terminal.top.sample import Queue, Requests, Sample, read_metrics

ANSWER_S: Final = 5.0
MAX_ANSWER_BYTES: Final = 64 << 20  # 100,000 requests, which is the longest queue, take a third of it
CHUNK_BYTES: Final = 1 << 16

Body = TypeVar("Body")


class _Detail(msgspec.Struct):
    code: str
    message: str = ""


class _Error(msgspec.Struct):
    error: _Detail


class _Health(msgspec.Struct):
    status: str = ""
    error: _Detail | None = None


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


def base_url(text: str) -> str:
    """The address that routes are added to; one that ends with `/v1`, as OpenAI's clients take it, means the same. Raises ConfigError."""
    wanted = f"--url is {text!r}; it takes http://HOST:PORT"
    try:
        parts = urlsplit(text)
        host, _ = parts.hostname, parts.port
    except ValueError:
        raise ConfigError(wanted) from None
    if parts.scheme == "https":
        raise ConfigError(f"{wanted}: this program speaks no TLS")
    if parts.scheme != "http" or not host or parts.username is not None or parts.query or parts.fragment:
        raise ConfigError(wanted)
    return text.rstrip("/").removesuffix("/v1").rstrip("/")


class ServerLooks:
    """Looks at one server. An asynchronous context: its connection is closed at the end."""

    def __init__(self, url: str, key: str | None) -> None:
        self.url = url
        self._key = key
        self._model: str | None = None
        headers = {"Authorization": f"Bearer {key}"} if key is not None else {}
        self._session = aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=ANSWER_S))

    async def __aenter__(self) -> "ServerLooks":
        """Nothing to open: the first look connects."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the connection."""
        await self._session.close()

    async def look(self) -> Sample:
        """How the server stands now.

        Raises ConnectionError where nobody answers, Unauthorized where the key is not taken, ConfigError where no server of ours
        answers, and what the server says where it is not ready (Loading, EngineStopped).
        """
        health = await self._health()
        queue = await self._get("/v1/queue", lambda body: msgspec.json.decode(body, type=Queue))
        at = asyncio.get_running_loop().time()
        metrics = await self._get("/metrics", lambda body: read_metrics(body.decode()))
        requests = await self._get("/v1/requests", lambda body: msgspec.json.decode(body, type=Requests))
        if self._model is None:
            self._model = await self._get("/v1/models", lambda body: msgspec.json.decode(body, type=_Models).data[0].id)
        return Sample(at, self._model, health, queue, requests.data, metrics)

    async def _health(self) -> str:
        """In a word. Raises what makes the server answer nothing else."""
        status, body = await self._exchange("/health")
        health = self._read("/health", body, lambda body: msgspec.json.decode(body, type=_Health)) if status in (200, 503) else None
        if health is None or not (health.status or health.error):
            raise self._foreign("/health", status)
        if not health.status and health.error is not None:
            raise error_for_code(health.error.code, health.error.message, None)
        return health.status

    async def _get(self, path: str, read: Callable[[bytes], Body]) -> Body:
        status, body = await self._exchange(path)
        if status != 200:
            raise self._refusal(path, status, body)
        return self._read(path, body, read)

    def _read(self, path: str, body: bytes, read: Callable[[bytes], Body]) -> Body:
        try:
            return read(body)
        except (ValueError, LookupError, msgspec.MsgspecError):
            raise self._foreign(path, 200) from None

    async def _exchange(self, path: str) -> tuple[int, bytes]:
        """Status and body. A redirect is not followed: the key is for this address."""
        try:
            async with self._session.get(self.url + path, allow_redirects=False) as response:
                body = bytearray()
                async for chunk in response.content.iter_chunked(CHUNK_BYTES):
                    body += chunk
                    if len(body) > MAX_ANSWER_BYTES:
                        raise self._foreign(path, response.status)
                return response.status, bytes(body)
        except aiohttp.ClientResponseError:
            raise ConfigError(f"What answers at {self.url} speaks no HTTP") from None
        except (aiohttp.ClientError, OSError) as error:  # TimeoutError is an OSError
            self._model = None  # another server may answer next time
            raise ConnectionError(_reason(error)) from error

    def _refusal(self, path: str, status: int, body: bytes) -> RunnerError:
        try:
            detail = msgspec.json.decode(body, type=_Error).error
        except msgspec.MsgspecError:
            return self._foreign(path, status)
        error = error_for_code(detail.code, detail.message, None)
        if status == Unauthorized.status:
            hint = "--api-key KEY names one" if self._key is None else None
            wanted = "wants an API key" if self._key is None else "does not take this API key"
            return Unauthorized(f"The server at {self.url} {wanted}", hint=hint)
        return self._foreign(path, status) if isinstance(error, NotFound) or error.status != status else error

    def _foreign(self, path: str, status: int) -> ConfigError:
        return ConfigError(f"What answers at {self.url} is no slotfile server: GET {path} gives {_told(status)}")


def _told(status: int) -> str:
    return f"a {status}" if status != 200 else "something else"


def _reason(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientConnectorError):
        number = error.os_error.errno
        return os.strerror(number) if number is not None and number > 0 else error.os_error.strerror or str(error.os_error)
    if isinstance(error, TimeoutError):
        return f"no answer within {ANSWER_S:g} s"
    return "the connection was closed"
