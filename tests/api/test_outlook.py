"""What the front says of the time to come from the engine's own words: slots, queue and counters."""

from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from runner.api.call import Call, Choice
from runner.api.outlook import LEARN_EVERY_S, Outlook
from runner.engine.order import Tier
from runner.serving.client import EngineClient
from runner.serving.protocol import Counters, SlotState, Snapshot
from tests.fakes import model_info

STEP_S = 0.1


class Engine:
    """Says what it is told to say: a step takes `STEP_S`, and nobody's prompt takes any time."""

    def __init__(self) -> None:
        self.info = model_info(n_slots=1)
        self.snapshot: Snapshot | None = None
        self.queue: list[str] = []
        self.n_steps = 0

    def tell(self, running: str, *queue: str, n_decoded: int = 0) -> None:
        self.n_steps += 100
        counters = Counters(n_steps=self.n_steps, decode_s=self.n_steps * STEP_S)
        slot = SlotState(0, "decode", running, 10 + n_decoded, 10, 0, n_decoded)
        self.snapshot = Snapshot([slot], len(queue), counters, 0.1, queue=list(queue))
        self.queue = list(queue)


def choice(name: str) -> Choice:
    made = Choice(cast(Call, SimpleNamespace()), 0, name)
    made.n_prompt = 10
    return made


@pytest.mark.parametrize(("can_shift", "waits"), [(False, False), (True, True)])
def test_an_answer_that_its_slot_does_not_end_is_waited_for(can_shift: bool, waits: bool) -> None:
    engine = Engine()
    engine.info = msgspec.structs.replace(engine.info, context_shift=can_shift)
    outlook = Outlook(cast(EngineClient, cast(Any, engine)), lambda: 100.0)
    a, b = choice("a"), choice("b")
    for made in (a, b):
        outlook.began(made, client="x", tier=Tier.NORMAL, max_tokens=10_000)
    engine.tell("a", "b", n_decoded=600)
    wait_s = outlook.wait_s(b)
    assert wait_s is not None
    assert (wait_s > STEP_S) is waits


def test_waits_follow_from_the_slots_and_the_queue_and_run_down_between_two_words() -> None:
    engine, clock = Engine(), [100.0]
    outlook = Outlook(cast(EngineClient, cast(Any, engine)), lambda: clock[0])
    a, b, c = (choice(name) for name in "abc")
    for made, client in ((a, "x"), (b, "y"), (c, "x")):
        outlook.began(made, client=client, tier=Tier.NORMAL, max_tokens=20)
    assert (outlook.wait_s(b), outlook.room_s(1), outlook.mean_wait_s()) == (None, None, None)  # the engine has said nothing yet
    engine.tell("a", "c", "b", n_decoded=5)
    assert outlook.wait_s(c) == pytest.approx(15 * STEP_S, rel=0.02)
    assert outlook.wait_s(b) == pytest.approx(35 * STEP_S, rel=0.02)
    assert outlook.wait_s(a) is None
    assert outlook.room_s(1) == pytest.approx(15 * STEP_S, rel=0.02)
    assert outlook.tokens_s(11) == outlook.wait_s(b)
    assert outlook.client_s("x", 1) == outlook.wait_s(c)
    assert outlook.mean_wait_s() == pytest.approx(25 * STEP_S, rel=0.02)
    clock[0] += LEARN_EVERY_S / 8
    assert outlook.wait_s(c) == pytest.approx(15 * STEP_S - LEARN_EVERY_S / 8, rel=0.02)
