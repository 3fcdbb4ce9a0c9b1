"""From a checked generation to an HTTP answer, whole or streamed; how its objects look is the `Shape`'s affair."""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Final

import msgspec
from aiohttp import web
from msgspec import UNSET

from runner.api.access import AccessEntry
from runner.api.call import Call
from runner.api.call import Choice as Sequence
from runner.api.deadlines import deadlines
from runner.api.domains import SESSION_HEADER, session_name
from runner.api.errors import error_json
from runner.api.front import Front
from runner.api.identity import CLIENT, PART_HEADER
from runner.api.notices import NOTICES_HEADER, wants_notices
from runner.api.parameters import Generation
from runner.api.responses import Answer, Choice, Result, Shape, Truncation, timings, usage
from runner.api.sse import DONE, EventStream, event
from runner.errors import InternalError, RequestCancelled, RunnerError

ENTRY: Final = web.RequestKey("entry", AccessEntry)
_LOG: Final = logging.getLogger("slotfile.api")
_MARK: Final = "\x00text\x00"


async def answer(front: Front, request: web.Request, generation: Generation, shape: Shape) -> web.StreamResponse:
    """Run a generation and answer with it.

    Nothing is sent before every prompt is known to fit, so what the client did wrong still has a status of its own. When
    the client leaves, this task is cancelled, and the engine hears of it at once.
    """
    entry = request[ENTRY]
    generation = _signed(front, generation, request)
    limits = deadlines(front.config, generation.queue_timeout_s, generation.timeout_s, request.headers, entry.started_at)
    has_notices = wants_notices(request.headers.get(NOTICES_HEADER))
    call = front.start(generation, entry, limits)
    try:
        await call.accepted()
        writer = _Writer(front, generation, shape, call)
        if generation.is_stream:
            return await _stream(front, request, call, writer, has_notices=has_notices)
        await call.done()
        return web.Response(body=writer.whole(call), content_type="application/json")
    finally:
        call.cancel()


def _signed(front: Front, generation: Generation, request: web.Request) -> Generation:
    """With the owner whose share it is charged to, the tier that this client is given, and whom its cells are shared with."""
    client = request[CLIENT]
    session = session_name(request.headers.get(SESSION_HEADER), generation.session)
    trust = front.domains.trust(client, salt=generation.cache_salt, session=session)
    owner = client.owner(request.headers.get(PART_HEADER), generation.user)
    return msgspec.structs.replace(generation, owner=owner, tier=client.tier(generation.tier), trust=trust)


async def _stream(front: Front, request: web.Request, call: Call, writer: "_Writer", *, has_notices: bool) -> web.StreamResponse:
    """Send the headers, then let the call's callbacks write; this task sleeps until the end."""
    stream = EventStream(request, lambda n_unread: _give_up(front, request[ENTRY].request_id, call, n_unread))
    try:
        await stream.open(writer.openings())
        _connect(call, stream, writer)
        with front.notices.told_to(stream, call) if has_notices else nullcontext():
            await call.done()
        stream.write(writer.closing(call))
    except RunnerError as error:  # too late for a status: an error event, and no [DONE]
        _break_off(request, stream, error)
    except (ConnectionError, asyncio.CancelledError):
        stream.abandon()
        raise
    except Exception:  # noqa: BLE001 - a status line must not follow in the middle of a body
        _LOG.exception("id=%s a stream failed", request[ENTRY].request_id)
        _break_off(request, stream, InternalError("The server failed to answer this request"))
    return await stream.close()


def _give_up(front: Front, request_id: str, call: Call, n_unread: int) -> None:
    """The client does not read: what it would be sent is not worth a slot."""
    front.metrics.slow_reader()
    _LOG.warning("id=%s its client does not read: %d bytes lie there, and it is cut off", request_id, n_unread)
    call.fail(RequestCancelled("The client did not read its answer"))


def _break_off(request: web.Request, stream: EventStream, error: RunnerError) -> None:
    request[ENTRY].error = error
    stream.write(event(error_json(error)))


def _connect(call: Call, stream: EventStream, writer: "_Writer") -> None:
    """Send what came while the headers went out, and from now on everything as it comes."""

    def end(sequence: Sequence) -> None:
        stream.write(writer.ending(sequence))

    for sequence in call.choices:
        sequence.stream_to(writer.emitter(stream, sequence.index))
        if sequence.finished is not None:
            end(sequence)
    call.on_choice_end = end


class _Writer:
    """Encodes one answer: its id, time and names are the same in every chunk."""

    def __init__(self, front: Front, generation: Generation, shape: Shape, call: Call) -> None:
        """`call` is accepted: what its prompt is made of is known."""
        self._shape = shape
        self._generation = generation
        self._id = f"{shape.id_prefix}{secrets.token_hex(12)}"
        self._created = int(time.time())
        self._model = front.model().name
        self._fingerprint = front.fingerprint
        self._tier = generation.service_tier if generation.tells_tier else UNSET
        self._truncation = Truncation(call.choices[0].n_dropped) if generation.truncates else UNSET

    def whole(self, call: Call) -> bytes:
        """The body of an answer that is not streamed."""
        results = _results(call)
        choices = [self._shape.whole(result) for result in results]
        whole = msgspec.structs.replace(
            self._answer(self._shape.object_name, choices),
            usage=usage(results, self._generation.n),
            timings=timings(results),
            service_tier=self._tier,
            truncation=self._truncation,
        )
        return msgspec.json.encode(whole)

    def openings(self) -> bytes:
        """The first chunk of every choice. What was dropped is said here: nothing of the answer has come yet."""
        openings = [self._shape.opening(index) for index in range(self._generation.n_choices)]
        chunks = [self._chunk(opening) for opening in openings if opening is not None]
        return b"".join(event(msgspec.json.encode(msgspec.structs.replace(chunk, truncation=self._truncation))) for chunk in chunks)

    def emitter(self, stream: EventStream, index: int) -> Callable[[str], None]:
        """What writes a choice's text: all of a chunk but the text is encoded once, here."""
        head, _, tail = self._event(self._shape.delta(index, _MARK)).rpartition(msgspec.json.encode(_MARK))
        encode, write = msgspec.json.Encoder().encode, stream.write

        def emit(text: str) -> None:
            write(head + encode(text) + tail)

        return emit

    def ending(self, sequence: Sequence) -> bytes:
        """The last chunk of a choice."""
        result = _result(sequence)
        chunk = self._chunk(self._shape.ending(result.index, result.finish_reason))
        own = timings([result] if self._generation.n_choices == 1 else [])
        return event(msgspec.json.encode(msgspec.structs.replace(chunk, timings=own, service_tier=self._tier)))

    def closing(self, call: Call) -> bytes:
        """What follows the last choice's end: the usage, if it was asked for, and the mark."""
        if not self._generation.include_usage:
            return DONE
        total = msgspec.structs.replace(self._answer(self._shape.chunk_name, []), usage=usage(_results(call), self._generation.n))
        return event(msgspec.json.encode(total)) + DONE

    def _event(self, choice: Choice) -> bytes:
        return event(msgspec.json.encode(self._chunk(choice)))

    def _chunk(self, choice: Choice) -> Answer:
        chunk = self._answer(self._shape.chunk_name, [choice])
        return msgspec.structs.replace(chunk, usage=None) if self._generation.include_usage else chunk

    def _answer(self, name: str, choices: list[Choice]) -> Answer:
        return Answer(
            id=self._id, object=name, created=self._created, model=self._model, system_fingerprint=self._fingerprint, choices=choices
        )


def _results(call: Call) -> list[Result]:
    return [_result(sequence) for sequence in call.choices]


def _result(sequence: Sequence) -> Result:
    assert sequence.finished is not None
    return Result(sequence.index, "".join(sequence.texts), sequence.finished)
