"""The engine's process, its pipes and its last words.

A plain subprocess of the same executable with pipes for stdin and stdout: `multiprocessing` would start a resource tracker
beside it (one more Python process to unpack, to end and to be killed) and buys nothing that two pipes lack.
"""

import asyncio
import subprocess
import sys
from typing import Any, Protocol

import msgspec

from runner.config import EngineConfig, child_environment
from runner.serving.protocol import Configure, FrameReader, FromEngine, ToEngine, frame

ENGINE_FLAG = "--engine-process"
_STDIN, _STDOUT, _STDERR = 0, 1, 2
_MAX_LINE_BYTES = 1 << 16


class Owner(Protocol):
    """Who hears what the engine says."""

    def on_message(self, message: FromEngine) -> None:
        """One message, in order."""

    def on_line(self, line: str) -> None:
        """One line of standard error."""

    def on_exit(self, returncode: int | None) -> None:
        """The process has ended and everything it said has been heard."""


class EngineChild(asyncio.SubprocessProtocol):
    """One engine process."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._frames = FrameReader()
        self._lines = bytearray()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
        self._transport: asyncio.SubprocessTransport | None = None
        self._stdin: asyncio.WriteTransport | None = None
        self._n_open_pipes = 2
        self._has_exited = False
        self._is_gone = asyncio.get_running_loop().create_future()

    @classmethod
    async def start(cls, config: EngineConfig, owner: Owner) -> "EngineChild":
        """Start the process and tell it its configuration."""
        loop = asyncio.get_running_loop()
        child = cls(owner)
        await loop.subprocess_exec(
            lambda: child,
            *_command(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=_environment(),
            **_apart(),
        )
        child.send(Configure(config))
        return child

    @property
    def pid(self) -> int | None:
        """Process id."""
        return self._transport.get_pid() if self._transport else None

    def send(self, message: ToEngine) -> None:
        """Queue a message on the pipe; a dead engine's is dropped (its end is told by `on_exit`)."""
        if self._stdin is not None and not self._stdin.is_closing():
            self._stdin.write(frame(self._encoder.encode(message)))

    def kill(self) -> None:
        """End the process now."""
        if self._transport is not None and not self._has_exited:
            self._transport.kill()

    async def end(self, within_s: float) -> None:
        """Close the pipe, which ends the engine; kill it where it does not go."""
        if self._stdin is not None:
            self._stdin.close()
        done, _ = await asyncio.wait([self._is_gone], timeout=within_s)
        if not done:
            self.kill()
            await asyncio.wait([self._is_gone], timeout=within_s)

    # -- asyncio's side ------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The process runs."""
        assert isinstance(transport, asyncio.SubprocessTransport)
        self._transport = transport
        stdin = transport.get_pipe_transport(_STDIN)
        assert isinstance(stdin, asyncio.WriteTransport)
        self._stdin = stdin

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        """Bytes of either pipe."""
        if fd == _STDOUT:
            for payload in self._frames.feed(data):
                self._owner.on_message(self._decoder.decode(payload))
            return
        for line in lines_of(self._lines, data):
            self._owner.on_line(line)

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        """A pipe is at its end."""
        if fd in (_STDOUT, _STDERR):
            self._n_open_pipes -= 1
            self._tell_when_gone()

    def process_exited(self) -> None:
        """The process has ended; its pipes may still hold data."""
        self._has_exited = True
        self._tell_when_gone()

    def _tell_when_gone(self) -> None:
        if self._has_exited and self._n_open_pipes == 0 and not self._is_gone.done():
            self._is_gone.set_result(None)
            assert self._transport is not None
            self._transport.close()
            self._owner.on_exit(self._transport.get_returncode())


def lines_of(buffer: bytearray, data: bytes) -> list[str]:
    """Cut whole lines off a growing buffer; a line longer than 64 KiB is cut there."""
    buffer += data
    lines = []
    while (end := buffer.find(b"\n")) >= 0 or len(buffer) > _MAX_LINE_BYTES:
        end = end if end >= 0 else _MAX_LINE_BYTES
        lines.append(bytes(buffer[:end]).decode("utf-8", errors="replace").rstrip())
        del buffer[: end + 1]
    return [line for line in lines if line]


def _command() -> list[str]:
    if getattr(sys, "frozen", False):
        return [sys.executable, ENGINE_FLAG]
    return [sys.executable, "-m", "runner.serving.process"]


def _environment() -> dict[str, str]:
    # A failed assertion in ggml would start gdb to print a backtrace: seconds in which the front waits for the end.
    return child_environment({"GGML_NO_BACKTRACE": "1"})


def _apart() -> dict[str, Any]:
    """Out of the terminal's process group: Ctrl-C is the front's to handle."""
    if sys.platform == "win32":
        return {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}
    return {"start_new_session": True}
