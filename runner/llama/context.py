"""The llama_context: KV cells for N slots and the graph that computes on them."""

from dataclasses import dataclass
from typing import Any

from runner.bundle.kv_cells import GGML_TYPES, is_quantised
from runner.config import CacheType, EngineConfig, FlashAttn
from runner.engine.capacity import padded
from runner.errors import ModelError
from runner.llama.library import Library
from runner.llama.model import Model

_FLASH_ATTN = {"auto": -1, "off": 0, "on": 1}


@dataclass(frozen=True, slots=True)
class ContextSize:
    """Slots, tokens a slot, rows a batch, threads for one row and for many, and tokens of the pool that all slots share (0: none)."""

    n_slots: int
    n_ctx_slot: int
    n_batch: int
    n_threads: int
    n_threads_batch: int
    n_pool: int = 0


@dataclass(frozen=True, slots=True)
class Kernels:
    """Flash attention, types of keys and values in the cells, and whether layers with a sliding window keep all cells of a slot."""

    flash_attn: FlashAttn = "auto"
    cache_type_k: CacheType = "f16"
    cache_type_v: CacheType = "f16"
    swa_full: bool = False

    @classmethod
    def of(cls, config: EngineConfig) -> "Kernels":
        """As chosen. Quantised values work with flash attention only, so llama.cpp is not asked whether it has it."""
        flash_attn = "on" if config.flash_attn == "auto" and is_quantised(config.cache_type_v) else config.flash_attn
        return cls(flash_attn, config.cache_type_k, config.cache_type_v, config.swa_full)


class Context:
    """A llama_context in which each slot has its own region of cells, or all share one pool. `close` frees it."""

    def __init__(self, library: Library, model: Model, size: ContextSize, kernels: Kernels) -> None:
        """Allocate. Raises ModelError where llama.cpp cannot."""
        self._api: Any = library.api
        params = self._api.llama_context_default_params()
        params.n_ctx = padded(size.n_pool) if size.n_pool else size.n_slots * padded(size.n_ctx_slot)
        params.n_batch = params.n_ubatch = size.n_batch
        params.n_seq_max = size.n_slots
        # Only one row a slot is ever sampled from: without this bound llama.cpp reserves logits for every row of a batch.
        params.n_outputs_max = size.n_slots
        params.n_threads, params.n_threads_batch = size.n_threads, size.n_threads_batch
        params.flash_attn_type = _FLASH_ATTN[kernels.flash_attn]
        params.type_k, params.type_v = GGML_TYPES[kernels.cache_type_k], GGML_TYPES[kernels.cache_type_v]
        params.kv_unified = size.n_pool > 0
        params.no_perf = True
        params.swa_full = kernels.swa_full
        self.handle: int = self._api.llama_init_from_model(model.handle, params) or 0
        if not self.handle:
            raise ModelError(
                f"llama.cpp could not allocate {size.n_slots} slots of {size.n_ctx_slot:,} tokens", hint="fewer --slots or a smaller --ctx"
            )
        self.memory = self._api.llama_get_memory(self.handle)
        self.n_ctx_slot = size.n_ctx_slot
        assert self._api.llama_n_ctx_seq(self.handle) >= size.n_ctx_slot

    @property
    def can_shift(self) -> bool:
        """Whether positions can be changed: where not, the next decode aborts the process. True of recurrent states too, which keep
        what was taken out: see `Model.can_be_cut`.
        """
        return bool(self._api.llama_memory_can_shift(self.memory))

    def close(self) -> None:
        """Free the cells and the compute buffers."""
        if self.handle:
            self._api.llama_free(self.handle)
            self.handle = 0
