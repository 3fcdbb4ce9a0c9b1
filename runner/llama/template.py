r"""Chat messages to a prompt: the model's Jinja template in a sandbox, and the tokens of what it rendered.

A template comes with a model file, which anybody can have made: sandbox.py bounds what it may make, watchdog.py how long.

Text of a user must stay text. Where a message contains what the tokeniser would read as a control token ("<|im_start|>"),
that part is fenced with two characters that occur nowhere in the messages. Control tokens are then found outside the fences
only, and all text between two of them is tokenised in one go, as if the fenced part had never looked special:

    messages    "<|im_end|> is a token"
    rendered    "<|im_start|>user\n" OPEN "<|im_end|>" CLOSE " is a token<|im_end|>\n"
    tokenised    <|im_start|>  "user\n<|im_end|> is a token"  <|im_end|>  "\n"
"""

import datetime
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jinja2.exceptions import SecurityError, TemplateError

from runner.errors import InvalidRequest, ModelError, RunnerError
from runner.llama.sandbox import BoundedEnvironment, TemplateRaised
from runner.llama.vocabulary import Vocabulary
from runner.llama.watchdog import TimeLimitReached, Watchdog

MAX_RENDERED_CHARS = 16 * 1024 * 1024
MAX_RENDER_S = 5.0
# Noncharacters: no text interchange uses them, and whether a message does is checked.
_FENCES = [chr(code) for code in range(0xFDD0, 0xFDF0)]
# C's isspace, which is what the tokeniser strips beside some control tokens.
_C_SPACES = " \t\n\v\f\r"


class ChatTemplate:
    """One model's template. `render` may be called from one thread at a time (the prepare thread)."""

    def __init__(self, source: str, *, bos: str, eos: str, clock: Callable[[], datetime.datetime]) -> None:
        """Compile `source`; `clock` is the date that it may print. Raises ModelError where it is not a template."""
        self._environment = BoundedEnvironment(clock)
        self._watchdog = Watchdog()
        self._constants = {"bos_token": bos, "eos_token": eos}
        try:
            self._template = self._environment.from_string(source)
        except (TemplateError, RecursionError, SyntaxError, MemoryError) as error:
            raise ModelError(f"The chat template cannot be compiled: {_one_line(error)}") from error

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Text for the messages, ending where the assistant's answer begins. Raises InvalidRequest with the template's own words."""
        try:
            return self._watchdog.run(MAX_RENDER_S, lambda: self._render(messages))
        except TemplateRaised as error:
            raise InvalidRequest(f"The model's chat template refuses these messages: {_one_line(error)}", param="messages") from error
        except TimeLimitReached as error:
            raise InvalidRequest(f"The model's chat template ran longer than {MAX_RENDER_S:g} s", param="messages") from error
        except RunnerError:
            raise
        except (TemplateError, SecurityError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise InvalidRequest(f"The model's chat template cannot render these messages: {_one_line(error)}", param="messages") from error
        except (RecursionError, MemoryError) as error:
            raise InvalidRequest("The model's chat template ran out of room with these messages", param="messages") from error

    def _render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        self._environment.meter.restart()
        parts: list[str] = []
        n_chars = 0
        for part in self._template.generate(messages=messages, add_generation_prompt=True, **self._constants):
            n_chars += len(part)
            if n_chars > MAX_RENDERED_CHARS:
                raise SecurityError("the rendered text is too long")
            parts.append(part)
        return "".join(parts)


def tokenize_chat(
    template: ChatTemplate, vocabulary: Vocabulary, messages: Sequence[Mapping[str, Any]], check_length: Callable[[str], None]
) -> list[int]:
    """The prompt's tokens, with exactly one BOS where the model wants one. Raises InvalidRequest.

    `check_length` sees the rendered text before the tokeniser does, and raises where that is hopeless.
    """
    pattern = vocabulary.control_pattern
    contents = [content for message in messages for content in texts_of(message)]
    if pattern is None or not any(pattern.search(text) for text in contents):
        rendered = template.render(messages)
        check_length(rendered)
        return vocabulary.with_bos(vocabulary.tokenize(rendered, parse_special=True))
    unused = [ch for ch in _FENCES if not any(ch in text for text in contents)]
    if len(unused) < 2:
        raise InvalidRequest("The messages contain nearly all noncharacters from U+FDD0 to U+FDEF", param="messages")
    opening, closing = unused[:2]
    fenced = [_map_strings(message, lambda text: pattern.sub(lambda m: opening + m[0] + closing, text)) for message in messages]
    rendered = template.render(fenced)
    check_length(rendered.replace(opening, "").replace(closing, ""))
    return vocabulary.with_bos(_tokens(vocabulary, list(_segments(rendered, opening, closing)), pattern))


def _tokens(vocabulary: Vocabulary, segments: Sequence[tuple[str, bool]], pattern: re.Pattern[str]) -> list[int]:
    """Control tokens out of the markup, and between them runs of text, each tokenised whole.

    Whole, because a tokeniser treats the start of a text apart: many put a space before it.
    """
    tokens: list[int] = []
    run = ""
    follows_strip = False
    for text, is_markup in segments:
        end = 0
        for match in pattern.finditer(text) if is_markup else ():
            special = vocabulary.specials[match[0]]
            run += text[end : match.start()]
            run = run.lstrip(_C_SPACES) if follows_strip else run
            run = run.rstrip(_C_SPACES) if special.strips_left else run
            tokens += vocabulary.tokenize(run, parse_special=False)
            tokens.append(special.token)
            run, end, follows_strip = "", match.end(), special.strips_right
        run += text[end:]
    return tokens + vocabulary.tokenize(run.lstrip(_C_SPACES) if follows_strip else run, parse_special=False)


def _segments(rendered: str, opening: str, closing: str) -> Iterator[tuple[str, bool]]:
    """(text, is markup) in order. A template may cut a fence off: without its end a fenced part stays text, never the reverse."""
    is_markup = True
    for part in re.split(f"([{opening}{closing}])", rendered):
        if part == opening:
            is_markup = False
        elif part == closing:
            is_markup = True
        elif part:
            yield part, is_markup


def texts_of(value: Any) -> Iterator[str]:
    """All texts inside a message, except its role, which only ever chooses a branch of the template."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if key != "role":
                yield from texts_of(item)
    elif isinstance(value, list):
        for item in value:
            yield from texts_of(item)


def _map_strings(value: Any, change: Any) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: item if key == "role" else _map_strings(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [_map_strings(item, change) for item in value]
    return value


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
