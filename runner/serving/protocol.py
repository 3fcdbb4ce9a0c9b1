"""What the front and the engine say to each other: msgspec structs as tagged unions, msgpack in frames of a 4-byte length.

front -> engine: Configure (once, first), Submit, Cancel, Flush (last).
engine -> front: LoadProgress*, then Ready or LoadFailed; then Accepted or Refused for each Submit, and one StepEvents a step.
"""

from collections.abc import Iterable, Iterator
from typing import Any, Final

import msgspec

from runner.config import DEFAULT_ITL_TARGET_S, CacheType, EngineConfig, SamplingDefaults
from runner.engine.order import NOBODY, Owner, Tier
from runner.engine.sampling import SamplingParams

MAX_FRAME_BYTES: Final = 1 << 30
LENGTH_BYTES: Final = 4
# What the end of an engine may take that writes cells to disk.
FLUSH_S: Final = 20.0


class ChatPrompt(msgspec.Struct, frozen=True, tag="chat"):
    """Messages for the chat template: dicts with `role`, `content` and whatever the template knows beside them.

    `truncates`: oldest turns may go where they do not fit (serving/truncation.py).
    """

    messages: list[dict[str, Any]]
    truncates: bool = False


class TextPrompt(msgspec.Struct, frozen=True, tag="text"):
    """Text as it stands: special tokens in it are parsed, BOS is added where the model wants one and the text has none."""

    text: str


class TokenPrompt(msgspec.Struct, frozen=True, tag="tokens"):
    """Token ids as they stand."""

    tokens: list[int]


Prompt = ChatPrompt | TextPrompt | TokenPrompt


class Configure(msgspec.Struct, frozen=True, tag="configure"):
    """The first frame an engine reads."""

    config: EngineConfig


class Submit(msgspec.Struct, frozen=True, kw_only=True, tag="submit"):
    """One generation. `max_tokens` None: until the slot's end; more than that takes a context shift. `echo` sends the prompt's text first.

    `seed_offset` is added to the request's seed or the server's: the choices of one request differ, and can be had again.
    `arrived_at` is when the client took it over (see Stamps); it stays when a second engine gets it.
    `domain` is the trust domain inside which cells are shared, `session` (empty: none) a conversation that comes back; both are digests or
    empty, never a client's words. The cells of what `is_stateless` are forgotten at its end.
    """

    request_id: str
    prompt: Prompt
    sampling: SamplingParams
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    cache_prompt: bool = True
    echo: bool = False
    seed_offset: int = 0
    arrived_at: float = 0.0
    tier: Tier = Tier.NORMAL
    owner: Owner = NOBODY
    domain: str = ""
    session: str = ""
    is_stateless: bool = False


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """End one request at whatever stage it is. Unknown ids are ignored: the request may have ended meanwhile."""

    request_id: str


class Flush(msgspec.Struct, frozen=True, tag="flush"):
    """Write to disk what is worth it, then end: what an engine with `--kv-dir` is told where it has the time."""


ToEngine = Configure | Submit | Cancel | Flush


class DeviceInfo(msgspec.Struct, frozen=True):
    """One back-end device: `kind` is cpu, gpu, igpu or accel; memory in bytes, 0 where the driver does not say."""

    name: str
    description: str
    kind: str
    memory_free: int
    memory_total: int


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What was loaded and what was chosen for this machine. Sizes in bytes; `notes` are sentences for a person.

    A token of the vocabulary stands for `longest_piece_bytes` of a text at most and for `word_starts_per_token` places where
    something follows a space (0: that is not known), besides `unknown_bytes`,
    of which the tokeniser makes nothing.
    """

    name: str
    path: str
    architecture: str
    description: str
    n_params: int
    n_vocab: int
    longest_piece_bytes: int
    word_starts_per_token: int
    unknown_bytes: bytes
    n_ctx_train: int
    size_bytes: int
    has_chat_template: bool
    bos: str
    eos: str
    n_slots: int
    n_ctx_slot: int
    n_batch: int
    n_threads: int
    n_threads_batch: int
    n_gpu_layers: int
    flash_attn: bool
    kv_bytes: int
    n_swa: int
    devices: list[DeviceInfo]
    cpu_library: str
    llama_cpp_version: str
    load_s: float
    sampling: SamplingDefaults
    notes: list[str]
    itl_target_s: float = DEFAULT_ITL_TARGET_S
    prompt_chunk: int = 0
    cache_type_k: CacheType = "f16"
    cache_type_v: CacheType = "f16"
    swa_full: bool = False
    context_shift: bool = False
    kv_pool: int = 0


class LoadProgress(msgspec.Struct, frozen=True, tag="loading"):
    """`fraction` of the weights that are read, 0 to 1."""

    fraction: float


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The engine takes requests from now on."""

    info: ModelInfo


class LoadFailed(msgspec.Struct, frozen=True, tag="load_failed"):
    """The engine ends after this. `is_final`: trying again cannot help. The rest is the RunnerError's."""

    message: str
    is_final: bool
    code: str = "model_error"
    hint: str | None = None


class Accepted(msgspec.Struct, frozen=True, tag="accepted"):
    """The prompt is rendered, tokenised and fits a slot: from here on a failure is an error event, not a status.

    `n_dropped` of its messages had to go for that.
    """

    request_id: str
    n_prompt: int
    n_dropped: int = 0


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The request can never succeed. `code` is the `code` of a RunnerError subclass."""

    request_id: str
    code: str
    message: str
    param: str | None


class Delta(msgspec.Struct, frozen=True, array_like=True):
    """Text that became complete in one step. `n_tokens` may be positive with empty text (held back) and the reverse (flushed)."""

    request_id: str
    text: str
    n_tokens: int


class Stamps(msgspec.Struct, frozen=True, array_like=True):
    """Monotonic instants in seconds (one clock for all processes of a machine). 0.0: never got there.

    `admitted_at` is its first slot; `parked_s` seconds after that it had none.
    """

    arrived_at: float
    prepared_at: float
    admitted_at: float
    first_token_at: float
    finished_at: float
    parked_s: float = 0.0


class Finished(msgspec.Struct, frozen=True, array_like=True):
    """The end of a request. `reason`: stop, length or cancelled."""

    request_id: str
    reason: str
    n_prompt: int
    n_cached: int
    n_completion: int
    stamps: Stamps


class Failed(msgspec.Struct, frozen=True, array_like=True):
    """The end of one request by a fault. `code` is the `code` of a RunnerError subclass."""

    request_id: str
    code: str
    message: str


class SlotState(msgspec.Struct, frozen=True, array_like=True):
    """One slot as `/slots` shows it. `state`: idle, prefill or decode; `n_cells` tokens lie in its KV cells."""

    slot_id: int
    state: str
    request_id: str
    n_cells: int
    n_prompt: int
    n_cached: int
    n_decoded: int


class Counters(msgspec.Struct, frozen=True, kw_only=True):
    """Totals since this engine started. Times in seconds.

    `itl_counts` are the gaps between two tokens of a sequence by the buckets of `timings.ITL_BUCKETS_S` (not cumulative, the
    last one is beyond all of them), `itl_s` their sum.
    """

    n_steps: int = 0
    n_passes: int = 0
    n_decode_rows: int = 0
    n_prompt_rows: int = 0
    n_cached_tokens: int = 0
    n_moves: int = 0
    n_parks: int = 0
    n_forks: int = 0
    n_saves: int = 0
    n_loads: int = 0
    n_shifts: int = 0
    n_violations: int = 0
    decode_s: float = 0.0
    sample_s: float = 0.0
    move_s: float = 0.0
    python_s: float = 0.0
    itl_s: float = 0.0
    itl_counts: list[int] = []


class HostState(msgspec.Struct, frozen=True, array_like=True):
    """Host memory for cells: saved states, bytes of these and of checkpoints and their bound, and of them those of parked sequences."""

    n_states: int = 0
    used_bytes: int = 0
    limit_bytes: int = 0
    parked_bytes: int = 0


class Snapshot(msgspec.Struct, frozen=True):
    """The engine as of the last step: taken at most every 50 ms while busy, when it falls idle, and then once a second.

    `n_waiting` sequences have no slot, `n_parked` of them had one.
    `queue` are the ids of those without a slot in the order in which they will get one, as far as it can be told (empty where they are
    too many); None: as it was said last.
    Of `n_used_cells` those that several slots share count once.
    `longest_step_s` is what the slowest step should take: the front ends an engine that is silent for ten times as long.
    """

    slots: list[SlotState]
    n_waiting: int
    counters: Counters
    longest_step_s: float
    n_parked: int = 0
    host: HostState = HostState()
    queue: list[str] | None = None
    n_used_cells: int = 0


class StepEvents(msgspec.Struct, tag="step"):
    """All that one step brought, in the order: placed, deltas, ends. `placed` requests got a slot and are being computed."""

    placed: list[str] = []
    deltas: list[Delta] = []
    finished: list[Finished] = []
    failed: list[Failed] = []
    snapshot: Snapshot | None = None


FromEngine = LoadProgress | Ready | LoadFailed | Accepted | Refused | StepEvents


class FrameReader:
    """Cuts a byte stream into frames. `feed` takes any split of the stream."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterable[bytes]:
        """Each frame that became whole. Raises ValueError, when it is reached, on a length no peer of ours sends."""
        if not self._buffer and int.from_bytes(data[:LENGTH_BYTES], "little") == len(data) - LENGTH_BYTES:
            return (data[LENGTH_BYTES:],)  # one frame, as nearly every read of a step's events brings
        return self._cut(data)

    def _cut(self, data: bytes) -> Iterator[bytes]:
        self._buffer += data
        while len(self._buffer) >= LENGTH_BYTES:
            length = int.from_bytes(self._buffer[:LENGTH_BYTES], "little")
            if length > MAX_FRAME_BYTES:
                raise ValueError(f"a frame of {length} bytes is announced; the limit is {MAX_FRAME_BYTES}")
            if len(self._buffer) < LENGTH_BYTES + length:
                return
            frame = bytes(self._buffer[LENGTH_BYTES : LENGTH_BYTES + length])
            del self._buffer[: LENGTH_BYTES + length]
            yield frame


class FrameWriter:
    """Makes frames of messages. Text that UTF-8 cannot hold does not stop one: it may come from a template, an error or a command line."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()

    def frame(self, message: ToEngine | FromEngine) -> bytes:
        """One message as one frame; lone surrogates in it become U+FFFD."""
        try:
            return frame(self._encoder.encode(message))
        except UnicodeEncodeError:
            return frame(self._encoder.encode(_printable(msgspec.to_builtins(message, builtin_types=(bytes,)))))


def frame(payload: bytes) -> bytes:
    """Put the length before an encoded message. Raises ValueError for one that the peer would not take."""
    if len(payload) > MAX_FRAME_BYTES:
        raise ValueError(f"a message has {len(payload)} bytes; the limit is {MAX_FRAME_BYTES}")
    return len(payload).to_bytes(LENGTH_BYTES, "little") + payload


def _printable(value: Any) -> Any:
    """A tree of plain values, with every text in it made valid (halves of a pair that belong together are joined)."""
    match value:
        case str():
            return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        case dict():
            return {_printable(key): _printable(item) for key, item in value.items()}
        case list() | tuple():
            return [_printable(item) for item in value]
        case _:
            return value
