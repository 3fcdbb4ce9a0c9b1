"""Chat templates: what they render, what a hostile one cannot do, and that a user's text stays text."""

import time
from collections.abc import Sequence
from typing import Any

import pytest

from runner.errors import InvalidRequest, ModelError
from runner.llama.template import ChatTemplate, _segments

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def render(source: str, messages: Sequence[dict[str, Any]] = ({"role": "user", "content": "hi"},)) -> str:
    """Compile and render."""
    return ChatTemplate(source, bos="<s>", eos="</s>").render(messages)


def test_chatml() -> None:
    assert render(CHATML) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_constants_filters_and_the_generation_block() -> None:
    source = "{{ bos_token }}{% generation %}{{ messages[0] | tojson }}{% endgeneration %}{{ strftime_now('%Y')|length }}"
    assert render(source) == '<s>{"role": "user", "content": "hi"}4'


def test_loop_controls() -> None:
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"


def test_a_templates_own_refusal_is_a_400_in_its_words() -> None:
    with pytest.raises(InvalidRequest) as caught:
        render("{{ raise_exception('roles must alternate') }}")
    assert str(caught.value) == "The model's chat template refuses these messages: roles must alternate"
    assert caught.value.param == "messages"


HOSTILE = [
    "{{ lipsum.__globals__['os'].popen('touch pwned') }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.system('id') }}",
    "{{ messages.append(1) }}",
    "{% for i in range(10**9) %}x{% endfor %}",
    "{{ 'a' * 10**9 }}",
    "{{ 10**10**10 }}",
    "{{ [0] * 10**9 }}",
    "{{ 'a'.ljust(10**9) }}",
    "{{ 'a'.center(10**9) }}",
    "{{ 'a' | center(1000000000) }}",
    "{{ 'a' | indent(1000000000) }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%1000000000d' | format(1) }}",
    "{{ '{:1000000000d}'.format(1) }}",
    "{% set ns = namespace(x='a' * 1000000) %}{% for i in range(99999) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ undefined_thing.attribute.other }}",
    "{{ messages[0]['content'] + 1 }}",
    "{{ 1 / 0 }}",
    "{% include '/etc/passwd' %}",
]


@pytest.mark.parametrize("source", HOSTILE)
def test_a_hostile_or_broken_template_is_an_error_and_nothing_else(source: str) -> None:
    started = time.monotonic()
    with pytest.raises((InvalidRequest, ModelError)) as caught:
        render(source)
    assert time.monotonic() - started < 8.0
    assert "\n" not in str(caught.value)


def test_an_endless_template_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.llama.template.MAX_RENDER_S", 0.3)
    nested = "{% for a in range(99999) %}{% for b in range(99999) %}{% set c = a * b %}{% endfor %}{% endfor %}"
    with pytest.raises(InvalidRequest, match="ran longer than"):
        render(nested)


def test_a_template_that_is_none_is_a_model_error() -> None:
    with pytest.raises(ModelError, match="cannot be compiled"):
        render("{% for %}")


def test_text_between_fences_is_no_markup() -> None:
    assert list(_segments("a(b)c", "(", ")")) == [("a", True), ("b", False), ("c", True)]


@pytest.mark.parametrize(("rendered", "literal"), [("a(b", ["b"]), ("b)c(d)", ["d"]), ("(a)(b)", ["a", "b"]), ("((a)", ["a"])])
def test_a_template_that_cuts_a_fence_off_never_turns_text_into_markup(rendered: str, literal: list[str]) -> None:
    assert [text for text, is_markup in _segments(rendered, "(", ")") if not is_markup] == literal
