"""How long a request may wait and take: the server's word and the request's own, the smaller counts."""

import math
from typing import Final

import msgspec

from runner.api.errors import shown
from runner.config import MAX_DEADLINE_S, ServerConfig
from runner.errors import InvalidRequest, TimedOut

TIMEOUT_HEADER: Final = "X-Request-Timeout"


class Deadlines(msgspec.Struct, frozen=True, kw_only=True):
    """0.0 is none. `queue_s` counts from the hand-over to the engine; `ends_at` is an instant of the event loop's clock.

    `total_s` and `total_by` say how long that is after the request's arrival, and who set it.
    """

    queue_s: float = 0.0
    ends_at: float = 0.0
    total_s: float = 0.0
    total_by: str = ""

    def waited_too_long(self) -> TimedOut:
        """The error of a request that got no slot in time."""
        return TimedOut(f"The request has waited {self.queue_s:g} s for a slot, which is the limit (--queue-timeout)")

    def took_too_long(self) -> TimedOut:
        """The error of a request that is not done in time."""
        return TimedOut(f"The request is not done after {self.total_s:g} s, which is the limit ({self.total_by})")


NO_DEADLINES: Final = Deadlines()


def deadlines(config: ServerConfig, timeout_s: float, header: str | None, arrived_at: float) -> Deadlines:
    """Join the limits of the server, the field `timeout` and the header. Raises InvalidRequest for a header that is no number."""
    totals = {"--request-timeout": config.request_timeout_s, "'timeout'": timeout_s, TIMEOUT_HEADER: _seconds(header)}
    given = [(seconds, name) for name, seconds in totals.items() if seconds > 0]
    total_s, by = min(given, default=(0.0, ""))
    return Deadlines(queue_s=config.queue_timeout_s, ends_at=arrived_at + total_s if given else 0.0, total_s=total_s, total_by=by)


def _seconds(header: str | None) -> float:
    if header is None or not header.strip():
        return 0.0
    try:
        seconds = float(header) if header.isascii() else math.nan
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= MAX_DEADLINE_S:
        text = f"The header {TIMEOUT_HEADER} is {shown(header)!r}; it takes seconds from 0 to {MAX_DEADLINE_S}"
        raise InvalidRequest(text, param=TIMEOUT_HEADER)
    return seconds
