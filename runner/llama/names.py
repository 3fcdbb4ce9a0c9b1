"""Finding any of many names in a text, at a cost that does not depend on how many names there are."""

import re
from collections.abc import Collection


def names_pattern(names: Collection[str]) -> re.Pattern[str] | None:
    r"""A pattern that matches the longest name at each place; None without names.

    The names become a trie, and branches that go on alike are written once. So Gemma's 6,242 names from "<unused0>" to
    "<unused6241>" are some 200 characters, and the character after a "<" decides:

        <(?:bos|eos|unused[0-9]...)>      and not      <unused6241>|<unused6240>|...
    """
    root: _Trie = {}
    for name in names:
        node = root
        for ch in name:
            node = node.setdefault(ch, {})
        if name:
            node[_END] = {}
    if not root:
        return None
    try:
        return re.compile(_written(root))
    except RecursionError:  # thousands of names, each the beginning of the next: no real vocabulary, but a file may hold it
        return re.compile("|".join(map(re.escape, sorted(filter(None, names), key=len, reverse=True))))


# A trie by character; the empty key marks the end of a name.
_Trie = dict[str, "_Trie"]
_END = ""


def _written(root: _Trie) -> str:
    """The pattern for what may follow, made from the leaves up: a name may be longer than Python's recursion is deep."""
    written: dict[int, str] = {}
    todo = [root]
    while todo:
        node = todo[-1]
        unwritten = [child for child in node.values() if id(child) not in written]
        if unwritten:
            todo += unwritten
            continue
        written[id(node)] = _alternatives({ch: written[id(child)] for ch, child in node.items()})
        todo.pop()
    return written[id(root)]


def _alternatives(branches: dict[str, str]) -> str:
    """`branches`: what follows each character. The end of a name comes last: a longer one is preferred."""
    by_rest: dict[str, list[str]] = {}
    for ch, rest in branches.items():
        if ch != _END:
            by_rest.setdefault(rest, []).append(ch)
    parts = [_one_of(chars) + rest for rest, chars in by_rest.items()]
    if _END in branches:
        return f"(?:{'|'.join(parts)})?" if parts else ""
    return parts[0] if len(parts) == 1 else f"(?:{'|'.join(parts)})"


def _one_of(chars: list[str]) -> str:
    return re.escape(chars[0]) if len(chars) == 1 else f"[{''.join(map(re.escape, chars))}]"
