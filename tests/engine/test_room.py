"""The bounds on numbers."""

import pytest

from runner.engine.room import over_queue, waiting_of_client


@pytest.mark.parametrize(("n_live", "n_new", "over"), [(0, 1, 0), (8, 4, 0), (12, 1, 1), (11, 1, 0), (11, 3, 2), (0, 13, 1)])
def test_the_queue_holds_four_behind_eight_slots(n_live: int, n_new: int, over: int) -> None:
    assert over_queue(n_live, n_new, 8, 4) == over


@pytest.mark.parametrize(("n_own", "n_live", "n_waiting"), [(0, 0, 0), (0, 7, 0), (0, 8, 1), (3, 20, 4), (3, 9, 2)])
def test_of_a_client_wait_those_for_whom_no_slot_is_free(n_own: int, n_live: int, n_waiting: int) -> None:
    assert waiting_of_client(n_own, 1, n_live, 8) == n_waiting
