"""Frames, however the bytes arrive."""

import msgspec
import pytest

from runner.config import SERVER_SETTINGS, EngineConfig, ModelFile
from runner.engine.sampling import SamplingParams
from runner.serving import protocol
from runner.serving.protocol import (
    MAX_FRAME_BYTES,
    Accepted,
    Cancel,
    ChatPrompt,
    Configure,
    Delta,
    Failed,
    Finished,
    FrameReader,
    FrameWriter,
    FromEngine,
    LoadFailed,
    LoadProgress,
    Refused,
    Stamps,
    StepEvents,
    Submit,
    TextPrompt,
    ToEngine,
    TokenPrompt,
    frame,
)

TO_ENGINE = [
    Configure(EngineConfig(model=ModelFile("m.gguf", 65536, 10), model_name="m")),
    Submit(request_id="a", prompt=ChatPrompt([{"role": "user", "content": "hi"}]), sampling=SamplingParams(), stop=("x",)),
    Submit(request_id="b", prompt=TextPrompt("hi"), sampling=SamplingParams(logit_bias=((5, -1.0),)), max_tokens=3),
    Submit(request_id="c", prompt=TokenPrompt([1, 2]), sampling=SamplingParams(), domain="d", session="s", is_stateless=True),
    Submit(request_id="d", prompt=ChatPrompt([{"role": "user", "content": "hi"}], truncates=True), sampling=SamplingParams()),
    Cancel("a"),
]
FROM_ENGINE = [
    LoadProgress(0.5),
    LoadFailed("no", is_final=True),
    Accepted("a", 7),
    Accepted("a", 7, 12),
    Refused("a", "invalid_request_error", "no", "messages"),
    StepEvents(["a"], [Delta("a", "é", 1)], [Finished("b", "stop", 1, 0, 2, Stamps(1.0, 2.0, 3.0, 4.0, 5.0))], [Failed("c", "x", "y")]),
]


@pytest.mark.parametrize("message", TO_ENGINE, ids=lambda message: type(message).__name__)
def test_what_the_front_says_comes_back_equal(message: ToEngine) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=ToEngine) == message


@pytest.mark.parametrize("message", FROM_ENGINE, ids=lambda message: type(message).__name__)
def test_what_the_engine_says_comes_back_equal(message: FromEngine) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=FromEngine) == message


def test_frames_are_cut_right_at_every_split() -> None:
    payloads = [b"", b"a", b"bc" * 300]
    stream = b"".join(map(frame, payloads))
    for cut in range(len(stream) + 1):
        reader = FrameReader()
        assert [*reader.feed(stream[:cut]), *reader.feed(stream[cut:])] == payloads


def test_frames_are_cut_right_one_byte_at_a_time() -> None:
    reader = FrameReader()
    assert [found for byte in frame(b"abc") + frame(b"d") for found in reader.feed(bytes([byte]))] == [b"abc", b"d"]


def test_an_absurd_length_is_refused() -> None:
    with pytest.raises(ValueError, match="a frame of 4294967295 bytes"):
        list(FrameReader().feed(b"\xff\xff\xff\xff"))


@pytest.mark.parametrize(
    ("message", "kind", "expected"),
    [
        (Refused("a", "x", "half \ud83d", None), FromEngine, Refused("a", "x", "half \ufffd", None)),
        (StepEvents(deltas=[Delta("a", "\ud83d\ude00", 1)]), FromEngine, StepEvents(deltas=[Delta("a", "\U0001f600", 1)])),
        (LoadFailed("m", True, "c", "\udcff"), FromEngine, LoadFailed("m", True, "c", "\ufffd")),
        (
            Submit(request_id="a", prompt=ChatPrompt([{"role": "user", "\ud800": ["\udfff", 1, None]}]), sampling=SamplingParams()),
            ToEngine,
            Submit(request_id="a", prompt=ChatPrompt([{"role": "user", "\ufffd": ["\ufffd", 1, None]}]), sampling=SamplingParams()),
        ),
        (
            Configure(EngineConfig(model=ModelFile("\udcff.gguf", 0, 1), model_name="m")),
            ToEngine,
            Configure(EngineConfig(model=ModelFile("\ufffd.gguf", 0, 1), model_name="m")),
        ),
    ],
    ids=["refusal", "pair", "hint", "messages", "path"],
)
def test_lone_surrogates_stop_no_message(message: ToEngine | FromEngine, kind: type, expected: ToEngine | FromEngine) -> None:
    (payload,) = FrameReader().feed(FrameWriter().frame(message))
    assert msgspec.msgpack.decode(payload, type=kind) == expected


def test_a_message_that_the_peer_would_not_take_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "MAX_FRAME_BYTES", 10)
    assert len(frame(bytes(10))) == 14
    with pytest.raises(ValueError, match="a message has 11 bytes; the limit is 10"):
        frame(bytes(11))


def test_the_largest_body_that_can_be_configured_fits_a_frame() -> None:
    (setting,) = [setting for setting in SERVER_SETTINGS if setting.name == "max-body"]
    assert setting.max is not None
    assert setting.max * 2 <= MAX_FRAME_BYTES
