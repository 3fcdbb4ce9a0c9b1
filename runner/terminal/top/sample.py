"""What one look at a server brought, in the fields of its endpoints that the view needs (docs/reference.md, HTTP routes)."""

from typing import Final

import msgspec

METRIC_PREFIX: Final = "slotfile_"


class SlotNow(msgspec.Struct, frozen=True):
    """One slot of `GET /v1/queue`. `n_cells` tokens lie in it; `n_cached` of its prompt were there before."""

    id: int
    state: str
    request_id: str | None
    n_cells: int
    n_prompt: int
    n_cached: int
    n_decoded: int


class Share(msgspec.Struct, frozen=True):
    """Sequences of one tier or client."""

    n_running: int
    n_waiting: int


class Queue(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /v1/queue`. `clients` are there for those who may see all."""

    n_ctx_slot: int
    slots: list[SlotNow]
    n_waiting: int
    n_parked: int
    mean_wait_s: float | None
    tiers: dict[str, Share]
    clients: dict[str, Share] | None = None


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One row of `GET /v1/requests`. `client` is there for those who may see all."""

    id: str
    state: str
    tier: str
    age_s: float
    n_prompt: int
    n_generated: int
    place: int | None
    estimated_wait_s: float | None
    client: str | None = None


class Requests(msgspec.Struct, frozen=True):
    """`GET /v1/requests`."""

    data: list[Request]


class Sample(msgspec.Struct, frozen=True):
    """One look. `at` is the instant of it in seconds of the caller's clock, `metrics` those without labels, by name without prefix."""

    at: float
    model: str
    health: str
    queue: Queue
    requests: list[Request]
    metrics: dict[str, float]


def read_metrics(text: str) -> dict[str, float]:
    """Those metrics of ours that have no labels. Raises ValueError for what is not Prometheus' text format."""
    pairs = (line.split(" ") for line in text.splitlines() if line.startswith(METRIC_PREFIX) and "{" not in line)
    return {name.removeprefix(METRIC_PREFIX): float(value) for name, value in pairs}
