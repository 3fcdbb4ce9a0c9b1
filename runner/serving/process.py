"""The engine process: the decode loop and three threads around it.

    reader   frames from the front -> prepare thread, decode loop. The front's end (EOF) ends this process, mid-decode too.
    prepare  template, tokeniser, checks (see prepare.py)
    main     load, then the decode loop
    writer   writes what the pipe to the front has no room for: the decode loop never waits for a reader that stands still

stdin and stdout are the pipes; what native code prints goes to stderr, which the front logs. A thread that ends by a fault ends
the process: half an engine would leave the front waiting.
"""

import gc
import os
import select
import signal
import sys
import threading
import time
import traceback
from queue import SimpleQueue
from typing import NoReturn

import msgspec

from runner.errors import RunnerError
from runner.serving.load import Engine, Native, load_engine
from runner.serving.loop import EngineLoop
from runner.serving.prepare import PrepareThread
from runner.serving.protocol import (
    Cancel,
    Configure,
    Flush,
    FrameReader,
    FrameWriter,
    FromEngine,
    LoadFailed,
    LoadProgress,
    Ready,
    Submit,
    ToEngine,
)

_READ_BYTES = _WRITE_BYTES = 1 << 16
# How long another thread may keep the GIL from the decode thread when it comes back from llama_decode.
_SWITCH_INTERVAL_S = 0.0005
_EXIT_LOAD_FAILED = 3
_EXIT_BUG = 70


class Writer:
    """Writes messages in order, from any thread, without waiting for the front.

    A message goes straight into the pipe while that has room: handing each one to a thread costs a step more than the write does
    (docs/log.md). What the pipe does not take, a thread writes when the front reads again. Windows' pipes cannot be written
    without waiting: there the thread writes all of it.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._frames = FrameWriter()
        self._backlog = bytearray()
        self._has_backlog = threading.Condition()
        self._is_finished = False
        self._is_direct = sys.platform != "win32"
        if self._is_direct:
            os.set_blocking(fd, False)
        self._thread = threading.Thread(target=self._run, name="writer", daemon=True)
        self._thread.start()

    def put(self, message: FromEngine) -> None:
        """Write or queue a message."""
        data = self._frames.frame(message)
        with self._has_backlog:
            if self._is_direct and not self._backlog:
                data = data[self._write(data) :]
            if data:
                self._backlog += data
                self._has_backlog.notify()

    def finish(self) -> None:
        """Write what is queued and end."""
        with self._has_backlog:
            self._is_finished = True
            self._has_backlog.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._has_backlog:
                while not self._backlog:
                    if self._is_finished:
                        return
                    self._has_backlog.wait()
                data = bytes(self._backlog[:_WRITE_BYTES])
            # Without the lock, but alone: nobody else writes before the backlog is empty.
            if self._is_direct:
                select.select((), (self._fd,), ())
            n = self._write(data)
            with self._has_backlog:
                del self._backlog[:n]

    def _write(self, data: bytes) -> int:
        """How many bytes the pipe took."""
        try:
            return os.write(self._fd, data)
        except BlockingIOError:
            return 0
        except OSError:
            os._exit(0)  # the front has gone


class Reader:
    """Reads the Configure frame, then, as a thread, everything that follows. EOF ends the process at once."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._frames = FrameReader()
        self._ready: list[bytes] = []
        self._decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
        self._receiver: SimpleQueue[tuple[PrepareThread, EngineLoop]] = SimpleQueue()

    def read_configure(self) -> Configure:
        """Block until the first frame is there."""
        message = self._decoder.decode(self._next())
        assert isinstance(message, Configure)
        return message

    def start(self) -> None:
        """Watch the pipe from now on. Requests wait until `connect`."""
        threading.Thread(target=self._run, name="reader", daemon=True).start()

    def connect(self, prepare: PrepareThread, loop: EngineLoop) -> None:
        """Tell where requests go."""
        self._receiver.put((prepare, loop))

    def _run(self) -> None:
        first = self._next()
        prepare, loop = self._receiver.get()
        self._dispatch(first, prepare, loop)
        while True:
            self._dispatch(self._next(), prepare, loop)

    def _dispatch(self, data: bytes, prepare: PrepareThread, loop: EngineLoop) -> None:
        match self._decoder.decode(data):
            case Submit() as submit:
                prepare.submit(submit)
            case Cancel(request_id) as cancel:
                if not prepare.cancel(request_id):
                    loop.inbox.put(cancel)
            case Flush() as flush:
                loop.inbox.put(flush)
            case Configure():
                raise AssertionError("a second Configure")

    def _next(self) -> bytes:
        while not self._ready:
            data = os.read(self._fd, _READ_BYTES)
            if not data:
                os._exit(0)
            self._ready.extend(self._frames.feed(data))
        return self._ready.pop(0)


def engine_main() -> NoReturn:
    """Serve one front over stdin and stdout until it ends."""
    threading.excepthook = lambda fault: _fatal(fault.exc_value)
    try:
        _run()
    except BaseException as error:  # noqa: BLE001 - whatever it was, the front must see this process end and start another
        _fatal(error)


def _run() -> NoReturn:
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        # The front decides when the engine ends: a signal to the whole group must not cut streams that the front drains.
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    reader, writer = _take_pipes()
    try:
        native = Native.open()  # needs no configuration, which the front may still be reading
        config = reader.read_configure().config
        reader.start()
        engine = load_engine(config, clock=time.monotonic, progress=lambda part: writer.put(LoadProgress(part)), native=native)
        loop = engine.make_loop(writer.put)
    except RunnerError as error:
        writer.put(LoadFailed(error.message, is_final=True, code=error.code, hint=error.hint))
        writer.finish()
        os._exit(_EXIT_LOAD_FAILED)
    _serve(engine, loop, reader, writer)


def _serve(engine: Engine, loop: EngineLoop, reader: Reader, writer: Writer) -> NoReturn:
    prepare = PrepareThread(engine.preparer, clock=time.monotonic, done=loop.inbox.put, emit=writer.put)
    prepare.start()
    reader.connect(prepare, loop)
    gc.freeze()  # what the load has made stays for ever: no later collection walks over it between two steps
    gc.enable()
    writer.put(Ready(engine.info))
    loop.run()
    assert loop.is_over, "the decode loop has ended"
    writer.finish()
    os._exit(0)


def _fatal(error: BaseException | None) -> NoReturn:
    """The end of every thread that ends by a fault, told on stderr."""
    try:
        traceback.print_exception(error)
        sys.stderr.flush()
    finally:
        os._exit(_EXIT_BUG)


def _take_pipes() -> tuple[Reader, Writer]:
    """Keep the pipes to ourselves: what any library prints goes to stderr and not into a frame."""
    fd_in, fd_out = os.dup(0), os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    os.dup2(2, 1)
    if sys.platform == "win32":
        import msvcrt

        msvcrt.setmode(fd_in, os.O_BINARY)
        msvcrt.setmode(fd_out, os.O_BINARY)
    return Reader(fd_in), Writer(fd_out)


if __name__ == "__main__":
    engine_main()
