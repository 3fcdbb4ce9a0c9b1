"""Who asks for what, and when: one function of a seed for each kind of day. All times are seconds of the simulated clock."""

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from runner.engine.order import Tier

NEVER: Final = math.inf
# Of the trace `team`.
_MEMBERS: Final = 10
_WEIGHTS: Final = (1.0, 2.0, 4.0)


class Arrival(NamedTuple):
    """A request. It is cancelled at `leaves_at`, unless it has ended. The first `n_common` tokens of its prompt are its client's own.

    `part` and `weight` as of `order.Owner`.
    """

    at: float
    client: int
    n_prompt: int
    n_generate: int
    tier: Tier = Tier.NORMAL
    leaves_at: float = NEVER
    n_common: int = 0
    part: str = ""
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Scene:
    """What a trace is made for. `between_s`: the mean time between two requests; 0: all are there from the start."""

    n_requests: int
    n_clients: int
    between_s: float
    seed: int
    n_ctx: int


def nobody(client: int, now: float) -> Arrival | None:
    """No answer makes anybody ask again."""
    return None


@dataclass(frozen=True, slots=True)
class Trace:
    """`arrivals` come by themselves, in order of time. `reply` is asked whenever a request has ended: what does its client send now?"""

    arrivals: Iterator[Arrival]
    reply: Callable[[int, float], Arrival | None] = nobody


Lengths = Callable[[random.Random], tuple[int, int]]


class _Source:
    """Draws of one scene: times between arrivals, and lengths that fit a slot."""

    def __init__(self, scene: Scene, lengths: Lengths) -> None:
        self.random = random.Random(scene.seed)  # noqa: S311
        self._scene, self._lengths = scene, lengths

    def sizes(self) -> tuple[int, int]:
        """Tokens of a prompt, and tokens to generate."""
        n_prompt, n_generate = self._lengths(self.random)
        n_generate = max(1, min(n_generate, self._scene.n_ctx // 2))
        return max(1, min(n_prompt, self._scene.n_ctx - n_generate)), n_generate

    def wait(self, n_requests: float = 1.0) -> float:
        """Seconds until the next arrival of `n_requests` at once."""
        return self.random.expovariate(1.0) * self._scene.between_s * n_requests

    def client(self) -> int:
        """Any of them."""
        return self.random.randrange(self._scene.n_clients)


def _even(rng: random.Random) -> tuple[int, int]:
    return rng.randrange(16, 129), rng.randrange(8, 41)


def _heavy(rng: random.Random) -> tuple[int, int]:
    return int(rng.lognormvariate(math.log(60), 1.2)), int(8 * rng.paretovariate(1.5))


def _long(rng: random.Random) -> tuple[int, int]:
    n_prompt, n_generate = _even(rng)
    return 4 * n_prompt, n_generate


def poisson(scene: Scene) -> Trace:
    """Independent requests of similar size: prompts of 16 to 128 tokens, 8 to 40 generated."""
    return Trace(_independent(scene, _even))


def tails(scene: Scene) -> Trace:
    """Independent requests, most of them short and a few very long: lognormal prompts (median 60), Pareto answers (from 8)."""
    return Trace(_independent(scene, _heavy))


def _independent(scene: Scene, lengths: Lengths) -> Iterator[Arrival]:
    source, at = _Source(scene, lengths), 0.0
    for _ in range(scene.n_requests):
        at += source.wait()
        yield Arrival(at, source.client(), *source.sizes())


def bursts(scene: Scene) -> Trace:
    """Quiet, then 64 requests at the same moment, from 64 clients."""
    return Trace(_bursts(scene))


def _bursts(scene: Scene) -> Iterator[Arrival]:
    source, at = _Source(scene, _even), 0.0
    for i in range(scene.n_requests):
        if i % 64 == 0:
            at += source.wait(64)
        yield Arrival(at, source.client(), *source.sizes())


def greedy(scene: Scene) -> Trace:
    """Client 0 sends 50 requests at once, again and again: half of all. The others send one at a time."""
    return Trace(_greedy(scene))


def _greedy(scene: Scene) -> Iterator[Arrival]:
    source, at, n_left = _Source(scene, _even), 0.0, scene.n_requests
    others = range(1, max(2, scene.n_clients))
    while n_left:
        if source.random.random() < 1 / 51:
            n = min(50, n_left)
            yield from (Arrival(at, 0, *source.sizes()) for _ in range(n))
        else:
            n = 1
            yield Arrival(at, source.random.choice(others), *source.sizes())
        n_left -= n
        at += source.wait(100 / 51)


def tiers(scene: Scene) -> Trace:
    """Independent requests of which a tenth is high, a half normal, a quarter low and the rest batch."""
    return Trace(_tiers(scene))


def _tiers(scene: Scene) -> Iterator[Arrival]:
    rng = random.Random(scene.seed + 2)  # noqa: S311
    for arrival in _independent(scene, _even):
        yield arrival._replace(tier=rng.choices(tuple(Tier), (10, 50, 25, 15))[0])


def chats(scene: Scene) -> Trace:
    """Clients that return: the first half of a prompt is the same each time."""
    return Trace(_chats(scene))


def _chats(scene: Scene) -> Iterator[Arrival]:
    for arrival in _independent(scene, _long):
        yield arrival._replace(n_common=arrival.n_prompt // 2)


def team(scene: Scene) -> Trace:
    """Keys of ten members each, who name themselves and so divide their key's share; of three keys one weighs 2 and one 4."""
    return Trace(_team(scene))


def _team(scene: Scene) -> Iterator[Arrival]:
    for arrival in _independent(scene, _even):
        key, member = divmod(arrival.client, _MEMBERS)
        yield arrival._replace(client=key, part=str(member), weight=_WEIGHTS[key % len(_WEIGHTS)])


def adversarial(scene: Scene) -> Trace:
    """Prompts that fill a slot among prompts of one token, cancels at any stage, all tiers, and clients that come as others leave."""
    source = _Source(scene, _extreme)
    purse = iter(range(scene.n_requests))

    def one(at: float) -> Arrival | None:
        if next(purse, None) is None:
            return None
        rng = source.random
        # Half of those that leave do so within the time that a request like it takes, a third at once.
        patience_s = rng.choice((0.0, rng.expovariate(1.0), rng.expovariate(0.1))) if rng.random() < 0.3 else NEVER
        return Arrival(at, source.client(), *source.sizes(), rng.choice(tuple(Tier)), at + patience_s)

    def arrivals() -> Iterator[Arrival]:
        at = 0.0
        while (arrival := one(at)) is not None:
            yield arrival
            at += source.wait(2)

    return Trace(arrivals(), lambda client, now: one(now) if source.random.random() < 0.5 else None)


def _extreme(rng: random.Random) -> tuple[int, int]:
    kind = rng.random()
    if kind < 0.02:
        return 1 << 20, rng.randrange(1, 9)
    if kind < 0.3:
        return 1, rng.choice((1, 2, 40))
    return _heavy(rng)


TRACES: Final[dict[str, Callable[[Scene], Trace]]] = {
    trace.__name__: trace for trace in (poisson, bursts, tails, greedy, tiers, chats, team, adversarial)
}
