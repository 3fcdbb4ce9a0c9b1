"""How fast sequences get slots here: from what steps cost and what answers take, the times at which the next slots become free.

The machine is followed forward as the scheduler drives it. Slots that decode get a token each in a step of `step_s`; prompts are
computed in order of arrival, and while one is, a chunk of it goes beside every such step:

    n steps of decoding while a prompt is computed    n (step_s + chunk_s), of which n chunk_s go into the prompt
    n steps without a prompt                          n step_s
    a prompt while nobody decodes                     its rows x row_s

A slot is free when its sequence has had its tokens: whoever is next takes it. Of the tokens that a sequence may still generate it will
generate the share that those with about as much allowance did (1 where clients ask for what they get; where all ask for as much as
there is and end by themselves, so much is left at any moment, whatever they have had). Of a prompt that waits, the share is computed
that was not cached of late.
"""

import heapq
import math
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from runner.engine.budget import LEAST_CHUNK
from runner.engine.fit import Fit

# What the ends before count when a new one comes: some fifty make a mean.
_KEEP: Final = 0.98
# Tokens of an answer, until one has ended that was allowed about as much.
_FIRST_ANSWER: Final = 128


class Work(NamedTuple):
    """What a sequence still needs, in tokens: of its prompt to be computed, of its answer to be generated."""

    n_prompt: float
    n_new: float


class _Share:
    """A part of a whole, lately."""

    __slots__ = ("part", "whole")

    def __init__(self, part: float, whole: float) -> None:
        self.part, self.whole = part, whole

    def learn(self, part: float, whole: float) -> None:
        """One more of each."""
        self.part = _KEEP * self.part + part
        self.whole = _KEEP * self.whole + whole

    @property
    def value(self) -> float:
        """0 to 1."""
        return self.part / self.whole


class Pace:
    """What one engine has shown of its pace. Pure; seconds."""

    def __init__(self, *, target_gap_s: float, chunk_rows: int = 0) -> None:
        """`target_gap_s` as of the prompt budget; `chunk_rows`, where it is not 0, is the size of a chunk whatever it costs."""
        self.target_gap_s, self.chunk_rows = target_gap_s, chunk_rows
        # An interval of many steps: none is off because a machine stood still for a moment.
        self._steps = Fit(2, first=0, most=math.inf)
        self._answers: dict[int, _Share] = {}
        self._computed = _Share(1.0, 1.0)

    @property
    def has_learned(self) -> bool:
        """Whether there was a step."""
        return self._steps.has_learned

    @property
    def step_s(self) -> float:
        """A token for every slot that decodes."""
        return self._steps.coefficients[0]

    @property
    def row_s(self) -> float:
        """A token of a prompt."""
        return self._steps.coefficients[1]

    @property
    def chunk_s(self) -> float:
        """What a prompt takes between two tokens of those that decode."""
        if self.chunk_rows:
            return self.chunk_rows * self.row_s
        return max(self.target_gap_s - self.step_s, LEAST_CHUNK * self.row_s)

    def learn_steps(self, n_steps: int, n_prompt_rows: int, seconds: float) -> None:
        """So many steps were made, with so many rows of prompts in them, and that took so long."""
        if n_steps > 0 and seconds > 0.0:
            self._steps.learn((float(n_steps), float(n_prompt_rows)), seconds)

    def learn_end(self, *, n_prompt: int, n_cached: int, n_generated: int, max_tokens: int) -> None:
        """A sequence that had a slot has ended, by itself or not."""
        self._answer(max_tokens).learn(n_generated, max_tokens)
        self._computed.learn(n_prompt - n_cached, n_prompt)

    def new(self, *, n_prompt: int, max_tokens: int) -> Work:
        """Of a sequence without a slot that has not had one."""
        return Work(n_prompt * self._computed.value, self._left(max_tokens, 0))

    def begun(self, *, n_prompt: int, max_tokens: int, n_cells: int, n_generated: int) -> Work:
        """Of a sequence that has a slot, or had one: so many of its tokens have cells."""
        return Work(0 if n_generated else max(0, n_prompt - n_cells), self._left(max_tokens, n_generated))

    def starts(self, running: Iterable[Work], waiting: Iterable[Work], n_slots: int) -> Iterator[float]:
        """When each of those that wait gets its slot, in seconds from now. Ask only after a step was learned.

        `running` in the order in which prompts are computed, `waiting` in that of their turns. Costs the logarithm of the slots for each
        that is drawn.
        """
        course = _Course(self.step_s, self.row_s, self.chunk_s)
        n_free = n_slots
        for work in running:
            course.place(work)
            n_free -= 1
        for work in waiting:
            if n_free > 0:
                n_free -= 1
            else:
                course.go_to_next_end()
            yield course.seconds
            course.place(work)

    def _left(self, max_tokens: int, n_generated: int) -> float:
        return self._answer(max_tokens).value * max(0, max_tokens - n_generated)

    def _answer(self, max_tokens: int) -> _Share:
        """Of those that may generate as many, to a factor of two."""
        octave = max_tokens.bit_length()
        share = self._answers.get(octave)
        if share is None:
            share = self._answers[octave] = _Share(min(_FIRST_ANSWER, max_tokens), max_tokens)
        return share


class _Course:
    """The machine on its way: the time, the steps made, who decodes until which step, and prompts in their order."""

    def __init__(self, step_s: float, row_s: float, chunk_s: float) -> None:
        self.seconds = 0.0
        self._step_s, self._row_s, self._chunk_s = step_s, row_s, chunk_s
        self._n_steps = 0.0
        self._ends: list[float] = []
        self._prompts: deque[tuple[float, float]] = deque()

    def place(self, work: Work) -> None:
        """Give a sequence a slot."""
        if work.n_prompt * self._row_s > 0.0:
            self._prompts.append((work.n_prompt * self._row_s, work.n_new))
        else:
            heapq.heappush(self._ends, self._n_steps + work.n_new)

    def go_to_next_end(self) -> None:
        """Until a slot is free. There is one that is not."""
        while not self._ends or (self._prompts and self._prompt_is_done_first()):
            self._finish_prompt()
        n_steps = self._ends[0] - self._n_steps
        if self._prompts:
            left_s, n_new = self._prompts[0]
            self._prompts[0] = max(0.0, left_s - n_steps * self._chunk_s), n_new
        self._pass(n_steps)
        heapq.heappop(self._ends)

    def _prompt_is_done_first(self) -> bool:
        return self._prompts[0][0] <= (self._ends[0] - self._n_steps) * self._chunk_s

    def _finish_prompt(self) -> None:
        left_s, n_new = self._prompts[0]
        if self._ends:
            self._pass(left_s / self._chunk_s)
        else:
            self.seconds += left_s
        self._prompts.popleft()
        heapq.heappush(self._ends, self._n_steps + n_new)

    def _pass(self, n_steps: float) -> None:
        self.seconds += n_steps * (self._step_s + (self._chunk_s if self._prompts else 0.0))
        self._n_steps += n_steps
