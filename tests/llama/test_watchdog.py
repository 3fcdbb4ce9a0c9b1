"""A time limit arrives in the limited code or not at all."""

import contextlib
import threading
import time

import pytest

from runner.llama.watchdog import TimeLimitReached, Watchdog


def spin(seconds: float) -> str:
    """Python code without a pause."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass
    return "done"


def test_what_is_quick_returns_and_starts_one_thread_for_many() -> None:
    watchdog, before = Watchdog(), threading.active_count()
    assert [watchdog.run(0.4, lambda: "done") for _ in range(50)] == ["done"] * 50
    assert threading.active_count() <= before + 1


def test_its_thread_ends_when_nothing_is_limited() -> None:
    watchdog = Watchdog()
    watchdog.run(0.1, lambda: None)
    time.sleep(0.2)
    assert not watchdog._is_running
    with pytest.raises(TimeLimitReached):
        watchdog.run(0.1, lambda: spin(5))


def test_what_swallows_every_exception_is_stopped() -> None:
    def stubborn() -> None:
        while True:
            with contextlib.suppress(Exception):
                spin(0.01)

    with pytest.raises(TimeLimitReached):
        Watchdog().run(0.1, stubborn)


def test_nothing_arrives_after_the_return() -> None:
    watchdog = Watchdog()
    outcomes = set()
    for n in range(14):
        try:
            outcomes.add(watchdog.run(0.2, lambda n=n: spin(0.17 + n * 0.01)))  # type: ignore[misc]
        except TimeLimitReached:
            outcomes.add("stopped")
        spin(0.002)
    assert outcomes == {"done", "stopped"}
