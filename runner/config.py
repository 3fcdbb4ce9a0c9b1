"""What the person who starts the program can set: one table of settings, and the typed values that come out of it.

The table is the only place that knows an option's name, environment variable, default and help text; the command line,
the documentation test and `slotfile info` are made from it. No other module reads the environment.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import msgspec

from runner.errors import ConfigError

ENV_PREFIX: Final = "SLOTFILE_"
MAX_SLOTS: Final = 256
DEFAULT_PORT: Final = 8080
# Enough for 300,000 tokens even where every character of the text is escaped; a slot holds 4,096 unless told otherwise.
DEFAULT_MAX_BODY: Final = 8 * 1024 * 1024


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
    seed: int | None = None
    chat_template: str | None = None
    sampling: SamplingDefaults = SamplingDefaults()


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the HTTP server is told at its start."""

    host: str | None = None  # None: 127.0.0.1 and ::1
    port: int = DEFAULT_PORT
    api_keys: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    max_body_bytes: int = DEFAULT_MAX_BODY
    max_queue: int = 256
    drain_timeout_s: float = 0.0


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """What the person at the terminal asks of every answer. `max_tokens` None: until the slot is full."""

    system: str = ""
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Setting:
    """One option. `name` is the long option without dashes; `SLOTFILE_` plus the name in capitals is its environment variable."""

    name: str
    kind: Literal["str", "int", "float", "path", "choice", "list"]
    help: str
    default: str | int | float | None = None
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
    Setting("seed", "int", "seed for requests that bring none (default: a new one for each request)", min=0, max=2**32 - 2),
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
    Setting("api-key-file", "path", "file with one API key a line"),
    Setting("allowed-host", "list", "further name that clients may use in the Host header; may be given several times"),
    Setting("cors-origin", "list", "web origin that may call this server from a browser; may be given several times"),
    Setting("max-body", "int", "largest request body in bytes", default=DEFAULT_MAX_BODY, min=1024, max=1 << 28),
    Setting("max-queue", "int", "requests that may wait for a slot before new ones get 503", default=256, min=0, max=100_000),
    Setting("drain-timeout", "float", "seconds that running requests may go on after SIGTERM", default=0.0, min=0, max=86_400),
)

LOG_SETTINGS: Final = (
    Setting("log-file", "path", "file for the log (default: standard error; while the terminal chat runs, a file in the state directory)"),
    Setting("log-level", "choice", "least severe level to log", default="info", choices=("debug", "info", "warning", "error")),
)

ANSWER_SETTINGS: Final = (
    Setting("system", "str", "system prompt of the terminal chat or of `run`"),
    Setting("max-tokens", "int", "longest answer at the terminal in tokens (default: until the slot is full)", min=1, max=1 << 30),
)


def read_api_keys(keys: tuple[str, ...], file: Path | None) -> tuple[str, ...]:
    """Join keys given as options with those of a file (one a line, `#` starts a comment). Raises ConfigError."""
    found = list(keys)
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"The API key file {file} cannot be read: {error}") from error
        found += [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
        if not found:
            raise ConfigError(f"The API key file {file} holds no key")
    for key in found:
        if not key.isascii() or not key.isprintable() or not key or " " in key:
            raise ConfigError("An API key must be of printable ASCII characters without spaces")
    return tuple(dict.fromkeys(found))


def parse_gpu_layers(text: str) -> int | None:
    """`auto` -> None, a number -> int. Raises ConfigError."""
    if text == "auto":
        return None
    if text.isdecimal() and int(text) <= 10_000:
        return int(text)
    raise ConfigError(f"--gpu-layers is {text!r}; it takes 'auto' or a whole number from 0 to 10000")
