"""The work of `start`, `serve` and `chat`: an HTTP server, a terminal chat, or both on one engine."""

import asyncio
import logging
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from runner import __version__
from runner.api.listen import bind
from runner.cli.signals import StopSignals
from runner.cli.state import history_path
from runner.cli.surface import Streams
from runner.config import AnswerOptions, ServerConfig
from runner.errors import ModelError
from runner.serving.client import EngineClient
from runner.serving.protocol import ModelInfo

if TYPE_CHECKING:
    from runner.api.server import Server
    from runner.terminal.reading import Reader
    from runner.terminal.render import Screen

KEYBOARD_EVERY_S: Final = 0.1

log: Final = logging.getLogger("slotfile")


@dataclass(frozen=True, slots=True)
class ServicePlan:
    """What is offered. `server` None: no HTTP. `answers` None: no chat at the terminal."""

    streams: Streams
    server: ServerConfig | None
    answers: AnswerOptions | None


class Service:
    """Serves and chats as planned. The ports are taken when it is made: before the engine starts, so that an error costs nothing."""

    def __init__(self, plan: ServicePlan) -> None:
        """Raises ConfigError for a port that cannot be had."""
        self._plan = plan
        self._sockets: list[socket.socket] = [] if plan.server is None else bind(plan.server)
        self._server: Server | None = None
        self._screen: Screen | None = None

    async def run(self, engine: EngineClient, signals: StopSignals) -> int:
        """Serve while the model loads (503), say when it is ready, then serve and chat until the chat is left."""
        if self._plan.server is not None:
            from runner.api.server import Server  # aiohttp is imported while the engine loads

            self._server = Server(self._plan.server, engine, self._sockets, version=__version__)
            await self._server.start()
        if self._plan.answers is not None:
            await self._chat(engine, signals, self._plan.answers)
            return 0
        self._announce(await self._ready(engine))
        await asyncio.Event().wait()
        return 0

    async def drain(self) -> None:
        """Let running requests end, for as long as `--drain-timeout` says."""
        if self._server is not None and self._plan.server is not None and self._plan.server.drain_timeout_s > 0:
            log.info("draining: running requests have %g s", self._plan.server.drain_timeout_s)
            await self._server.drain(self._plan.server.drain_timeout_s)

    async def close(self) -> None:
        """Close every connection and socket."""
        if self._server is not None:
            await self._server.close()
        for listener in self._sockets:
            listener.close()
        if self._screen is not None:
            await self._screen.close()

    async def _ready(self, engine: EngineClient) -> ModelInfo:
        from runner.terminal.progress import progress_line

        stream = sys.stderr if self._plan.streams.shows_progress else None
        async with progress_line(stream, lambda: engine.load_fraction):
            return await engine.wait_ready()

    def _announce(self, info: ModelInfo) -> None:
        """Say what was chosen, and where we listen: only now is it true."""
        from runner.terminal.render import chosen_lines

        lines = [f"slotfile {__version__}", *chosen_lines(info)]
        if self._server is not None:
            lines.append(f"listening on {' and '.join(self._server.urls)}")
        for line in lines:
            log.info(line)
            self._note(line)
        if self._server is not None and self._server.warning is not None:
            log.warning(self._server.warning)
            self._note(f"Warning: {self._server.warning}")

    def _note(self, line: str) -> None:
        if self._screen is not None and self._plan.streams.has_cursor:
            self._screen.note(line)

    async def _chat(self, engine: EngineClient, signals: StopSignals, answers: AnswerOptions) -> None:
        from runner.terminal.render import Screen, Surface, enable_ansi
        from runner.terminal.repl import Chat

        streams = self._plan.streams
        enable_ansi()
        self._screen = screen = Screen(Surface(streams.has_cursor, streams.has_colour), sys.stdout, sys.stderr)
        async with self._reader(signals) as reader:
            info = await self._ready(engine)
            check_chat_template(info)
            self._announce(info)
            self._note("/help shows the commands." + (" Leaving the chat stops the server." if self._server is not None else ""))
            await screen.flush()
            chat = Chat(engine, info, screen, reader, answers)
            signals.take_interrupt = chat.interrupt
            await chat.run()

    @asynccontextmanager
    async def _reader(self, signals: StopSignals) -> "AsyncIterator[Reader]":
        from runner.terminal.keyboard import drop_overflow, quiet_keyboard
        from runner.terminal.reading import PipeReader, PromptReader

        if not self._plan.streams.has_cursor:
            yield PipeReader(0, prompt=self._prompt)
            return
        reader = PromptReader(history_path())
        with quiet_keyboard(0, is_prompting=lambda: reader.is_reading) as signals.at_once:
            watching = asyncio.create_task(self._keep_keys_coming(reader, drop_overflow))
            try:
                yield reader
            finally:
                watching.cancel()

    async def _keep_keys_coming(self, reader: "Reader", drop_overflow: Callable[[int], bool]) -> None:
        """During an answer nobody reads the keyboard; a paste that fills the terminal's buffer would shut Ctrl-C out."""
        while True:
            await asyncio.sleep(KEYBOARD_EVERY_S)
            if not reader.is_reading and drop_overflow(0):
                self._note("What was typed during the answer was too long to keep and is dropped; it can be pasted again at the prompt.")

    def _prompt(self) -> None:
        if self._plan.streams.asks:
            sys.stderr.write("> ")
            sys.stderr.flush()


def check_chat_template(info: ModelInfo) -> None:
    """Raises ModelError where the model has no chat template and cannot chat."""
    if not info.has_chat_template:
        raise ModelError(
            f"{info.name} has no chat template, so it cannot chat", hint="--chat-template FILE brings one; run --raw needs none"
        )
