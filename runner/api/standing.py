"""Where sequences stand, as far as the front can tell: from the engine's last snapshot, and from what it said since."""

from typing import Literal

import msgspec

from runner.api.call import Choice
from runner.serving.client import EngineClient
from runner.serving.protocol import SlotState

State = Literal["queued", "prefill", "decode", "parked"]


class Standing(msgspec.Struct, frozen=True):
    """One sequence. `place` is its turn for the next slot, from 1; None where it has one or the engine does not say."""

    state: State
    place: int | None = None
    slot: SlotState | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether it holds no slot."""
        return self.state in ("queued", "parked")


class Standings:
    """All sequences at one moment."""

    def __init__(self, client: EngineClient) -> None:
        snapshot = client.snapshot
        self.n_waiting = snapshot.n_waiting if snapshot is not None else client.n_live
        self._n_snapshots = client.n_snapshots
        self._slots = {slot.request_id: slot for slot in snapshot.slots if slot.request_id} if snapshot is not None else {}
        self._places = {request_id: place for place, request_id in enumerate(client.queue, 1)}

    def of(self, choice: Choice) -> Standing:
        """One that is not over."""
        if not choice.is_placed:
            return Standing("queued", self._places.get(choice.request_id))
        if (slot := self._slots.get(choice.request_id)) is not None:
            return Standing("prefill" if slot.state == "prefill" else "decode", None, slot)
        if choice.placed_at == self._n_snapshots:  # since the last snapshot, which therefore knows nothing of its slot
            return Standing("prefill")
        return Standing("parked", self._places.get(choice.request_id))
