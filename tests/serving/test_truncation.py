"""Which turns of a conversation go: whole ones, the oldest, no more often than needed; and how little work it takes to find out."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.serving.truncation import MAX_TRIES, Fitted, Message, always_kept, fit, reserved, roundest, split

ROLES = st.sampled_from(["system", "user", "assistant", "tool"])


def message(role: str, n_words: int, name: str = "w") -> dict[str, Any]:
    """A message of so many tokens; its first word is its name."""
    return {"role": role, "content": " ".join([name] * n_words)}


def conversation(n_turns: int, n_words: int = 10) -> list[dict[str, Any]]:
    """A system prompt, turns of a question and an answer, and a last question; each says which it is."""
    turns = [message(role, n_words, f"{role}-{turn}") for turn in range(n_turns) for role in ("user", "assistant")]
    return [message("system", n_words, "system"), *turns, message("user", n_words, "last")]


class Template:
    """Renders a token a word and `n_around` around each message; keeps what it was asked."""

    def __init__(self, n_around: int = 4, n_before: int = 0, thinking: int = 0) -> None:
        """`n_before` tokens stand before all; of an answer before the last question `thinking` words are left out."""
        self._n_around, self._n_before, self._thinking = n_around, n_before, thinking
        self.asked: list[list[Message]] = []
        self.n_costed = 0

    def tokenize(self, messages: Sequence[Message], *, is_short: bool) -> list[int]:
        self.asked.append(list(messages))
        return [0] * self.size(messages)

    def size(self, messages: Sequence[Message]) -> int:
        return self._n_before + sum(self._n_around + self._n_words(each) for each in messages)

    def cost(self, each: Message) -> int:
        self.n_costed += 1
        return 1 + len(each["content"].split())

    def _n_words(self, each: Message) -> int:
        n_words = len(each["content"].split())
        return max(0, n_words - self._thinking) if each["role"] == "assistant" else n_words

    def fit(self, messages: Sequence[Message], room: int) -> Fitted:
        return fit(messages, room=room, cost=self.cost, tokenize=self.tokenize)


def kept(messages: Sequence[Message], n_dropped: int) -> list[Message]:
    """The messages that are left."""
    head, _ = split(messages)
    return [*head, *messages[len(head) + n_dropped :]]


def test_turns_are_whole_and_what_comes_before_the_first_user_is_one_too() -> None:
    roles = ["system", "system", "assistant", "user", "assistant", "tool", "assistant", "user", "user", "system"]
    head, turns = split([message(role, 1) for role in roles])
    assert [each["role"] for each in head] == ["system", "system"]
    assert [[each["role"] for each in turn] for turn in turns] == [
        ["assistant"],
        ["user", "assistant", "tool", "assistant"],
        ["user"],
        ["user", "system"],
    ]


@given(st.lists(ROLES))
def test_split_loses_nothing_and_begins_every_turn_but_the_first_with_a_user(roles: list[str]) -> None:
    messages = [message(role, 1) for role in roles]
    head, turns = split(messages)
    assert [*head, *(each for turn in turns for each in turn)] == messages
    assert all(turn[0]["role"] == "user" for turn in turns[1:])
    assert all(each["role"] != "user" for turn in turns for each in turn[1:])


@given(st.integers(1, 5000), st.integers(0, 300))
def test_roundest_number_has_most_factors_of_two(first: int, n: int) -> None:
    numbers = range(first, first + n + 1)
    assert roundest(first, first + n) == max(numbers, key=lambda number: number & -number)


@pytest.mark.parametrize(
    ("max_tokens", "n_ctx", "expected"), [(None, 512, 128), (600, 512, 128), (128, 512, 128), (20, 512, 20), (None, 2, 1)]
)
def test_answer_is_kept_what_it_may_take_but_a_quarter_of_the_slot_at_most(max_tokens: int | None, n_ctx: int, expected: int) -> None:
    assert reserved(max_tokens, n_ctx) == expected


def test_conversation_that_fits_is_rendered_once_and_whole() -> None:
    template, messages = Template(), conversation(5)
    room = template.size(messages)
    assert template.fit(messages, room) == Fitted([0] * room)
    assert template.asked == [messages]


def test_one_token_too_many_drops_turns() -> None:
    template, messages = Template(), conversation(5)
    fitted = template.fit(messages, template.size(messages) - 1)
    assert fitted.n_dropped >= 2
    assert template.asked[-1] == kept(messages, fitted.n_dropped)


def test_system_prompt_and_last_turn_stay_and_tools_keep_their_calls() -> None:
    call, result = message("assistant", 5, "call"), message("tool", 5, "result")
    old = [message("user", 20, "old"), call, result, message("assistant", 20, "old")]
    last = [message("user", 5, "last"), call, result]
    messages = [message("system", 5, "system"), *old * 20, *last]
    template = Template()
    fitted = template.fit(messages, 400)
    (left, *rest) = kept(messages, fitted.n_dropped)
    assert left == messages[0]
    assert rest[0]["role"] == "user"
    assert rest[-3:] == last
    assert fitted.n_dropped % len(old) == 0
    assert len(fitted.tokens) == template.size([left, *rest]) <= 400


@pytest.mark.parametrize("n_words", [500, 5000])
def test_last_turn_is_kept_even_where_it_does_not_fit(n_words: int) -> None:
    messages = [*conversation(30)[:-1], message("user", n_words, "last")]
    template = Template()
    fitted = template.fit(messages, 300)
    assert kept(messages, fitted.n_dropped) == [messages[0], messages[-1]]
    assert len(fitted.tokens) == template.size([messages[0], messages[-1]])


@pytest.mark.parametrize("roles", ["system", "user", "system user", "assistant", "system system"])
def test_what_has_no_earlier_turn_drops_nothing(roles: str) -> None:
    messages = [message(role, 1000) for role in roles.split()]
    assert Template().fit(messages, 100).n_dropped == 0
    assert always_kept(messages) == messages


CONVERSATIONS = st.lists(st.tuples(ROLES, st.integers(0, 40)), min_size=1, max_size=120)


@given(CONVERSATIONS, st.integers(1, 900), st.integers(0, 12), st.sampled_from([0, 30]), st.sampled_from([0, 10]), st.booleans())
def test_any_conversation_fits_or_has_no_earlier_turn(
    parts: list[tuple[str, int]], room: int, n_around: int, n_before: int, thinking: int, is_long: bool
) -> None:
    messages = [message(role, n_words, f"m{index}") for index, (role, n_words) in enumerate(parts * (5 if is_long else 1))]
    template = Template(n_around, n_before, thinking)
    fitted = template.fit(messages, room)
    left = kept(messages, fitted.n_dropped)
    assert len(fitted.tokens) == template.size(left)
    assert len(template.asked) <= MAX_TRIES + 2
    # System messages and the last turn stay; the cut lies before a turn.
    head, turns = split(messages)
    assert left == [*head, *left[len(head) :]]
    assert not turns or left[-len(turns[-1]) :] == turns[-1]
    cuts = [sum(map(len, turns[:cut])) for cut in range(max(1, len(turns)))]
    assert fitted.n_dropped in cuts
    assert len(fitted.tokens) <= room or fitted.n_dropped == cuts[-1]


def test_nothing_is_counted_that_lies_further_back_than_the_room_goes() -> None:
    template = Template()
    template.fit(conversation(5000), 1000)
    assert template.n_costed < 100
    assert sum(map(len, template.asked)) < 3 * 100


def test_cut_stays_while_turns_come_and_what_is_kept_is_between_half_and_all() -> None:
    template, messages = Template(), conversation(300)
    room = 1000  # about 35 turns
    cuts = []
    for n_turns in range(40, 300):
        fitted = template.fit([*messages[: 1 + 2 * n_turns], messages[-1]], room)
        cuts.append(fitted.n_dropped)
        assert room / 2 - 28 < len(fitted.tokens) <= room
    moves = sum(before != after for before, after in pairwise(cuts))
    assert cuts == sorted(cuts)
    assert moves <= 260 / 16 + 1  # 16 turns are nearly half of the room
    for start in range(0, 250, 10):
        assert len(set(cuts[start : start + 11])) <= 2, "ten further turns move the cut once at most"


def test_cut_is_stable_where_turns_are_of_many_sizes() -> None:
    template = Template()
    sizes = [5 + 37 * turn % 60 for turn in range(300)]
    turns = [[message("user", n_words, f"u{turn}"), message("assistant", 2 * n_words, f"a{turn}")] for turn, n_words in enumerate(sizes)]
    cuts = []
    for n_turns in range(40, 300):
        messages = [message("system", 20), *(each for turn in turns[:n_turns] for each in turn), message("user", 30, "last")]
        cuts.append(template.fit(messages, 3000).n_dropped)
    assert sum(before != after for before, after in pairwise(cuts)) <= 260 / 7  # half of the room holds 14 turns
