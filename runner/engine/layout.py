"""Keeping decoding slots adjacent: a gap costs one more pass over the weights in every step.

busy    0 . 2 . . 5 . 7      four passes
swap    2 <-> 1              0 1 . . . 5 . 7      three passes
"""

from collections.abc import Mapping, Set
from dataclasses import dataclass

from runner.engine.kv import Swap

# Copying a byte of KV cells costs about as much as reading this many bytes of weights in a pass (measured: docs/log.md).
COPY_COST = 12.0
# Nobody knows when a generation ends: more than this many steps are not counted on.
MAX_EXPECTED_STEPS = 48


@dataclass(frozen=True, slots=True)
class Weights:
    """What a pass reads and what a swap copies, in bytes."""

    model_bytes: int
    cell_bytes: int


@dataclass(frozen=True, slots=True)
class Mover:
    """A decoding sequence that could change its slot."""

    n_cells: int
    n_steps_left: int


def closing_swap(movers: Mapping[int, Mover], busy: Set[int], free: Mapping[int, int], weights: Weights) -> Swap | None:
    """The next exchange of a busy and a free slot on the way to fewer runs, or None where none pays for itself.

    The shortest run is dissolved, a slot a step, into places beside a run that is at least as long: so runs only ever grow
    together. `busy` are all slot ids in use, `movers` those that may move, `free` the ids that may be moved to with the number
    of cached cells that would change places.
    """
    runs = sorted(_runs(busy), key=lambda run: (len(run), sum(movers[i].n_cells for i in run if i in movers)))
    if len(runs) < 2:
        return None
    for run in runs:
        if not all(slot_id in movers for slot_id in run):
            continue
        beside = {i for other in runs if other is not run and len(other) >= len(run) for i in (other[0] - 1, other[-1] + 1)}
        targets = [i for i in beside if i in free and _pays([movers[i] for i in run], free[i], weights)]
        if targets:
            target = min(targets, key=lambda i: (free[i], i))
            return Swap(max(run, key=lambda i: abs(i - target)), target)
    return None


def _runs(ids: Set[int]) -> list[list[int]]:
    runs: list[list[int]] = []
    for slot_id in sorted(ids):
        if runs and runs[-1][-1] == slot_id - 1:
            runs[-1].append(slot_id)
        else:
            runs.append([slot_id])
    return runs


def _pays(run: list[Mover], n_cached: int, weights: Weights) -> bool:
    """Whether the pass that the whole run costs is worth copying all of its cells (and the cached ones that make room)."""
    n_steps = min(max(mover.n_steps_left for mover in run), MAX_EXPECTED_STEPS)
    n_cells = sum(mover.n_cells for mover in run) + n_cached * len(run)
    return n_steps * weights.model_bytes > COPY_COST * n_cells * weights.cell_bytes
