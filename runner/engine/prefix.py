"""How much of a prompt already lies in a slot."""

from collections.abc import Sequence

_BLOCK = 256


def n_shared(a: Sequence[int], b: Sequence[int]) -> int:
    """The length of the longest common prefix of two token lists. Compares block by block: lists of 10,000 take microseconds."""
    n = min(len(a), len(b))
    done = 0
    while done < n and a[done : done + _BLOCK] == b[done : done + _BLOCK]:
        done += _BLOCK
    done = min(done, n)
    while done < n and a[done] == b[done]:
        done += 1
    return done
