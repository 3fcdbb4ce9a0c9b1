"""SamplingParams to a llama.cpp sampler chain."""

import ctypes
import math
from collections.abc import Iterable
from typing import Any

from runner.engine.sampling import SamplingParams

_MIN_KEEP = 1
# Dividing by less overflows a 32-bit logit, and the likeliest token is chosen anyway.
_GREEDY_BELOW = 1e-4


def build_chain(api: Any, n_vocab: int, sampling: SamplingParams, banned: Iterable[int], seed: int) -> int:
    """A new chain, in llama-server's order: bias, penalties, top_k, top_p, min_p, temperature, choice. The caller frees it.

    `banned` tokens get a bias of minus infinity (the end-of-generation tokens under `ignore_eos`).
    """
    chain = api.llama_sampler_chain_init(api.llama_sampler_chain_default_params())

    def add(sampler: Any) -> None:
        api.llama_sampler_chain_add(chain, sampler)

    biases = dict(sampling.logit_bias) | dict.fromkeys(banned, -math.inf)
    if biases:
        array = (api.llama_logit_bias * len(biases))(*(api.llama_logit_bias(token, bias) for token, bias in biases.items()))
        add(api.llama_sampler_init_logit_bias(n_vocab, len(biases), array))
    if sampling.has_penalties:
        add(_penalties(api, n_vocab, sampling))
    if sampling.temperature < _GREEDY_BELOW:
        add(api.llama_sampler_init_greedy())
        return _address(chain)
    if sampling.top_k > 0:
        add(api.llama_sampler_init_top_k(sampling.top_k))
    if sampling.top_p < 1.0:
        add(api.llama_sampler_init_top_p(sampling.top_p, _MIN_KEEP))
    if sampling.min_p > 0.0:
        add(api.llama_sampler_init_min_p(sampling.min_p, _MIN_KEEP))
    add(api.llama_sampler_init_temp(sampling.temperature))
    add(api.llama_sampler_init_dist(seed))
    return _address(chain)


def _penalties(api: Any, n_vocab: int, sampling: SamplingParams) -> Any:
    # 0.3.36 takes the vocabulary's size first; the binding's declaration is the authority on what it expects.
    values = (sampling.repeat_last_n, sampling.repeat_penalty, sampling.frequency_penalty, sampling.presence_penalty)
    assert api.llama_sampler_init_penalties.argtypes[0] is ctypes.c_int32
    return api.llama_sampler_init_penalties(n_vocab, *values)


def _address(pointer: Any) -> int:
    address = ctypes.cast(pointer, ctypes.c_void_p).value
    assert address is not None
    return address
