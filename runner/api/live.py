"""GET /v1/queue, GET /v1/requests, DELETE /v1/requests/{id}: who is here, how they stand, and taking one back.

With keys, a key sees and touches its own requests and one with `admin` all; without keys everybody does. Never a prompt's text.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator
from typing import Literal

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from runner.api.call import Choice
from runner.api.errors import shown
from runner.api.front import Front, LiveCall
from runner.api.identity import CLIENT
from runner.api.standing import Standing, Standings, State
from runner.api.status import Slot, json_response, slot_list
from runner.engine.order import Tier
from runner.errors import NotFound, RequestCancelled


class Share(msgspec.Struct, frozen=True):
    """Sequences of one tier or client: those that hold a slot, and those that do not."""

    n_running: int
    n_waiting: int


class Queue(msgspec.Struct, frozen=True, kw_only=True):
    """Slots and queue. Parked sequences wait as well. `mean_wait_s` of those that wait is null while nothing is known of the pace."""

    n_slots: int
    n_ctx_slot: int
    slots: list[Slot]
    n_waiting: int
    n_parked: int
    mean_wait_s: float | None
    tiers: dict[str, Share]
    clients: dict[str, Share] | UnsetType


class LiveRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence; a request with several answers has several. `n_prompt` is 0 until it is counted.

    `estimated_wait_s` is what is left until it gets a slot: null where it has one, its place is not known or nothing is known of the pace.
    """

    id: str
    state: State
    tier: str
    client: str | UnsetType
    age_s: float
    n_prompt: int
    n_cached: int
    n_generated: int
    place: int | None
    estimated_wait_s: float | None
    slot_id: int | None


class LiveRequests(msgspec.Struct, frozen=True):
    """A list as OpenAI writes one, in order of arrival."""

    data: list[LiveRequest]
    object: Literal["list"] = "list"


class Cancelled(msgspec.Struct, frozen=True):
    """What was taken back, as it stood."""

    cancelled: list[LiveRequest]


async def queue(front: Front, request: web.Request) -> web.Response:
    """The whole picture, in numbers."""
    info, standings = front.model(), Standings(front.client)
    found = [(live, standings.of(choice)) for live in front.live for choice in _open(live)]
    n_waiting = sum(standing.is_waiting for _, standing in found)
    wait_s = front.bounds.mean_wait_s(n_waiting) if n_waiting else 0.0
    tiers = _shares([(live.tier.name.lower(), standing) for live, standing in found])
    return json_response(
        Queue(
            n_slots=info.n_slots,
            n_ctx_slot=info.n_ctx_slot,
            slots=slot_list(front, request[CLIENT]),
            n_waiting=n_waiting,
            n_parked=sum(standing.state == "parked" for _, standing in found),
            mean_wait_s=round(wait_s, 1) if wait_s is not None else None,
            tiers={tier.name.lower(): tiers.get(tier.name.lower(), Share(0, 0)) for tier in Tier},
            clients=_shares([(live.client, standing) for live, standing in found]) if front.shows_all_to(request[CLIENT]) else UNSET,
        )
    )


async def requests(front: Front, request: web.Request) -> web.Response:
    """The live requests that the caller may see."""
    return json_response(LiveRequests(_rows(front, request, front.visible_to(request[CLIENT]))))


async def cancel(front: Front, request: web.Request) -> web.Response:
    """Take back a request by its `x-request-id`, or by the id of one of its sequences, which ends the others too. Raises NotFound."""
    wanted, visible = request.match_info["id"], front.visible_to(request[CLIENT])
    found = [live for live in visible if any(choice.request_id == wanted for choice in live.call.choices)]
    found = found or [live for live in visible if live.request_id == wanted]
    if not found:  # another client's request is none that this one could tell from one that is not there
        raise NotFound(f"There is no live request {shown(wanted)!r}")
    rows = _rows(front, request, found)
    for live in found:
        live.call.fail(RequestCancelled("The request was cancelled"))
    return json_response(Cancelled(rows))


def _open(live: LiveCall) -> Iterator[Choice]:
    return (choice for choice in live.call.choices if not choice.is_over)


def _rows(front: Front, request: web.Request, calls: list[LiveCall]) -> list[LiveRequest]:
    standings, now, names_clients = Standings(front.client), asyncio.get_running_loop().time(), front.shows_all_to(request[CLIENT])
    return [
        LiveRequest(
            id=choice.request_id,
            state=standing.state,
            tier=live.tier.name.lower(),
            client=live.client if names_clients else UNSET,
            age_s=round(now - live.began_at, 3),
            n_prompt=choice.n_prompt,
            n_cached=standing.slot.n_cached if standing.slot is not None else 0,
            n_generated=choice.n_completion,
            place=standing.place,
            estimated_wait_s=_wait_s(front, choice, standing),
            slot_id=standing.slot.slot_id if standing.slot is not None else None,
        )
        for live in calls
        for choice in _open(live)
        for standing in [standings.of(choice)]
    ]


def _wait_s(front: Front, choice: Choice, standing: Standing) -> float | None:
    wait_s = front.bounds.wait_s(choice, standing.place) if standing.place is not None else None
    return round(wait_s, 1) if wait_s is not None else None


def _shares(found: list[tuple[str, Standing]]) -> dict[str, Share]:
    counts = Counter((name, standing.is_waiting) for name, standing in found)
    return {name: Share(counts[name, False], counts[name, True]) for name in dict.fromkeys(name for name, _ in found)}
