"""What happens when the engine process ends: who gets an answer, who gets an error, and who is left running."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from runner.config import EngineConfig, ModelFile
from runner.errors import EngineCrashed, EngineStopped, ModelError
from runner.serving.child import EngineChild
from runner.serving.client import EngineClient, EngineState, RestartPolicy
from runner.serving.protocol import Submit, TextPrompt
from tests.conftest import engine_config
from tests.serving.client_rig import GREEDY, Heard, answer, ask

COUNTING = "1, 2, 3, 4, 5, 6,"
NO_MODEL = EngineConfig(model=ModelFile("none.gguf", 0, 1), model_name="none")
AT_ONCE = RestartPolicy(delays_s=(0.0,))


@pytest_asyncio.fixture
async def engine(smollm2_path: Path) -> AsyncIterator[EngineClient]:
    """An engine that a test may kill, started again at once."""
    client = EngineClient(engine_config(smollm2_path, n_slots=4, n_ctx_slot=512), policy=AT_ONCE)
    await client.start()
    await client.wait_ready()
    yield client
    await client.close()


def kill(client: EngineClient) -> None:
    """Kill -9."""
    assert client.pid is not None
    os.kill(client.pid, signal.SIGKILL)


async def until(condition: Callable[[], bool]) -> None:
    """Look every 2 ms."""
    while not condition():  # noqa: ASYNC110 - nothing announces these states
        await asyncio.sleep(0.002)


async def test_streams_end_with_an_error_and_waiters_are_answered_by_the_next_engine(engine: EngineClient) -> None:
    streams = [ask(engine, f"{COUNTING} {i},", 400, ignore_eos=True)[1] for i in range(4)]
    await asyncio.gather(*(heard.first.wait() for heard in streams))
    waiting = [ask(engine, COUNTING, 3)[1] for _ in range(4)]
    await asyncio.sleep(0.1)
    killed_at = time.monotonic()
    kill(engine)
    for heard in streams:
        with pytest.raises(EngineStopped, match="ended while this request was being answered"):
            await heard.end()
    ninth = ask(engine, COUNTING, 3)[1]
    for heard in (*waiting, ninth):
        stamps = (await heard.end()).stamps
        assert heard.text == " 7,"
        assert stamps.prepared_at > killed_at
        assert (stamps.arrived_at < killed_at) == (heard is not ninth)
    assert engine.n_restarts == 1


async def test_a_request_that_ran_at_two_deaths_is_not_tried_again_and_one_that_waited_is(engine: EngineClient) -> None:
    long_prompts = [ask(engine, "river stone " * 240 + str(i), 5)[1] for i in range(4)]
    waiting = ask(engine, COUNTING, 3)[1]
    for n_deaths in (1, 2):
        await until(lambda: engine.state is EngineState.READY and all(live.is_placed for live in list(engine._requests)[:4]))
        kill(engine)
        await until(lambda: engine.n_restarts >= n_deaths)  # noqa: B023 - called before the loop goes on
    outcomes = await asyncio.gather(*(heard.end() for heard in long_prompts), return_exceptions=True)
    assert any(isinstance(outcome, EngineCrashed) for outcome in outcomes)
    await waiting.end()
    assert waiting.text == " 7,"


async def test_a_cancelled_request_does_not_come_back_with_the_next_engine(engine: EngineClient) -> None:
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGSTOP)
    request_id, heard = ask(engine, COUNTING, 3)
    engine.cancel(request_id)
    kill(engine)
    assert (await heard.end()).reason == "cancelled"
    assert (await answer(engine, COUNTING, 3))[0] == " 7,"


async def test_an_engine_that_stands_still_is_ended_and_replaced(smollm2_path: Path) -> None:
    policy = RestartPolicy(min_silence_s=4.0, silence_per_step=0.0)
    engine = EngineClient(engine_config(smollm2_path, n_slots=4, n_ctx_slot=512), policy=policy)
    await engine.start()
    await engine.wait_ready()
    stream = ask(engine, COUNTING, 400, ignore_eos=True)[1]
    await stream.first.wait()
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGSTOP)
    with pytest.raises(EngineStopped):
        await stream.end(20)
    assert (await answer(engine, COUNTING, 3))[0] == " 7,"
    await engine.close()


async def test_closing_ends_the_process_and_its_requests(smollm2_path: Path) -> None:
    client = EngineClient(engine_config(smollm2_path, n_slots=1, n_ctx_slot=512))
    await client.start()
    await client.wait_ready()
    heard = ask(client, COUNTING, 400, ignore_eos=True)[1]
    await heard.first.wait()
    pid = client.pid
    assert pid is not None
    started = time.monotonic()
    await client.close()
    assert time.monotonic() - started < 2.0
    assert not psutil.pid_exists(pid)
    with pytest.raises(EngineStopped):
        await heard.end()
    with pytest.raises(EngineStopped):
        ask(client, COUNTING)


async def test_a_file_that_cannot_be_loaded_is_told_once_and_not_tried_again(tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(b"GGUF" + bytes(100))
    client = EngineClient(engine_config(damaged, n_slots=1, n_ctx_slot=512))
    await client.start()
    with pytest.raises(ModelError, match="could not load the model"):
        await client.wait_ready()
    assert isinstance(await client.wait_failed(), ModelError)
    assert client.n_restarts == 0
    await client.close()


def scripted(script: str) -> partial[Coroutine[None, None, EngineChild]]:
    """A child that runs this in place of an engine."""
    return partial(EngineChild.start, command=(sys.executable, "-c", script))


async def test_an_engine_that_dies_three_times_at_load_is_given_up_with_its_last_words() -> None:
    client = EngineClient(NO_MODEL, scripted("import sys; sys.stderr.write('out of luck\\n'); sys.exit(9)"), AT_ONCE)
    await client.start()
    with pytest.raises(ModelError, match="exit code 9 while it loaded the model: out of luck"):
        await client.wait_ready()
    assert client.n_restarts == 2
    await client.close()


@pytest.mark.parametrize("garbage", [r"\xff" * 8, r"\x01\0\0\0\xc1", r"\x02\0\0\0\x92\x01"], ids=["length", "msgpack", "type"])
async def test_an_engine_that_sends_what_is_no_message_is_ended(garbage: str) -> None:
    script = f"import sys, time; sys.stdout.buffer.write(b'{garbage}'); sys.stdout.flush(); time.sleep(60)"
    client = EngineClient(NO_MODEL, scripted(script), AT_ONCE)
    await client.start()
    with pytest.raises(ModelError, match="the engine sent what is no message"):
        await asyncio.wait_for(client.wait_ready(), 10)
    await client.close()


async def test_a_command_that_cannot_be_run_is_given_up_with_the_systems_words(tmp_path: Path) -> None:
    client = EngineClient(NO_MODEL, partial(EngineChild.start, command=(str(tmp_path / "gone"),)), AT_ONCE)
    await client.start()
    with pytest.raises(ModelError, match="could not be started: No such file or directory"):
        await asyncio.wait_for(client.wait_ready(), 10)
    await client.close()


async def test_a_sink_that_raises_loses_its_own_request_only(engine: EngineClient) -> None:
    class Broken(Heard):
        def on_text(self, text: str, n_tokens: int) -> None:
            raise RuntimeError("a bug in a handler")

    broken = Broken()
    engine.submit(Submit(request_id="broken", prompt=TextPrompt(COUNTING), sampling=GREEDY, max_tokens=50), broken)
    other = ask(engine, COUNTING, 3)[1]
    assert (await broken.end()).reason == "cancelled"
    await other.end()
    assert other.text == " 7,"


FRONT = """
import asyncio, sys
from pathlib import Path
from runner.serving.client import EngineClient
from tests.conftest import engine_config
from tests.serving.client_rig import ask

async def main() -> None:
    client = EngineClient(engine_config(Path(sys.argv[1]), n_slots=1, n_ctx_slot=512))
    await client.start()
    await client.wait_ready()
    heard = ask(client, "1, 2, 3,", 480, ignore_eos=True)[1]
    await heard.first.wait()
    print(client.pid, flush=True)
    await heard.end()

asyncio.run(main())
"""


def test_the_engine_goes_when_its_front_is_killed_even_in_the_middle_of_a_decode(smollm2_path: Path) -> None:
    front = subprocess.Popen([sys.executable, "-c", FRONT, str(smollm2_path)], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2])
    assert front.stdout is not None
    pid = int(front.stdout.readline())
    front.kill()
    front.wait()
    front.stdout.close()
    deadline = time.monotonic() + 2.0
    while psutil.pid_exists(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not psutil.pid_exists(pid)
