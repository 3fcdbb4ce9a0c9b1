"""The longest common prefix of token lists."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.engine.prefix import n_shared


@pytest.mark.parametrize("n", [0, 1, 255, 256, 257, 511, 512, 513, 1000])
def test_blocks_do_not_show(n: int) -> None:
    shared = list(range(n))
    assert n_shared([*shared, -1, 5], [*shared, -2, 5]) == n
    assert n_shared(shared, [*shared, 1]) == n


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_it_equals_the_definition(a: list[int], b: list[int]) -> None:
    n = n_shared(a, b)
    assert a[:n] == b[:n]
    assert n == min(len(a), len(b)) or a[n] != b[n]
