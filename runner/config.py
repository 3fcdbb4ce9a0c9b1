"""What the person who starts the program can set: one table of settings, and the typed values that come out of it.

The table is the only place that knows an option's name, environment variable, default and help text; the command line,
the documentation test and `slotfile info` are made from it. No other module reads the environment.
"""

import hashlib
from dataclasses import dataclass
from typing import Final, Literal, get_args

import msgspec

from runner.errors import ConfigError

ENV_PREFIX: Final = "SLOTFILE_"
MAX_SLOTS: Final = 256
DEFAULT_PORT: Final = 8080
# Enough for 300,000 tokens even where every character of the text is escaped; a slot holds 4,096 unless told otherwise.
DEFAULT_MAX_BODY: Final = 8 * 1024 * 1024
# Chosen by what a stream sees beside a long prompt, and what that prompt waits (docs/log.md).
DEFAULT_ITL_TARGET_S: Final = 0.215
DEFAULT_QUEUE_TOKENS: Final = 1_000_000
MAX_DEADLINE_S: Final = 86_400
DEFAULT_KV_DIR_MIB: Final = 4096


class ModelFile(msgspec.Struct, frozen=True):
    """Where a GGUF lies: `length` bytes from `offset` of the file at `path` (a plain GGUF has offset 0)."""

    path: str
    offset: int
    length: int


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """What a request that does not say gets. The values are llama.cpp's own defaults; a model's manifest may bring others."""

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64


FlashAttn = Literal["auto", "on", "off"]
CacheType = Literal["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1"]
CACHE_TYPES: Final = get_args(CacheType)
PolicyName = Literal["fair", "priority", "fcfs"]
KvMode = Literal["partitioned", "unified"]


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the engine process is told at its start. `None` means: choose what fits this machine."""

    model: ModelFile
    model_name: str
    n_slots: int | None = None
    n_ctx_slot: int | None = None
    n_threads: int | None = None
    n_threads_batch: int | None = None
    n_batch: int = 512
    n_gpu_layers: int | None = None
    device: str | None = None
    flash_attn: FlashAttn = "auto"
    cache_type_k: CacheType = "f16"
    cache_type_v: CacheType = "f16"
    swa_full: bool = False
    kv: KvMode = "partitioned"
    kv_pool: int | None = None  # with unified cells only
    context_shift: bool = False
    seed: int | None = None
    chat_template: str | None = None
    sampling: SamplingDefaults = SamplingDefaults()
    itl_target_s: float = DEFAULT_ITL_TARGET_S
    prompt_chunk: int = 0  # 0: by itl_target_s
    policy: PolicyName = "fair"
    share_grace_s: float = 1.0
    max_running_per_client: int = 0  # 0: no limit
    kv_host_mib: int | None = None
    checks_each_step: bool = False
    kv_dir: str | None = None
    kv_dir_mib: int = DEFAULT_KV_DIR_MIB
    model_sha256: str | None = None  # of the GGUF, where the model's manifest says it


TierName = Literal["high", "normal", "low", "batch"]


class ApiKey(msgspec.Struct, frozen=True, kw_only=True):
    """One key, and what its owner may do. `name` stands for it in logs and shares; keys of one name are one client."""

    secret: str
    name: str
    weight: float = 1.0
    best_tier: TierName = "normal"
    is_admin: bool = False

    @classmethod
    def plain(cls, secret: str) -> "ApiKey":
        """A key without attributes; its name says nothing of it."""
        return cls(secret=secret, name=f"key:{hashlib.sha256(secret.encode()).hexdigest()[:8]}")


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the HTTP server is told at its start. Where 0 is no limit, the comment says so."""

    host: str | None = None  # None: 127.0.0.1 and ::1
    port: int = DEFAULT_PORT
    api_keys: tuple[str, ...] = ()
    file_keys: tuple[ApiKey, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    trusted_proxies: tuple[str, ...] = ()
    max_body_bytes: int = DEFAULT_MAX_BODY
    max_queue: int = 256
    max_queue_tokens: int = DEFAULT_QUEUE_TOKENS  # 0: no limit; so are those below
    max_waiting_per_client: int = 0
    tokens_per_minute: int = 0
    queue_timeout_s: float = 0.0
    request_timeout_s: float = 0.0
    drain_timeout_s: float = 0.0
    isolate_clients: bool = False
    is_stateless: bool = False

    @property
    def keys(self) -> tuple[ApiKey, ...]:
        """All keys; what the file says of one counts, where it was given twice."""
        named = [*(ApiKey.plain(secret) for secret in self.api_keys), *self.file_keys]
        return tuple({key.secret: key for key in named}.values())


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """What the person at the terminal asks of every answer. `max_tokens` None: until the slot is full."""

    system: str = ""
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Setting:
    """One option. `name` is the long option without dashes; `SLOTFILE_` plus the name in capitals is its environment variable.

    A flag is on where it is typed, and takes 1, true, 0 or false in the environment and in a manifest.
    """

    name: str
    kind: Literal["str", "int", "float", "path", "directory", "choice", "list", "flag"]
    help: str
    default: str | int | float | bool | None = None
    short: str | None = None
    choices: tuple[str, ...] = ()
    min: float | None = None
    max: float | None = None

    @property
    def flag(self) -> str:
        """The long option as typed."""
        return f"--{self.name}"

    @property
    def env(self) -> str:
        """The environment variable that sets the same value."""
        return ENV_PREFIX + self.name.upper().replace("-", "_")


KV_DIR_SETTING: Final = Setting(
    "kv-dir",
    "directory",
    "directory that keeps conversations, their tokens and cells, beyond a restart; its owner's alone, mode 0700 (default: none)",
)

MODEL_SETTINGS: Final = (
    Setting("model", "path", "GGUF file to load instead of the one inside this executable", short="-m"),
    Setting(
        "slots",
        "int",
        "sequences that decode together, each with KV cells of its own (default: what fits memory, at most 4)",
        min=1,
        max=MAX_SLOTS,
    ),
    Setting("ctx", "int", "tokens a slot holds, enforced exactly (default: what memory and model hold, at most 4096)", min=16),
    Setting("threads", "int", "threads for computing (default: the CPUs this process may use)", min=1, max=512),
    Setting("threads-batch", "int", "threads for computing prompts (default: as --threads)", min=1, max=512),
    Setting("batch", "int", "prompt tokens computed in one step at most", default=512, min=32, max=8192),
    Setting("gpu-layers", "str", "layers to put on the GPU: auto, or a number", default="auto"),
    Setting("device", "str", "back-end device to use, as `doctor` names it; 'cpu' for none (default: the best one)"),
    Setting("flash-attn", "choice", "flash attention kernels", default="auto", choices=("auto", "on", "off")),
    Setting("cache-type-k", "choice", "type of the keys in the KV cache", default="f16", choices=CACHE_TYPES),
    Setting(
        "cache-type-v",
        "choice",
        "type of the values in the KV cache; a quantised one needs flash attention",
        default="f16",
        choices=CACHE_TYPES,
    ),
    Setting(
        "swa-full",
        "flag",
        "keep all cells of a slot in layers with a sliding window too: more memory, and every prefix can be used again",
        default=False,
    ),
    Setting(
        "kv",
        "choice",
        "KV cells of the slots: partitioned, a region for each, or unified, one pool where a common prefix lies once",
        default="partitioned",
        choices=("partitioned", "unified"),
    ),
    Setting(
        "kv-pool",
        "int",
        "tokens that the pool of --kv unified holds (default: --slots times --ctx, so that every slot can be full)",
        min=16,
        max=1 << 30,
    ),
    Setting(
        "context-shift",
        "flag",
        "where max_tokens is more than the slot has room for, forget the middle of the text and go on, instead of ending",
        default=False,
    ),
    Setting("seed", "int", "seed for requests that bring none (default: a new one for each request)", min=0, max=2**32 - 2),
    Setting(
        "itl-target",
        "float",
        "seconds between two tokens of a stream that a prompt computed meanwhile should not exceed",
        default=DEFAULT_ITL_TARGET_S,
        min=0,
        max=60,
    ),
    Setting(
        "prompt-chunk",
        "int",
        "prompt tokens computed in one step while others stream, at most; 0 is what --itl-target allows",
        default=0,
        min=0,
        max=8192,
    ),
    Setting("policy", "choice", "who gets the next slot", default="fair", choices=("fair", "priority", "fcfs")),
    Setting(
        "share-grace",
        "float",
        "seconds that a client below its share waits before one above its own gives a slot back; "
        "a twentieth of it where that one has more requests waiting",
        default=1.0,
        min=0,
        max=3600,
    ),
    Setting("max-running-per-client", "int", "slots that one client may hold at a time; 0 is no limit", default=0, min=0, max=MAX_SLOTS),
    Setting(
        "kv-host-mib",
        "int",
        "host memory in MiB for the cells of parked requests (default: a quarter of what is free at the start)",
        min=0,
        max=1 << 24,
    ),
    KV_DIR_SETTING,
    Setting(
        "kv-dir-mib",
        "int",
        "size of that directory in MiB at most; what was longest unused is deleted first",
        default=DEFAULT_KV_DIR_MIB,
        min=1,
        max=1 << 30,
    ),
    Setting("chat-template", "path", "file with a Jinja chat template that replaces the model's own"),
    Setting(
        "temperature",
        "float",
        "temperature of requests that bring none; 0 takes the likeliest token (default: the model's own, else 0.8)",
        min=0,
        max=100,
    ),
)

SERVER_SETTINGS: Final = (
    Setting("host", "str", "address to listen on (default: 127.0.0.1 and ::1)"),
    Setting("port", "int", "port to listen on; 0 takes a free one", default=DEFAULT_PORT, min=0, max=65535),
    Setting("api-key", "list", "key that clients must send as a bearer token; may be given several times"),
    Setting("api-key-file", "path", "file with one API key a line, and its attributes: name=, weight=, tier=, admin"),
    Setting("allowed-host", "list", "further name that clients may use in the Host header; may be given several times"),
    Setting("cors-origin", "list", "web origin that may call this server from a browser; may be given several times"),
    Setting("trusted-proxy", "list", "address or CIDR of a proxy whose X-Forwarded-For is believed; may be given several times"),
    Setting("max-body", "int", "largest request body in bytes", default=DEFAULT_MAX_BODY, min=1024, max=1 << 28),
    Setting("max-queue", "int", "requests that may wait for a slot before new ones get 503", default=256, min=0, max=100_000),
    Setting(
        "max-queue-tokens",
        "int",
        "prompt tokens that may wait for a slot before new ones get 503; 0 is no limit",
        default=DEFAULT_QUEUE_TOKENS,
        min=0,
        max=1 << 40,
    ),
    Setting(
        "max-waiting-per-client",
        "int",
        "requests of one client that may wait for a slot before it gets 429; 0 is no limit",
        default=0,
        min=0,
        max=100_000,
    ),
    Setting(
        "tokens-per-minute",
        "int",
        "prompt and answer tokens that one client may use in a minute before it gets 429; 0 is no limit",
        default=0,
        min=0,
        max=1 << 40,
    ),
    Setting("queue-timeout", "float", "seconds that a request may wait for a slot; 0 is no limit", default=0.0, min=0, max=MAX_DEADLINE_S),
    Setting("request-timeout", "float", "seconds that a request may take in all; 0 is no limit", default=0.0, min=0, max=MAX_DEADLINE_S),
    Setting("drain-timeout", "float", "seconds that running requests may go on after SIGTERM", default=0.0, min=0, max=86_400),
    Setting(
        "isolate-clients",
        "flag",
        "share computed prompts only among the requests of one API key, or of one address where no keys are set",
        default=False,
    ),
    Setting(
        "stateless",
        "flag",
        "share computed prompts only among the answers to one request, and forget them when it ends",
        default=False,
    ),
)

LOG_SETTINGS: Final = (
    Setting("log-file", "path", "file for the log (default: standard error; while the terminal chat runs, a file in the state directory)"),
    Setting("log-level", "choice", "least severe level to log", default="info", choices=("debug", "info", "warning", "error")),
)

ANSWER_SETTINGS: Final = (
    Setting("system", "str", "system prompt of the terminal chat or of `run`"),
    Setting("max-tokens", "int", "longest answer at the terminal in tokens (default: until the slot is full)", min=1, max=1 << 30),
)


def check_kv(config: EngineConfig) -> None:
    """Raises ConfigError where what was chosen of pool, slots and context shift does not go together."""
    if config.kv == "partitioned" and config.kv_pool is not None:
        raise ConfigError(
            f"--kv-pool is {config.kv_pool:,} and --kv is partitioned: there is no pool", hint="--kv unified, or no --kv-pool"
        )
    if config.kv_pool is not None and config.n_ctx_slot is not None and config.kv_pool < config.n_ctx_slot:
        raise ConfigError(
            f"--kv-pool is {config.kv_pool:,} and --ctx is {config.n_ctx_slot:,}: the pool must hold one full slot at least",
            hint=f"--kv-pool {config.n_ctx_slot}, or --ctx {config.kv_pool}",
        )
    if config.kv == "unified" and config.context_shift:
        raise ConfigError(
            "--context-shift cannot be used with --kv unified: cells that slots share cannot change their positions for one of them",
            hint="no --context-shift, or --kv partitioned",
        )


def parse_gpu_layers(text: str) -> int | None:
    """`auto` -> None, a number -> int. Raises ConfigError."""
    if text == "auto":
        return None
    if text.isdecimal() and int(text) <= 10_000:
        return int(text)
    raise ConfigError(f"--gpu-layers is {text!r}; it takes 'auto' or a whole number from 0 to 10000")
