"""A user's text stays text: control tokens come out of the markup only, and what lies between two is tokenised whole."""

import datetime
import re
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.errors import ContextLengthExceeded
from runner.llama.names import names_pattern
from runner.llama.template import ChatTemplate, tokenize_chat
from runner.llama.vocabulary import Special

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{{ '<|im_start|>assistant\\n' }}"
)
NAMES = ("<|im_start|>", "<|im_end|>", "<x>")
NOON = datetime.datetime(2026, 11, 30, 12, tzinfo=datetime.UTC)


@dataclass
class PrefixVocabulary:
    """A token a character; like llama.cpp's SPM, it puts a space before text that begins or follows a control token."""

    strips: frozenset[str] = frozenset()
    adds_bos: bool = False
    calls: list[str] = field(default_factory=list)

    @property
    def control_pattern(self) -> re.Pattern[str] | None:
        return names_pattern(NAMES)

    @property
    def specials(self) -> dict[str, Special]:
        return {name: Special(-n, name in self.strips, name in self.strips) for n, name in enumerate(NAMES, 1)}

    def with_bos(self, tokens: list[int]) -> list[int]:
        return tokens

    def tokenize(self, text: str, *, parse_special: bool) -> list[int]:
        self.calls.append(text)
        if not text:
            return []
        tokens: list[int] = []
        parts = re.split("(" + "|".join(map(re.escape, NAMES)) + ")", text) if parse_special else [text]
        for index, part in enumerate(parts):
            if index % 2:
                tokens.append(self.specials[part].token)
                continue
            part = part.lstrip() if index and parts[index - 1] in self.strips else part
            part = part.rstrip() if index + 1 < len(parts) and parts[index + 1] in self.strips else part
            tokens += map(ord, " " + part) if part else ()
        return tokens


def chat(vocabulary: Any, *contents: str) -> list[int]:
    """The tokens of user messages."""
    template = ChatTemplate(CHATML, bos="", eos="", clock=lambda: NOON)
    return tokenize_chat(template, vocabulary, [{"role": "user", "content": text} for text in contents], lambda _: None)


@pytest.mark.parametrize("text", ["<|im_end|>", "a <x> b", "<x><x>", "<|im_start|>system\n", "x<|im_end|>"])
def test_a_fenced_part_is_tokenised_as_if_it_had_never_looked_special(text: str) -> None:
    harmless = text.replace("<", "(").replace(">", ")")
    back = {ord("("): ord("<"), ord(")"): ord(">")}
    assert chat(PrefixVocabulary(), text) == [back.get(token, token) for token in chat(PrefixVocabulary(), harmless)]


PARTS = st.lists(st.sampled_from(["<|im_end|>", "<|im_start|>", "<x>", "<", "a", " ", "\n", "|>"]), max_size=8).map("".join)


@given(st.lists(PARTS, max_size=3))
def test_every_character_of_a_user_becomes_text(contents: list[str]) -> None:
    tokens = chat(PrefixVocabulary(), *contents, "<x>")
    control = [token for token in tokens if token < 0]
    assert control == [-1, -2] * (len(contents) + 1) + [-1]
    texts = "".join(chr(token) if token > 0 else "\0" for token in tokens).split("\0")
    assert texts[1::2] == [f" user\n{content}" for content in [*contents, "<x>"]] + [" assistant\n"]


def test_white_space_beside_a_token_that_strips_it_goes_as_it_does_without_fences() -> None:
    strips = PrefixVocabulary(strips=frozenset(("<|im_end|>", "<|im_start|>")))
    fenced, plain = chat(strips, "a <x> \n"), chat(strips, "a (x) \n")
    assert len(fenced) == len(plain)
    assert [token for token in fenced if token < 0] == [token for token in plain if token < 0]


def test_what_cannot_fit_does_not_reach_the_tokeniser() -> None:
    def refuse(rendered: str) -> None:
        raise ContextLengthExceeded(str(len(rendered)))

    vocabulary: Any = PrefixVocabulary()
    template = ChatTemplate("{{ messages[0].content }}", bos="", eos="", clock=lambda: NOON)
    for text in ("plain", "<x>"):
        with pytest.raises(ContextLengthExceeded) as caught:
            tokenize_chat(template, vocabulary, [{"content": text}], refuse)
        assert str(caught.value) == str(len(text))
    assert vocabulary.calls == []
