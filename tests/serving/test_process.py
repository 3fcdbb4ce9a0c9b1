"""The engine process must not go on with a thread less: whatever ends one of its threads ends it, visibly."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from runner.config import EngineConfig, ModelFile
from runner.engine.sampling import SamplingParams
from runner.serving.protocol import (
    Configure,
    FrameReader,
    FromEngine,
    LoadFailed,
    Ready,
    Refused,
    Submit,
    TextPrompt,
    ToEngine,
    frame,
)
from tests.fakes import model_info

CONFIGURE = Configure(EngineConfig(model=ModelFile("none.gguf", 0, 1), model_name="none"))
SUBMIT = Submit(request_id="a", prompt=TextPrompt("hi"), sampling=SamplingParams())

# An engine whose model is played: its decode loop waits, its prepare thread does what a test says.
ENGINE = """
import threading, time
from queue import SimpleQueue
from types import SimpleNamespace
from runner.errors import ConfigError, InvalidRequest
from runner.serving import prepare, process
from tests.fakes import model_info

class Loop:
    inbox = SimpleQueue()
    def run(self):
        time.sleep(60)

class Preparer:
    def prepare(self, submit, *_):
        raise InvalidRequest("a template said \\ud800")

def load(config, *, clock, progress, native):
    return SimpleNamespace(info=model_info(), preparer=Preparer(), make_loop=lambda emit: Loop())

process.load_engine = load
FAULT
process.engine_main()
"""


def started(fault: str) -> "subprocess.Popen[bytes]":
    """Such an engine, with pipes."""
    command = [sys.executable, "-c", ENGINE.replace("FAULT", fault)]
    root = Path(__file__).parents[2]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=root)


def run_engine(fault: str, sent: bytes) -> tuple[int, list[FromEngine], str]:
    """Exit code, messages and standard error of an engine that is sent these frames and then left alone until it ends."""
    with started(fault) as engine:
        assert engine.stdin is not None
        assert engine.stdout is not None
        assert engine.stderr is not None
        engine.stdin.write(sent)
        engine.stdin.flush()
        try:
            engine.wait(20)
        finally:
            engine.kill()
        messages = [decoded(found) for found in FrameReader().feed(engine.stdout.read())]
        return engine.returncode, messages, engine.stderr.read().decode()


def decoded(payload: bytes) -> FromEngine:
    """One message."""
    return msgspec.msgpack.decode(payload, type=FromEngine)


def framed(*messages: ToEngine) -> bytes:
    """Frames as the front sends them."""
    return b"".join(frame(msgspec.msgpack.encode(message)) for message in messages)


@pytest.mark.parametrize(
    ("fault", "sent", "words"),
    [
        ("", b"\xff" * 8, "ValueError: a frame of"),
        ("", framed(SUBMIT), "AssertionError"),
        ("", framed(CONFIGURE) + b"\xff" * 8, "ValueError: a frame of"),
        ("", framed(CONFIGURE) + frame(b"\xc1"), "DecodeError"),
        ("", framed(CONFIGURE, CONFIGURE), "a second Configure"),
        ("prepare.PrepareThread._run = lambda self: 1 / 0", framed(CONFIGURE), "ZeroDivisionError"),
        ("Preparer.prepare = lambda *_: exit(0)", framed(CONFIGURE, SUBMIT), "SystemExit"),
        ("process.ModelInfo = 0; model_info = lambda: object()", framed(CONFIGURE), "TypeError"),
        ("process.load_engine = lambda *_, **__: 1 / 0", framed(CONFIGURE), "ZeroDivisionError"),
        ("Loop.run = lambda self: 1 / 0", framed(CONFIGURE), "ZeroDivisionError"),
        ("Loop.run = lambda self: None", framed(CONFIGURE), "the decode loop has ended"),
    ],
    ids=[
        "first frame",
        "no Configure",
        "later frame",
        "message",
        "second Configure",
        "prepare thread start",
        "prepare thread",
        "writer",
        "load",
        "decode loop",
        "loop's end",
    ],
)
def test_a_fault_in_any_thread_ends_the_process_with_its_traceback(fault: str, sent: bytes, words: str) -> None:
    returncode, _, stderr = run_engine(fault, sent)
    assert returncode == 70
    assert "Traceback (most recent call last)" in stderr
    assert words in stderr


def test_an_error_whose_text_is_no_unicode_reaches_the_front() -> None:
    with started("") as engine:
        assert engine.stdin is not None
        assert engine.stdout is not None
        engine.stdin.write(framed(CONFIGURE, SUBMIT))
        engine.stdin.flush()
        frames = FrameReader()
        messages: list[FromEngine] = []
        while len(messages) < 2 and (data := os.read(engine.stdout.fileno(), 1 << 16)):
            messages += map(decoded, frames.feed(data))
        engine.kill()
    assert messages == [Ready(model_info()), Refused("a", "invalid_request_error", "a template said \ufffd", None)]


def test_a_load_error_is_told_with_its_kind_and_hint() -> None:
    fault = """
def load(config, *, clock, progress, native):
    raise ConfigError("--device is 'x'", hint="slotfile doctor")
process.load_engine = load
"""
    returncode, messages, stderr = run_engine(fault, framed(CONFIGURE))
    assert (returncode, stderr) == (3, "")
    assert messages == [LoadFailed("--device is 'x'", is_final=True, code="config_error", hint="slotfile doctor")]
