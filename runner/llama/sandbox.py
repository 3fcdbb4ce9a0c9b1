"""What a chat template from an unknown file may do: Jinja's immutable sandbox, with a bound on the size of everything it makes.

Rendering happens in one process with everybody's streams, so neither memory nor one long native call is a template's to take
(a time limit only arrives between two steps of Python: see watchdog.py). The rule that makes all the others simple:

    no value that a template makes is larger than MAX_VALUE_BYTES when it is written out,
    and all of them together are not larger than MAX_MADE_BYTES.

Written out means that shared parts count each time: [x, x] made thirty times over is small in memory and 2^30 parts as text.
Whoever makes values is asked for their size: operators, `~`, list and dict displays, blocks, filters and calls. What could make
a huge one in a single native step (replace, join, format, a repetition) is measured before.
"""

import datetime
import json
import re
from collections.abc import Callable, Iterable, Mapping
from types import BuiltinMethodType, MethodType
from typing import Any, Final

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_environment

MAX_VALUE_BYTES: Final = 16 * 1024 * 1024
MAX_MADE_BYTES: Final = 256 * 1024 * 1024
# A template has no business with a larger number: not as a width, a repetition or an exponent.
MAX_NUMBER: Final = 1_000_000
_MAX_WIDTH: Final = 10_000
_MAX_INT_BITS: Final = 4096
_MAX_DEPTH: Final = 64
# About what CPython takes for a list or dict, and for each place in one.
_CONTAINER_BYTES, _PLACE_BYTES = 64, 16
# Nothing in a chat prompt needs them, and what they may make is hard to foresee.
_NO_FILTERS: Final = ("filesizeformat", "pprint", "random", "striptags", "urlize", "wordwrap", "xmlattr")
_NO_GLOBALS: Final = ("lipsum",)
_SPACES: Final = "\t\n\v\f\r\x1c\x1d\x1e\x1f "
_FORMAT_WIDTH: Final = re.compile(r"\d{5}|%[^a-zA-Z%]*\*|\{[^{}]*:[^{}]*\{")


class TemplateRaised(Exception):
    """The template's own `raise_exception(message)`."""


class Meter:
    """How much one rendering has made so far."""

    def __init__(self) -> None:
        self._made = 0

    def restart(self) -> None:
        """A new rendering begins."""
        self._made = 0

    def charge(self, value: Any) -> Any:
        """Count a value that was made, and return it. Raises SecurityError beyond the bounds."""
        if not isinstance(value, (str, bytes, list, tuple, dict, set, frozenset)):
            return value
        return self._add(value, written_size(value))

    def _add(self, value: Any, size: int) -> Any:
        self._made += size
        if size > MAX_VALUE_BYTES or self._made > MAX_MADE_BYTES:
            raise _too_long()
        return value


def written_size(value: Any) -> int:
    """Bytes of a value when it is written out, shared parts counted each time. Linear in the distinct parts."""
    return text_size(value) if isinstance(value, (str, bytes)) else _size(value, {}, 0)


def text_size(text: str | bytes) -> int:
    """Bytes of memory, at most."""
    return len(text) if isinstance(text, bytes) or text.isascii() else 4 * len(text)


def _size(value: Any, known: dict[int, int], depth: int) -> int:
    if isinstance(value, (str, bytes)):
        return text_size(value)
    items: Iterable[Any]
    if isinstance(value, Mapping):
        items = (part for pair in value.items() for part in pair)
    elif isinstance(value, (list, tuple, set, frozenset)):
        items = value
    else:
        return 8
    if (size := known.get(id(value))) is None:
        if depth > _MAX_DEPTH:
            raise SecurityError(f"the template nests values more than {_MAX_DEPTH} deep")
        size = known[id(value)] = _CONTAINER_BYTES + sum(_PLACE_BYTES + _size(item, known, depth + 1) for item in items)
    return size


class _Code(CodeGenerator):
    """Jinja's compiler, with the template's meter around what makes values inline."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802 - jinja2's names
        """`a ~ b`"""
        self.write("environment.join_texts((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_List(self, node: nodes.List, frame: Frame) -> None:  # noqa: N802
        """`[a, b]`"""
        self._metered(super().visit_List, node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:  # noqa: N802
        """`{a: b}`"""
        self._metered(super().visit_Dict, node, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:  # noqa: N802
        """`(a, b)`, unless it is the target of an assignment"""
        if node.ctx == "load":
            self._metered(super().visit_Tuple, node, frame)
        else:
            super().visit_Tuple(node, frame)

    def _metered(self, write: Callable[[Any, Frame], None], node: nodes.Node, frame: Frame) -> None:
        if all(isinstance(part, nodes.Const) for part in node.iter_child_nodes()):
            write(node, frame)  # as large as it stands in the template
            return
        self.write("environment.meter.charge(")
        write(node, frame)
        self.write(")")


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox for chat templates. `meter` is restarted for each rendering; one thread at a time."""

    code_generator_class = _Code
    intercepted_binops = frozenset(("*", "**", "%", "+"))

    def __init__(self, clock: Callable[[], datetime.datetime]) -> None:
        """`clock` tells the local time to templates that print a date."""
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # else "a" * 10**9 is folded while the template compiles
            extensions=[loopcontrols, _Generation],
        )
        self.meter = Meter()
        self.concat = self.join_texts  # type: ignore[method-assign]  # what set blocks, macros and filter blocks are joined with
        for name in _NO_FILTERS:
            del self.filters[name]
        self.filters |= {"tojson": to_json, "join": _join, "sum": _sum}
        self.filters = {name: self._metered_filter(name, inner) for name, inner in self.filters.items()}
        for name in _NO_GLOBALS:
            del self.globals[name]
        self.globals["namespace"] = _Namespace
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda layout: clock().strftime(str(layout)[:200])

    def join_texts(self, parts: Iterable[Any]) -> str:
        """Texts one after the other; stops at the bound."""
        texts, size = [], 0
        for part in parts:
            text = str(part)
            size += text_size(text)
            if size > MAX_VALUE_BYTES:
                raise _too_long()
            texts.append(text)
        joined: str = self.meter.charge("".join(texts))
        return joined

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Refuse to repeat, raise or format beyond the bounds."""
        if operator == "*":
            _check_product(left, right)
        elif operator == "**":
            _check_power(left, right)
        elif operator == "%" and isinstance(left, (str, bytes)):
            check_format(left, (right,))
        elif operator == "+" and isinstance(left, (str, bytes, list, tuple)) and isinstance(right, (str, bytes, list, tuple)):
            _check_length(len(left) + len(right))
        return self.meter.charge(super().call_binop(context, operator, left, right))

    def call(self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Refuse calls that make something huge ("x".ljust(10**9)); their arguments are values too (a macro's `varargs`)."""
        _check_numbers((*args, *kwargs.values()))
        self.meter.charge(args)
        self.meter.charge(kwargs)
        if isinstance(__obj, (BuiltinMethodType, MethodType)) and isinstance(__obj.__self__, (str, bytes)):
            _check_method(__obj.__self__, __obj.__name__, args, kwargs)
        return self.meter.charge(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`str.format`, also where it is called by something other than the template."""
        inner = super().wrap_str_format(value)
        if inner is None:
            return None
        text = value.__self__

        def bounded(*args: Any, **kwargs: Any) -> str:
            check_format(text, (*args, *kwargs.values()))
            made: str = inner(*args, **kwargs)
            return made

        return bounded

    def _metered_filter(self, name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        check = _FILTER_CHECKS.get(name)
        # jinja2 marks with this attribute what a filter wants to be given first.
        n_given = int(hasattr(inner, "jinja_pass_arg"))

        def bounded(*args: Any, **kwargs: Any) -> Any:
            _check_numbers((*args[n_given + 1 :], *kwargs.values()), _MAX_WIDTH)  # not the value that is filtered
            if check is not None:
                check(*args[n_given:], **kwargs)
            return self.meter.charge(inner(*args, **kwargs))

        if n_given:
            bounded.jinja_pass_arg = inner.jinja_pass_arg  # type: ignore[attr-defined]
        return bounded


# -- what must be measured before it is made ---------------------------------------------------------------------------


def _too_long() -> SecurityError:
    return SecurityError("the template makes a text that is too long")


def _check_length(size: int) -> None:
    if size > MAX_VALUE_BYTES:
        raise _too_long()


def _check_numbers(values: Iterable[Any], limit: int = MAX_NUMBER) -> None:
    if any(isinstance(value, int) and abs(value) > limit for value in values):
        raise SecurityError(f"the template uses a number above {limit:,}")


def _check_product(left: Any, right: Any) -> None:
    for many, times in ((left, right), (right, left)):
        if isinstance(many, (str, bytes, list, tuple)) and isinstance(times, int):
            _check_length(written_size(many) * times)
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > _MAX_INT_BITS:
        raise SecurityError("the template makes a number that is too large")


def _check_power(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() * abs(right) > _MAX_INT_BITS:
        raise SecurityError("the template makes a number that is too large")


def check_format(text: str | bytes, values: tuple[Any, ...]) -> None:
    """For `%` and `format`: each field may write any of the values, at a width."""
    layout = text.decode("latin-1") if isinstance(text, bytes) else text
    if _FORMAT_WIDTH.search(layout):
        raise SecurityError("the template formats to an unreasonable width")
    n_fields = max(layout.count("%"), layout.count("{"))
    _check_length(text_size(text) + n_fields * written_size(values))


def _check_replace(text: Any, old: Any = "", new: Any = "", *_: Any, **named: Any) -> None:
    text, old, new = str(text), str(named.get("old", old)), str(named.get("new", new))
    n_places = text.count(old) if old else len(text) + 1
    _check_length(text_size(text) + n_places * text_size(new))


def _check_indent(text: Any, width: Any = 4, *_: Any, **named: Any) -> None:
    width, text = named.get("width", width), str(text)
    size = text_size(width) if isinstance(width, str) else int(width)
    _check_length(text_size(text) + (text.count("\n") + 1) * size)


def _check_list(values: Any, *_: Any, **__: Any) -> None:
    if isinstance(values, str):
        _check_length(len(values) * _PLACE_BYTES * 4)


_FILTER_CHECKS: Final[dict[str, Callable[..., None]]] = {
    "replace": _check_replace,
    "indent": _check_indent,
    "format": lambda text, *args, **kwargs: check_format(str(text), (*args, *kwargs.values())),
    **dict.fromkeys(("list", "sort", "unique", "batch", "slice", "reverse", "groupby", "map", "select", "reject"), _check_list),
}


def _check_method(text: str | bytes, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Methods of a text whose result may be many times as long. Widths (`ljust`, `zfill`) are numbers: checked already."""
    size = text_size(text)
    if name == "replace" and len(args) >= 2:
        old, new = args[:2]
        n_places = text.count(old) if old else len(text) + 1
        _check_length(size + n_places * text_size(new))
    elif name == "join" and args:
        if not isinstance(args[0], (str, bytes, list, tuple, dict)):
            raise SecurityError("the template joins something that is not a list")
        _check_length(size * len(args[0]) + written_size(args[0]))
    elif name == "expandtabs":
        _check_length(size + size * (kwargs.get("tabsize", args[0] if args else 8)))
    elif name == "translate" and args and isinstance(args[0], Mapping):
        _check_length(size * (1 + max(map(written_size, args[0].values()), default=0)))
    elif name in ("split", "rsplit", "splitlines"):
        between = args[0] if name != "splitlines" and args else kwargs.get("sep")
        _check_length(size + _n_parts(text, between) * _CONTAINER_BYTES)


def _n_parts(text: Any, between: Any) -> int:
    """Into how many parts a split would cut, at most."""
    if between:
        return int(text.count(between)) + 1
    if isinstance(text, str) and text.isascii():
        return sum(map(text.count, _SPACES)) + 1
    return len(text) // 2 + 1


# -- filters, globals and blocks of our own ------------------------------------------------------------------------------


@pass_environment
def _join(environment: BoundedEnvironment, values: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    """`join`, which stops at the bound."""
    get = make_attrgetter(environment, attribute) if attribute is not None else None

    def parts() -> Iterable[Any]:
        for index, value in enumerate(values):
            if index and d:
                yield d
            yield value if get is None else get(value)

    return environment.join_texts(parts())


@pass_environment
def _sum(environment: BoundedEnvironment, values: Iterable[Any], attribute: str | int | None = None, start: Any = 0) -> Any:
    """`sum` of numbers."""
    get = make_attrgetter(environment, attribute) if attribute is not None else None
    total = start
    for value in values:
        number = value if get is None else get(value)
        if not isinstance(total, (int, float)) or not isinstance(number, (int, float)):
            raise SecurityError("the template sums what is not a number")
        total += number
    return total


def to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, sort_keys: bool = False) -> str:
    """`tojson` as the templates of this field expect it: plain JSON, not the HTML-safe kind of jinja2."""
    indent = min(int(indent), 16) if indent else None
    _check_length(written_size(value) * (1 + (indent or 0)))
    text = json.dumps(value, ensure_ascii=False, indent=indent, sort_keys=sort_keys)
    # Noncharacters stay: with them template.py marks what a user wrote.
    return _ESCAPED.sub(lambda match: json.dumps(match[0])[1:-1], text) if ensure_ascii else text


_ESCAPED: Final = re.compile("[^\x00-\x7f\ufdd0-\ufdef]")


class _Namespace(Namespace):
    """Jinja's `namespace`, which does not write out what it holds: that may be put there after it was measured."""

    def __repr__(self) -> str:
        return "<Namespace>"


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}`, which some templates put around answers for training: rendered as it stands."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own contract

    def parse(self, parser: Parser) -> nodes.Node:
        """Turn the block into a call that returns its body."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Any) -> Any:
        return caller()


def _raise_exception(message: str) -> None:
    raise TemplateRaised(message)
