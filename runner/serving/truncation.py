"""`truncation: "auto"`: whole oldest turns go until a conversation fits its slot and leaves room for an answer.

A turn is a user's message and all that follows it up to the next one, so that tool calls keep their results. What stays always are the
system's messages at the start and the last turn.

    system | turn 0 | turn 1 | turn 2 | turn 3 | turn 4 | turn 5, the last
     keep    drop ------------------>   keep ----------------------------->

Where the cut lies decides what the prefix cache is worth: behind one that moves at every turn nothing but the system's messages is ever
found again. So more goes than has to: of all cuts that leave between half of the room for earlier turns and the whole of it, the one
before the turn whose number has the most factors of two is taken. While turns come, it stays the best of those for 2^n turns, where half
of the room holds 2^n to 2^(n+1) of them, and nobody has to remember it: the next request brings the whole conversation, and finds it again.

Tokens are counted from the end backwards and only as far as the room goes, so a conversation of any length costs about as much as one
that fits. The counts of single messages lack what the template writes around them; two prompts that are rendered tell how much that is.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, Protocol

Message = Mapping[str, Any]
Turn = Sequence[Message]

# Cuts that are tried before only the last turn is kept: an estimate may be off by a turn.
MAX_TRIES: Final = 4


class Tokenize(Protocol):
    """The exact tokens of a prompt. `is_short`: its messages are known to fit the room, but for what the template adds."""

    def __call__(self, messages: Sequence[Message], *, is_short: bool) -> list[int]:
        """Raises InvalidRequest."""


@dataclass(frozen=True, slots=True)
class Fitted:
    """A prompt's tokens, and how many messages were dropped for them."""

    tokens: list[int]
    n_dropped: int = 0


def reserved(max_tokens: int | None, n_ctx_slot: int) -> int:
    """Tokens of a slot that stay free for the answer: what it may take, but a quarter of the slot at most.

    Else a client that sets no limit, or one as large as the slot, would have its conversation cut down to nothing.
    """
    quarter = max(1, n_ctx_slot // 4)
    return quarter if max_tokens is None else min(max_tokens, quarter)


def split(messages: Sequence[Message]) -> tuple[Turn, list[Turn]]:
    """The system's messages at the start, and the turns. What comes before the first user is a turn too."""
    start = next((index for index, message in enumerate(messages) if message["role"] != "system"), len(messages))
    begins = [index for index in range(start, len(messages)) if index == start or messages[index]["role"] == "user"]
    return messages[:start], [messages[begin:end] for begin, end in pairwise([*begins, len(messages)])]


def always_kept(messages: Sequence[Message]) -> list[Message]:
    """What no truncation drops."""
    head, turns = split(messages)
    return [*head, *(turns[-1] if turns else ())]


def fit(messages: Sequence[Message], *, room: int, cost: Callable[[Message], int], tokenize: Tokenize) -> Fitted:
    """The prompt of a conversation: of at most `room` tokens, or without any earlier turn.

    `cost` is about a message's tokens, without what the template adds: at least 1. Tokenises MAX_TRIES + 2 prompts at most.
    Raises InvalidRequest.
    """
    head, turns = split(messages)
    costs = _costs_of_latest(head, turns, cost, room)
    first, last = len(turns) - len(costs), len(turns) - 1

    def prompt(cut: int, *, is_short: bool = True) -> Fitted:
        kept = [*head, *(message for turn in turns[cut:] for message in turn)]
        return Fitted(tokenize(kept, is_short=is_short), len(messages) - len(kept))

    if first >= last:
        return prompt(max(0, last), is_short=False)
    longest = prompt(first)
    if first == 0 and len(longest.tokens) <= room:
        return longest
    least = prompt(last)
    if len(least.tokens) > room:
        return least
    sizes = _sizes(turns[first:], costs, len(longest.tokens), len(least.tokens))
    middle = (room + len(least.tokens)) / 2
    low = next(first + index for index, size in enumerate(sizes) if first + index and size <= room)
    high = next(first + index for index, size in enumerate(sizes) if first + index >= low and size <= middle)
    for _ in range(MAX_TRIES):
        cut = roundest(low, high)
        fitted = prompt(cut)
        if len(fitted.tokens) <= room:
            return fitted
        low, high = cut + 1, max(cut + 1, high)
    return least


def roundest(first: int, last: int) -> int:
    """Of the numbers from `first` (at least 1) to `last`, the one that is divisible by the highest power of two."""
    bit = ((first - 1) ^ last).bit_length() - 1
    return last >> bit << bit


def _costs_of_latest(head: Turn, turns: Sequence[Turn], cost: Callable[[Message], int], room: int) -> list[int]:
    """What the latest turns cost, oldest first: as many of them as have room beside the head. Looks at no message further back."""
    costs: list[int] = []
    for part in (head, *reversed(turns)):
        n_tokens = 0
        for message in part:
            n_tokens += cost(message)
            if n_tokens > room:
                return costs[:0:-1]
        room -= n_tokens
        costs.append(n_tokens)
    return costs[:0:-1]


def _sizes(turns: Sequence[Turn], costs: Sequence[int], n_longest: int, n_least: int) -> list[float]:
    """About the tokens of the prompt that begins with each of these turns; those with the first and the last of them are known."""
    n_written = (n_longest - n_least - sum(costs[:-1])) / sum(map(len, turns[:-1]))  # by the template around each message
    sizes = [float(n_least)]
    for turn, n_tokens in zip(reversed(turns[:-1]), reversed(costs[:-1]), strict=True):
        sizes.append(sizes[-1] + n_tokens + n_written * len(turn))
    return sizes[::-1]
