"""Where messages come from: a person at a prompt, or the lines of a pipe or file.

A message is one line, or everything between two triple quotes. At the prompt a paste is one message too, whether or not the terminal
marks it as a paste: a line end that more input follows at once is part of the message.
"""

import asyncio
import codecs
import os
import queue
import select
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

from prompt_toolkit import PromptSession
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.keys import Keys
from prompt_toolkit.output import ColorDepth, Output

from runner.environment import environment

QUOTES: Final = '"""'
PASTE_GAP_S: Final = 0.01  # nobody types the next key this soon after Enter
CHUNK_BYTES: Final = 1 << 16


class Reader(Protocol):
    """A source of messages."""

    @property
    def is_reading(self) -> bool:
        """Whether a message is awaited right now."""

    async def read(self) -> str | None:
        """The next message, or None at the end."""


def is_open_block(text: str) -> bool:
    """Whether the text opened a block with triple quotes and has not closed it."""
    return text.startswith(QUOTES) and text.count(QUOTES) == 1


def unquoted(text: str) -> str:
    """The message without the triple quotes that made a block of it."""
    if text.startswith(QUOTES) and text.endswith(QUOTES) and text.count(QUOTES) == 2:
        return text[len(QUOTES) : -len(QUOTES)].strip("\n")
    return text


class PipeReader:
    """Messages from the lines of a descriptor. It is read on a daemon thread, on demand: a pipe that never closes holds nothing up."""

    def __init__(self, descriptor: int, *, prompt: Callable[[], None] = lambda: None) -> None:
        """`prompt` is called before each message, for a person at a terminal without a cursor."""
        self.is_reading = False
        self._descriptor = descriptor
        self._prompt = prompt
        self._loop = asyncio.get_running_loop()
        self._wanted: queue.SimpleQueue[asyncio.Future[bytes]] = queue.SimpleQueue()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._text = ""
        self._at_end = False
        threading.Thread(target=self._fetch, name="input", daemon=True).start()

    async def read(self) -> str | None:
        """The next line that is not blank, or block; None at the end of the file."""
        self._prompt()
        self.is_reading = True
        try:
            return await self._message()
        finally:
            self.is_reading = False

    async def _message(self) -> str | None:
        message = ""
        while (line := await self._line()) is not None:
            message += line
            whole = message.strip()
            if whole and not is_open_block(whole):
                return unquoted(whole)
        return message.strip().removeprefix(QUOTES).strip() or None

    async def _line(self) -> str | None:
        while "\n" not in self._text and not self._at_end:
            chunk = await self._chunk()
            self._at_end = not chunk
            self._text += self._decoder.decode(chunk, final=not chunk)
        line, end, self._text = self._text.partition("\n")
        return (line.removesuffix("\r") + end) or None

    async def _chunk(self) -> bytes:
        chunk: asyncio.Future[bytes] = self._loop.create_future()
        self._wanted.put(chunk)
        return await chunk

    def _fetch(self) -> None:
        while True:
            wanted = self._wanted.get()
            try:
                chunk = os.read(self._descriptor, CHUNK_BYTES)
            except OSError:
                chunk = b""
            try:
                self._loop.call_soon_threadsafe(_answer, wanted, chunk)
            except RuntimeError:  # the loop ended while the pipe stood still
                return


class PromptReader:
    """Messages from a person at a terminal, with history and editing. Ctrl-D on an empty line leaves, and so does Ctrl-C twice."""

    def __init__(self, history_path: Path | None) -> None:
        self.is_reading = False
        self._wants_to_leave = False
        self._session: PromptSession[str] = PromptSession(
            message="> ",
            history=open_history(history_path),
            multiline=True,
            prompt_continuation="  ",
            placeholder=self._placeholder,
            key_bindings=self._key_bindings(),
            enable_suspend=True,
            output=_terminal_output(),
        )
        self._session.default_buffer.on_text_insert += self._stay

    async def read(self) -> str | None:
        """The next message, or None where the person leaves."""
        self._wants_to_leave = False
        try:
            return unquoted((await self._session.prompt_async(pre_run=self._begin, handle_sigint=False)).strip())
        except EOFError:
            return None
        finally:
            self.is_reading = False

    def _begin(self) -> None:
        self.is_reading = True  # from here on Ctrl-C is a key and no signal

    def _placeholder(self) -> str:
        return "(Ctrl-C again or Ctrl-D leaves)" if self._wants_to_leave else ""

    def _stay(self, _: object) -> None:
        self._wants_to_leave = False

    def _key_bindings(self) -> KeyBindings:
        bindings = KeyBindings()
        bindings.add("c-c")(self._interrupt)
        bindings.add("<any>")(_text)
        bindings.add("tab")(_text)
        bindings.add("enter")(_enter)
        bindings.add("escape", "enter")(_new_line)
        return bindings

    def _interrupt(self, event: KeyPressEvent) -> None:
        if not event.current_buffer.text and self._wants_to_leave:
            event.app.exit(exception=EOFError)
        event.current_buffer.reset()
        self._wants_to_leave = True


class QuietFileHistory(FileHistory):
    """History in a file; a file that cannot be written any more is no reason to stop."""

    def store_string(self, string: str) -> None:
        """Append one message."""
        try:
            super().store_string(string)
        except OSError:
            return


def open_history(path: Path | None) -> History:
    """The history in a file that only its owner reads, or in memory where there is no such place."""
    if path is None:
        return InMemoryHistory()
    try:
        path.touch(mode=0o600)
    except OSError:
        return InMemoryHistory()
    return QuietFileHistory(str(path))


def _text(event: KeyPressEvent) -> None:
    """All text that came at once goes in at once: a paste without marks is not drawn key by key."""
    waiting = event.app.key_processor.input_queue
    text = event.data
    while waiting and (waiting[0].key == Keys.Tab or waiting[0].key == waiting[0].data):
        text += waiting.popleft().data
    event.current_buffer.insert_text(text)


def _enter(event: KeyPressEvent) -> None:
    buffer = event.current_buffer
    if _more_input_waits(event) or is_open_block(buffer.text):
        buffer.newline(copy_margin=False)
    elif buffer.text.strip():
        buffer.validate_and_handle()


def _new_line(event: KeyPressEvent) -> None:
    event.current_buffer.newline(copy_margin=False)


def _more_input_waits(event: KeyPressEvent) -> bool:
    if any(press.key not in (Keys.CPRResponse, "?") for press in event.app.key_processor.input_queue):
        return True
    if sys.platform == "win32":
        return False  # prompt_toolkit itself tells a paste from typing there
    return bool(select.select([event.app.input.fileno()], [], [], PASTE_GAP_S)[0])


def _terminal_output() -> Output | None:
    if sys.platform == "win32":
        return None
    from prompt_toolkit.output.vt100 import Vt100_Output

    # Without cursor position requests: a late reply would be typed into the shell after the end.
    output = Vt100_Output.from_pty(sys.stdout, term=environment("TERM"), default_color_depth=ColorDepth.from_env())
    output.enable_cpr = False
    return output


def _answer(wanted: asyncio.Future[bytes], chunk: bytes) -> None:
    if not wanted.done():
        wanted.set_result(chunk)
