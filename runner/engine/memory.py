"""All cells of one engine: which tokens lie in which slot and in host memory, and what a step does with them before its rows.

Token lists are changed at once, as if what is ordered had been done; the orders are taken with the plan. What the back end refuses is
told to `refused`, and what cannot be known before a batch is computed to `extend` and `cut`.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from collections.abc import Sequence as Seq
from typing import Final

from runner.engine.cell_pool import CellPool
from runner.engine.cells import Cells, HostCells, Mark, Slot
from runner.engine.costs import Rows, StepCosts
from runner.engine.following import LEAST_FOLLOWED, Following
from runner.engine.host_memory import HostMemory, worth_of
from runner.engine.kv import Checkpoint, Copy, Forget, Fork, KvOp, Load, Rewind, Save, Shift, Swap, Trim
from runner.engine.lifecycle import State
from runner.engine.memory_kind import MemoryKind
from runner.engine.placing import Placer, Source, Way, most_kept
from runner.engine.prefix_index import BLOCK, PrefixIndex
from runner.engine.reservations import Reservations, n_reserved
from runner.engine.sequence import Sequence
from runner.engine.slots import SlotPool

# What the copies of cells in one step may take together, seconds, where they are more than one.
MOST_MOVED_S: Final = 0.01
# Checkpoints of one slot; of more the one goes whose neighbours are nearest to each other.
MOST_MARKS: Final = 6
# Tokens between two of them at least.
LEAST_BETWEEN_MARKS: Final = 64


class KvMemory:
    """The only one that changes a slot's tokens, and that orders operations on cells."""

    def __init__(
        self, pool: SlotPool, kind: MemoryKind, costs: StepCosts, *, host_bytes: int, oldest: Callable[[int], int] = lambda slot_id: 0
    ) -> None:
        """`host_bytes` bounds what is kept in host memory. `oldest`: see `Placer`; asked only where the model has a window."""
        self.pool, self.kind, self._costs = pool, kind, costs
        self.host = HostMemory(host_bytes)
        self.following = Following()
        # Where all slots take their cells from one pool.
        self.cells = CellPool(len(pool.slots), kind.pool_cells) if kind.is_unified else None
        self._reservations = Reservations(pool, self.cells, self.following, kind.shares_cells) if self.cells is not None else None
        self._index: PrefixIndex[Cells] = PrefixIndex()
        self._oldest = oldest
        self.placer = Placer(pool, self._index, self.host, kind, costs, oldest)
        self._ops: list[KvOp] = []
        # Of this step: bytes that its operations move, and that its forks move when it is decoded.
        self.n_moved_bytes = self.n_forked_bytes = 0
        for slot in pool.slots:
            self._index.put(slot)

    # -- a step's orders -----------------------------------------------------------------------------------------------

    @property
    def has_orders(self) -> bool:
        """Whether something was ordered that no plan has taken yet."""
        return bool(self._ops)

    @property
    def orders(self) -> Seq[KvOp]:
        """Those."""
        return self._ops

    def order(self, *ops: KvOp) -> None:
        """Have something done, of sampler chains, in its turn."""
        self._ops += ops

    def begin_step(self) -> None:
        """Nothing has been moved yet."""
        self.n_moved_bytes = self.n_forked_bytes = 0

    def take_orders(self) -> tuple[KvOp, ...]:
        """For the plan."""
        ops, self._ops = tuple(self._ops), []
        return ops

    def decoded(self) -> None:
        """llama.cpp has decoded a batch: no copy is queued any more."""
        for slot in self.pool.slots:
            slot.is_pending = False

    def may_move(self, n_bytes: int) -> bool:
        """Whether so many more bytes may be moved in this step: the first always, others while all take no time to speak of."""
        before = self.n_moved_bytes + self.n_forked_bytes
        if before == 0 or n_bytes == 0:
            return True
        move_s = self._costs.move_s(before + n_bytes)
        return move_s is not None and move_s <= MOST_MOVED_S

    # -- a pool that all slots share ------------------------------------------------------------------------------------

    @property
    def n_attended(self) -> int:
        """Cells that each row goes over beside its own slot's: in a shared pool all that are used."""
        return 0 if self.cells is None else self.cells.n_used

    @property
    def n_used_cells(self) -> int:
        """Cells that are used; one that several slots share counts once."""
        return sum(len(slot.tokens) for slot in self.pool.slots) if self.cells is None else self.cells.n_used

    def has_room_for(self, sequence: Sequence, without: Collection[Sequence] = ()) -> bool:
        """Whether a slot would be of use to it, if those gave up theirs; where each slot has its own cells, always."""
        room = self._reservations
        if room is None:
            return True
        matches = self.placer.matches(sequence) if _may_reuse(sequence) else []
        sources = [
            source.keep
            for source in self.placer.sources(matches, most_kept(sequence))
            if source.shares_cells and isinstance(source.cells, Slot) and not (source.cells.is_free or source.cells.sequence in without)
        ]
        return room.fits(sequence, {}, n_shared=max(sources, default=0), without=without)

    def make_room(self, n_cells: int, now: float, spared: Collection[Cells] = ()) -> bool:
        """Have so many cells free, at the cost of idle slots: what is worth least goes first, to host memory where it is worth that."""
        if self.cells is None or self.cells.n_free >= n_cells:
            return True
        idle = [slot for slot in self.pool.slots if slot.is_free and slot.tokens and slot not in spared]
        for slot in sorted(idle, key=lambda slot: self.placer.loss(slot, 0, now)):
            if self.placer.loss(slot, 0, now)[1]:
                self._save(slot)
            self.cut(slot, 0)
            if self.cells.n_free >= n_cells:
                return True
        return False

    # -- sequences come and go -----------------------------------------------------------------------------------------

    def place(self, sequence: Sequence, now: float) -> Slot | None:
        """Give it a free slot with as many of its cells as are worth it; where another's prompt computes more of them, it follows that.

        None where more would have to be moved than may be in this step, or where there is no room for what it needs.
        """
        if self._reservations is not None and not self._reservations.could_fit(sequence):
            return None
        matches = self.placer.matches(sequence) if _may_reuse(sequence) else []

        def fits(way: Way) -> bool:
            return self._fits(sequence, way, matches)

        way = self.placer.way_for(sequence, matches, now, fits)
        leader = self._leader(sequence, matches, way.keep) if way is not None else None
        if way is not None and leader is not None and way.source is not None:
            # What comes from there takes the place of all that would be copied now.
            way = self.placer.way_for(sequence, matches, now, fits, copies=False)
        if way is None or not self.may_move(way.n_bytes):
            return None
        self._go(way, sequence, now)
        self.pool.bind(way.target, sequence)
        sequence.n_reserved = n_reserved(sequence)
        self._index.sync(way.target)
        self.forget_parked(sequence)
        if leader is not None:
            self.following.follow(sequence, *leader)
        return way.target

    def serve_followers(self, now: float) -> None:
        """Let those go on whose leaders have computed enough, or do not compute any more, as far as cells may be moved in this step."""
        served = []
        for sequence in self.following.ready(self._n_computed):
            if not self._refill(sequence, now):
                break
            self.following.leave(sequence)
            served.append(sequence)
        for sequence in served:
            leader = self._leader(sequence, self.placer.matches(sequence), len(self._slot_of(sequence).tokens))
            if leader is not None:
                self.following.follow(sequence, *leader)

    def is_held(self, sequence: Sequence) -> bool:
        """Whether it must compute nothing now: it waits for another's cells, or others need its own as they are, which cannot be cut."""
        following = self.following
        if following.is_waiting(sequence):
            return True
        return self.kind.needs_marks and following.is_awaited_at(sequence, len(self._slot_of(sequence).tokens))

    def release(self, sequence: Sequence, now: float) -> None:
        """It needs its slot no more. Its cells stay, unless nobody may ever use them."""
        slot = self._slot_of(sequence)
        self.following.leave(sequence)
        self._drop_hidden(slot, sequence)
        self.pool.release(slot, now)
        if (sequence.is_stateless or slot.is_shifted) and len(slot.tokens):
            self.cut(slot, 0)
        else:
            self._index.sync(slot)

    def _drop_hidden(self, slot: Slot, sequence: Sequence) -> None:
        """A client does not bring back what a stop string hid. Where cells cannot be cut at any time, they are cut while they can."""
        keep = len(sequence.prompt) + sequence.n_shown_tokens
        n_tokens = len(slot.tokens)
        if not self.kind.needs_marks or sequence.state is not State.DECODE or keep >= n_tokens:
            return
        if self.kind.reach(n_tokens, keep, (), self._oldest(slot.slot_id)) == (keep, None):
            self.cut(slot, keep)

    def park(self, sequence: Sequence, now: float) -> None:
        """Take its slot. Its cells are kept in host memory where they fit and to copy them twice is faster than to compute them again.

        Never shifted ones: whatever is in host memory is there for whoever's tokens begin like that.
        """
        slot = self._slot_of(sequence)
        n_tokens = len(slot.tokens)
        n_bytes = self.kind.state_bytes(n_tokens)
        if n_tokens and not (slot.is_pending or slot.is_shifted or self._is_slower(n_tokens, n_bytes)):
            kept = self._save(slot, sequence)
            sequence.n_kept = 0 if kept is None else n_tokens
        self.following.leave(sequence)
        self.pool.release(slot, now)
        if slot.is_shifted:
            self.cut(slot, 0)
        else:
            self._index.sync(slot)

    def forget_parked(self, sequence: Sequence) -> None:
        """A parked sequence has ended, or goes on."""
        if sequence.n_kept:
            self._give_up(self.host.of(sequence))
            sequence.n_kept = 0

    def n_had(self, sequence: Sequence) -> int:
        """How many of its tokens lie in slots and host memory, or will when a prompt has been computed."""
        return max((min(n, most_kept(sequence)) for _, n in self.placer.matches(sequence)), default=0)

    def adopt(self, tokens: list[int], domain: str, session: str, now: float, marks: Iterable[tuple[int, int]] = ()) -> HostCells | None:
        """Take cells into host memory that come from elsewhere, with checkpoints of (position, bytes); None where there is no room."""
        made = [Mark(pos, self.host.new_id(), n_bytes) for pos, n_bytes in marks]
        cells = HostCells(tokens, domain, session, now, made, state_id=self.host.new_id(), n_bytes=self.kind.state_bytes(len(tokens)))
        cells.worth = worth_of(cells)
        if not self._make_room(cells.n_bytes + sum(mark.n_bytes for mark in made)):
            return None
        for mark in made:
            self.host.hold(mark)
        self.host.put(cells)
        self._index.put(cells)
        return cells

    def bytes_of(self, sequence: Sequence) -> int:
        """What its cells weigh in host memory."""
        return self.kind.state_bytes(len(self._slot_of(sequence).tokens))

    def exchange(self, swap: Swap) -> None:
        """Let two slots change all that they hold."""
        a, b = self.pool[swap.source], self.pool[swap.target]
        assert not (a.is_pending or b.is_pending)
        self.n_moved_bytes += self.kind.state_bytes(len(a.tokens)) + self.kind.state_bytes(len(b.tokens))
        for slot in (a, b):
            self._index.discard(slot)
        self.pool.exchange(a, b)
        for slot in (a, b):
            self._index.put(slot)
        self._ops.append(swap)

    # -- what a batch has changed --------------------------------------------------------------------------------------

    def extend(self, slot: Slot, tokens: Seq[int]) -> None:
        """So many cells more were computed."""
        n_before = len(slot.tokens)
        slot.tokens.extend(tokens)
        if self.cells is not None:
            self.cells.extend(slot.slot_id, len(tokens))
        n = len(slot.tokens)
        if n // BLOCK != n_before // BLOCK and (slot.sequence is None or n > len(slot.sequence.script)):
            self._index.sync(slot, n_before)

    def cut(self, slot: Slot, keep: int) -> None:
        """Only the first `keep` are certain to be there: so it is ordered, whatever is there."""
        del slot.tokens[keep:]
        self._let_go(slot, keep)
        slot.is_shifted = slot.is_shifted and keep > 0
        self._lose_marks(slot, [mark for mark in slot.marks if mark.pos <= keep])
        self._index.sync(slot)
        self._ops.append(Trim(slot.slot_id, keep))

    def shift(self, slot: Slot, keep: int) -> None:
        """Make room in a full slot: of what lies behind the first `keep` the older half goes, one token at least."""
        discard = max(1, (len(slot.tokens) - keep) // 2)
        assert 0 < keep < keep + discard < len(slot.tokens), f"slot {slot.slot_id}: {len(slot.tokens)} cells, {keep} to be kept"
        assert not slot.is_pending
        assert self.cells is None, "the positions of shared cells are not one slot's to change"
        del slot.tokens[keep : keep + discard]
        slot.is_pending = slot.is_shifted = True
        self._lose_marks(slot, [])
        self._index.sync(slot)
        self._ops.append(Shift(slot.slot_id, keep, discard))

    def forget(self, slot: Slot) -> list[int]:
        """Its cells are gone; returns what they were."""
        tokens, slot.tokens = slot.tokens, []
        self._let_go(slot, 0)
        slot.is_shifted = False
        self._lose_marks(slot, [])
        self._index.sync(slot)
        return tokens

    def script_changed(self, slot: Slot) -> None:
        """The script of its sequence has become another."""
        self._index.sync(slot)

    def mark(self, slot: Slot) -> None:
        """Keep a checkpoint of the cells as they are, where the model needs one to come back here and there is room."""
        pos = len(slot.tokens)
        n_bytes = self.kind.mark_bytes(pos)
        if not self.kind.needs_marks or slot.is_pending or (pos <= self.kind.n_swa and self.kind.can_be_cut):
            return
        if any(pos - LEAST_BETWEEN_MARKS < mark.pos <= pos for mark in slot.marks) or not self._make_room(n_bytes):
            return
        mark = Mark(pos, self.host.new_id(), n_bytes)
        self.host.hold(mark)
        self.n_moved_bytes += n_bytes
        self._ops.append(Checkpoint(slot.slot_id, mark.state_id))
        slot.marks.append(mark)
        if len(slot.marks) > MOST_MARKS:
            nearest = min(range(1, len(slot.marks) - 1), key=lambda i: slot.marks[i + 1].pos - slot.marks[i - 1].pos)
            self._lose_marks(slot, [mark for i, mark in enumerate(slot.marks) if i != nearest])

    def refused(self, ops: Iterable[KvOp], refused: Iterable[KvOp]) -> set[int]:
        """Take back what rested on cells that the back end did not give: returns the ids of slots that are empty now.

        The operations are gone through in order: one that was carried out later may have moved the empty cells, or filled them.
        """
        was_refused = {id(op) for op in refused}
        emptied: set[int] = set()
        void: set[int] = set()
        for op in ops:
            is_refused = id(op) in was_refused
            match op:
                case Trim(slot_id) | Load(_, slot_id) | Rewind(_, slot_id) | Shift(slot_id) if is_refused:
                    emptied.add(slot_id)
                case Load(_, slot_id):
                    emptied.discard(slot_id)
                case Save(slot_id, state_id) | Checkpoint(slot_id, state_id) if is_refused or slot_id in emptied:
                    void.add(state_id)
                case Fork(source, target) | Copy(source, target):
                    (emptied.add if is_refused or source in emptied else emptied.discard)(target)
                case Swap(source, target) if is_refused:
                    emptied |= {source, target}
                case Swap(source, target):
                    places = {source: target, target: source}
                    emptied = {places.get(slot_id, slot_id) for slot_id in emptied}
        self._lose_states(void)
        return emptied

    # -- inner ---------------------------------------------------------------------------------------------------------

    def _fits(self, sequence: Sequence, way: Way, matches: Iterable[tuple[Cells, int]]) -> bool:
        """Whether there is room in the pool for a sequence that goes this way."""
        room, source = self._reservations, way.source
        if room is None:
            return True
        if source is None:
            keeps, n_brought = {way.target.slot_id: way.keep}, 0
        else:
            n_kept = way.keep if source.shares_cells else len(source.cells.tokens)
            keeps, n_brought = {source.cells.slot_id: n_kept} if isinstance(source.cells, Slot) else {}, source.n_brought
        n_shared = 0 if n_brought else way.keep
        if self.kind.shares_cells and (leader := self._leader(sequence, matches, way.keep)) is not None:
            n_shared = max(n_shared, leader[1])
        return room.fits(sequence, keeps, n_shared=n_shared, n_brought=n_brought)

    def _make_room_for(self, source: Source, slot: Slot, now: float) -> bool:
        """Have the cells free that come from there, and not at its cost."""
        cells = source.cells
        if isinstance(cells, HostCells):
            cells.is_in_use = True
        has_room = self.make_room(source.n_brought, now, (cells, slot))
        if isinstance(cells, HostCells):
            cells.is_in_use = False
        return has_room

    def _let_go(self, slot: Slot, keep: int) -> None:
        if self.cells is not None:
            self.cells.cut(slot.slot_id, keep)

    def _refill(self, sequence: Sequence, now: float) -> bool:
        """Give a follower the cells that others have of its tokens by now; False where it has to wait for the next step."""
        slot = self._slot_of(sequence)
        matches = [(cells, n) for cells, n in self.placer.matches(sequence) if cells is not slot]
        source = self.placer.best_source(self.placer.sources(matches, _most_followed(sequence)))
        if source is None or source.keep - self.placer.tokens_of(source.n_bytes) <= len(slot.tokens):
            return True
        if slot.is_pending or not self.may_move(source.n_bytes):
            return False
        if not self._make_room_for(source, slot, now):
            return True
        marks = self._marks_of(source)
        self._fetch(source, slot)
        self._fill(slot, sequence.script[: source.keep], sequence, marks)
        if sequence.n_parks == 0:
            sequence.n_cached = source.keep
        return True

    def _n_computed(self, leader: Sequence) -> int | None:
        return len(self._slot_of(leader).tokens) if leader.state is State.PREFILL else None

    def _leader(self, sequence: Sequence, matches: Iterable[tuple[Cells, int]], n_has: int) -> tuple[Sequence, int] | None:
        best: tuple[Sequence, int] | None = None
        for cells, n in matches:
            other = cells.sequence if isinstance(cells, Slot) else None
            n = min(n, _most_followed(sequence))
            least = n_has + LEAST_FOLLOWED if best is None else best[1] + 1
            if other is not None and n > len(cells.tokens) and n >= least and self._leads(other, sequence):
                best = other, n
        return best

    def _leads(self, other: Sequence, sequence: Sequence) -> bool:
        """Whether another's prompt goes on without that of `sequence`: not its own follower, nor one whose leader is gone."""
        root = self.following.root_of(other)
        return root is not sequence and self._n_computed(root) is not None

    def _go(self, way: Way, sequence: Sequence, now: float) -> None:
        slot = way.target
        saved = way.source.cells if way.source is not None and isinstance(way.source.cells, HostCells) else None
        if saved is not None:
            saved.is_in_use = True
        if way.saves:
            self._save(slot)
        marks = [mark for mark in slot.marks if mark.pos <= way.keep]
        self._let_go(slot, way.keep if way.source is None else 0)
        if way.source is not None:
            self._make_room_for(way.source, slot, now)
            self._fetch(way.source, slot)
            marks = self._marks_of(way.source)
        elif way.keep == len(slot.tokens) and way.keep:
            self.mark(slot)
            marks = slot.marks
        elif way.mark is not None:
            self._ops.append(Rewind(way.mark.state_id, slot.slot_id, way.keep))
        elif way.keep < len(slot.tokens):
            self._ops.append(Trim(slot.slot_id, way.keep))
        self._fill(slot, sequence.script[: way.keep], sequence, marks)
        if saved is not None:
            saved.is_in_use = False
            if saved.may_go and way.keep == len(saved.tokens):
                self._give_up(saved)  # it goes on in the slot, whole

    def _fetch(self, source: Source, slot: Slot) -> None:
        """Order that the slot gets these cells."""
        cells, keep = source.cells, source.keep
        if self.cells is not None:
            self.cells.cut(slot.slot_id, 0)
            if source.shares_cells and isinstance(cells, Slot):
                self.cells.share(cells.slot_id, slot.slot_id, keep)
            else:
                self.cells.extend(slot.slot_id, keep)
        if isinstance(cells, HostCells):
            self._ops.append(Load(cells.state_id, slot.slot_id))
            self.n_moved_bytes += source.n_bytes
        elif isinstance(cells, Slot) and source.is_fork:
            self._ops.append(Fork(cells.slot_id, slot.slot_id, keep))
            self.n_forked_bytes += source.n_bytes
            cells.is_pending = slot.is_pending = not source.shares_cells
            return
        elif isinstance(cells, Slot):
            self._ops.append(Copy(cells.slot_id, slot.slot_id, len(cells.tokens) if source.mark else keep))
            self.n_moved_bytes += source.n_bytes
        if source.mark is not None:
            self._ops.append(Rewind(source.mark.state_id, slot.slot_id, keep))
        elif isinstance(cells, HostCells) and keep < len(cells.tokens):
            self._ops.append(Trim(slot.slot_id, keep))

    def _marks_of(self, source: Source) -> list[Mark]:
        return [mark for mark in source.cells.marks if mark.pos <= source.keep]

    def _fill(self, slot: Slot, tokens: list[int], sequence: Sequence, marks: list[Mark]) -> None:
        """The slot has these tokens, and they are the sequence's."""
        for mark in marks:
            self.host.hold(mark)
        self._lose_marks(slot, [])
        slot.marks = list(marks)
        slot.session = sequence.session
        slot.tokens = tokens
        if slot.domain != sequence.domain:
            self._index.discard(slot)
            slot.domain = sequence.domain
            self._index.put(slot)
        else:
            self._index.sync(slot)

    def _save(self, slot: Slot, owner: Sequence | None = None) -> HostCells | None:
        """Order a copy in host memory; None where there is no room for it. Shorter ones of the same beginning are given up for it."""
        assert not slot.is_shifted
        for older in self._index.prefixes_of(slot.tokens, slot.domain):
            if isinstance(older, HostCells) and older.may_go:
                self._give_up(older)
        n_tokens = len(slot.tokens)
        cells = HostCells(list(slot.tokens), slot.domain, slot.session, slot.used_at, state_id=self.host.new_id(), owner=owner)
        cells.n_bytes = self.kind.state_bytes(n_tokens)
        cells.worth = worth_of(cells)
        if not self._make_room(cells.n_bytes, cells.worth if owner is None else math.inf):
            return None
        for mark in slot.marks:
            self.host.hold(mark)
        cells.marks = list(slot.marks)
        self.host.put(cells)
        self._index.put(cells)
        self._ops.append(Save(slot.slot_id, cells.state_id))
        self.n_moved_bytes += cells.n_bytes
        return cells

    def _make_room(self, n_bytes: int, worth: float = math.inf) -> bool:
        given_up = self.host.room_for(n_bytes, worth)
        for cells in given_up or ():
            self._give_up(cells)
        return given_up is not None

    def _give_up(self, cells: HostCells) -> None:
        self._index.discard(cells)
        self.host.remove(cells)
        self._lose_marks(cells, [])
        self._ops.append(Forget(cells.state_id))

    def _lose_marks(self, cells: Cells, kept: list[Mark]) -> None:
        for mark in cells.marks:
            if mark not in kept and self.host.let_go(mark):
                self._ops.append(Forget(mark.state_id))
        cells.marks = list(kept)

    def _lose_states(self, void: set[int]) -> None:
        """These were never saved."""
        if not void:
            return
        for saved in [cells for cells in self.host if cells.state_id in void]:
            if saved.owner is not None:
                saved.owner.n_kept = 0
            self._give_up(saved)
        for cells in self._all():
            self._lose_marks(cells, [mark for mark in cells.marks if mark.state_id not in void])

    def _all(self) -> Iterator[Cells]:
        yield from self.pool.slots
        yield from self.host

    def _is_slower(self, n_cells: int, n_bytes: int) -> bool:
        """While one of the two was never measured, copying is taken to be faster: it is, by far, on every machine we know."""
        move_s, compute_s = self._costs.move_s(2 * n_bytes), self._costs.prompt_s(Rows(n_cells, 1, n_cells))
        return move_s is not None and compute_s is not None and move_s > compute_s

    def _slot_of(self, sequence: Sequence) -> Slot:
        assert sequence.slot_id is not None
        return self.pool[sequence.slot_id]


def _may_reuse(sequence: Sequence) -> bool:
    """Whether cells of others may be its own; those that a parked one had always may."""
    return sequence.cache_prompt or sequence.n_parks > 0


def _most_followed(sequence: Sequence) -> int:
    """Of its script: a follower computes one token at least, with which its prefill ends."""
    return len(sequence.script) - 1
