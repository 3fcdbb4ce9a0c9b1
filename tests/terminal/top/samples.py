"""Looks at a server that never was."""

from typing import Any

from runner.terminal.top.sample import Queue, Request, Sample, Share, SlotNow

TIERS = {"high": Share(0, 0), "normal": Share(2, 1), "low": Share(0, 1), "batch": Share(0, 0)}
CLIENTS = {"anna": Share(2, 0), "ben": Share(0, 2)}
SLOTS = [
    SlotNow(0, "decode", "a#1", n_cells=110, n_prompt=100, n_cached=40, n_decoded=11),
    SlotNow(1, "prefill", "b#2", n_cells=50, n_prompt=200, n_cached=0, n_decoded=0),
    SlotNow(2, "idle", None, n_cells=70, n_prompt=0, n_cached=0, n_decoded=0),
]


def request(request_id: str, state: str, **fields: Any) -> Request:
    """One live request."""
    plain: dict[str, Any] = {"tier": "normal", "age_s": 3.0, "n_prompt": 100, "n_generated": 0, "place": None, "client": "anna"}
    plain |= {"estimated_wait_s": None}
    return Request(id=request_id, state=state, **(plain | fields))


REQUESTS = [
    request("a#1", "decode", n_generated=11),
    request("b#2", "prefill"),
    request("c#3", "parked", client="ben", tier="low", place=2, age_s=9.0, estimated_wait_s=4.0),
    request("d#4", "queued", client="ben", place=1, age_s=2.0, estimated_wait_s=2.0),
]


def sample(at: float = 10.0, **changes: Any) -> Sample:
    """One look; `changes` are of the queue's fields, or `requests`, `metrics`, `health`."""
    queue: dict[str, Any] = {"n_ctx_slot": 1000, "slots": SLOTS, "n_waiting": 2, "n_parked": 1, "mean_wait_s": 3.0}
    queue |= {"tiers": TIERS, "clients": CLIENTS}
    queue |= {name: value for name, value in changes.items() if name in Queue.__struct_fields__}
    requests, metrics = changes.get("requests", REQUESTS), changes.get("metrics", {})
    return Sample(at, "tiny", changes.get("health", "ok"), Queue(**queue), requests, metrics)


def hidden(looked: Sample) -> dict[str, Any]:
    """The changes that make of a look what a key without `admin` sees of it, where it is ben's."""
    slots = [SlotNow(slot.id, slot.state, None, slot.n_cells, slot.n_prompt, slot.n_cached, slot.n_decoded) for slot in looked.queue.slots]
    requests = [request(row.id, row.state, place=row.place, client=None) for row in looked.requests if row.client == "ben"]
    return {"slots": slots, "requests": requests, "clients": None}
