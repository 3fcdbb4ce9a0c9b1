"""The bounds of a server that a simulated day may have: what is refused, and what is ended because it took too long."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from runner.engine.room import over_queue, waiting_of_client
from runner.engine.scheduler import Scheduler


class Bound(StrEnum):
    """Which one a request was refused by."""

    QUEUE = "queue"
    CLIENT = "client"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """As the server's options of the same names; 0: none."""

    max_queue: int = 0
    max_waiting_per_client: int = 0
    queue_timeout_s: float = 0.0
    timeout_s: float = 0.0

    def refuses(self, client: str, scheduler: Scheduler, n_slots: int) -> Bound | None:
        """Whether a request of `client` that came now would be refused, in the order in which the server asks."""
        n_live = len(scheduler.waiting) + len(scheduler.running)
        if self.max_waiting_per_client and n_live >= n_slots:
            n_own = sum(sequence.owner.client == client for sequence in scheduler.waiting)
            if waiting_of_client(n_own, 1, n_live, n_slots) > self.max_waiting_per_client:
                return Bound.CLIENT
        if self.max_queue and over_queue(n_live, 1, n_slots, self.max_queue):
            return Bound.QUEUE
        return None


NO_LIMITS: Final = Limits()
