"""Keys and states for tests of parked cells on disk."""

import random

from runner.serving.kv_format import SavedCheckpoint, SavedState
from runner.serving.kv_key import StateKey

KEY = StateKey(
    model_id="a model",
    llama_cpp_version="b1",
    cache_type_k="f16",
    cache_type_v="q8_0",
    flash_attn=True,
    n_streams=4,
    n_ctx_slot=4096,
    kv_unified=False,
    swa_full=False,
    rope_freq_base=0.0,
    rope_freq_scale=0.0,
    rope_scaling_type=-1,
)
DOMAIN, SESSION = "0" * 31 + "a", "b" * 32


def state(
    n_tokens: int = 20,
    n_bytes: int = 100,
    *,
    seed: int = 1,
    domain: str = DOMAIN,
    session: str = SESSION,
    checkpoints: tuple[int, ...] = (),
    used_at: float = 1000.0,
) -> SavedState:
    """Tokens and bytes that follow from the seed, in files of one size; a checkpoint has half as many bytes as there are cells."""
    numbers = random.Random(seed)
    return SavedState(
        [numbers.randrange(256, 50_000) for _ in range(n_tokens)],
        domain,
        session,
        memoryview(numbers.randbytes(n_bytes)),
        tuple(SavedCheckpoint(pos, memoryview(numbers.randbytes(n_bytes // 2))) for pos in checkpoints),
        used_at,
    )


def content(found: SavedState | None) -> object:
    """What two equal states have in common."""
    assert found is not None
    saved = [(checkpoint.pos, bytes(checkpoint.data)) for checkpoint in found.checkpoints]
    return found.tokens, found.domain, found.session, bytes(found.cells), saved
