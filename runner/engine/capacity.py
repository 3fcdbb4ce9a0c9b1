"""How many slots of which size fit the memory of this machine."""

from bisect import bisect_right
from dataclasses import dataclass

from runner.bundle.header import Header
from runner.bundle.kv_cells import cell_bytes
from runner.config import EngineConfig
from runner.errors import ConfigError

DEFAULT_SLOTS = 4
DEFAULT_CTX = 4096
SMALLEST_DEFAULT_CTX = 512
# llama.cpp allocates cells in multiples of this.
CTX_MULTIPLE = 256
# What the KV cells may take of the memory that is left beside the weights, when we choose.
CHOSEN_SHARE = 0.5
# Compute buffers and the program itself.
RESERVE_BYTES = 192 * 1024 * 1024
MIB = 1024 * 1024
# More than any model or memory holds.
MOST_CELLS = 1 << 32


@dataclass(frozen=True, slots=True)
class Capacity:
    """`n_slots` slots of `n_ctx_slot` tokens; `notes` say what was chosen and why.

    All share a pool that holds `n_pool` tokens, or (0) have cells of their own.
    """

    n_slots: int
    n_ctx_slot: int
    kv_bytes: int
    notes: tuple[str, ...]
    n_pool: int = 0


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the person who starts the program asked for; None: choose."""

    n_slots: int | None
    n_ctx_slot: int | None


def padded(n_ctx: int) -> int:
    """Cells that llama.cpp allocates for a slot of `n_ctx` tokens."""
    return -(-n_ctx // CTX_MULTIPLE) * CTX_MULTIPLE


@dataclass(frozen=True, slots=True)
class SlotMemory:
    """What the cells of slots take, as llama.cpp allocates them (src/llama-kv-cache-iswa.cpp).

    `full_bytes` a token, and `window_bytes` for the last `n_swa` and a batch of `n_batch`. `is_unified`: all slots share one pool, of
    `pool` tokens or (None) as many as they hold when they are full.
    """

    full_bytes: int
    window_bytes: int = 0
    n_swa: int = 0
    n_batch: int = 0
    is_unified: bool = False
    pool: int | None = None

    @classmethod
    def of(cls, header: Header, config: EngineConfig) -> "SlotMemory":
        """By the model and the types that were chosen. Raises ModelDamaged."""
        cell = cell_bytes(header, config)
        return cls(cell.full, cell.window, cell.n_swa, config.n_batch, config.kv == "unified", config.kv_pool)

    def n_bytes(self, n_ctx: int, n_slots: int = 1) -> int:
        """Bytes of the region of a slot of `n_ctx` tokens, or of a pool of so many that `n_slots` share."""
        n_cells = padded(n_ctx)
        return n_cells * self.full_bytes + min(n_cells, padded(n_slots * self.n_swa + self.n_batch)) * self.window_bytes

    def total_bytes(self, n_slots: int, n_ctx: int) -> int:
        """Bytes of `n_slots` slots of `n_ctx` tokens."""
        if self.is_unified:
            return self.n_bytes(self.pool_tokens(n_slots, n_ctx), n_slots)
        return n_slots * self.n_bytes(n_ctx)

    def pool_tokens(self, n_slots: int, n_ctx: int) -> int:
        """Tokens that the pool of so many slots holds; 0 where each has its own cells."""
        return (self.pool or n_slots * n_ctx) if self.is_unified else 0

    def default_ctx(self, n_ctx_train: int) -> int:
        """Tokens a slot where nobody asks for another number and memory holds them."""
        return min(DEFAULT_CTX, n_ctx_train or DEFAULT_CTX, self.pool or DEFAULT_CTX)

    def most_tokens(self, n_bytes: int, n_slots: int = 1) -> int:
        """Tokens of the largest slot, or pool of `n_slots`, that fits, in whole multiples; 0 where none does."""
        sizes = range(0, MOST_CELLS, CTX_MULTIPLE)
        return sizes[bisect_right(sizes, n_bytes, key=lambda n_ctx: self.n_bytes(n_ctx, n_slots)) - 1]


def choose_capacity(wanted: Wanted, *, n_ctx_train: int, slot: SlotMemory, weights_bytes: int, memory_bytes: int) -> Capacity:
    """Fit slots and context into `memory_bytes`. What was asked for is never made smaller: it fits or ConfigError says why not.

    `memory_bytes` is what is free where weights and cells will lie.
    """
    room = memory_bytes - weights_bytes - RESERVE_BYTES
    train = n_ctx_train or DEFAULT_CTX
    n_slots = wanted.n_slots or DEFAULT_SLOTS
    n_ctx = wanted.n_ctx_slot or slot.default_ctx(n_ctx_train)
    notes: list[str] = []
    if wanted.n_ctx_slot is None:
        while n_ctx > SMALLEST_DEFAULT_CTX and slot.total_bytes(n_slots, n_ctx) > room * CHOSEN_SHARE:
            n_ctx = max(SMALLEST_DEFAULT_CTX, n_ctx // 2)
    if wanted.n_slots is None:
        while n_slots > 1 and slot.total_bytes(n_slots, n_ctx) > room * CHOSEN_SHARE:
            n_slots -= 1
    kv_bytes = slot.total_bytes(n_slots, n_ctx)
    if kv_bytes > max(0, room):
        what = f"A pool of {slot.pool:,} tokens needs" if slot.pool else f"{n_slots} slots of {n_ctx:,} tokens need"
        raise ConfigError(
            f"{what} {kv_bytes // MIB:,} MiB for the KV cache beside {weights_bytes // MIB:,} MiB of "
            f"weights, and {max(0, memory_bytes) // MIB:,} MiB of memory are free",
            hint=_what_fits(n_slots, slot, max(0, room)),
        )
    if wanted.n_ctx_slot is None:
        why = (
            "the model was trained on no more"
            if n_ctx == train
            else "the pool holds no more"
            if n_ctx == slot.pool
            else "memory holds no more"
            if n_ctx < DEFAULT_CTX
            else "raise it with --ctx"
        )
        notes.append(f"{n_ctx:,} tokens a slot were chosen ({why})")
    elif n_ctx > train:
        notes.append(f"--ctx {n_ctx:,} is more than the {train:,} tokens the model was trained on: answers may degrade")
    if wanted.n_slots is None:
        notes.append(f"{n_slots} slots were chosen ({'memory holds no more' if n_slots < DEFAULT_SLOTS else 'raise it with --slots'})")
    return Capacity(n_slots, n_ctx, kv_bytes, tuple(notes), slot.pool_tokens(n_slots, n_ctx))


def _what_fits(n_slots: int, slot: SlotMemory, room: int) -> str | None:
    """Options that would fit: as many of the wanted slots as can hold the smallest context that is of use, or the largest pool."""
    if slot.pool:
        n_pool = slot.most_tokens(room, n_slots)
        return f"--kv-pool {n_pool} --ctx {n_pool}, or less of --ctx" if n_pool else None
    n_slots = min(n_slots, room // max(1, slot.n_bytes(SMALLEST_DEFAULT_CTX)))
    if n_slots == 0:
        return None
    return f"--slots {n_slots} --ctx {slot.most_tokens(room // n_slots)}"
