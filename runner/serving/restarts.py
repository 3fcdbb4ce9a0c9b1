"""What follows from an engine's end and from its silence: pure decisions, with the time passed in.

When an engine ends, these requests can have been the reason, and are its suspects:

    placed       in a slot: the decode thread computes them, all in one step
    preparing    the oldest that is not accepted: the prepare thread takes them in order, so no other can have been in its hands
    accepted     only where none was placed: the word that they were may have died with the engine
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """When an engine is started again, given up, and taken for stuck. Times in seconds.

    `delays_s` are those before the first, second, ... start in a row; an engine that served for `proven_after_s` begins the row
    anew. A request that was a suspect at `max_deaths` deaths is not submitted again.
    """

    delays_s: tuple[float, ...] = (0.0, 1.0, 5.0, 30.0)
    proven_after_s: float = 60.0
    max_load_failures: int = 3
    max_deaths: int = 2
    watch_every_s: float = 1.0
    min_silence_s: float = 30.0
    silence_per_step: float = 10.0
    close_within_s: float = 1.0

    def silence_limit_s(self, longest_step_s: float) -> float:
        """How long an engine with work may say nothing, where its slowest step should take `longest_step_s`."""
        return max(self.min_silence_s, self.silence_per_step * longest_step_s)


class InEngine(Protocol):
    """A request that an engine has been given, as the front knows it."""

    @property
    def handed_at(self) -> float:
        """When it went to the engine."""

    @property
    def is_accepted(self) -> bool:
        """Whether the prepare thread is done with it."""

    @property
    def is_placed(self) -> bool:
        """Whether it is in a slot."""


Request = TypeVar("Request", bound=InEngine)


class Restarts:
    """Counts how engines ended: how long to wait before the next start, and when to give up."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._n_load_failures = 0
        self._n_in_a_row = 0
        self._ready_at: float | None = None

    @property
    def is_hopeless(self) -> bool:
        """Whether no further engine is started."""
        return self._n_load_failures >= self._policy.max_load_failures

    @property
    def delay_s(self) -> float:
        """The wait before the next start."""
        delays_s = self._policy.delays_s
        return delays_s[min(max(self._n_in_a_row, 1), len(delays_s)) - 1]

    def ready(self, now: float) -> None:
        """An engine has loaded its model."""
        self._n_load_failures = 0
        self._ready_at = now

    def ended(self, now: float) -> None:
        """An engine has ended, or could not even be started."""
        if self._ready_at is None:
            self._n_load_failures += 1
        elif now - self._ready_at >= self._policy.proven_after_s:
            self._n_in_a_row = 0
        self._n_in_a_row += 1
        self._ready_at = None

    def give_up(self) -> None:
        """The engine itself said that trying again cannot help."""
        self._n_load_failures = self._policy.max_load_failures


class Pulse:
    """When the two threads of an engine were last heard of: one may stand still while the other goes on."""

    def __init__(self, now: float) -> None:
        self._stepped_at = self._prepared_at = now

    def stepped(self, now: float) -> None:
        """The decode thread has sent a step's events; an idle one sends them every second."""
        self._stepped_at = now

    def prepared(self, now: float) -> None:
        """The prepare thread is done with one more request."""
        self._prepared_at = now

    def silence_s(self, now: float, requests: Sequence[InEngine]) -> float:
        """How long a thread that has one of these requests to work on has shown nothing of it; 0 without any."""
        since = [self._stepped_at for request in requests if request.is_accepted][:1]
        since += [max(self._prepared_at, request.handed_at) for request in requests if not request.is_accepted][:1]
        return now - min(since, default=now)


def suspects(requests: Iterable[Request], n_slots: int) -> list[Request]:
    """Which of the requests that an engine had, oldest first, can have been the reason of its end."""
    requests = list(requests)
    preparing = [request for request in requests if not request.is_accepted][:1]
    placed = [request for request in requests if request.is_placed]
    accepted = [request for request in requests if request.is_accepted][:n_slots]
    return (placed or accepted) + preparing
