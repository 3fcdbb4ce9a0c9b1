"""The pure decisions after an engine's end, and about its silence."""

from dataclasses import dataclass

import pytest

from runner.serving.restarts import Pulse, RestartPolicy, Restarts, suspects


@dataclass(frozen=True)
class Request:
    """P is placed, a accepted, . with the prepare thread."""

    name: str
    is_accepted: bool
    is_placed: bool
    handed_at: float = 0.0


def requests(picture: str) -> list[Request]:
    """One request a character, oldest first; its name is its index."""
    return [Request(str(index), char in "aP", char == "P") for index, char in enumerate(picture)]


@pytest.mark.parametrize(
    ("picture", "expected"),
    [
        ("", ""),
        ("PP", "01"),
        ("PPa", "01"),
        ("PPaa.", "014"),
        ("PP..", "012"),
        (".", "0"),
        ("...", "0"),
        ("aaa", "01"),
        ("aa..", "012"),
        (".a", "10"),
    ],
    ids=repr,
)
def test_suspects_are_the_placed_and_the_one_being_prepared(picture: str, expected: str) -> None:
    assert "".join(request.name for request in suspects(requests(picture), n_slots=2)) == expected


def test_every_state_of_an_engine_with_requests_has_a_suspect() -> None:
    for picture in ("P", "a", ".", "Pa", "P.", "a.", "Pa."):
        assert suspects(requests(picture), n_slots=1)


def test_delays_grow_with_ends_in_a_row_and_begin_anew_after_a_proven_engine() -> None:
    restarts = Restarts(RestartPolicy())
    delays = []
    now = 0.0
    for served_s in (1.0, 1.0, 1.0, 1.0, 1.0, 60.0, 1.0):
        restarts.ready(now)
        now += served_s
        restarts.ended(now)
        delays.append(restarts.delay_s)
    assert delays == [0.0, 1.0, 5.0, 30.0, 30.0, 0.0, 1.0]
    assert not restarts.is_hopeless


def test_three_failures_at_load_in_a_row_are_hopeless_and_a_load_between_them_begins_anew() -> None:
    restarts = Restarts(RestartPolicy())
    restarts.ended(0.0)
    restarts.ended(1.0)
    restarts.ready(2.0)
    restarts.ended(3.0)
    restarts.ended(4.0)
    restarts.ended(5.0)
    assert not restarts.is_hopeless
    restarts.ended(6.0)
    assert restarts.is_hopeless


def test_a_failure_that_no_retry_mends_is_hopeless_at_once() -> None:
    restarts = Restarts(RestartPolicy())
    restarts.give_up()
    restarts.ended(0.0)
    assert restarts.is_hopeless


def test_the_silence_limit_follows_the_slowest_step_and_never_falls_below_its_minimum() -> None:
    policy = RestartPolicy()
    assert [policy.silence_limit_s(step_s) for step_s in (0.0, 3.0, 4.0)] == [30.0, 30.0, 40.0]


def test_an_engine_without_requests_is_never_silent() -> None:
    assert Pulse(0.0).silence_s(1000.0, []) == 0.0


def test_steps_do_not_hide_a_prepare_thread_that_stands_still() -> None:
    pulse = Pulse(0.0)
    pulse.stepped(99.0)
    assert pulse.silence_s(100.0, requests("P.")) == 100.0


def test_prepared_requests_do_not_hide_a_decode_thread_that_stands_still() -> None:
    pulse = Pulse(0.0)
    pulse.prepared(99.0)
    assert pulse.silence_s(100.0, requests("Pa.")) == 100.0


def test_a_request_that_came_late_has_not_waited_since_the_one_before_it() -> None:
    pulse = Pulse(0.0)
    assert pulse.silence_s(100.0, [Request("late", is_accepted=False, is_placed=False, handed_at=95.0)]) == 5.0


def test_a_queue_before_the_prepare_thread_counts_from_the_last_one_that_came_out() -> None:
    pulse = Pulse(0.0)
    pulse.prepared(70.0)
    assert pulse.silence_s(100.0, [Request("old", is_accepted=False, is_placed=False, handed_at=1.0)]) == 30.0
