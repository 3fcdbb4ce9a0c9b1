"""An engine process whose back end fails now and then, as llama.cpp might: `python -m tests.soak.faulty_engine SEED RATE LEAK_KIB`.

    decode     NO_ROOM, INVALID, BROKEN: before anything was computed, after all was, or with one slot's cells lost
    apply      an operation on cells that the cache refuses
    sample     raises once after SIGUSR1, which ends the process as a fault in a sampler does

RATE is the share of decodes that fail; of the operations on cells, which are rarer, ten times as many do.
LEAK_KIB is lost with every decode: a soak must notice that.
The product is not touched: the back end's class is replaced before the engine is loaded.
"""

import random
import signal
import sys
from unittest.mock import patch

from runner.engine.batch import BatchPlan, Outcome
from runner.engine.kv import Copy, Drop, Forget, Fork, KvOp, Load, Park, Rewind, Swap, Trim, Unpark
from runner.llama.backend import LlamaBackend
from runner.serving import load
from runner.serving.process import engine_main

KIB = 1024
CELLS = 10.0


class Faults:
    """Which calls fail. One seed, one row of faults."""

    def __init__(self, seed: int, rate: float, leak_kib: int) -> None:
        self.random = random.Random(seed)
        self._rate, self._leak_kib = rate, leak_kib
        self._lost: list[bytearray] = []
        self.sampler_is_due = False

    def strikes(self, times: float = 1.0) -> bool:
        """Whether this call fails."""
        return self.random.random() < self._rate * times

    def leak(self) -> None:
        """Lose some memory, touched as a real loss would be."""
        if self._leak_kib:
            self._lost.append(bytearray(b"x" * self._leak_kib * KIB))

    def on_signal(self, number: int, frame: object) -> None:
        """The next sampler fails."""
        self.sampler_is_due = True


def faulty(faults: Faults) -> type[LlamaBackend]:
    """The back end with these faults."""

    class FaultyBackend(LlamaBackend):
        def decode(self, plan: BatchPlan) -> Outcome:
            faults.leak()
            if not faults.strikes():
                return super().decode(plan)
            outcome = faults.random.choice((Outcome.NO_ROOM, Outcome.INVALID, Outcome.BROKEN))
            if outcome is Outcome.BROKEN:
                self._break(plan)
            return outcome

        def sample(self, plan: BatchPlan) -> list[int]:
            if faults.sampler_is_due:
                raise RuntimeError("a sampler failed (injected)")
            return super().sample(plan)

        def _break(self, plan: BatchPlan) -> None:
            how = faults.random.choice(("before", "after", "lost"))
            if how == "after":
                super().decode(plan)
            elif how == "lost":
                self._clear(faults.random.choice(plan.chunks).slot_id)

        def _apply(self, op: KvOp) -> bool:
            if isinstance(op, Park | Unpark | Drop | Forget) or not faults.strikes(CELLS):
                return super()._apply(op)
            match op:
                case Trim(slot_id) | Load(_, slot_id) | Rewind(_, slot_id):
                    self._clear(slot_id)
                case Fork(_, target) | Copy(_, target):
                    self._clear(target)
                case Swap(source, target):
                    self._chains[source], self._chains[target] = self._chains[target], self._chains[source]
                    self._clear(source)
                    self._clear(target)
            return False

    return FaultyBackend


def main() -> None:
    """Serve as the real engine process does."""
    seed, rate, leak_kib = sys.argv[1:]
    faults = Faults(int(seed), float(rate), int(leak_kib))
    if hasattr(signal, "SIGUSR1"):
        signal.signal(signal.SIGUSR1, faults.on_signal)
    with patch.object(load, "LlamaBackend", faulty(faults)):
        engine_main()


if __name__ == "__main__":
    main()
