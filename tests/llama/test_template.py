"""Chat templates: what they render, what a hostile one cannot do, and that a user's text stays text."""

import datetime
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import pytest
from jinja2 import Environment

from runner.errors import InvalidRequest, ModelError
from runner.llama.sandbox import to_json
from runner.llama.template import ChatTemplate, _segments
from tests.conftest import ROOT

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


NOON = datetime.datetime(2026, 11, 30, 12, tzinfo=datetime.UTC)


def render(source: str, messages: Sequence[dict[str, Any]] = ({"role": "user", "content": "hi"},)) -> str:
    """Compile and render."""
    return ChatTemplate(source, bos="<s>", eos="</s>", clock=lambda: NOON).render(messages)


def test_chatml() -> None:
    assert render(CHATML) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_constants_filters_and_the_generation_block() -> None:
    source = "{{ bos_token }}{% generation %}{{ messages[0] | tojson }}{% endgeneration %}{{ strftime_now('%d %b %Y') }}"
    assert render(source) == '<s>{"role": "user", "content": "hi"}30 Nov 2026'


def test_loop_controls() -> None:
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"


def test_a_templates_own_refusal_is_a_400_in_its_words() -> None:
    with pytest.raises(InvalidRequest) as caught:
        render("{{ raise_exception('roles must alternate') }}")
    assert str(caught.value) == "The model's chat template refuses these messages: roles must alternate"
    assert caught.value.param == "messages"


DOUBLING = "{% set ns = namespace(x='a' * 1000) %}{% for i in range(99) %}"
HOSTILE = [
    "{{ lipsum.__globals__['os'].popen('touch pwned') }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.system('id') }}",
    "{{ messages.append(1) }}",
    "{% for i in range(10**9) %}x{% endfor %}",
    "{{ 'a' * 10**9 }}",
    "{{ 10**10**10**10**10 }}",
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
    "{{ lipsum(n=1000000) }}",
    "{{ '{:10000000000d}'.format(1) }}",
    "{{ '{:{w}}'.format(1, w=999999) }}",
    "{{ '%*d' % (999999999, 1) }}",
    "{{ '%1000000000d'.__mod__(1) + 1 }}",
    "{{ ('%(a)s' * 9999) % {'a': 'x' * 99999} }}",
    "{{ ('{a}' * 9999).format(a='x' * 99999) }}",
    "{{ ('{a}' * 9999).format_map({'a': 'x' * 99999}) }}",
    "{{ ('%(a)s' * 9999) | format(a='x' * 99999) }}",
    DOUBLING + "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    DOUBLING + "{% set ns.x = [ns.x, ns.x] | join %}{% endfor %}",
    DOUBLING + "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}{% endfor %}",
    DOUBLING + "{% set ns.x = ns.x * 2 %}{% endfor %}",
    DOUBLING + "{% set ns.x = '%s%s' % (ns.x, ns.x) %}{% endfor %}",
    DOUBLING + "{% set ns.x = '{0}{0}'.format(ns.x) %}{% endfor %}",
    DOUBLING + "{% set ns.x = ns.x.replace('a', 'aa') %}{% endfor %}",
    DOUBLING + "{% set ns.x = ns.x | replace('a', 'aa') %}{% endfor %}",
    DOUBLING + "{% set ns.x = ns.x.join(['a', 'b', 'c']) %}{% endfor %}",
    DOUBLING + "{% set ns.x = ns.x.translate({97: 'aa'}) %}{% endfor %}",
    DOUBLING + "{% macro twice(t) %}{{ t }}{{ t }}{% endmacro %}{% set ns.x = twice(ns.x) %}{% endfor %}",
    DOUBLING + "{% filter replace('a', 'aa') %}{{ ns.x }}{% endfilter %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    DOUBLING + "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    DOUBLING + "{% set ns.x = (ns.x, ns.x) %}{% endfor %}{{ ns.x }}",
    DOUBLING + "{% set ns.x = {'a': ns.x, 'b': ns.x} %}{% endfor %}{{ ns.x | tojson }}",
    DOUBLING + "{% set ns.x = dict(a=ns.x, b=ns.x) %}{% endfor %}{{ ns.x | string }}",
    DOUBLING + "{% set ns.x = [ns.x] * 2 %}{% endfor %}{{ ns.x }}",
    DOUBLING + "{% set ns.x = namespace(a=ns.x, b=[ns.x, ns.x]) %}{% endfor %}{{ ns.x.b }}{{ 1 / 0 }}",
    DOUBLING + "{% macro f(n) %}{% set n.x = varargs %}{% endmacro %}{{ f(ns, ns.x, ns.x) }}{% endfor %}{{ ns.x }}",
    "{% set ns = namespace(x=9) %}{% for i in range(999) %}{% set ns.x = ns.x * ns.x %}{% endfor %}{{ ns.x }}",
    "{{ 1000000 ** 1000000 }}",
    "{{ ('a' * 99999) | replace('', 'x' * 99999) }}",
    "{{ ('a' * 99999).replace('', 'x' * 99999) }}",
    "{{ (['a'] * 99999) | join('x' * 99999) }}",
    "{{ ('x' * 99999).join(['a'] * 99999) }}",
    "{{ ('x' * 99999).join('a' * 99999) }}",
    "{{ ([{'a': 'x' * 99999}] * 99999) | join('', attribute='a') }}",
    "{{ ([['x'] * 9999] * 9999) | sum(start=[]) }}",
    "{{ ('\\n' * 99999) | indent(9999) }}",
    "{{ ('\\n' * 99999) | indent('x' * 99999) }}",
    "{{ ('\\t' * 99999).expandtabs(999999) }}",
    "{{ [[0] * 99999] * 99999 }}",
    "{{ ([[0] * 9999] * 9999) | string }}",
    "{{ ('a b' * 999999) | wordwrap(1, wrapstring='x' * 99999) }}",
    "{% set ns = namespace(l=[]) %}{% for i in range(9999) %}{% set ns.l = [ns.l, 'x' * 999999 ~ i] %}{% endfor %}",
    "{% set ns = namespace(l=[]) %}{% for i in range(9999) %}{% set ns.l = ns.l + ['x' * 999999 ~ i] %}{% endfor %}",
    "{% set ns = namespace(l=[]) %}{% for i in range(9999) %}{% set ns.l = ns.l + [range(99999) | list] %}{% endfor %}",
    "{% set ns = namespace(l=[]) %}{% for i in range(9999) %}{% set ns.l = ns.l + [('x ' * 99999).split()] %}{% endfor %}",
    "{% for i in range(99999) %}{{ 'x' * 999999 }}{% endfor %}",
]


@pytest.mark.parametrize("source", HOSTILE)
def test_a_hostile_or_broken_template_is_an_error_and_nothing_else(source: str) -> None:
    started = time.monotonic()
    with pytest.raises((InvalidRequest, ModelError)) as caught:
        render(source)
    assert time.monotonic() - started < 8.0
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS means something else elsewhere")
def test_no_hostile_template_takes_memory() -> None:
    """All of them one after the other, in a process that may have 400 MB more than it starts with."""
    script = (
        "import resource, sys, threading; threading.stack_size(1 << 18); sys.path.insert(0, '.'); from tests.llama.test_template import *\n"
        "size = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize() + 400_000_000\n"
        "resource.setrlimit(resource.RLIMIT_AS, (size, size))\n"
        "for source in HOSTILE:\n"
        "    try: render(source)\n"
        "    except (InvalidRequest, ModelError) as error: assert 'ran out of room' not in str(error) or 'macro f()' in source, source\n"
    )
    # A malloc arena a thread would reserve 128 MB each.
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT, timeout=60, env=os.environ | {"MALLOC_ARENA_MAX": "1"})


BUSY = [
    "{% for message in messages %}{{ message.role | upper }}: {{ message.content | trim }}{{ loop.cycle(' ', '\n') }}{% endfor %}",
    "{% set ns = namespace(t='') %}{% for message in messages %}{% set ns.t = ns.t + message.content + '\n' %}{% endfor %}{{ ns.t }}",
    "{{ messages | map(attribute='content') | join('\n') }}",
    "{{ messages | tojson(indent=4) }}",
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}",
    "{{ messages[-1].content.split('\n')[-1].strip() ~ ('%s and %s' % ('a', 'b')) }}",
]


@pytest.mark.parametrize("source", BUSY)
def test_a_long_conversation_is_within_the_bounds(source: str) -> None:
    messages = [{"role": ("user", "assistant")[n % 2], "content": f"{n} " + "some words " * 40} for n in range(300)]
    plain = Environment(trim_blocks=True, lstrip_blocks=True)
    plain.filters["tojson"] = to_json
    assert render(source, messages) == plain.from_string(source).render(messages=messages)


def test_json_escapes_leave_the_fences_standing() -> None:
    assert render("{{ messages[0].content | tojson(ensure_ascii=true) }}", [{"role": "user", "content": "é\ufdd0😀"}]) == (
        '"\\u00e9\ufdd0\\ud83d\\ude00"'
    )


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
