"""How a sequence's next token is chosen: plain values, checked at the edge, turned into a sampler chain by `llama/sampler.py`."""

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence's sampling. Every float is finite and every value in range before it gets here.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1, `min_p` 0, `repeat_penalty` 1 and both OpenAI penalties at 0 are off.
    `repeat_last_n` tokens of prompt tail and answer count for all three penalties. `logit_bias` is (token id, bias) pairs.
    `seed` None draws one (outside `engine/`).
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()

    @property
    def has_penalties(self) -> bool:
        """Whether any penalty changes a logit."""
        return self.repeat_last_n != 0 and (self.repeat_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0)
