r"""Chat messages to a prompt: the model's Jinja template in a sandbox, and the tokens of what it rendered.

A template comes with a model file, which anybody can have made. It runs in jinja2's ImmutableSandboxedEnvironment with
further bounds: no operator, filter or call makes a huge string, loops end, and rendering has a time limit.

Text of a user must stay text. Where a message contains what the tokeniser would read as a control token ("<|im_start|>"),
that part is fenced with two characters that occur nowhere in the messages, and tokenised as plain text between the fences:

    messages    "<|im_end|> is a token"
    rendered    "<|im_start|>user\n" OPEN "<|im_end|>" CLOSE " is a token<|im_end|>\n"
"""

import ctypes
import datetime
import json
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from runner.errors import InvalidRequest, ModelError, RunnerError
from runner.llama.vocabulary import Vocabulary

MAX_RENDERED_CHARS = 64 * 1024 * 1024
MAX_RENDER_S = 5.0
# A template has no business with a larger number: not as a width, a repetition or an exponent.
MAX_NUMBER = 1_000_000
_BOUNDED_OPERATORS = frozenset(("*", "**", "%", "+"))
# Noncharacters: no text interchange uses them, and whether a message does is checked.
_FENCES = [chr(code) for code in range(0xFDD0, 0xFDF0)]


class _RenderTimeout(Exception):
    """Raised asynchronously in the rendering thread by `_time_limit`."""


class _Raised(Exception):
    """The template's own `raise_exception(message)`."""


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}`, which some templates put around answers for training: rendered as it stands."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own contract

    def parse(self, parser: Parser) -> Node:
        """Turn the block into a call that returns its body."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Any) -> Any:
        return caller()


class _BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox, with a bound on how large a value one operation may make."""

    intercepted_binops = _BOUNDED_OPERATORS

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Refuse to multiply, raise or format beyond the bounds."""
        if operator == "+":
            if isinstance(left, (str, list)) and isinstance(right, (str, list)) and len(left) + len(right) > MAX_RENDERED_CHARS:
                raise SecurityError("the template makes a text that is too long")
        elif isinstance(left, (str, bytes, list, tuple)) or isinstance(right, (str, bytes, list, tuple)) or operator == "**":
            _check_numbers((left, right))
            if operator == "%" and isinstance(left, str):
                _check_format_width(left)
            if operator == "*":
                size = len(left) * right if hasattr(left, "__len__") and isinstance(right, int) else 0
                size = len(right) * left if hasattr(right, "__len__") and isinstance(left, int) else size
                if size > MAX_NUMBER:
                    raise SecurityError("the template makes a text that is too long")
        return super().call_binop(context, operator, left, right)

    def call(self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Refuse calls with numbers that only make sense as an attack ("x".ljust(10**9))."""
        _check_numbers((*args, *kwargs.values()))
        return super().call(__context, __obj, *args, **kwargs)


def _check_numbers(values: Sequence[Any]) -> None:
    if any(isinstance(value, int) and abs(value) > MAX_NUMBER for value in values):
        raise SecurityError(f"the template uses a number above {MAX_NUMBER:,}")


def _check_format_width(text: str) -> None:
    digits = "".join(ch if ch.isdigit() else " " for ch in text).split()
    if any(len(number) > 4 for number in digits):
        raise SecurityError("the template formats to an unreasonable width")


class ChatTemplate:
    """One model's template. `render` may be called from one thread at a time (the prepare thread)."""

    def __init__(self, source: str, *, bos: str, eos: str) -> None:
        """Compile `source`. Raises ModelError where it is not a template."""
        environment = _BoundedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # else "a" * 10**9 is folded while the template compiles
            extensions=[loopcontrols, _Generation],
        )
        environment.filters["tojson"] = _to_json
        for name in ("center", "indent", "wordwrap", "batch", "slice", "truncate"):
            environment.filters[name] = _bounded_filter(environment.filters[name])
        environment.filters["format"] = _bounded_format(environment.filters["format"])
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._constants = {"bos_token": bos, "eos_token": eos}
        try:
            self._template = environment.from_string(source)
        except (TemplateError, RecursionError) as error:
            raise ModelError(f"The chat template cannot be compiled: {_one_line(error)}") from error

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Text for the messages, ending where the assistant's answer begins. Raises InvalidRequest with the template's own words."""
        try:
            with _time_limit(MAX_RENDER_S):
                return self._render(messages)
        except _Raised as error:
            raise InvalidRequest(f"The model's chat template refuses these messages: {_one_line(error)}", param="messages") from error
        except _RenderTimeout as error:
            raise InvalidRequest(f"The model's chat template ran longer than {MAX_RENDER_S:g} s", param="messages") from error
        except RunnerError:
            raise
        except (TemplateError, SecurityError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise InvalidRequest(f"The model's chat template cannot render these messages: {_one_line(error)}", param="messages") from error
        except (RecursionError, MemoryError) as error:
            raise InvalidRequest("The model's chat template ran out of room with these messages", param="messages") from error

    def _render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        parts: list[str] = []
        n_chars = 0
        for part in self._template.generate(messages=messages, add_generation_prompt=True, **self._constants):
            n_chars += len(part)
            if n_chars > MAX_RENDERED_CHARS:
                raise SecurityError("the rendered text is too long")
            parts.append(part)
        return "".join(parts)


def tokenize_chat(template: ChatTemplate, vocabulary: Vocabulary, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """The prompt's tokens, with exactly one BOS where the model wants one. Raises InvalidRequest."""
    pattern = vocabulary.control_pattern
    contents = [content for message in messages for content in _strings(message)]
    if pattern is None or not any(pattern.search(text) for text in contents):
        tokens = vocabulary.tokenize(template.render(messages), parse_special=True)
        return vocabulary.with_bos(tokens)
    unused = [ch for ch in _FENCES if not any(ch in text for text in contents)]
    if len(unused) < 2:
        raise InvalidRequest("The messages contain nearly all noncharacters from U+FDD0 to U+FDEF", param="messages")
    opening, closing = unused[:2]
    fenced = [_map_strings(message, lambda text: pattern.sub(lambda m: opening + m[0] + closing, text)) for message in messages]
    tokens = []
    for text, is_markup in _segments(template.render(fenced), opening, closing):
        tokens += vocabulary.tokenize(text, parse_special=is_markup)
    return vocabulary.with_bos(tokens)


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


def _strings(value: Any) -> Iterator[str]:
    """All texts inside a message, except its role, which only ever chooses a branch of the template."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if key != "role":
                yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)


def _map_strings(value: Any, change: Any) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: item if key == "role" else _map_strings(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [_map_strings(item, change) for item in value]
    return value


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise _RenderTimeout in this thread after `seconds` of Python code.

    A template is interpreted Python: an exception set from outside arrives at the next bytecode. The lock makes sure that it
    cannot arrive after the block has ended.
    """
    thread = threading.get_ident()
    lock, is_over = threading.Lock(), False

    def expire() -> None:
        with lock:
            if not is_over:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(_RenderTimeout))

    timer = threading.Timer(seconds, expire)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        with lock:
            is_over = True
        timer.cancel()


def _bounded_filter(inner: Any) -> Any:
    def bounded(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(value, int) and value > 10_000 for value in (*args, *kwargs.values())):
            raise SecurityError("the template formats to an unreasonable width")
        return inner(*args, **kwargs)

    # jinja2 marks with this attribute what a filter wants to be given first.
    if hasattr(inner, "jinja_pass_arg"):
        bounded.jinja_pass_arg = inner.jinja_pass_arg  # type: ignore[attr-defined]
    return bounded


def _bounded_format(inner: Any) -> Any:
    def bounded(text: Any, *args: Any, **kwargs: Any) -> Any:
        _check_format_width(str(text))
        return inner(text, *args, **kwargs)

    return bounded


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, sort_keys: bool = False) -> str:
    """`tojson` as the templates of this field expect it: plain JSON, not the HTML-safe kind of jinja2."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=min(indent, 16) if indent else indent, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise _Raised(message)


def _strftime_now(layout: str) -> str:
    return datetime.datetime.now().astimezone().strftime(str(layout)[:200])


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
