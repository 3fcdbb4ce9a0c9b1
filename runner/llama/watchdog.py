"""A time limit on Python code that runs in one thread, without a thread a run."""

import ctypes
import threading
from collections.abc import Callable
from typing import TypeVar

_TICKS = 8
Result = TypeVar("Result")


class TimeLimitReached(BaseException):
    """Raised in the limited thread, at its next bytecode. No `except Exception` on the way catches it."""


class Watchdog:
    """Raises TimeLimitReached in a thread that has been inside `run` for too long; one thread at a time may be.

    Its own thread looks eight times in that time and ends when nothing was limited since it last looked: a start a burst of
    renderings instead of a start a rendering (60 us and two switches of the GIL each).
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wakes = threading.Event()
        self._is_running = False
        self._thread_id: int | None = None
        self._has_raised = False
        self._n_begun = self._n_seen = self._n_ticks = 0

    def run(self, seconds: float, work: Callable[[], Result]) -> Result:
        """What `work` returns. Raises TimeLimitReached after `seconds`, give or take an eighth, and never later than the return."""
        self._begin(seconds)
        try:
            try:
                return work()
            finally:
                self._end()
        except TimeLimitReached:
            self._end()  # it may have arrived before the other one could do anything; the next would be a tick away
            raise

    def _begin(self, seconds: float) -> None:
        with self._lock:
            self._thread_id, self._has_raised = threading.get_ident(), False
            self._n_begun += 1
            self._n_ticks = 0
            starts, self._is_running = not self._is_running, True
        if starts:
            threading.Thread(target=self._watch, args=(seconds / _TICKS,), name="watchdog", daemon=True).start()

    def _end(self) -> None:
        """What was raised and has not arrived is taken back, and raised here."""
        with self._lock:
            self._thread_id = None
            if self._has_raised:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(threading.get_ident()), None)
        if self._has_raised:
            raise TimeLimitReached

    def _watch(self, tick_s: float) -> None:
        while True:
            self._wakes.wait(tick_s)  # nobody sets it: a pause
            with self._lock:
                if self._thread_id is None and self._n_begun == self._n_seen:
                    self._is_running = False
                    return
                self._n_seen = self._n_begun
                self._n_ticks += 1
                if self._thread_id is not None and self._n_ticks > _TICKS:
                    # Again at each tick: a __del__ or a callback may have swallowed the last one.
                    self._has_raised = True
                    raising = ctypes.py_object(TimeLimitReached)
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread_id), raising)
