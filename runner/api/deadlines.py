"""How long a request may wait and take: the server's word and the request's own, the smaller counts."""

import math
from collections.abc import Mapping
from typing import Final

import msgspec

from runner.api.errors import shown
from runner.config import MAX_DEADLINE_S, ServerConfig
from runner.errors import InvalidRequest, TimedOut

TIMEOUT_HEADER: Final = "X-Request-Timeout"
QUEUE_TIMEOUT_HEADER: Final = "X-Queue-Timeout"


class Deadlines(msgspec.Struct, frozen=True, kw_only=True):
    """0.0 is none. `queue_s` counts from the hand-over to the engine; `ends_at` is an instant of the event loop's clock.

    `total_s` says how long that is after the request's arrival; `queue_by` and `total_by` who set them.
    """

    queue_s: float = 0.0
    queue_by: str = ""
    ends_at: float = 0.0
    total_s: float = 0.0
    total_by: str = ""

    def waited_too_long(self) -> TimedOut:
        """The error of a request that got no slot in time."""
        return TimedOut(f"The request has waited {self.queue_s:g} s for a slot, which is the limit ({self.queue_by})")

    def took_too_long(self) -> TimedOut:
        """The error of a request that is not done in time."""
        return TimedOut(f"The request is not done after {self.total_s:g} s, which is the limit ({self.total_by})")


NO_DEADLINES: Final = Deadlines()


def deadlines(config: ServerConfig, queue_s: float, total_s: float, headers: Mapping[str, str], arrived_at: float) -> Deadlines:
    """Join the limits of the server, of the fields `queue_timeout` and `timeout`, and of the headers.

    Raises InvalidRequest for a header that is no number.
    """
    queue_s, queue_by = _smallest({"--queue-timeout": config.queue_timeout_s, "'queue_timeout'": queue_s}, QUEUE_TIMEOUT_HEADER, headers)
    total_s, total_by = _smallest({"--request-timeout": config.request_timeout_s, "'timeout'": total_s}, TIMEOUT_HEADER, headers)
    ends_at = arrived_at + total_s if total_s else 0.0
    return Deadlines(queue_s=queue_s, queue_by=queue_by, ends_at=ends_at, total_s=total_s, total_by=total_by)


def _smallest(limits: dict[str, float], header: str, headers: Mapping[str, str]) -> tuple[float, str]:
    """The smallest limit that is one, and who set it."""
    found = limits | {header: _seconds(header, headers.get(header, ""))}
    return min(((seconds, name) for name, seconds in found.items() if seconds > 0), default=(0.0, ""))


def _seconds(header: str, text: str) -> float:
    if not text.strip():
        return 0.0
    try:
        seconds = float(text) if text.isascii() and "_" not in text else math.nan
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= MAX_DEADLINE_S:
        raise InvalidRequest(f"The header {header} is {shown(text)!r}; it takes seconds from 0 to {MAX_DEADLINE_S}", param=header)
    return seconds
