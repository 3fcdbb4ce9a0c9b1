"""The prepare thread: what it hands on, what it refuses, and that a cancel is never lost, whenever it comes."""

import threading
from collections.abc import Iterator
from queue import Empty, SimpleQueue
from typing import Any

import pytest

from runner.engine.sampling import SamplingParams
from runner.engine.sequence import Sequence, Times
from runner.errors import ContextLengthExceeded, InvalidRequest
from runner.llama.vocabulary import VocabularyFacts
from runner.serving.prepare import Prepared, Preparer, PrepareThread
from runner.serving.protocol import Accepted, ChatPrompt, FromEngine, Prompt, Refused, Submit, TextPrompt, TokenPrompt


def submit(request_id: str, text: str = "hi") -> Submit:
    """A request."""
    return Submit(request_id=request_id, prompt=TextPrompt(text), sampling=SamplingParams(seed=1))


class SlowPreparer:
    """Stands still at each request until told to go on; what the text says goes wrong does."""

    def __init__(self) -> None:
        self.begun: SimpleQueue[str] = SimpleQueue()
        self.go = threading.Semaphore(0)
        self.seen: list[str] = []

    def prepare(self, submit: Submit, arrived_at: float, now: float) -> Prepared:
        """A sequence of one token."""
        self.seen.append(submit.request_id)
        self.begun.put(submit.request_id)
        assert self.go.acquire(timeout=5)
        assert isinstance(submit.prompt, TextPrompt)
        if submit.prompt.text == "refuse":
            raise InvalidRequest("no", param="prompt")
        if submit.prompt.text == "bug":
            raise ZeroDivisionError("ours")
        times = Times(arrived_at=arrived_at, prepared_at=now)
        sequence = Sequence(request_id=submit.request_id, prompt=[1], sampling=submit.sampling, max_tokens=1, times=times)
        return Prepared(sequence, "", n_dropped=4 if submit.prompt.text == "long" else 0)


class Rig:
    """A thread, and what comes out of it in order."""

    def __init__(self) -> None:
        self.preparer = SlowPreparer()
        self._out: SimpleQueue[FromEngine | str] = SimpleQueue()
        self.thread = PrepareThread(
            self.preparer,  # type: ignore[arg-type]
            clock=lambda: 7.0,
            done=lambda prepared: self._out.put(prepared.sequence.request_id),
            emit=self._out.put,
        )
        self.thread.start()

    def go(self, n: int = 1) -> None:
        """Let `n` more requests be prepared."""
        self.preparer.go.release(n)

    def wait_begun(self) -> str:
        """Until the next request is being prepared."""
        return self.preparer.begun.get(timeout=5)

    def out(self, n: int) -> list[FromEngine | str]:
        """The next `n` messages; a str went to the decode thread."""
        return [self._out.get(timeout=5) for _ in range(n)]

    @property
    def is_silent(self) -> bool:
        """Whether nothing more came."""
        try:
            self._out.get(timeout=0.05)
        except Empty:
            return True
        return False


@pytest.fixture
def rig() -> Iterator[Rig]:
    """A started thread."""
    rig = Rig()
    yield rig
    rig.go(100)


CANCELLED = "request_cancelled", "The request was cancelled"


def test_requests_are_handed_on_in_their_order_each_after_its_acceptance(rig: Rig) -> None:
    for request_id in "abc":
        rig.thread.submit(submit(request_id))
    rig.go(3)
    assert rig.out(6) == [Accepted("a", 1), "a", Accepted("b", 1), "b", Accepted("c", 1), "c"]


def test_acceptance_says_how_many_messages_were_dropped(rig: Rig) -> None:
    rig.thread.submit(submit("a", "long"))
    rig.go()
    assert rig.out(1) == [Accepted("a", 1, 4)]


def test_a_cancel_before_preparing_saves_the_work(rig: Rig) -> None:
    rig.thread.submit(submit("a"))
    rig.wait_begun()
    rig.thread.submit(submit("b"))
    rig.thread.submit(submit("c"))
    assert rig.thread.cancel("b")
    rig.go(2)
    assert rig.out(5) == [Accepted("a", 1), "a", Refused("b", *CANCELLED, None), Accepted("c", 1), "c"]
    assert rig.preparer.seen == ["a", "c"]


def test_a_cancel_while_preparing_keeps_it_from_the_decode_thread(rig: Rig) -> None:
    rig.thread.submit(submit("a"))
    rig.wait_begun()
    assert rig.thread.cancel("a")
    assert rig.thread.cancel("a")
    rig.go()
    assert rig.out(1) == [Refused("a", *CANCELLED, None)]
    assert rig.is_silent


def test_a_cancel_after_preparing_is_the_decode_threads(rig: Rig) -> None:
    rig.thread.submit(submit("a"))
    rig.go()
    assert rig.out(2) == [Accepted("a", 1), "a"]
    assert not rig.thread.cancel("a")
    assert not rig.thread.cancel("nobody")


def test_an_id_can_come_again_after_its_cancel(rig: Rig) -> None:
    rig.thread.submit(submit("a"))
    rig.wait_begun()
    rig.thread.cancel("a")
    rig.go(2)
    assert rig.out(1) == [Refused("a", *CANCELLED, None)]
    rig.thread.submit(submit("a"))
    assert rig.out(2) == [Accepted("a", 1), "a"]


def test_a_cancel_of_what_is_refused_says_one_thing_only(rig: Rig) -> None:
    rig.thread.submit(submit("a", "refuse"))
    rig.wait_begun()
    rig.thread.cancel("a")
    rig.go()
    assert rig.out(1) == [Refused("a", *CANCELLED, None)]
    assert rig.is_silent


def test_a_refusal_and_a_bug_touch_one_request_each(rig: Rig, capfd: pytest.CaptureFixture[str]) -> None:
    for request_id, text in (("a", "refuse"), ("b", "bug"), ("c", "hi")):
        rig.thread.submit(submit(request_id, text))
    rig.go(3)
    assert rig.out(4) == [
        Refused("a", "invalid_request_error", "no", "prompt"),
        Refused("b", "internal_error", "The request could not be prepared: ZeroDivisionError", None),
        Accepted("c", 1),
        "c",
    ]
    told = capfd.readouterr().err
    assert told.startswith("Request b could not be prepared:\nTraceback")
    assert told.endswith("ZeroDivisionError: ours\n")
    assert "no" not in told.split("\n")


class CountingVocabulary:
    """A token a character, at most ten bytes each; remembers what it was asked."""

    n_tokens = 1000
    control_pattern = None
    facts = VocabularyFacts(frozenset(), {}, longest_piece_bytes=10, word_starts_per_token=1, unknown_bytes=b"")

    def __init__(self) -> None:
        self.asked: list[str] = []

    def tokenize(self, text: str, *, parse_special: bool) -> list[int]:
        self.asked.append(text)
        return [ord(ch) for ch in text]

    def with_bos(self, tokens: list[int]) -> list[int]:
        return tokens


@pytest.fixture
def vocabulary() -> CountingVocabulary:
    """For `preparer`."""
    return CountingVocabulary()


@pytest.fixture
def preparer(vocabulary: CountingVocabulary) -> Preparer:
    """Slots of eight tokens, and no template."""
    return Preparer(vocabulary, None, n_ctx_slot=8, seed=5)  # type: ignore[arg-type]


def prepare(preparer: Preparer, prompt: Prompt, now: float = 0.0, **fields: int) -> Sequence:
    """The sequence of a prompt."""
    return preparer.prepare(Submit(request_id="a", prompt=prompt, sampling=SamplingParams(), **fields), 0.0, now).sequence  # type: ignore[arg-type]


def test_a_prompt_of_several_answers_is_tokenised_once(preparer: Preparer, vocabulary: CountingVocabulary) -> None:
    first, second = (prepare(preparer, TextPrompt("abc"), seed_offset=n) for n in range(2))
    assert (list(first.prompt), list(second.prompt)) == ([97, 98, 99], [97, 98, 99])
    assert first.prompt is not second.prompt
    assert [first.sampling.seed, second.sampling.seed] == [5, 6]
    assert vocabulary.asked == ["abc"]


def test_a_refused_prompt_that_comes_again_is_refused_for_nothing(preparer: Preparer, vocabulary: CountingVocabulary) -> None:
    for _ in range(3):
        with pytest.raises(ContextLengthExceeded, match=r"The prompt has 8 tokens; a slot holds 8") as caught:
            prepare(preparer, TextPrompt("a" * 8))
        assert caught.value.param == "prompt"
    assert vocabulary.asked == ["a" * 8]


def test_what_was_found_is_forgotten_soon(preparer: Preparer, vocabulary: CountingVocabulary) -> None:
    for now in (0.0, 4.9, 5.1, 5.2):
        prepare(preparer, TextPrompt("a"), now)
    assert vocabulary.asked == ["a"] * 2
    for text in "bcdea":
        prepare(preparer, TextPrompt(text), 5.3)
    assert vocabulary.asked[2:] == list("bcdea")


def test_what_certainly_does_not_fit_is_not_tokenised(preparer: Preparer, vocabulary: CountingVocabulary) -> None:
    with pytest.raises(ContextLengthExceeded, match="at least 8 tokens"):
        prepare(preparer, TextPrompt("a" * 71))
    assert vocabulary.asked == []


@pytest.mark.parametrize(
    ("prompt", "message", "param"),
    [
        (TextPrompt(""), "The prompt is empty", "prompt"),
        (TokenPrompt([]), "The prompt is empty", "prompt"),
        (TokenPrompt([1, 1000]), "contains the token id 1000; this model's ids go from 0 to 999", "prompt"),
        (TokenPrompt([-1]), "contains the token id -1", "prompt"),
        (TokenPrompt([-1] * 8), "The prompt has 8 tokens", "prompt"),
        (ChatPrompt([]), "This model has no chat template", "messages"),
    ],
)
def test_refusals(preparer: Preparer, prompt: Prompt, message: str, param: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        prepare(preparer, prompt)
    assert caught.value.param == param


class PlainTemplate:
    """Renders a message as its content between brackets."""

    def render(self, messages: list[dict[str, Any]]) -> str:
        return "".join(f"[{message['content']}]" for message in messages)


@pytest.fixture
def chat_preparer(vocabulary: CountingVocabulary) -> Preparer:
    """Slots of 100 tokens: a character each, and two around a message."""
    return Preparer(vocabulary, PlainTemplate(), n_ctx_slot=100, seed=5)  # type: ignore[arg-type]


def turns(n: int) -> list[dict[str, Any]]:
    """So many turns of 14 tokens, after a system prompt of 4 and before a question of 8."""
    middle = [{"role": role, "content": f"{role[0]}{turn:04}"} for turn in range(n) for role in ("user", "assistant")]
    return [{"role": "system", "content": "be"}, *middle, {"role": "user", "content": "final?"}]


def rendered(sequence: Sequence) -> str:
    """A prompt as text."""
    return "".join(map(chr, sequence.prompt))


def test_oldest_turns_go_where_they_may_and_room_is_left_for_the_answer(chat_preparer: Preparer) -> None:
    prompt = ChatPrompt(turns(50), truncates=True)
    prepared = chat_preparer.prepare(Submit(request_id="a", prompt=prompt, sampling=SamplingParams()), 0.0, 0.0)
    text = rendered(prepared.sequence)
    assert text == "[be][u0048][a0048][u0049][a0049][final?]"
    assert (prepared.n_dropped, prepared.sequence.max_tokens) == (96, 100 - len(text))
    with pytest.raises(ContextLengthExceeded, match=r"The prompt has 712 tokens; a slot holds 100, and one at least must be left"):
        prepare(chat_preparer, ChatPrompt(turns(50)))


def test_room_that_the_answer_needs_decides_what_fits(chat_preparer: Preparer) -> None:
    prompt = ChatPrompt(turns(5), truncates=True)  # of 82 tokens
    assert len(rendered(prepare(chat_preparer, prompt, max_tokens=18))) == 82
    assert len(rendered(prepare(chat_preparer, prompt, max_tokens=19))) < 82
    assert len(rendered(prepare(chat_preparer, prompt))) < 75


def test_last_turn_that_does_not_fit_is_a_refusal_with_both_numbers(chat_preparer: Preparer) -> None:
    last = {"role": "user", "content": "x" * 94}
    assert len(prepare(chat_preparer, ChatPrompt([*turns(9), last | {"content": "x" * 93}], truncates=True)).prompt) == 99
    with pytest.raises(ContextLengthExceeded) as caught:
        prepare(chat_preparer, ChatPrompt([*turns(9), last], truncates=True))
    assert caught.value.message.startswith("The prompt has 100 tokens without its earlier turns; a slot holds 100, ")
    with pytest.raises(ContextLengthExceeded, match="The prompt has at least 1,000 tokens; a slot holds 100"):
        prepare(chat_preparer, ChatPrompt([*turns(9), last | {"content": "x" * 9994}], truncates=True))


def test_turn_that_certainly_does_not_fit_is_not_tokenised(chat_preparer: Preparer, vocabulary: CountingVocabulary) -> None:
    messages = [*turns(2), {"role": "assistant", "content": "x" * 100_000}, *turns(1)[1:]]
    prepared = prepare(chat_preparer, ChatPrompt(messages, truncates=True))
    assert rendered(prepared) == "[be][u0000][a0000][final?]"
    assert max(map(len, vocabulary.asked)) < 100


def test_answers_of_one_request_are_cut_once(chat_preparer: Preparer, vocabulary: CountingVocabulary) -> None:
    prompt = ChatPrompt(turns(50), truncates=True)
    first = prepare(chat_preparer, prompt)
    n_asked = len(vocabulary.asked)
    second = chat_preparer.prepare(Submit(request_id="b", prompt=prompt, sampling=SamplingParams()), 0.0, 0.0)
    assert (first.prompt, second.n_dropped, len(vocabulary.asked)) == (second.sequence.prompt, 96, n_asked)
    assert len(prepare(chat_preparer, prompt, max_tokens=1).prompt) > len(first.prompt)


@pytest.fixture
def shift_preparer(vocabulary: CountingVocabulary) -> Preparer:
    """Slots of 100 tokens that can be shifted."""
    return Preparer(vocabulary, PlainTemplate(), n_ctx_slot=100, seed=5, can_shift=True)  # type: ignore[arg-type]


def chat_of(n_system: int, *, n_user: int = 10) -> ChatPrompt:
    """A system prompt and a question of so many tokens."""
    return ChatPrompt([{"role": "system", "content": "s" * (n_system - 2)}, {"role": "user", "content": "u" * (n_user - 2)}])


@pytest.mark.parametrize(
    ("prompt", "n_keep"),
    [
        (TextPrompt("abc"), 16),
        (TokenPrompt([1, 2, 3]), 16),
        (ChatPrompt([{"role": "user", "content": "abc"}]), 16),
        (chat_of(10), 16),
        (chat_of(20), 21),  # and what the template writes before the user's text
        (chat_of(60), 25),
    ],
)
def test_where_a_slot_is_shifted_the_messages_of_the_system_stay(shift_preparer: Preparer, prompt: Prompt, n_keep: int) -> None:
    asked = prepare(shift_preparer, prompt, max_tokens=500)
    assert (asked.max_tokens, asked.n_keep) == (500, n_keep)


@pytest.mark.parametrize("fields", [{}, {"max_tokens": 97}])
def test_an_answer_without_a_limit_ends_where_its_slot_does(
    shift_preparer: Preparer, vocabulary: CountingVocabulary, fields: dict[str, int]
) -> None:
    asked = prepare(shift_preparer, TextPrompt("abc"), **fields)
    assert (asked.max_tokens, asked.n_keep, vocabulary.asked) == (97, 0, ["abc"])


def test_without_shifts_an_answer_ends_where_its_slot_does_whatever_its_limit(chat_preparer: Preparer) -> None:
    asked = prepare(chat_preparer, TextPrompt("abc"), max_tokens=500)
    assert (asked.max_tokens, asked.n_keep) == (97, 0)


def test_a_template_that_wants_more_than_the_system_keeps_the_least(vocabulary: CountingVocabulary) -> None:
    class StrictTemplate(PlainTemplate):
        def render(self, messages: list[dict[str, Any]]) -> str:
            if not messages[-1]["content"]:
                raise InvalidRequest("an empty message", param="messages")
            return super().render(messages)

    strict = Preparer(vocabulary, StrictTemplate(), n_ctx_slot=100, seed=5, can_shift=True)  # type: ignore[arg-type]
    assert prepare(strict, chat_of(20), max_tokens=500).n_keep == 16


def test_whom_a_request_shares_with_reaches_the_sequence(preparer: Preparer) -> None:
    asked = Submit(request_id="a", prompt=TextPrompt("a"), sampling=SamplingParams(), domain="d", session="s", is_stateless=True)
    sequence = preparer.prepare(asked, 0.0, 0.0).sequence
    assert (sequence.domain, sequence.session, sequence.is_stateless) == ("d", "s", True)
    sequence = prepare(preparer, TextPrompt("b"))
    assert (sequence.domain, sequence.session, sequence.is_stateless) == ("", "", False)
