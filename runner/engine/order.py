"""Who a sequence belongs to and how it ranks: the words that queue, scheduler, simulator and front share."""

from enum import IntEnum
from typing import Final

import msgspec


class Tier(IntEnum):
    """The class of a request; the lower number goes first."""

    HIGH = 0
    NORMAL = 1
    LOW = 2
    BATCH = 3


# How much later than its arrival a request counts as having arrived, in seconds: one that has waited longer than the difference of
# two tiers' slacks goes before a newcomer of the better one. So no tier waits for ever.
SLACK_S: Final = {Tier.HIGH: 0.0, Tier.NORMAL: 30.0, Tier.LOW: 120.0, Tier.BATCH: 600.0}


class Owner(msgspec.Struct, frozen=True):
    """Whose share a sequence is charged to.

    `client` is an API key's name or an address, `part` a name that the client gives itself: parts divide their client's share and
    never multiply it. A client of twice the `weight` gets twice the tokens.
    """

    client: str = ""
    part: str = ""
    weight: float = 1.0


NOBODY: Final = Owner()
