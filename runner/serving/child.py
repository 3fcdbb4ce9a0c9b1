"""The engine's process, its pipes and its last words.

A plain subprocess of the same executable with pipes for stdin and stdout: `multiprocessing` would start a resource tracker
beside it (one more Python process to unpack, to end and to be killed) and buys nothing that two pipes lack.
"""

import asyncio
import os
import signal
import subprocess
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import msgspec

from runner.config import EngineConfig
from runner.serving.protocol import Configure, Flush, FrameReader, FrameWriter, FromEngine, ToEngine
from runner.serving.spawn import EarlyEngine, Spawned, can_spawn, engine_command, spawn

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


class Child(Protocol):
    """What the client asks of an engine's process."""

    @property
    def pid(self) -> int | None:
        """Process id."""

    @property
    def has_ended(self) -> bool:
        """Whether `on_exit` was called."""

    def send(self, message: ToEngine) -> None:
        """Queue a message. Never blocks, never raises."""

    def kill(self) -> None:
        """End it now."""

    async def flush(self, within_s: float) -> None:
        """Let it write to disk what is worth it, and end by itself."""

    async def end(self, within_s: float) -> None:
        """End it, the quick way after `within_s`."""


StartChild = Callable[[EngineConfig, Owner], Awaitable[Child]]


class EngineChild(asyncio.SubprocessProtocol):
    """One engine process. On POSIX it is spawned here or was before (`EarlyEngine`), on Windows asyncio starts it."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._frames = FrameReader()
        self._lines = bytearray()
        self._encoder = FrameWriter()
        self._decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
        self._transport: asyncio.SubprocessTransport | None = None
        self._pipes: list[asyncio.BaseTransport] = []
        self._stdin: asyncio.WriteTransport | None = None
        self._pid: int | None = None
        self._returncode: int | None = None
        self._n_open_pipes = 2
        self._has_exited = False
        self._is_garbled = False
        self._is_gone = asyncio.get_running_loop().create_future()

    @classmethod
    async def start(
        cls, config: EngineConfig, owner: Owner, *, command: Sequence[str] = (), early: EarlyEngine | None = None
    ) -> "EngineChild":
        """Start the process, or take the one that waits, and tell it its configuration. Raises OSError where there is no room for it."""
        child = cls(owner)
        if can_spawn():
            waiting = early.take() if early is not None else None
            await child._connect(waiting or spawn(list(command) or None))
        else:
            await child._start_on_windows(list(command) or engine_command())
        child.send(Configure(config))
        return child

    @property
    def pid(self) -> int | None:
        """Process id."""
        return self._transport.get_pid() if self._transport else self._pid

    @property
    def has_ended(self) -> bool:
        """Whether `on_exit` was called."""
        return self._is_gone.done()

    def send(self, message: ToEngine) -> None:
        """Queue a message on the pipe; a dead engine's is dropped (its end is told by `on_exit`)."""
        if self._stdin is not None and not self._stdin.is_closing():
            self._stdin.write(self._encoder.frame(message))

    def kill(self) -> None:
        """End the process now."""
        if self._has_exited:
            return
        if self._transport is not None:
            self._transport.kill()
        elif self._pid is not None:
            os.kill(self._pid, signal.SIGKILL)  # not reaped yet, so the id is still its own

    async def flush(self, within_s: float) -> None:
        """Ask it to write to disk what is worth it and to end, and wait for that so long."""
        self.send(Flush())
        await asyncio.wait([self._is_gone], timeout=within_s)

    async def end(self, within_s: float) -> None:
        """Close the pipe, which ends the engine; kill it where it does not go."""
        if self._stdin is not None:
            self._stdin.close()
        done, _ = await asyncio.wait([self._is_gone], timeout=within_s)
        if not done:
            self.kill()
            await asyncio.wait([self._is_gone], timeout=within_s)

    # -- POSIX ---------------------------------------------------------------------------------------------------------

    async def _connect(self, spawned: Spawned) -> None:
        loop = asyncio.get_running_loop()
        self._pid = spawned.pid
        stdin, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, os.fdopen(spawned.stdin, "wb", 0))
        self._stdin = stdin
        self._pipes.append(stdin)
        for number, descriptor in ((_STDOUT, spawned.stdout), (_STDERR, spawned.stderr)):
            pipe, _ = await loop.connect_read_pipe(lambda n=number: _Outlet(self, n), os.fdopen(descriptor, "rb", 0))  # type: ignore[misc]
            self._pipes.append(pipe)

    def _reap(self) -> None:
        """Both pipes are at their end: the process has ended or is about to. A thread waits for it, nothing else does."""
        loop = asyncio.get_running_loop()

        def wait(pid: int) -> None:
            _, status = os.waitpid(pid, 0)
            loop.call_soon_threadsafe(self._reaped, os.waitstatus_to_exitcode(status))

        assert self._pid is not None
        threading.Thread(target=wait, args=(self._pid,), name="reap engine", daemon=True).start()

    def _reaped(self, returncode: int) -> None:
        self._returncode = returncode
        for pipe in self._pipes:
            pipe.close()
        self.process_exited()

    # -- Windows, and what both share ----------------------------------------------------------------------------------

    async def _start_on_windows(self, command: list[str]) -> None:
        flags = getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)
        loop, pipe = asyncio.get_running_loop(), subprocess.PIPE
        await loop.subprocess_exec(lambda: self, *command, stdin=pipe, stdout=pipe, stderr=pipe, creationflags=flags)

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
            self._take_frames(data)
            return
        for line in lines_of(self._lines, data):
            self._owner.on_line(line)

    def _take_frames(self, data: bytes) -> None:
        """An engine that sends what is no message is ended: nothing that follows in its pipe could be understood."""
        if self._is_garbled:
            return
        messages, fault = [], None
        try:
            for frame in self._frames.feed(data):
                messages.append(self._decoder.decode(frame))  # noqa: PERF401 - those before a fault are kept
        except ValueError as error:  # msgspec's errors are such
            fault = error
        for message in messages:
            self._owner.on_message(message)
        if fault is not None:
            self._is_garbled = True
            self._owner.on_line(f"the engine sent what is no message and is ended: {fault}")
            self.kill()

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        """A pipe is at its end."""
        if fd in (_STDOUT, _STDERR):
            self._n_open_pipes -= 1
            if self._n_open_pipes == 0 and self._transport is None:
                self._reap()
            self._tell_when_gone()

    def process_exited(self) -> None:
        """The process has ended; its pipes may still hold data."""
        self._has_exited = True
        self._tell_when_gone()

    def _tell_when_gone(self) -> None:
        if self._has_exited and self._n_open_pipes == 0 and not self._is_gone.done():
            self._is_gone.set_result(None)
            if self._transport is not None:
                self._transport.close()
                self._returncode = self._transport.get_returncode()
            self._owner.on_exit(self._returncode)


class _Outlet(asyncio.Protocol):
    """One of the engine's outputs."""

    def __init__(self, child: EngineChild, number: int) -> None:
        self._child, self._number = child, number

    def data_received(self, data: bytes) -> None:
        """Bytes came."""
        self._child.pipe_data_received(self._number, data)

    def connection_lost(self, exc: Exception | None) -> None:
        """Its end."""
        self._child.pipe_connection_lost(self._number, exc)


def lines_of(buffer: bytearray, data: bytes) -> list[str]:
    """Cut whole lines off a growing buffer; a line longer than 64 KiB is cut there."""
    buffer += data
    lines = []
    while (end := buffer.find(b"\n")) >= 0 or len(buffer) > _MAX_LINE_BYTES:
        end = end if end >= 0 else _MAX_LINE_BYTES
        lines.append(bytes(buffer[:end]).decode("utf-8", errors="replace").rstrip())
        del buffer[: end + 1]
    return [line for line in lines if line]
