"""Which token lists begin like a prompt: one trie for all of them, whoever holds their cells.

A node is a block of tokens, its path from the root of a trust domain a prefix. A lookup walks down the prompt's own blocks: what it costs
depends on the prompt's length and on nothing else. Lists that share no whole block do not find each other.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import Final, Generic, Protocol, TypeVar

from runner.engine.prefix import n_shared

# Tokens in a node. A shorter common prefix is not worth a copy; the last block is compared token by token.
BLOCK: Final = 16


class Holder(Protocol):
    """Whoever has tokens that can be found. Hashed by identity."""

    @property
    def domain(self) -> str:
        """The trust domain, fixed while it is in an index."""

    @property
    def known(self) -> list[int]:
        """The tokens that it has or will have: between two calls of `sync` they may have become more, fewer or others at the end."""


H = TypeVar("H", bound=Holder)


class _Node(Generic[H]):
    """The lists that go through a block, and the blocks that follow."""

    __slots__ = ("block", "children", "holders", "parent")

    def __init__(self, parent: "_Node[H] | None", block: tuple[int, ...]) -> None:
        self.parent, self.block = parent, block
        self.children: dict[tuple[int, ...], _Node[H]] = {}
        # A dict for its order: what is found does not depend on hashes.
        self.holders: dict[H, None] = {}


class PrefixIndex(Generic[H]):
    """All holders of one engine, apart by trust domain."""

    def __init__(self) -> None:
        self._roots: dict[str, _Node[H]] = {}
        # The nodes of a holder's whole blocks, root first.
        self._paths: dict[H, list[_Node[H]]] = {}

    def __contains__(self, holder: H) -> bool:
        return holder in self._paths

    def __len__(self) -> int:
        return len(self._paths)

    def put(self, holder: H) -> None:
        """Let it be found."""
        assert holder not in self._paths
        root = self._roots.get(holder.domain)
        if root is None:
            root = self._roots[holder.domain] = _Node(None, ())
        root.holders[holder] = None
        self._paths[holder] = [root]
        self.sync(holder)

    def sync(self, holder: H, n_same: int = 0) -> None:
        """Take note of what its tokens are now. The first `n_same` are those that were there: they are not looked at."""
        path, known = self._paths[holder], holder.known
        n_blocks = len(known) // BLOCK
        depth = min(n_same // BLOCK, n_blocks, len(path) - 1)
        while depth < min(n_blocks, len(path) - 1) and _block(known, depth) == path[depth + 1].block:
            depth += 1
        while len(path) - 1 > depth:
            self._leave(path.pop(), holder)
        for i in range(depth, n_blocks):
            node, block = path[-1], _block(known, i)
            child = node.children.get(block)
            if child is None:
                child = node.children[block] = _Node(node, block)
            child.holders[holder] = None
            path.append(child)

    def discard(self, holder: H) -> None:
        """Let it be found no more."""
        path = self._paths.pop(holder)
        while len(path) > 1:
            self._leave(path.pop(), holder)
        root = path[0]
        del root.holders[holder]
        if not root.holders:
            del self._roots[holder.domain]

    def matches(self, tokens: Seq[int], domain: str, most: int) -> Iterator[tuple[H, int]]:
        """Holders of the domain and how many first tokens they share with `tokens`, the longest about first, `most` of them.

        Only those that share a whole block. Of two that part in the same block the one that was there first comes first.
        """
        seen: set[H] = set()
        nodes = self._walk(tokens, domain)
        for depth in range(len(nodes) - 1, 0, -1):
            holders = nodes[depth].holders
            if len(holders) == len(seen):
                continue
            at = depth * BLOCK
            for holder in [holder for holder in holders if holder not in seen]:
                if len(seen) == most:
                    return
                seen.add(holder)
                yield holder, at + n_shared(holder.known[at : at + BLOCK], tokens[at : at + BLOCK])

    def prefixes_of(self, tokens: Seq[int], domain: str) -> list[H]:
        """Holders of a whole block at least whose tokens are all of them the beginning of `tokens`."""
        nodes = self._walk(tokens, domain)
        found = []
        for depth in range(1, len(nodes)):
            at = depth * BLOCK
            deeper = nodes[depth + 1].holders if depth + 1 < len(nodes) else {}
            if len(deeper) < len(nodes[depth].holders):
                here = [holder for holder in nodes[depth].holders if holder not in deeper]
                found += [h for h in here if len(h.known) < at + BLOCK and h.known[at:] == list(tokens[at : len(h.known)])]
        return found

    def n_unique(self, holder: H, *, most: int) -> int:
        """How many of its last tokens nobody else of its domain has, by whole blocks and what comes after them; `most` at most."""
        path = self._paths[holder]
        depth = len(path) - 1
        n = len(holder.known) - depth * BLOCK
        while depth > 0 and n < most and len(path[depth].holders) == 1:
            n += BLOCK
            depth -= 1
        return min(n, most)

    def _walk(self, tokens: Seq[int], domain: str) -> list[_Node[H]]:
        root = self._roots.get(domain)
        if root is None:
            return []
        nodes = [root]
        for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
            child = nodes[-1].children.get(tuple(tokens[start : start + BLOCK]))
            if child is None:
                break
            nodes.append(child)
        return nodes

    def _leave(self, node: _Node[H], holder: H) -> None:
        del node.holders[holder]
        if not node.holders:
            assert node.parent is not None
            del node.parent.children[node.block]


def _block(tokens: Seq[int], number: int) -> tuple[int, ...]:
    return tuple(tokens[number * BLOCK : (number + 1) * BLOCK])
