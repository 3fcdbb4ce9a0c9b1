"""The cells that llama.cpp allocates are those that were counted before, for every type, on both models."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from runner.bundle.gguf import read_header
from runner.config import CACHE_TYPES, CacheType, EngineConfig
from runner.engine.batch import BatchPlan, Chunk
from runner.engine.capacity import MIB, SlotMemory
from runner.llama.batch import Batch
from runner.llama.context import Context, ContextSize, Kernels
from runner.llama.library import Library
from runner.llama.model import Model
from runner.serving.load import NativeLog, load_engine
from tests.conftest import engine_config

PAIRS: list[tuple[CacheType, CacheType]] = [*((name, name) for name in CACHE_TYPES), ("q8_0", "q4_0"), ("f16", "q8_0"), ("q4_0", "f32")]


class Allocator:
    """One loaded model, and contexts of it."""

    def __init__(self, path: Path) -> None:
        self.log = NativeLog()
        self.library = Library(self.log)
        self.config = engine_config(path, n_slots=2, n_ctx_slot=3000, n_batch=64)
        self.model = Model(self.library, self.config.model, n_gpu_layers=0, devices=[])

    def mib(self, config: EngineConfig) -> float:
        """MiB that llama.cpp says it allocated for the cells."""
        assert config.n_slots is not None
        assert config.n_ctx_slot is not None
        self.log.kv_mib = 0.0
        n_pool = SlotMemory.of(read_header(config.model), config).pool_tokens(config.n_slots, config.n_ctx_slot)
        size = ContextSize(config.n_slots, config.n_ctx_slot, config.n_batch, 1, 1, n_pool)
        Context(self.library, self.model, size, Kernels.of(config)).close()
        return self.log.kv_mib


@pytest.fixture(scope="module")
def smollm2_cells(smollm2_path: Path) -> Iterator[Allocator]:
    allocator = Allocator(smollm2_path)
    yield allocator
    allocator.model.close()


@pytest.fixture(scope="module")
def gemma3_cells(gemma3_path: Path) -> Iterator[Allocator]:
    allocator = Allocator(gemma3_path)
    yield allocator
    allocator.model.close()


def expected_mib(config: EngineConfig) -> float:
    assert config.n_slots is not None
    assert config.n_ctx_slot is not None
    return SlotMemory.of(read_header(config.model), config).total_bytes(config.n_slots, config.n_ctx_slot) / MIB


@pytest.mark.parametrize(("type_k", "type_v"), PAIRS)
def test_full_attention(smollm2_cells: Allocator, type_k: CacheType, type_v: CacheType) -> None:
    config = msgspec.structs.replace(smollm2_cells.config, cache_type_k=type_k, cache_type_v=type_v)
    assert smollm2_cells.mib(config) == pytest.approx(expected_mib(config), abs=0.02)


@pytest.mark.parametrize("swa_full", [False, True])
@pytest.mark.parametrize(("type_k", "type_v"), PAIRS)
def test_sliding_windows(gemma3_cells: Allocator, type_k: CacheType, type_v: CacheType, swa_full: bool) -> None:
    config = msgspec.structs.replace(gemma3_cells.config, cache_type_k=type_k, cache_type_v=type_v, swa_full=swa_full)
    assert gemma3_cells.mib(config) == pytest.approx(expected_mib(config), abs=0.02)


@pytest.mark.parametrize(
    ("n_slots", "n_ctx", "n_batch"), [(1, 16, 8192), (2, 256, 512), (3, 1000, 32), (4, 4096, 512), (1, 1500, 1000), (2, 20_000, 2048)]
)
def test_sliding_windows_of_all_sizes(gemma3_cells: Allocator, n_slots: int, n_ctx: int, n_batch: int) -> None:
    config = msgspec.structs.replace(gemma3_cells.config, n_slots=n_slots, n_ctx_slot=n_ctx, n_batch=n_batch)
    assert gemma3_cells.mib(config) == pytest.approx(expected_mib(config), abs=0.02)


@pytest.mark.parametrize(("n_slots", "n_ctx", "pool"), [(4, 1000, None), (8, 1000, 1500), (2, 3000, None), (3, 256, 300)])
def test_a_pool_that_all_slots_share(gemma3_cells: Allocator, n_slots: int, n_ctx: int, pool: int | None) -> None:
    config = msgspec.structs.replace(gemma3_cells.config, n_slots=n_slots, n_ctx_slot=n_ctx, kv="unified", kv_pool=pool)
    assert gemma3_cells.mib(config) == pytest.approx(expected_mib(config), abs=0.02)


@pytest.mark.parametrize(("swa_full", "can_go_back"), [(False, False), (True, True)])
def test_windows_that_are_kept_in_full_lose_nothing(gemma3_cells: Allocator, swa_full: bool, can_go_back: bool) -> None:
    config = msgspec.structs.replace(gemma3_cells.config, n_slots=1, n_ctx_slot=1024, swa_full=swa_full)
    api, size = gemma3_cells.library.api, ContextSize(1, 1024, config.n_batch, 2, 2)
    context, batch = Context(gemma3_cells.library, gemma3_cells.model, size, Kernels.of(config)), Batch(api, config.n_batch, 1)
    for pos in range(0, 1024, config.n_batch):
        rows, _ = batch.fill(BatchPlan(chunks=(Chunk(0, pos, range(pos, pos + config.n_batch), has_logits=True),)))
        assert api.llama_decode(context.handle, rows) == 0
    assert (api.llama_memory_seq_pos_min(context.memory, 0) == 0) is can_go_back
    context.close()


def test_the_engine_tells_its_types_and_what_they_take(gemma3_path: Path) -> None:
    config = msgspec.structs.replace(
        engine_config(gemma3_path, n_slots=2, n_ctx_slot=2048), cache_type_k="q8_0", cache_type_v="q4_0", swa_full=True
    )
    engine = load_engine(config, clock=lambda: 0.0, progress=lambda fraction: None)
    info = engine.info
    assert (info.cache_type_k, info.cache_type_v, info.swa_full, info.flash_attn) == ("q8_0", "q4_0", True, True)
    assert info.kv_bytes / MIB == pytest.approx(expected_mib(config), abs=0.02)
