"""Two looks at a server become a picture. Pure: no clock, no I/O, no terminal."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from runner.terminal.top.sample import Request, Sample, Share, SlotNow

MINE: Final = "this key"
OTHERS: Final = "others"
ANOTHER: Final = "another key's"
TRAIL_LENGTH: Final = 120  # looks of which the rates are remembered: more than a screen shows


@dataclass(frozen=True, slots=True)
class SlotRow:
    """A slot. `n_cached`, `n_computed` and `n_generated` tokens, in this order, are what lies in it; an idle one keeps what it had.

    `tier` and `client` are empty where they are not known; `prompt_share` is how much of its prompt is there, while it is computed.
    """

    slot_id: int
    state: str
    tier: str
    client: str
    request_id: str
    age_s: float | None
    n_ctx: int
    n_cells: int
    n_cached: int
    n_computed: int
    n_generated: int
    prompt_share: float | None
    tokens_per_s: float | None


@dataclass(frozen=True, slots=True)
class QueueRow:
    """A sequence without a slot. `place` and `wait_s` are what the server says; None where it does not know."""

    place: int | None
    state: str
    tier: str
    client: str
    request_id: str
    n_prompt: int
    age_s: float
    wait_s: float | None


@dataclass(frozen=True, slots=True)
class ClientRow:
    """A client. `tokens_per_s` counts the tokens of its answers, `share` is its part of everybody's."""

    name: str
    n_running: int
    n_waiting: int
    tokens_per_s: float | None
    share: float | None


@dataclass(frozen=True, slots=True)
class Rates:
    """Tokens a second of the whole server between two looks; None where that cannot be told (the first look, another engine)."""

    decode: float | None = None
    prompt: float | None = None


@dataclass(frozen=True, slots=True)
class View:
    """Everything on the screen but trouble. Rows are in the order in which they are shown; `n_hidden` waiting ones are other keys'."""

    model: str
    health: str
    rates: Rates
    n_running: int
    n_waiting: int
    n_parked: int
    n_hidden: int
    mean_wait_s: float | None
    kv_share: float
    parked_bytes: float
    cached_share: float | None
    n_restarts: int
    tiers: dict[str, Share]
    slots: tuple[SlotRow, ...]
    queue: tuple[QueueRow, ...]
    clients: tuple[ClientRow, ...]
    trail: tuple[Rates, ...]


def view(before: Sample | None, now: Sample, trail: Sequence[Rates] = ()) -> View:
    """The picture at `now`; what has grown since `before` gives the rates. `trail` are the rates of the pictures before."""
    queue, metrics = now.queue, now.metrics
    rates = total_rates(before, now)
    rows = queue_rows(now.requests)
    n_cached, n_computed = metrics.get("engine_cached_tokens_total", 0.0), metrics.get("engine_prompt_rows_total", 0.0)
    return View(
        model=now.model,
        health=now.health,
        rates=rates,
        n_running=sum(share.n_running for share in queue.tiers.values()),
        n_waiting=queue.n_waiting,
        n_parked=queue.n_parked,
        n_hidden=max(0, queue.n_waiting - len(rows)),
        mean_wait_s=queue.mean_wait_s,
        kv_share=metrics.get("kv_cache_usage_perc", 0.0),
        parked_bytes=metrics.get("kv_parked_bytes", 0.0),
        cached_share=n_cached / (n_cached + n_computed) if n_cached + n_computed else None,
        n_restarts=int(metrics.get("engine_restarts_total", 0.0)),
        tiers=queue.tiers,
        slots=slot_rows(before, now),
        queue=rows,
        clients=client_rows(before, now),
        trail=(*trail, rates)[-TRAIL_LENGTH:],
    )


def total_rates(before: Sample | None, now: Sample) -> Rates:
    """From the engine's counters, which start again with it."""
    return Rates(*(_growth(before, now, f"engine_{kind}_rows_total") for kind in ("decode", "prompt")))


def slot_rows(before: Sample | None, now: Sample) -> tuple[SlotRow, ...]:
    """All slots by number."""
    earlier = {_identity(slot): slot for slot in before.queue.slots if slot.state != "idle"} if before is not None else {}
    known = {request.id: request for request in now.requests}
    elapsed_s = now.at - before.at if before is not None else 0.0
    return tuple(
        _slot_row(slot, known.get(slot.request_id or ""), _slot_rate(earlier.get(_identity(slot)), slot, elapsed_s), now.queue.n_ctx_slot)
        for slot in now.queue.slots
    )


def queue_rows(requests: Sequence[Request]) -> tuple[QueueRow, ...]:
    """Those that wait, by their place; those whose place is not known come last, the oldest first."""
    waiting = [request for request in requests if request.state in ("queued", "parked")]
    waiting.sort(key=lambda request: (request.place is None, request.place or 0, -request.age_s))
    return tuple(
        QueueRow(
            place=request.place,
            state=request.state,
            tier=request.tier,
            client=_name(request),
            request_id=request.id,
            n_prompt=request.n_prompt,
            age_s=request.age_s,
            wait_s=request.estimated_wait_s,
        )
        for request in waiting
    )


def client_rows(before: Sample | None, now: Sample) -> tuple[ClientRow, ...]:
    """Each client where their names may be seen, else this key and all others. The busiest first."""
    shares = now.queue.clients if now.queue.clients is not None else _mine_and_others(now)
    rates = _client_rates(before, now)
    total = sum(rates.values())
    rows = [
        ClientRow(name, share.n_running, share.n_waiting, rates.get(name), rates[name] / total if total and name in rates else None)
        for name, share in shares.items()
    ]
    return tuple(sorted(rows, key=lambda row: (-row.n_running, -row.n_waiting, row.name)))


def _growth(before: Sample | None, now: Sample, metric: str) -> float | None:
    if before is None or now.at <= before.at or metric not in before.metrics or metric not in now.metrics:
        return None
    grown = now.metrics[metric] - before.metrics[metric]
    return grown / (now.at - before.at) if grown >= 0 else None


def _slot_row(slot: SlotNow, request: Request | None, rate: float | None, n_ctx: int) -> SlotRow:
    n_prompt = min(slot.n_prompt, slot.n_cells)
    n_cached = min(slot.n_cached, n_prompt)
    return SlotRow(
        slot_id=slot.id,
        state=slot.state,
        tier=request.tier if request is not None else "",
        client=_name(request) if request is not None else _holder(slot),
        request_id=slot.request_id or "",
        age_s=request.age_s if request is not None else None,
        n_ctx=n_ctx,
        n_cells=slot.n_cells,
        n_cached=n_cached,
        n_computed=n_prompt - n_cached,
        n_generated=slot.n_cells - n_prompt if slot.state == "decode" else 0,
        prompt_share=n_prompt / slot.n_prompt if slot.state == "prefill" and slot.n_prompt else None,
        tokens_per_s=rate,
    )


def _holder(slot: SlotNow) -> str:
    """Of a slot without a request that may be seen: one whose id is withheld, or that ended between two answers of the server."""
    return ANOTHER if slot.state != "idle" and slot.request_id is None else ""


def _slot_rate(before: SlotNow | None, now: SlotNow, elapsed_s: float) -> float | None:
    """Tokens a second of one sequence: cells that were filled for its prompt, or tokens of its answer."""
    if before is None or elapsed_s <= 0 or now.state == "idle":
        return None
    grown = now.n_cells - before.n_cells if now.state == "prefill" else now.n_decoded - before.n_decoded
    return grown / elapsed_s if grown >= 0 else None


def _identity(slot: SlotNow) -> str | int:
    """A sequence may move to another slot. Of one whose id is another key's secret, only the slot is known."""
    return slot.request_id or slot.id


def _mine_and_others(now: Sample) -> dict[str, Share]:
    tiers = now.queue.tiers.values()
    n_waiting = sum(request.state in ("queued", "parked") for request in now.requests)
    n_running = len(now.requests) - n_waiting
    n_all_running, n_all_waiting = sum(tier.n_running for tier in tiers), sum(tier.n_waiting for tier in tiers)
    others = Share(max(0, n_all_running - n_running), max(0, n_all_waiting - n_waiting))
    return {MINE: Share(n_running, n_waiting), OTHERS: others}


def _client_rates(before: Sample | None, now: Sample) -> dict[str, float]:
    """By client; without names, this key's by its own rows and the others' by what is left of the total."""
    if before is None or now.at <= before.at:
        return {}
    earlier = {request.id: request.n_generated for request in before.requests}
    grown: Counter[str] = Counter()
    for request in now.requests:
        grown[_name(request)] += max(0, request.n_generated - earlier.get(request.id, 0))
    rates = {name: n_tokens / (now.at - before.at) for name, n_tokens in grown.items()}
    if now.queue.clients is None:
        total = total_rates(before, now).decode
        rates.setdefault(MINE, 0.0)
        rates |= {OTHERS: max(0.0, total - rates[MINE])} if total is not None else {}
    return rates


def _name(request: Request) -> str:
    return request.client if request.client is not None else MINE
