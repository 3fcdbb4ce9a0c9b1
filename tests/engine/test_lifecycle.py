"""The table of states is the whole truth."""

import itertools

import pytest

from runner.engine.lifecycle import TRANSITIONS, State
from runner.engine.sampling import SamplingParams
from runner.engine.sequence import Sequence


@pytest.mark.parametrize(("old", "new"), list(itertools.product(State, State)), ids=lambda state: state.name)
def test_only_the_transitions_of_the_table_are_allowed(old: State, new: State) -> None:
    sequence = Sequence("r", [1], SamplingParams(), 1)
    sequence.state = old
    if (old, new) in TRANSITIONS:
        sequence.move_to(new)
        assert sequence.state is new
    else:
        with pytest.raises(AssertionError):
            sequence.move_to(new)


def test_eog_at_the_cap_is_a_stop() -> None:
    sequence = Sequence("r", [1], SamplingParams(), max_tokens=1)
    assert sequence.accept(7, b"", is_eog=True) == ""
    assert sequence.reason == "stop"


def test_a_held_back_tail_is_flushed_at_the_cap() -> None:
    sequence = Sequence("r", [1], SamplingParams(), max_tokens=2, stop=("8X",))
    assert sequence.accept(1, b"7, ", is_eog=False) == "7, "
    assert sequence.accept(2, b"8", is_eog=False) == "8"
    assert sequence.reason == "length"


def test_a_held_back_tail_is_flushed_at_eog() -> None:
    sequence = Sequence("r", [1], SamplingParams(), max_tokens=9, stop=("8X",))
    assert sequence.accept(2, b"8", is_eog=False) == ""
    assert sequence.accept(7, b"", is_eog=True) == "8"


def test_ignore_eos_goes_on() -> None:
    sequence = Sequence("r", [1], SamplingParams(), max_tokens=9, ignore_eos=True)
    sequence.accept(7, b"", is_eog=True)
    assert sequence.reason is None
