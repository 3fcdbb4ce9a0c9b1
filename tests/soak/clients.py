"""Random clients: what they ask, how they behave, and what they take for a right answer.

A worker does one thing after another, each drawn by weight. Everything is drawn from the worker's own generator, so that a seed
gives the same clients; what the server makes of them depends on time.
"""

import asyncio
import json
import random
import socket
import string
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp

from tests.soak.ledger import Ledger, Sent, read_metrics

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
# Longer than any deadline of the server: what has no outcome by then is lost.
CLIENT_LIMIT_S: Final = 90.0
SHARED: Final = " ".join(f"Rule {n}: answer as briefly as the question allows." for n in range(30))
# A reader that stands still is cut off when 256 KiB lie there, after 30 s in which it takes nothing, or 60 s after its answer's end.
STILL_S: Final = 130.0
KNOWN_PROMPT: Final = "1, 2, 3, 4, 5, 6, 7, 8,"
KNOWN_TOKENS: Final = 12


@dataclass(frozen=True, slots=True)
class Key:
    """A line of the key file."""

    secret: str
    attributes: str

    @property
    def line(self) -> str:
        """As the file has it."""
        return f"{self.secret} {self.attributes}\n"

    @property
    def headers(self) -> dict[str, str]:
        """What its owner sends."""
        return {"Authorization": f"Bearer {self.secret}"}


ADMIN: Final = Key("key-of-admin", "name=admin tier=high admin")
KEYS: Final = (
    Key("key-of-anna", "name=anna weight=2 tier=high"),
    Key("key-of-bert", "name=bert tier=normal"),
    Key("key-of-cleo", "name=cleo weight=0.5 tier=normal"),
    Key("key-of-dora", "name=dora tier=low"),
    Key("key-of-greedy", "name=greedy tier=normal"),
)


class Lost(Exception):
    """A response ended in a way that the reference does not have."""


@dataclass(slots=True)
class Stream:
    """What of a stream has come so far."""

    n_choices: int
    has_notices: bool
    texts: list[str] = field(default_factory=list)
    reasons: dict[int, str] = field(default_factory=dict)
    is_done: bool = False
    error: str | None = None
    n_chunks: int = 0

    def __post_init__(self) -> None:
        self.texts = [""] * self.n_choices

    def take(self, event: str, data: str) -> None:
        """One event. Raises Lost for what must not come, or not here."""
        if self.is_done or self.error is not None:
            raise Lost(f"something follows the stream's end: {data[:100]}")
        if event:
            if not self.has_notices or event not in ("queue", "prefill"):
                raise Lost(f"event: {event}, which nobody asked for")
            json.loads(data)
        elif data == "[DONE]":
            self.is_done = True
        else:
            self._take_chunk(json.loads(data))

    def _take_chunk(self, chunk: dict[str, Any]) -> None:
        if "error" in chunk:
            self.error = error_code(chunk)
            return
        self.n_chunks += 1
        for choice in chunk["choices"]:
            index = choice["index"]
            if index in self.reasons:
                raise Lost(f"choice {index} goes on after its end")
            self.texts[index] += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            if (reason := choice["finish_reason"]) is not None:
                self.reasons[index] = reason

    def check_end(self) -> None:
        """The connection says that the body is whole. Raises Lost."""
        if self.error is not None:
            return
        if not self.is_done:
            raise Lost("the stream ends with neither [DONE] nor an error event")
        if len(self.reasons) != self.n_choices or not set(self.reasons.values()) <= {"stop", "length"}:
            raise Lost(f"{self.n_choices} answers ended so: {self.reasons}")


def error_code(body: object) -> str:
    """The code of an error object. Raises Lost where it is none of the documented form."""
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict) or set(error) != {"message", "type", "param", "code"} or not error["message"]:
        raise Lost(f"no error object: {str(body)[:200]}")
    return str(error["code"])


class Worker:
    """One client process, so to speak: a key, a generator, a connection pool."""

    def __init__(self, name: str, key: Key, url: str, ledger: Ledger, seed: int) -> None:
        self._random = random.Random(f"{seed}/{name}")
        self._name, self._key, self._url, self._ledger = name, key, url, ledger
        self._n_sent = 0
        self._acts: dict[Callable[[], Coroutine[None, None, None]], float] = {
            self._ask: 40,
            self._leave: 20,
            self._take_back: 8,
            self._be_wrong: 10,
            self._look: 8,
            self._flood: 2,
            self._burst: 3,
        }

    @asynccontextmanager
    async def connected(self) -> AsyncIterator["Worker"]:
        """With a connection pool."""
        async with aiohttp.ClientSession(self._url, headers=self._key.headers, connector=aiohttp.TCPConnector(limit=0)) as self._session:
            yield self

    async def run(self, stop: asyncio.Event) -> None:
        """Do one thing after another until `stop`."""
        acts, weights = list(self._acts), list(self._acts.values())
        async with self.connected():
            while not stop.is_set():
                (act,) = self._random.choices(acts, weights)
                try:
                    await act()
                except (aiohttp.ClientError, OSError, ValueError, Lost) as fault:
                    self._ledger.violate(f"{act.__name__.strip('_')}: {type(fault).__name__}: {fault}")
                await asyncio.sleep(self._random.expovariate(1.0))

    # -- what is asked -------------------------------------------------------------------------------------------------

    def _word(self) -> str:
        return "Q" + "".join(self._random.choices(string.ascii_uppercase, k=7))

    def _request(self, kind: str, **fixed: object) -> tuple[Sent, str, dict[str, Any], dict[str, str]]:
        """A request that fits: ledger entry, path, body, headers."""
        draw = self._random
        word, path = self._word(), draw.choice((CHAT, TEXT))
        body: dict[str, Any] = {
            "max_tokens": draw.choice((1, 8, 16, 32, 64)),
            "temperature": draw.choice((0, 0, 0, 0.8)),
            "stream": draw.random() < 0.6,
        }
        body |= self._prompt(path, word)
        extras: tuple[dict[str, Any], ...] = (
            {"n": draw.choice((2, 3))},
            {"stop": [draw.choice(("\n\n", ".", " the", word[:4] + "?"))]},
            {"seed": draw.randrange(1 << 32)},
            {"user": draw.choice(("one", "two"))},
            {"priority": draw.randrange(-5, 20)},
            {"timeout": draw.choice((0.2, 1, 5, 30))},
            {"ignore_eos": True},
            {"cache_prompt": False},
            {"stream_options": {"include_usage": True}},
            {"an_unknown_field": {"of": ["any", "kind"]}},
            {"frequency_penalty": 0.5, "repeat_last_n": 32},
            {"logit_bias": {"11": -5}, "top_k": 20, "min_p": 0.1},
            {"echo": True} if path == TEXT else {"max_completion_tokens": 20},
        )
        for extra in extras:
            if draw.random() < 0.15:
                body |= extra
        if draw.random() < 0.4:
            body["service_tier"] = draw.choice(("priority", "default", "flex", "batch", "auto"))
        body |= fixed
        self._n_sent += 1
        request_id = f"{self._name}-{self._n_sent}"
        headers = {"x-request-id": request_id}
        if draw.random() < 0.2:
            headers["X-Client-Id"] = draw.choice(("left", "right"))
        if draw.random() < 0.1:
            headers["X-Request-Timeout"] = draw.choice(("0.5", "3", "20"))
        if draw.random() < 0.4:
            headers["X-Queue-Events"] = draw.choice(("1", "true", "0"))
        n_prompts = len(body["prompt"]) if isinstance(body.get("prompt"), list) else 1
        return Sent(request_id, kind, n_prompts * body.get("n", 1), word=word), path, body, headers

    def _prompt(self, path: str, word: str) -> dict[str, object]:
        """Repeats the request's own word; short, long, or long with a beginning that others have too."""
        repeated = " ".join([word] * 5)
        items = " ".join(f"item {self._random.randrange(999)}" for _ in range(80))
        (before,) = self._random.choices(("", f"{SHARED} ", f"{items} "), (6, 2, 1))
        if path == TEXT:
            return {"prompt": self._random.choice((f"{before}{repeated}", [f"{before}{repeated}", repeated]))}
        ask = {"role": "user", "content": f"Repeat this line: {repeated}"}
        first = {"role": "user", "content": f"{before}{ask['content']}"}
        return {"messages": [first, {"role": "assistant", "content": repeated}, ask]}

    # -- what is done --------------------------------------------------------------------------------------------------

    async def _ask(self) -> None:
        """Ask and read to the end."""
        await self._answered(*self._request("ask"))

    async def _burst(self) -> None:
        """Ask for much at once: over the bounds of the queue."""
        requests = [self._request("burst", max_tokens=self._random.choice((8, 32))) for _ in range(self._random.randrange(6, 16))]
        await asyncio.gather(*(self._answered(*request) for request in requests))

    async def _leave(self) -> None:
        """Ask, and go at some stage: before the headers, in the queue, in the prefill, in the middle of the answer."""
        stage = self._random.choice(("at once", "soon", "on notice", "in the middle"))
        sent, path, body, headers = self._request(
            f"leave {stage}", stream=stage in ("on notice", "in the middle") or self._random.random() < 0.5
        )
        headers["X-Queue-Events"] = "1"
        n_events = {"at once": 0, "soon": 1000, "on notice": 1, "in the middle": self._random.randrange(2, 12)}[stage]
        limit_s = {"at once": self._random.choice((0.0, 0.001, 0.01)), "soon": self._random.random()}.get(stage, CLIENT_LIMIT_S)
        await self._answered(sent, path, body, headers, leaves_after=n_events, leaves_after_s=limit_s)

    async def _take_back(self) -> None:
        """Ask, and DELETE the request a little later."""
        sent, path, body, headers = self._request("take back", max_tokens=64)
        asking = asyncio.create_task(self._answered(sent, path, body, headers))
        await asyncio.sleep(self._random.random())
        async with self._session.delete(f"/v1/requests/{sent.request_id}") as response:
            said = await response.json()
        if response.status == 404:
            error_code(said)
        elif response.status != 200 or any(row["id"].partition("#")[0] != sent.request_id for row in said["cancelled"]):
            self._ledger.violate(f"DELETE of {sent.request_id}: {response.status} {said}")
        await asking

    async def _be_wrong(self) -> None:
        """Send what is refused, always with the same code."""
        draw = self._random
        sent, path, body, headers = self._request("wrong")
        data: bytes | None = None
        what = draw.choice(
            ("json", "range", "unsupported", "too long", "a little too long", "empty", "type", "key", "timeout", "method", "large")
        )
        code = {"type": "unsupported_media_type", "key": "invalid_api_key", "large": "request_too_large", "method": "method_not_allowed"}
        code |= dict.fromkeys(("too long", "a little too long"), "context_length_exceeded")
        expected = code.get(what, "invalid_request_error")
        method = "PUT" if what == "method" else "POST"
        match what:
            case "json":
                data = json.dumps(body).encode()[: draw.randrange(1, 60)] + b"\x00{"
            case "range":
                body |= draw.choice(
                    ({"temperature": 101}, {"n": 9}, {"max_tokens": 0}, {"stop": [""]}, {"top_p": "x"}, {"priority": 1 << 40})
                )
            case "unsupported":
                body |= draw.choice(
                    ({"json_schema": {"type": "object"}}, {"response_format": {"type": "json_object"}}, {"grammar": "root ::= [a-z]"})
                )
            case "too long" | "a little too long":
                n_words = 20_000 if what == "too long" else draw.randrange(1100, 1300)
                text = " ".join(f"{draw.randrange(10)}" for _ in range(n_words))
                body |= {"prompt": text} if path == TEXT else {"messages": [{"role": "user", "content": text}]}
                sent.n_choices = body.get("n", 1)
            case "empty":
                body |= {"prompt": []} if path == TEXT else {"messages": []}
            case "type":
                headers["Content-Type"] = "text/plain"
            case "key":
                headers["Authorization"] = "Bearer nobody"
            case "timeout":
                headers["X-Request-Timeout"] = draw.choice(("soon", "-1", "nan"))
            case "large":
                data = b'{"prompt": "' + b"x" * 300_000 + b'"}'
        sent.kind, sent.expects = f"wrong: {what}", frozenset({expected})
        await self._answered(sent, path, body, headers, method=method, data=data)
        if sent.outcome == "done":
            self._ledger.violate(f"{sent.kind} {sent.request_id} was answered")

    async def _look(self) -> None:
        """Watch the queue for a while, as `top` does."""
        for _ in range(self._random.randrange(1, 6)):
            for path in ("/v1/queue", "/v1/requests", "/slots", "/metrics", "/health"):
                async with self._session.get(path) as response:
                    text = await response.text()
                if response.status != 200:
                    self._ledger.violate(f"GET {path}: {response.status} {text[:200]}")
                elif path == "/metrics":
                    read_metrics(text)
                else:
                    json.loads(text)
            await asyncio.sleep(self._random.random())

    async def _flood(self) -> None:
        """Open connections that say nothing, or half of a request, and close them."""
        address = self._url.removeprefix("http://").split(":")
        opened = []
        for _ in range(self._random.randrange(5, 40)):
            _, writer = await asyncio.open_connection(address[0], int(address[1]))
            writer.write(
                self._random.choice(
                    (b"", b"POST /v1/comp", b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{")
                )
            )
            opened.append(writer)
        await asyncio.sleep(2 * self._random.random())
        for writer in opened:
            writer.transport.abort()

    async def stand_still(self, stop: asyncio.Event) -> None:
        """Ask for much, again where it is refused or too short, and read nothing for long: until the server has cut one of them off."""
        while not stop.is_set():
            if await self._is_cut_off():
                self._ledger.n_cut_off += 1
                return
            await asyncio.sleep(5.0)

    async def _is_cut_off(self) -> bool:
        sent, _, _, headers = self._request("stand still")
        sent.n_choices = 8
        body = {"prompt": KNOWN_PROMPT, "n": 8, "max_tokens": 220, "stream": True, "ignore_eos": True, "service_tier": "priority"}
        headers.pop("X-Request-Timeout", None)
        self._ledger.send(sent)
        data = json.dumps(body).encode()
        lines = {"Host": "localhost", "Content-Type": "application/json", "Content-Length": len(data), **headers, **self._key.headers}
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        loop, reader = asyncio.get_running_loop(), _small_socket()
        try:
            host, port = self._url.removeprefix("http://").split(":")
            await loop.sock_connect(reader, (host, int(port)))
            await loop.sock_sendall(reader, f"POST {TEXT} HTTP/1.1\r\n{head}\r\n".encode() + data)
            if not (await loop.sock_recv(reader, 64)).startswith(b"HTTP/1.1 200"):
                return False
            await asyncio.sleep(STILL_S)
            return not await self._rest_is_whole(reader)
        finally:
            reader.close()
            self._ledger.close(sent, "left")

    async def _rest_is_whole(self, reader: socket.socket) -> bool:
        """Read what was left: to the end of an answer that the system's buffers have held, or to where it was cut off."""
        loop, tail = asyncio.get_running_loop(), b""
        try:
            async with asyncio.timeout(STILL_S):
                while not tail.endswith(b"\r\n0\r\n\r\n"):
                    data = await loop.sock_recv(reader, 1 << 16)
                    if not data:
                        return False
                    tail = (tail + data)[-16:]
        except ConnectionError:
            return False
        except TimeoutError:
            self._ledger.violate(f"a reader that stood still for {STILL_S:g} s was neither cut off nor answered")
        return True

    async def known(self) -> str | None:
        """What the model says to a prompt whose answer no rounding changes; None where the request was refused or cut short."""
        sent, _, _, headers = self._request("known")
        sent.n_choices, sent.word = 1, ""
        body = {"prompt": KNOWN_PROMPT, "max_tokens": KNOWN_TOKENS, "temperature": 0, "service_tier": "priority", "stream": True}
        headers.pop("X-Request-Timeout", None)
        texts = await self._answered(sent, TEXT, body, headers)
        return texts[0] if sent.outcome == "done" else None

    # -- one request ---------------------------------------------------------------------------------------------------

    async def _answered(
        self,
        sent: Sent,
        path: str,
        body: Mapping[str, Any],
        headers: dict[str, str],
        *,
        method: str = "POST",
        data: bytes | None = None,
        leaves_after: int | None = None,
        leaves_after_s: float = CLIENT_LIMIT_S,
    ) -> list[str]:
        """Send it, read it to its end or to where its client leaves, and book the outcome. Returns the texts that came."""
        ledger, leaves = self._ledger, leaves_after is not None
        ledger.send(sent)
        content = data if data is not None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} | headers
        stream = Stream(sent.n_choices, headers.get("X-Queue-Events") in ("1", "true"))
        try:
            async with asyncio.timeout(leaves_after_s), self._session.request(method, path, data=content, headers=headers) as response:
                if response.status != 200:
                    ledger.close(sent, "refused", status=response.status, code=error_code(await response.json()))
                elif not body["stream"]:
                    sent.texts = whole_texts(await response.json(), sent.n_choices)
                    ledger.close(sent, "done", status=200)
                elif await self._read(response, stream, leaves_after):
                    stream.check_end()
                    sent.texts = stream.texts
                    ledger.close(sent, "broken" if stream.error else "done", status=200, code=stream.error)
                else:
                    response.close()
        except TimeoutError:
            if leaves_after_s == CLIENT_LIMIT_S:
                ledger.violate(f"{sent.kind} {sent.request_id}: no end within {CLIENT_LIMIT_S:g} s")
        except (Lost, ValueError, KeyError, aiohttp.ClientError) as fault:
            ledger.violate(f"{sent.kind} {sent.request_id}: {type(fault).__name__}: {fault}")
        if sent.outcome is None:
            sent.texts = stream.texts
            ledger.close(sent, "left" if leaves else "lost")
        if sent.code in ("server_overloaded", "rate_limit_exceeded"):
            await asyncio.sleep(self._random.uniform(0.5, 2.0))  # less than Retry-After says, and not at once
        return sent.texts

    async def _read(self, response: aiohttp.ClientResponse, stream: Stream, leaves_after: int | None) -> bool:
        """Read events; whether it was all of them."""
        n_events = 0
        async for event, data in events(response):
            stream.take(event, data)
            n_events += 1
            if n_events == leaves_after:
                return False
        return True


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[tuple[str, str]]:
    """The server-sent events of a response: name and data. Raises Lost for a line that is none."""
    name = ""
    async for raw in response.content:
        line = raw.decode().rstrip("\n")
        match line.partition(": "):
            case ("event", _, value):
                name = value
            case ("data", _, value):
                yield name, value
                name = ""
            case ("", _, _) if not line or line.startswith(":"):
                pass
            case _:
                raise Lost(f"a line that is no event: {line[:100]}")


def whole_texts(body: dict[str, Any], n_choices: int) -> list[str]:
    """The texts of an answer that is not streamed. Raises Lost."""
    choices = body["choices"]
    if [choice["index"] for choice in choices] != list(range(n_choices)):
        raise Lost(f"{n_choices} answers were asked for: {str(body)[:200]}")
    if not {choice["finish_reason"] for choice in choices} <= {"stop", "length"}:
        raise Lost(f"a finish_reason of its own: {str(body)[:200]}")
    return [choice["text"] if "text" in choice else choice["message"]["content"] for choice in choices]


def _small_socket() -> socket.socket:
    """One behind which the system holds some 30 KiB, on both sides together, and not four MiB."""
    made = socket.socket()
    made.setblocking(False)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)
    return made
