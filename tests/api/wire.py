"""What tests say to a server: JSON through a client, or bytes through a socket where the framing itself is the subject."""

import asyncio
import io
import json
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO: dict[str, Any] = {"model": "any", "messages": [{"role": "user", "content": "Hi"}]}


@dataclass(frozen=True)
class Reply:
    """A whole HTTP answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """OpenAI's error object."""
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert isinstance(error["message"], str)
        return dict(error)

    @property
    def events(self) -> list[str]:
        """The data of every server-sent event; comments are left out, and every event must end with a blank line."""
        blocks = self.body.decode().split("\n\n")
        assert blocks.pop() == ""
        return [block.removeprefix("data: ") for block in blocks if not block.startswith(":")]

    @property
    def chunks(self) -> list[Any]:
        """The events up to [DONE], as JSON."""
        assert self.events[-1] == "[DONE]"
        return [json.loads(event) for event in self.events[:-1]]


class Wire:
    """One server, from a client's side."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url = url
        self.host = urlsplit(url).hostname or ""
        self.port = urlsplit(url).port or 0
        self._session = session

    async def send(self, method: str, path: str, *, headers: dict[str, str] | None = None, **kwargs: Any) -> Reply:
        """One request through an HTTP client."""
        async with self._session.request(method, path, headers=headers, **kwargs) as response:
            folded = {name.lower(): value for name, value in response.headers.items()}
            return Reply(response.status, folded, await response.read())

    async def get(self, path: str, **headers: str) -> Reply:
        """GET; header names are given with underscores."""
        return await self.send("GET", path, headers={name.replace("_", "-"): value for name, value in headers.items()})

    async def post(self, path: str, body: Any, **headers: str) -> Reply:
        """POST a value as JSON, or bytes as they are."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        named = {"Content-Type": "application/json"} | {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.send("POST", path, headers=named, data=io.BytesIO(data))

    async def chat(self, **fields: Any) -> Reply:
        """A chat completion."""
        return await self.post(CHAT, HELLO | fields)

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A bare connection."""
        return await asyncio.open_connection(self.host, self.port)

    async def start(self, body: dict[str, Any], path: str = CHAT) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A bare connection with a POST already sent."""
        reader, writer = await self.open()
        writer.write(self.message(body, path))
        return reader, writer

    def message(self, body: dict[str, Any], path: str = CHAT, version: str = "1.1") -> bytes:
        """A POST as bytes."""
        data = json.dumps(body).encode()
        lines = (f"POST {path} HTTP/{version}", f"Host: {self.host}:{self.port}", "Content-Type: application/json")
        return "\r\n".join((*lines, f"Content-Length: {len(data)}", "", "")).encode() + data

    async def raw(self, data: bytes) -> Reply:
        """Send bytes, read until the server closes the connection or its answer is complete."""
        reader, writer = await self.open()
        writer.write(data)
        head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)).decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
        length = int(headers.get("content-length", "-1"))
        body = await asyncio.wait_for(reader.readexactly(length) if length >= 0 else reader.read(), 5)
        writer.close()
        return Reply(int(head[0].split()[1]), headers, body)
