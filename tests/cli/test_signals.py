"""What signals mean: first a clean end, then a quick one. One key press is one signal, however often it arrives."""

import os
import signal
from collections.abc import Callable

import pytest

from runner.cli.signals import StopSignals

INT, TERM = signal.SIGINT, signal.SIGTERM


class Clock:
    """Time that a test sets."""

    now = 100.0

    def __call__(self) -> float:
        """Seconds."""
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def stop(clock: Clock) -> StopSignals:
    return StopSignals(clock)


@pytest.mark.parametrize(("number", "code"), [(INT, 130), (TERM, 0), (signal.SIGHUP, 129)])
def test_exit_code_says_which_signal_it_was(stop: StopSignals, number: signal.Signals, code: int) -> None:
    stop.receive(number)
    assert stop.asked.is_set()
    assert stop.exit_code == code


def test_signal_that_arrives_twice_at_once_is_one(stop: StopSignals, clock: Clock) -> None:
    stop.receive(INT)
    clock.now += 0.29
    stop.receive(INT)
    assert not stop.is_urgent.is_set()
    clock.now += 0.02
    stop.receive(INT)
    assert stop.is_urgent.is_set()


def test_second_signal_of_another_kind_is_urgent_at_once(stop: StopSignals) -> None:
    stop.receive(TERM)
    stop.receive(INT)
    assert stop.is_urgent.is_set()
    assert stop.exit_code == 0


def test_third_signal_ends_the_process_there_and_then(stop: StopSignals, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[object] = []
    exits: Callable[[int], None] = ended.append
    monkeypatch.setattr(os, "_exit", exits)
    stop.at_once = lambda: ended.append("terminal given back")
    for _ in range(3):
        stop.receive(INT)
        clock.now += 1.0
    assert ended == ["terminal given back", 130]


def test_chat_takes_an_interrupt_while_it_answers(stop: StopSignals, clock: Clock) -> None:
    takes = [True, False]
    stop.take_interrupt = lambda: takes.pop(0)
    stop.receive(INT)
    assert not stop.asked.is_set()
    stop.receive(INT)
    assert takes == [False], "the echo of the same key press reached the chat"
    clock.now += 1.0
    stop.receive(INT)
    assert stop.asked.is_set()


def test_chat_takes_no_sigterm(stop: StopSignals) -> None:
    stop.take_interrupt = lambda: True
    stop.receive(TERM)
    assert stop.asked.is_set()
