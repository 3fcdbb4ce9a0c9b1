"""The client before an engine that a test plays: who is submitted when, who hears what, and when engines are started and given up."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable

import pytest

from runner.config import EngineConfig, ModelFile
from runner.errors import ConfigError, EngineCrashed, EngineStopped, InternalError, InvalidRequest, ModelError, RunnerError
from runner.serving.client import EngineClient, EngineState, RestartPolicy
from runner.serving.protocol import (
    Counters,
    Failed,
    Finished,
    LoadFailed,
    LoadProgress,
    Ready,
    Refused,
    Snapshot,
    Stamps,
    StepEvents,
    Submit,
    TextPrompt,
)
from tests.fakes import model_info
from tests.serving.client_rig import GREEDY, Heard, ask
from tests.serving.fake_child import STAMPS, Children, FakeChild

CONFIG = EngineConfig(model=ModelFile("m.gguf", 0, 1), model_name="m")
QUICK = RestartPolicy(delays_s=(0.0,), watch_every_s=0.001)
SNAPSHOT = Snapshot([], 0, Counters(), 0.1)


@pytest.fixture
def children() -> Children:
    """The engines of `client`."""
    return Children()


@pytest.fixture
async def client(children: Children) -> AsyncIterator[EngineClient]:
    """A client whose first engine loads."""
    client = EngineClient(CONFIG, children.start, QUICK)
    await client.start()
    yield client
    await client.close()


async def settle() -> None:
    """Let restarts without a delay happen."""
    for _ in range(10):
        await asyncio.sleep(0)


async def next_engine(children: Children, *, is_ready: bool = True) -> FakeChild:
    """Kill the present engine; its successor."""
    children.last.die()
    await settle()
    if is_ready:
        children.last.ready()
    return children.last


async def error_of(heard: Heard) -> RunnerError:
    """The error that ended it."""
    with pytest.raises(RunnerError) as raised:
        await heard.end(1)
    return raised.value


def asked(client: EngineClient, *names: str) -> list[Heard]:
    """Requests of these ids."""
    return [ask(client, "hi", request_id=name)[1] for name in names]


# -- order and resubmission --------------------------------------------------------------------------------------------


async def test_requests_wait_for_the_load_and_go_in_their_order(client: EngineClient, children: Children) -> None:
    asked(client, "a", "b")
    assert children.last.sent == []
    children.last.ready()
    asked(client, "c")
    assert children.last.submitted == ["a", "b", "c"]


async def test_the_next_engine_gets_who_had_no_text_in_the_old_order_before_those_that_came_meanwhile(
    client: EngineClient, children: Children
) -> None:
    children.last.ready()
    heards = dict(zip("abcd", asked(client, *"abcd"), strict=True))
    children.last.accept(*"abc")
    children.last.place("a", "b")
    children.last.text("b")
    children.last.finish("a")
    children.last.die()
    asked(client, "e")
    await settle()
    children.last.ready()
    assert children.last.submitted == ["c", "d", "e"]
    assert isinstance(await error_of(heards["b"]), EngineStopped)


async def test_text_that_is_empty_does_not_count_as_sent(client: EngineClient, children: Children) -> None:
    children.last.ready()
    (heard,) = asked(client, "a")
    children.last.accept("a")
    children.last.place("a")
    children.last.text("a", "")
    engine = await next_engine(children)
    engine.accept("a")
    engine.text("a", "Hello")
    engine.finish("a")
    assert (await heard.end(1)).reason == "stop"
    assert (heard.text, heard.n_tokens, heard.n_prompt) == ("Hello", 1, 7)


async def test_a_sink_that_only_gathered_text_is_answered_anew_by_the_next_engine(client: EngineClient, children: Children) -> None:
    class Gathering(Heard):
        def restart(self) -> bool:
            self.text = ""
            return super().restart()

    heard = Gathering()
    children.last.ready()
    client.submit(submit("a"), heard)
    children.last.accept("a")
    children.last.place("a")
    children.last.text("a", "Hel")
    engine = await next_engine(children)
    assert engine.submitted == ["a"]
    engine.text("a", "Hello")
    engine.finish("a")
    await heard.end(1)
    assert (heard.text, heard.n_tokens) == ("Hello", 1)


def submit(request_id: str) -> Submit:
    """A request of this id."""
    return Submit(request_id=request_id, prompt=TextPrompt("hi"), sampling=GREEDY)


async def test_acceptance_may_come_again_from_the_next_engine(client: EngineClient, children: Children) -> None:
    class Counting(Heard):
        n_accepted = 0

        def on_accepted(self, n_prompt: int, n_dropped: int = 0) -> None:
            self.n_accepted += 1

    heard = Counting()
    children.last.ready()
    client.submit(submit("a"), heard)
    children.last.accept("a")
    engine = await next_engine(children)
    engine.accept("a")
    engine.finish("a")
    await heard.end(1)
    assert heard.n_accepted == 2


async def test_placement_is_told_once_by_each_engine(client: EngineClient, children: Children) -> None:
    class Counting(Heard):
        n_placed = 0

        def on_placed(self) -> None:
            self.n_placed += 1

    heard = Counting()
    children.last.ready()
    client.submit(submit("a"), heard)
    children.last.accept("a")
    for _ in range(2):  # parked and resumed, say
        children.last.place("a")
    assert heard.n_placed == 1
    engine = await next_engine(children)
    engine.accept("a")
    engine.place("a")
    engine.finish("a")
    await heard.end(1)
    assert heard.n_placed == 2


async def test_snapshot_is_told_after_the_ends_of_its_step(
    client: EngineClient, children: Children, caplog: pytest.LogCaptureFixture
) -> None:
    children.last.ready()
    asked(client, "a", "b")
    seen: list[tuple[int, int, list[str]]] = []
    client.on_snapshot = lambda: seen.append((client.n_snapshots, client.n_live, client.queue))
    end = Finished("a", "stop", 1, 0, 1, Stamps(1.0, 1.0, 1.0, 1.0, 1.0))
    for queue in (["b"], None):
        client.on_message(StepEvents(finished=[end], snapshot=Snapshot([], 1, Counters(), 0.1, queue=queue)))
    client.on_message(StepEvents(finished=[end]))
    assert seen == [(1, 1, ["b"]), (2, 1, ["b"])]
    client.on_snapshot = lambda: 1 / 0  # type: ignore[assignment]
    client.on_message(StepEvents(snapshot=SNAPSHOT))
    assert "what listens to snapshots failed" in caplog.text


async def test_the_arrival_is_the_fronts_instant_for_every_engine(client: EngineClient, children: Children) -> None:
    before = time.monotonic()
    asked(client, "a")
    after = time.monotonic()
    children.last.ready()
    arrivals = [message.arrived_at for message in children.last.sent if isinstance(message, Submit)]
    engine = await next_engine(children)
    arrivals += [message.arrived_at for message in engine.sent if isinstance(message, Submit)]
    assert len(arrivals) == 2
    assert arrivals[0] == arrivals[1]
    assert before <= arrivals[0] <= after


async def test_an_id_that_is_live_is_refused_and_its_request_goes_on(client: EngineClient, children: Children) -> None:
    (heard,) = asked(client, "a")
    with pytest.raises(ValueError, match="'a' is live already"):
        asked(client, "a")
    children.last.ready()
    children.last.finish("a")
    assert (await heard.end(1)).reason == "stop"


async def test_the_end_of_one_request_may_cancel_another_of_the_same_death(client: EngineClient, children: Children) -> None:
    class Twin(Heard):
        def on_failed(self, error: RunnerError) -> None:
            client.cancel("b")
            super().on_failed(error)

    twin = Twin()
    children.last.ready()
    client.submit(submit("a"), twin)
    (other,) = asked(client, "b")
    children.last.text("a")
    engine = await next_engine(children)
    assert isinstance(await error_of(twin), EngineStopped)
    assert (await other.end(1)).reason == "cancelled"
    assert engine.submitted == []


# -- suspects ----------------------------------------------------------------------------------------------------------


async def test_a_poison_request_in_decode_is_ended_at_its_second_death_and_the_waiting_are_answered(
    client: EngineClient, children: Children
) -> None:
    poison, innocent, unprepared = asked(client, "poison", "innocent", "unprepared")
    children.last.ready(n_slots=1)
    for n_deaths in (1, 2):
        assert children.last.submitted == ["poison", "innocent", "unprepared"]
        children.last.accept("poison", "innocent", "unprepared")
        children.last.place("poison")
        await next_engine(children)
        assert client.n_restarts == n_deaths
    assert isinstance(await error_of(poison), EngineCrashed)
    assert children.last.submitted == ["innocent", "unprepared"]
    for name, heard in (("innocent", innocent), ("unprepared", unprepared)):
        children.last.finish(name)
        assert (await heard.end(1)).reason == "stop"


async def test_a_poison_request_in_prepare_is_ended_at_its_second_death_whoever_is_placed(client: EngineClient, children: Children) -> None:
    children.last.ready()
    (poison,) = asked(client, "poison")
    later: list[Heard] = []
    for n_deaths in (1, 2):
        later += asked(client, f"later-{n_deaths}")
        await next_engine(children)
    assert isinstance(await error_of(poison), EngineCrashed)
    assert children.last.submitted == ["later-1", "later-2"]
    for n_deaths, heard in zip((1, 2), later, strict=True):
        children.last.finish(f"later-{n_deaths}")
        assert (await heard.end(1)).reason == "stop"


async def test_a_poison_request_in_prepare_is_a_suspect_beside_streams_that_run(client: EngineClient, children: Children) -> None:
    children.last.ready()
    stream, poison = asked(client, "stream", "poison")
    children.last.accept("stream")
    children.last.place("stream")
    children.last.text("stream")
    await next_engine(children)
    second_stream, waiting = asked(client, "stream-2", "waiting")
    children.last.say(StepEvents(placed=["stream-2"]))
    await next_engine(children)
    assert isinstance(await error_of(stream), EngineStopped)
    assert isinstance(await error_of(poison), EngineCrashed)
    assert children.last.submitted == ["stream-2", "waiting"]
    assert not second_stream.has_ended
    assert not waiting.has_ended


async def test_a_crash_before_the_word_of_the_placement_came_through_still_counts(client: EngineClient, children: Children) -> None:
    (poison,) = asked(client, "poison")
    children.last.ready()
    for _ in range(2):
        children.last.accept("poison")
        await next_engine(children)
    assert isinstance(await error_of(poison), EngineCrashed)


async def test_who_was_placed_in_one_engine_and_waited_in_the_next_was_a_suspect_once(client: EngineClient, children: Children) -> None:
    children.last.ready(n_slots=1)
    placed_first, placed_second = asked(client, "first", "second")
    children.last.accept("first", "second")
    children.last.place("first")
    engine = await next_engine(children)
    engine.accept("first", "second")
    engine.place("second")
    engine = await next_engine(children)
    assert engine.submitted == ["first", "second"]
    assert not placed_first.has_ended
    assert not placed_second.has_ended


async def test_a_stream_that_ran_at_two_deaths_ends_as_the_crash_it_is(client: EngineClient, children: Children) -> None:
    children.last.ready()
    (heard,) = asked(client, "a")
    children.last.place("a")
    engine = await next_engine(children)
    engine.place("a")
    engine.text("a")
    await next_engine(children)
    assert isinstance(await error_of(heard), EngineCrashed)


# -- cancel ------------------------------------------------------------------------------------------------------------


async def test_a_cancel_while_loading_ends_the_request_at_once(client: EngineClient, children: Children) -> None:
    heard, other = asked(client, "a", "b")
    client.cancel("a")
    assert (await heard.end(1)).reason == "cancelled"
    children.last.ready()
    assert children.last.submitted == ["b"]
    assert not other.has_ended


async def test_a_cancel_before_acceptance_is_ended_by_the_engines_refusal(client: EngineClient, children: Children) -> None:
    children.last.ready()
    (heard,) = asked(client, "a")
    client.cancel("a")
    client.cancel("a")
    assert children.last.cancelled == ["a"]
    assert not heard.has_ended
    children.last.say(Refused("a", "request_cancelled", "The request was cancelled", None))
    assert (await heard.end(1)).reason == "cancelled"


async def test_a_cancel_after_acceptance_is_ended_by_the_engine(client: EngineClient, children: Children) -> None:
    children.last.ready()
    (heard,) = asked(client, "a")
    children.last.accept("a")
    client.cancel("a")
    assert children.last.cancelled == ["a"]
    children.last.finish("a", "cancelled")
    assert (await heard.end(1)).reason == "cancelled"


async def test_a_cancelled_request_ends_with_its_engine_and_does_not_come_back(client: EngineClient, children: Children) -> None:
    children.last.ready()
    (heard,) = asked(client, "a")
    client.cancel("a")
    engine = await next_engine(children)
    assert (await heard.end(1)).reason == "cancelled"
    assert engine.submitted == []


async def test_a_cancel_while_restarting_ends_the_request_at_once(client: EngineClient, children: Children) -> None:
    children.last.ready()
    before, other = asked(client, "before", "other")
    engine = await next_engine(children, is_ready=False)
    assert client.state is EngineState.RESTARTING
    (meanwhile,) = asked(client, "meanwhile")
    for name in ("before", "meanwhile"):
        client.cancel(name)
    for heard in (before, meanwhile):
        assert (await heard.end(1)).reason == "cancelled"
    engine.ready()
    assert engine.submitted == ["other"]
    assert not other.has_ended


async def test_a_cancel_of_an_unknown_id_does_nothing(client: EngineClient, children: Children) -> None:
    children.last.ready()
    client.cancel("nobody")
    assert children.last.sent == []


# -- starting and giving up --------------------------------------------------------------------------------------------


async def test_a_restart_that_cannot_be_spawned_is_tried_again(client: EngineClient, children: Children) -> None:
    children.last.ready()
    (heard,) = asked(client, "a")
    children.faults = [OSError(11, "Resource temporarily unavailable"), RuntimeError("can't start new thread")]
    await next_engine(children)
    assert client.n_restarts == 3
    children.last.finish("a")
    assert (await heard.end(1)).reason == "stop"


async def test_three_failed_spawns_are_given_up_with_the_systems_words(client: EngineClient, children: Children) -> None:
    children.last.ready()
    (heard,) = asked(client, "a")
    children.faults = [OSError(12, "Cannot allocate memory")] * 3
    children.last.die()
    error = await asyncio.wait_for(client.wait_failed(), 1)
    assert str(error) == "The engine process could not be started: Cannot allocate memory"
    assert isinstance(await error_of(heard), EngineStopped)
    assert client.state is EngineState.FAILED
    assert children.n_starts == 4


async def test_the_first_spawn_may_fail_too(children: Children) -> None:
    children.faults = [OSError(12, "Cannot allocate memory")] * 3
    client = EngineClient(CONFIG, children.start, QUICK)
    await client.start()
    with pytest.raises(ModelError, match="could not be started: Cannot allocate memory"):
        await asyncio.wait_for(client.wait_ready(), 1)
    await client.close()


async def test_a_failed_spawn_is_followed_by_the_delays_of_the_policy(children: Children) -> None:
    children.faults = [OSError(12, "Cannot allocate memory")]
    client = EngineClient(CONFIG, children.start, RestartPolicy(delays_s=(0.05,)))
    await client.start()
    await settle()
    assert children.n_starts == 1
    await asyncio.sleep(0.1)
    assert children.n_starts == 2
    await client.close()


async def test_three_deaths_at_load_are_given_up_with_the_engines_last_words(client: EngineClient, children: Children) -> None:
    for _ in range(3):
        children.last.words("out of luck")
        await next_engine(children, is_ready=False)
    with pytest.raises(ModelError, match=r"^The engine ended with signal 6 while it loaded the model: out of luck$"):
        await client.wait_ready()
    assert (client.n_restarts, len(children.all)) == (2, 3)


async def test_words_of_an_earlier_engine_are_not_those_of_the_last(client: EngineClient, children: Children) -> None:
    children.last.words("a warning")
    for _ in range(3):
        await next_engine(children, is_ready=False)
    assert str(await client.wait_failed()) == "The engine ended with signal 6 while it loaded the model"


async def test_a_final_load_failure_brings_the_engines_error_with_its_hint(client: EngineClient, children: Children) -> None:
    children.last.say(LoadFailed("--device is 'x'", is_final=True, code="config_error", hint="slotfile doctor"))
    children.last.die(3)
    with pytest.raises(ConfigError, match="--device is 'x'") as raised:
        await client.wait_ready()
    assert raised.value.hint == "slotfile doctor"
    assert client.n_restarts == 0


async def test_an_engine_that_ended_before_its_start_was_through_is_not_kept(children: Children) -> None:
    class Hasty(Children):
        async def start(self, config: EngineConfig, owner: object) -> FakeChild:
            child = await super().start(config, owner)  # type: ignore[arg-type]
            assert isinstance(child, FakeChild)
            if self.n_starts == 1:
                child.die(1)
            return child

    hasty = Hasty()
    client = EngineClient(CONFIG, hasty.start, QUICK)
    await client.start()
    pids = [client.pid]
    await settle()
    assert [*pids, client.pid] == [None, 2]
    await client.close()


async def test_the_snapshot_and_the_load_fraction_are_those_of_the_present_engine(client: EngineClient, children: Children) -> None:
    children.last.ready()
    seen = []
    children.last.show(SNAPSHOT)
    children.last.say(StepEvents())
    seen.append((client.snapshot, client.load_fraction))
    engine = await next_engine(children, is_ready=False)
    engine.say(LoadProgress(0.3))
    seen.append((client.snapshot, client.load_fraction))
    assert seen == [(SNAPSHOT, 1.0), (None, 0.3)]


# -- the watchdog ------------------------------------------------------------------------------------------------------

IMPATIENT = RestartPolicy(delays_s=(0.0,), watch_every_s=0.005, min_silence_s=0.05, silence_per_step=0.0)


@pytest.fixture
async def impatient(children: Children) -> AsyncIterator[EngineClient]:
    """A client that waits 50 ms, with a ready engine that beats as idle ones do."""
    client = EngineClient(CONFIG, children.start, IMPATIENT)
    await client.start()
    children.last.ready()
    yield client
    await client.close()


async def beat(children: Children, what: Callable[[FakeChild], None], for_s: float = 0.2) -> None:
    """The first engine does something every 10 ms, as long as it is the last."""
    first = children.last
    for _ in range(round(for_s / 0.01)):
        if children.last is not first or first.has_ended:
            return
        what(first)
        await asyncio.sleep(0.01)


async def test_an_engine_that_stands_still_in_prepare_is_ended_although_its_loop_beats(impatient: EngineClient, children: Children) -> None:
    asked(impatient, "a")
    await beat(children, lambda engine: engine.show(SNAPSHOT))
    assert impatient.n_restarts == 1


async def test_an_engine_that_stands_still_in_a_step_is_ended_although_it_accepts(impatient: EngineClient, children: Children) -> None:
    asked(impatient, "a")
    children.last.accept("a")
    children.last.place("a")
    await beat(children, lambda engine: engine.say(Refused("nobody", "invalid_request_error", "no", None)))
    assert impatient.n_restarts == 1


async def test_an_engine_that_works_on_is_left_alone(impatient: EngineClient, children: Children) -> None:
    asked(impatient, "a")
    children.last.accept("a")
    await beat(children, lambda engine: engine.show(SNAPSHOT))
    assert impatient.n_restarts == 0


async def test_a_queue_that_moves_before_the_prepare_thread_is_left_alone(impatient: EngineClient, children: Children) -> None:
    names = iter([f"r{index}" for index in range(20)])
    asked(impatient, *(f"r{index}" for index in range(20)), "last")

    def go_on(engine: FakeChild) -> None:
        engine.show(SNAPSHOT)
        engine.accept(next(names))

    await beat(children, go_on)
    assert impatient.n_restarts == 0


async def test_an_engine_without_requests_may_be_silent(impatient: EngineClient) -> None:
    await asyncio.sleep(0.1)
    assert impatient.n_restarts == 0


# -- closing -----------------------------------------------------------------------------------------------------------


async def test_closing_fails_the_live_and_ends_the_engine(client: EngineClient, children: Children) -> None:
    children.last.ready()
    heards = asked(client, "a", "b")
    children.last.text("a")
    await client.close()
    for heard in heards:
        assert str(await error_of(heard)) == "The server is shutting down"
    assert children.last.ended_within_s == QUICK.close_within_s
    with pytest.raises(EngineStopped):
        asked(client, "c")
    await client.close()
    assert len(children.all) == 1


@pytest.mark.parametrize(
    "message",
    [Ready(model_info()), LoadProgress(0.5), LoadFailed("no", is_final=True), StepEvents(snapshot=SNAPSHOT)],
    ids=lambda message: type(message).__name__,
)
async def test_nothing_that_the_engine_says_after_closing_revives_the_client(
    client: EngineClient, children: Children, message: Ready | LoadProgress | LoadFailed | StepEvents
) -> None:
    await client.close()
    children.last.say(message)
    assert (client.state, client.info, client.snapshot) == (EngineState.CLOSED, None, None)
    with pytest.raises(EngineStopped):
        asked(client, "a")


async def test_closing_during_a_restart_leaves_no_engine(client: EngineClient, children: Children) -> None:
    children.last.ready()
    (heard,) = asked(client, "a")
    children.last.die()
    await client.close()
    assert isinstance(await error_of(heard), EngineStopped)
    await settle()
    assert children.n_starts == 1


async def test_closing_while_the_engine_is_being_spawned_ends_it(children: Children) -> None:
    gate = asyncio.Event()

    class Slow(Children):
        async def start(self, config: EngineConfig, owner: object) -> FakeChild:
            await gate.wait()
            child = await super().start(config, owner)  # type: ignore[arg-type]
            assert isinstance(child, FakeChild)
            return child

    slow = Slow()
    client = EngineClient(CONFIG, slow.start, QUICK)
    starting = asyncio.ensure_future(client.start())
    await settle()
    await client.close()
    gate.set()
    await starting
    assert slow.last.has_ended
    await settle()
    assert (client.pid, slow.n_starts, client._tasks) == (None, 1, set())


async def test_closing_a_client_that_never_started_does_nothing() -> None:
    await EngineClient(CONFIG, Children().start).close()


# -- sinks that raise --------------------------------------------------------------------------------------------------


def broken_in(method: str, calls: list[str] | None = None) -> Heard:
    """A sink with a bug in one method, whose calls are counted."""

    def fault(*_: object) -> bool:
        if calls is not None:
            calls.append(method)
        raise RuntimeError("a bug in a handler")

    heard = Heard()
    setattr(heard, method, fault)
    return heard


@pytest.mark.parametrize("method", ["on_accepted", "on_text"])
async def test_a_sink_that_raises_before_the_end_has_its_request_cancelled_and_hears_the_end(
    client: EngineClient, children: Children, method: str
) -> None:
    calls: list[str] = []
    broken = broken_in(method, calls)
    children.last.ready()
    client.submit(submit("broken"), broken)
    (other,) = asked(client, "other")
    children.last.accept("broken", "other")
    for _ in range(3):
        children.last.text("broken")
    assert children.last.cancelled == ["broken"]
    children.last.finish("broken", "cancelled")
    children.last.finish("other")
    assert (await broken.end(1)).reason == "cancelled"
    assert (await other.end(1)).reason == "stop"
    assert calls == [method]


@pytest.mark.parametrize("method", ["on_finished", "on_failed"])
async def test_a_sink_that_raises_at_its_end_takes_nobody_along(client: EngineClient, children: Children, method: str) -> None:
    children.last.ready()
    client.submit(submit("broken"), broken_in(method))
    (other,) = asked(client, "other")
    finished, failed = [Finished("broken", "stop", 1, 0, 1, STAMPS)], [Failed("broken", "internal_error", "why")]
    events = StepEvents(finished=finished) if method == "on_finished" else StepEvents(failed=failed)
    events.finished = [*events.finished, Finished("other", "stop", 1, 0, 1, STAMPS)]
    children.last.say(events)
    assert (await other.end(1)).reason == "stop"
    assert client.n_live == 0


async def test_a_sink_that_raises_when_asked_for_a_restart_ends_with_an_error(client: EngineClient, children: Children) -> None:
    broken = broken_in("restart")
    children.last.ready()
    client.submit(submit("broken"), broken)
    (other,) = asked(client, "other")
    engine = await next_engine(children)
    assert isinstance(await error_of(broken), EngineStopped)
    assert engine.submitted == ["other"]
    assert not other.has_ended


# -- refusals, faults and the log --------------------------------------------------------------------------------------


async def test_a_refusal_is_the_error_that_the_engine_named(client: EngineClient, children: Children) -> None:
    children.last.ready()
    (heard,) = asked(client, "a")
    children.last.say(Refused("a", "invalid_request_error", "no", "messages"))
    error = await error_of(heard)
    assert (type(error), error.message, error.param) == (InvalidRequest, "no", "messages")


async def test_faults_are_logged_with_the_requests_id(client: EngineClient, children: Children, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "slotfile.engine")
    children.last.ready()
    heards = asked(client, "failed", "unprepared", "stream", "waiting")
    children.last.fail("failed")
    children.last.say(Refused("unprepared", "internal_error", "The request could not be prepared: KeyError", None))
    children.last.text("stream")
    await next_engine(children)
    assert isinstance(await error_of(heards[0]), InternalError)
    assert caplog.messages == [
        "id=failed failed: internal_error: llama_decode returned -1",
        "id=unprepared failed: The request could not be prepared: KeyError",
        "The engine ended with signal 6; 2 requests were with it, 2 are live",
        "id=stream failed: engine_stopped: The engine ended while this request was being answered; the answer is incomplete",
    ]


async def test_what_clients_did_wrong_is_not_logged(client: EngineClient, children: Children, caplog: pytest.LogCaptureFixture) -> None:
    children.last.ready()
    asked(client, "a")
    children.last.say(Refused("a", "invalid_request_error", "text of the client", None))
    assert caplog.messages == []
