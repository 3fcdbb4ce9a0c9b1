"""The fields that chat and text completions share, checked and turned into what the engine takes.

What is accepted beyond OpenAI: `top_k` (-1 and 0 are off), `min_p`, `repeat_penalty`, `repeat_last_n` (-1 is the whole
context), `ignore_eos`, `cache_prompt`, `cache_salt`, `priority` (lower goes first), `timeout` and `queue_timeout` (seconds), and from the
Responses API `truncation`. What is narrower: `seed` is 0 to 2^63 - 1, `n` is 1 to 8, `stop` takes 16 texts.
"""

from typing import Final, TypeVar

import msgspec

from runner.api.admission import admit_prompts
from runner.api.domains import Trust, checked_salt
from runner.api.errors import shown
from runner.api.schemas import GenerationBody, plain
from runner.config import MAX_DEADLINE_S
from runner.engine.order import NOBODY, Owner, Tier
from runner.engine.sampling import SamplingParams
from runner.errors import InvalidRequest
from runner.serving.protocol import ModelInfo, Prompt, Submit

MAX_N: Final = 8
MAX_CHOICES: Final = 128
MAX_STOPS: Final = 16
MAX_STOP_CHARS: Final = 1024
MAX_LOGIT_BIASES: Final = 1024

# Of an answer that no slot's end bounds.
MOST_SHIFTED_TOKENS: Final = 1 << 30
RANGES: Final[dict[str, tuple[float, float]]] = {
    "temperature": (0, 100),
    "top_p": (0, 1),
    "top_k": (-1, 2**31 - 1),
    "min_p": (0, 1),
    "frequency_penalty": (-2, 2),
    "presence_penalty": (-2, 2),
    "repeat_penalty": (0.01, 100),
    "repeat_last_n": (-1, 2**31 - 1),
    "seed": (0, 2**63 - 1),
    "n": (1, MAX_N),
    "max_tokens": (1, float("inf")),
    "max_completion_tokens": (1, float("inf")),
    "priority": (-(2**31), 2**31 - 1),
    "timeout": (0, MAX_DEADLINE_S),
    "queue_timeout": (0, MAX_DEADLINE_S),
}

# OpenAI's `service_tier`; it has no batch tier in these fields. `auto` and `default` are the same here.
SERVICE_TIERS: Final = {
    "priority": Tier.HIGH,
    "default": Tier.NORMAL,
    "auto": Tier.NORMAL,
    "flex": Tier.LOW,
    "batch": Tier.BATCH,
}
FIRST_BATCH_PRIORITY: Final = 10

_NOTHING: Final[tuple[object, ...]] = (False, [], {}, "")
# Fields with an effect that this server does not have, and the values with which they have none.
UNSUPPORTED: Final[dict[str, tuple[object, ...]]] = {
    "grammar": _NOTHING,
    "json_schema": _NOTHING,
    "structured_outputs": _NOTHING,
    "guided_json": _NOTHING,
    "guided_regex": _NOTHING,
    "guided_choice": _NOTHING,
    "guided_grammar": _NOTHING,
    "response_format": ({"type": "text"},),
    "tools": _NOTHING,
    "tool_choice": ("none", "auto"),
    "functions": _NOTHING,
    "function_call": ("none", "auto"),
    "logprobs": (False,),  # for text, 0 asks for the log probability of each chosen token
    "top_logprobs": (0,),
    "best_of": (1,),
    "suffix": _NOTHING,
    "modalities": ([], ["text"]),
    "audio": _NOTHING,
}


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """A request body after all checks. Choice `i` of the answer belongs to prompt `i // n`; `n_bytes` are those of all prompts.

    `tier` is the one asked for until the request's client is known, which sets `owner` and `trust` too. `tells_tier`: the answer names it.
    `truncates`: oldest turns may go, and the answer says how many messages did. `session` is a name that the client gave.
    """

    prompts: list[Prompt]
    n_bytes: int
    n: int
    sampling: SamplingParams
    max_tokens: int | None
    stop: tuple[str, ...]
    is_stream: bool
    include_usage: bool
    ignore_eos: bool
    cache_prompt: bool
    echo: bool = False
    tier: Tier = Tier.NORMAL
    tells_tier: bool = False
    user: str = ""
    cache_salt: str = ""
    session: str = ""
    truncates: bool = False
    owner: Owner = NOBODY
    trust: Trust = Trust()
    timeout_s: float = 0.0
    queue_timeout_s: float = 0.0

    @property
    def service_tier(self) -> str:
        """OpenAI's name of the tier."""
        return next(name for name, tier in SERVICE_TIERS.items() if tier is self.tier)

    @property
    def n_choices(self) -> int:
        """How many sequences the answer takes."""
        return len(self.prompts) * self.n

    def submit(self, choice: int, request_id: str) -> Submit:
        """What the engine is given for one choice; each of the `n` has a seed of its own."""
        return Submit(
            request_id=request_id,
            prompt=self.prompts[choice // self.n],
            sampling=self.sampling,
            seed_offset=choice % self.n,
            max_tokens=self.max_tokens,
            stop=self.stop,
            ignore_eos=self.ignore_eos,
            cache_prompt=self.cache_prompt,
            echo=self.echo,
            tier=self.tier,
            owner=self.owner,
            domain=self.trust.domain,
            session=self.trust.session,
            is_stateless=self.trust.is_stateless,
        )


def generation(body: GenerationBody, prompts: list[Prompt], info: ModelInfo, *, echo: bool = False) -> Generation:
    """Check what all bodies share. Raises InvalidRequest that names the field."""
    _check_ranges(body)
    _check_unsupported(body)
    n = body.n or 1
    if len(prompts) * n > MAX_CHOICES:
        raise InvalidRequest(
            f"{len(prompts)} prompts with n = {n} ask for {len(prompts) * n} answers; the limit is {MAX_CHOICES}", param="prompt"
        )
    return Generation(
        prompts=prompts,
        n_bytes=admit_prompts(prompts, info),
        n=n,
        sampling=_sampling(body, info),
        max_tokens=_max_tokens(body, info),
        stop=_stop(body.stop),
        is_stream=bool(body.stream),
        include_usage=bool(body.stream and body.stream_options and body.stream_options.include_usage),
        ignore_eos=bool(body.ignore_eos),
        cache_prompt=body.cache_prompt is not False,
        echo=echo,
        tier=_tier(body),
        tells_tier=body.service_tier is not None or body.priority is not None,
        user=body.user or "",
        cache_salt=checked_salt(body.cache_salt or ""),
        session=body.prompt_cache_key or "",
        truncates=truncates(body),
        timeout_s=body.timeout or 0.0,
        queue_timeout_s=body.queue_timeout or 0.0,
    )


def _check_ranges(body: GenerationBody) -> None:
    for name, (low, high) in RANGES.items():
        value = getattr(body, name, None)
        if value is not None and not low <= value <= high:  # NaN and infinities do not get through the decoder
            limit = f"at least {low}" if high == float("inf") else f"{low} to {high}"
            raise InvalidRequest(f"{name!r} is {shown(value)}; it takes {limit}", param=name)


def _check_unsupported(body: GenerationBody) -> None:
    """Refuse what would change the answer and is not offered: an answer without it would look right and be wrong."""
    for name, harmless in UNSUPPORTED.items():
        value = plain(getattr(body, name, None))
        if value is not None and not any(value == known and type(value) is type(known) for known in harmless):
            raise InvalidRequest(f"{name!r} is not supported by this server{_instead(harmless)}", param=name)


def _instead(harmless: tuple[object, ...]) -> str:
    """What is accepted, where that is more than nothing."""
    values = [msgspec.json.encode(value).decode() for value in harmless if value]
    return f", except {' and '.join(values)}" if values else ""


def truncates(body: GenerationBody) -> bool:
    """Whether oldest turns may go. Raises InvalidRequest."""
    if body.truncation not in (None, "auto", "disabled"):
        raise InvalidRequest(f"'truncation' is {shown(body.truncation)!r}; it takes auto, disabled", param="truncation")
    return body.truncation == "auto"


def _tier(body: GenerationBody) -> Tier:
    """`priority` counts where both are given: it is the finer of the two."""
    named = SERVICE_TIERS.get("auto" if body.service_tier is None else body.service_tier)
    if named is None:
        raise InvalidRequest(f"'service_tier' is {shown(body.service_tier)!r}; it takes {', '.join(SERVICE_TIERS)}", param="service_tier")
    if body.priority is None:
        return named
    if body.priority <= 0:
        return Tier.HIGH if body.priority < 0 else Tier.NORMAL
    return Tier.LOW if body.priority < FIRST_BATCH_PRIORITY else Tier.BATCH


def _sampling(body: GenerationBody, info: ModelInfo) -> SamplingParams:
    default = info.sampling
    return SamplingParams(
        temperature=_or(body.temperature, default.temperature),
        top_k=max(0, _or(body.top_k, default.top_k)),
        top_p=_or(body.top_p, default.top_p),
        min_p=_or(body.min_p, default.min_p),
        repeat_penalty=_or(body.repeat_penalty, default.repeat_penalty),
        repeat_last_n=_last_n(_or(body.repeat_last_n, default.repeat_last_n), info.n_ctx_slot),
        frequency_penalty=_or(body.frequency_penalty, 0.0),
        presence_penalty=_or(body.presence_penalty, 0.0),
        seed=body.seed,
        logit_bias=_logit_bias(body.logit_bias or {}, info.n_vocab),
    )


Number = TypeVar("Number", int, float)


def _or(value: Number | None, default: Number) -> Number:
    return default if value is None else value


def _last_n(value: int, n_ctx_slot: int) -> int:
    return n_ctx_slot if value < 0 else min(value, n_ctx_slot)


def _max_tokens(body: GenerationBody, info: ModelInfo) -> int | None:
    """The smaller of both names, never more than a slot holds unless it can be shifted; None: until the slot's end."""
    given = [value for value in (body.max_tokens, getattr(body, "max_completion_tokens", None)) if value is not None]
    return min(*given, MOST_SHIFTED_TOKENS if info.context_shift else info.n_ctx_slot) if given else None


def _stop(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) else stop or []
    if len(stops) > MAX_STOPS:
        raise InvalidRequest(f"'stop' has {len(stops)} texts; it takes at most {MAX_STOPS}", param="stop")
    if any(not text or len(text) > MAX_STOP_CHARS for text in stops):
        raise InvalidRequest(f"'stop' takes texts of 1 to {MAX_STOP_CHARS} characters", param="stop")
    return tuple(dict.fromkeys(stops))


def _logit_bias(biases: dict[str, float], n_vocab: int) -> tuple[tuple[int, float], ...]:
    if len(biases) > MAX_LOGIT_BIASES:
        raise InvalidRequest(f"'logit_bias' has {len(biases)} entries; it takes at most {MAX_LOGIT_BIASES}", param="logit_bias")
    return tuple((_biased_token(key, n_vocab), _bias(key, bias)) for key, bias in biases.items())


def _biased_token(key: str, n_vocab: int) -> int:
    if not (key.isascii() and key.isdecimal() and len(key) <= 10 and int(key) < n_vocab):
        raise InvalidRequest(f"'logit_bias' names {shown(key)!r}; it takes token ids from 0 to {n_vocab - 1}", param="logit_bias")
    return int(key)


def _bias(key: str, bias: float) -> float:
    if not -100 <= bias <= 100:
        raise InvalidRequest(f"'logit_bias' gives token {key} {bias}; it takes -100 to 100", param="logit_bias")
    return bias
