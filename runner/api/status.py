"""What the server says of itself: /health, /v1/models, /slots, /metrics and a page that names the endpoints."""

import html
from typing import Final

import msgspec
from aiohttp import web

from runner.api.errors import ErrorDetail, shown
from runner.api.exposition import CONTENT_TYPE
from runner.api.front import APP_NAME, Front
from runner.api.identity import CLIENT, Client
from runner.errors import Draining, ModelNotFound
from runner.serving.client import EngineState
from runner.serving.protocol import ModelInfo

PAGE_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
}


class Health(msgspec.Struct, frozen=True, omit_defaults=True):
    """`status`: ok, restarting (requests are taken and wait) or draining (503, with an error object)."""

    status: str
    error: ErrorDetail | None = None


class ModelMeta(msgspec.Struct, frozen=True):
    """What a client may want to know of a model, under llama.cpp's names; `n_ctx` is what one slot holds."""

    n_ctx: int
    n_ctx_train: int
    n_vocab: int
    n_params: int
    size: int


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """OpenAI's model object."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = APP_NAME
    meta: ModelMeta


class ModelList(msgspec.Struct, frozen=True):
    """OpenAI's list of models."""

    data: list[Model]
    object: str = "list"


class Slot(msgspec.Struct, frozen=True):
    """One slot: `state` is idle, prefill or decode. Counts of tokens, no text. `request_id` of a request that the caller may see."""

    id: int
    state: str
    request_id: str | None
    n_cells: int
    n_prompt: int
    n_cached: int
    n_decoded: int


class Slots(msgspec.Struct, frozen=True):
    """All slots and the queue, at most 50 ms old while the engine is busy."""

    n_slots: int
    n_ctx_slot: int
    n_waiting: int
    slots: list[Slot]


async def health(front: Front, request: web.Request) -> web.Response:
    """200 once the model answers and until the server goes down; 503 before and after."""
    if front.is_draining:
        gone = Draining("The server is going down and takes no new requests")
        return json_response(Health("draining", ErrorDetail(gone.message, gone.type, None, gone.code)), status=gone.status)
    front.model()
    return json_response(Health("restarting" if front.client.state is EngineState.RESTARTING else "ok"))


async def models(front: Front, request: web.Request) -> web.Response:
    """The one model."""
    return json_response(ModelList([_model(front)]))


async def model(front: Front, request: web.Request) -> web.Response:
    """The model by its name. Raises ModelNotFound for any other."""
    name = request.match_info["id"]
    if name != front.model().name:
        raise ModelNotFound(f"The model {shown(name)!r} is not served here; {front.model().name!r} is", param="model")
    return json_response(_model(front))


async def slots(front: Front, request: web.Request) -> web.Response:
    """What each slot does."""
    info, snapshot = front.model(), front.client.snapshot
    n_waiting = snapshot.n_waiting if snapshot is not None else 0
    return json_response(Slots(info.n_slots, info.n_ctx_slot, n_waiting, slot_list(front, request[CLIENT])))


def slot_list(front: Front, client: Client) -> list[Slot]:
    """All slots as of the engine's last snapshot, with the request ids that a client may see. Raises what `Front.model` raises."""
    info, snapshot = front.model(), front.client.snapshot
    if snapshot is None:
        return [Slot(slot_id, "idle", None, 0, 0, 0, 0) for slot_id in range(info.n_slots)]
    shows_all = front.shows_all_to(client)
    own = {choice.request_id for live in front.visible_to(client) for choice in live.call.choices}
    return [
        Slot(
            slot.slot_id,
            slot.state,
            (slot.request_id or None) if shows_all or slot.request_id in own else None,
            slot.n_cells,
            slot.n_prompt,
            slot.n_cached,
            slot.n_decoded,
        )
        for slot in snapshot.slots
    ]


async def metrics(front: Front, request: web.Request) -> web.Response:
    """Numbers for Prometheus."""
    return web.Response(body=front.metrics.render(), headers={"Content-Type": CONTENT_TYPE})


async def index(front: Front, request: web.Request) -> web.Response:
    """A page that names the endpoints; it needs neither script nor style."""
    name = html.escape(front.client.info.name) if front.client.info is not None else "loading"
    endpoints = (
        "POST /v1/chat/completions",
        "POST /v1/completions",
        "GET /v1/models",
        "GET /health",
        "GET /v1/queue",
        "GET /v1/requests",
        "GET /slots",
        "GET /metrics",
    )
    items = "".join(f"<li><code>{endpoint}</code></li>" for endpoint in endpoints)
    page = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{APP_NAME}</title></head>'
        f"<body><h1>{APP_NAME}</h1><p>Model: {name}</p><ul>{items}</ul></body></html>\n"
    )
    return web.Response(text=page, content_type="text/html", headers=PAGE_HEADERS)


def _model(front: Front) -> Model:
    info: ModelInfo = front.model()
    meta = ModelMeta(info.n_ctx_slot, info.n_ctx_train, info.n_vocab, info.n_params, info.size_bytes)
    return Model(id=info.name, created=front.started_at, meta=meta)


def json_response(value: msgspec.Struct, status: int = 200) -> web.Response:
    """A value as the body of an answer."""
    return web.Response(status=status, body=msgspec.json.encode(value), content_type="application/json")
