"""Whose share a request is charged to: keys, addresses, proxies that are believed and lists that are made up."""

from typing import Any

import pytest

from runner.api.identity import Client, Identities
from runner.config import ApiKey
from runner.engine.order import Owner, Tier
from runner.errors import ConfigError, InvalidRequest
from tests.api.test_guard import serving
from tests.api.wire import COMPLETIONS, Wire
from tests.fakes import FakeEngineClient

PROXIES = ("10.0.0.0/8", "192.0.2.1", "fd00::/8")


def address(peer: str, *forwarded: str, proxies: tuple[str, ...] = PROXIES) -> str:
    return Identities(proxies).address(peer, list(forwarded))


BELIEVED = [
    (["203.0.113.7"], "203.0.113.7"),
    (["1.2.3.4, 203.0.113.7"], "203.0.113.7"),  # what the client wrote itself stands further left
    (["1.2.3.4", "203.0.113.7, 10.9.9.9"], "203.0.113.7"),  # two lines are one list; its last entry is a proxy of ours
    (["203.0.113.7,10.9.9.9 ,192.0.2.1"], "203.0.113.7"),
    (["10.1.1.1, 10.2.2.2"], "10.1.1.1"),  # all are ours: the one that began
    (["rubbish, 203.0.113.7"], "203.0.113.7"),
    (["203.0.113.7:4711"], "203.0.113.7"),
    (["[2001:db8::7]:443"], "2001:db8::7"),
    (["2001:DB8:0::7"], "2001:db8::7"),
    (["::ffff:203.0.113.7"], "203.0.113.7"),
    (["fe80::1%eth0"], "fe80::1"),
]


@pytest.mark.parametrize(("forwarded", "expected"), BELIEVED)
def test_right_most_address_that_is_no_trusted_proxy_is_the_client(forwarded: list[str], expected: str) -> None:
    assert address("10.0.0.1", *forwarded) == expected
    assert address("::ffff:10.0.0.1", *forwarded) == expected
    assert address("fd00::1", *forwarded) == expected


@pytest.mark.parametrize(("forwarded", "expected"), BELIEVED)
def test_list_of_a_peer_that_is_not_trusted_is_not_looked_at(forwarded: list[str], expected: str) -> None:
    assert address("198.51.100.9", *forwarded) == "198.51.100.9"
    assert address("10.0.0.1", *forwarded, proxies=()) == "10.0.0.1"


@pytest.mark.parametrize(
    "forwarded",
    [[], [""], [","], ["unknown"], ["203.0.113.7, unknown"], ["203.0.113.7, 999.1.1.1"], ["1.2.3.4, x, 10.1.1.1"], ["é"], ["[::1"]],
)
def test_broken_list_says_nothing(forwarded: list[str]) -> None:
    assert address("10.0.0.1", *forwarded) == "10.0.0.1"


@pytest.mark.parametrize(("peer", "expected"), [("", "unknown"), ("somewhere", "somewhere"), ("::ffff:198.51.100.9", "198.51.100.9")])
def test_peer_without_an_address_is_one_client(peer: str, expected: str) -> None:
    assert address(peer, "203.0.113.7") == expected


@pytest.mark.parametrize("text", ["", "proxy", "10.0.0.0/33", "10.0.0", "http://10.0.0.1"])
def test_trusted_proxy_that_is_no_address_is_a_config_error(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--trusted-proxy .* is no address"):
        Identities([text])


@pytest.mark.parametrize(("header", "user", "part"), [(None, "", ""), ("", "u", "u"), ("h", "u", "h"), (None, "x" * 128, "x" * 128)])
def test_header_or_user_names_a_part_and_never_the_client(header: str | None, user: str, part: str) -> None:
    assert Client("c", 2.0).owner(header, user) == Owner("c", part, 2.0)


@pytest.mark.parametrize(
    ("header", "user", "param"), [("x" * 129, "", "X-Client-Id"), ("a\udcff", "", "X-Client-Id"), (None, "x" * 129, "user")]
)
def test_part_that_is_too_long_or_cannot_be_printed_is_refused_by_name(header: str | None, user: str, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Client("c").owner(header, user)
    assert caught.value.param == param
    assert len(caught.value.message) < 300


async def test_client_is_the_address_where_no_keys_are_set(wire: Wire, engine: FakeEngineClient) -> None:
    await wire.post(COMPLETIONS, {"prompt": "x", "user": "anna"}, X_Forwarded_For="203.0.113.7")
    await wire.post(COMPLETIONS, {"prompt": "x", "user": "anna"}, X_Client_Id="team")
    assert [submit.owner for submit in engine.submits] == [Owner("127.0.0.1", "anna"), Owner("127.0.0.1", "team")]


async def test_trusted_proxy_names_the_client(engine: FakeEngineClient) -> None:
    async with serving(engine, trusted_proxies=("127.0.0.0/8", "::1")) as wire:
        await wire.chat()
        await wire.post(COMPLETIONS, {"prompt": "x"}, X_Forwarded_For="1.2.3.4, 203.0.113.7")
    assert [submit.owner.client for submit in engine.submits] == ["127.0.0.1", "203.0.113.7"]


async def test_client_is_the_keys_name_whatever_the_address(engine: FakeEngineClient) -> None:
    named = ApiKey(secret="s-2", name="team-a", weight=2.0)
    async with serving(engine, api_keys=("s-1", "s-2"), file_keys=(named,), trusted_proxies=("127.0.0.1",)) as wire:
        for key in ("s-1", "s-2"):
            reply = await wire.post(COMPLETIONS, {"prompt": "x"}, Authorization=f"Bearer {key}", X_Forwarded_For="203.0.113.7")
            assert reply.status == 200
    first, second = (submit.owner for submit in engine.submits)
    assert (first, second) == (Owner(ApiKey.plain("s-1").name), Owner("team-a", "", 2.0))
    assert "s-1" not in first.client
    assert first.client.startswith("key:")
    assert len(first.client) == 12


async def test_too_long_a_part_is_a_400_that_names_it(wire: Wire, engine: FakeEngineClient) -> None:
    reply = await wire.chat(user="x" * 129)
    assert (reply.status, reply.error["param"]) == (400, "user")
    reply = await wire.post(COMPLETIONS, {"prompt": "x"}, X_Client_Id="x" * 129)
    assert (reply.status, reply.error["param"]) == (400, "X-Client-Id")
    assert not engine.submits


TIERS: list[tuple[dict[str, Any], Tier]] = [
    ({}, Tier.NORMAL),
    ({"service_tier": None, "priority": None}, Tier.NORMAL),
    ({"service_tier": "priority"}, Tier.HIGH),
    ({"service_tier": "auto"}, Tier.NORMAL),
    ({"service_tier": "default"}, Tier.NORMAL),
    ({"service_tier": "flex"}, Tier.LOW),
    ({"service_tier": "batch"}, Tier.BATCH),
    ({"priority": -5}, Tier.HIGH),
    ({"priority": 0}, Tier.NORMAL),
    ({"priority": 1}, Tier.LOW),
    ({"priority": 9}, Tier.LOW),
    ({"priority": 10}, Tier.BATCH),
    ({"priority": 1000}, Tier.BATCH),
    ({"priority": 0, "service_tier": "flex"}, Tier.NORMAL),
    ({"priority": -1, "service_tier": "batch"}, Tier.HIGH),
]
NAMES = {Tier.HIGH: "priority", Tier.NORMAL: "default", Tier.LOW: "flex", Tier.BATCH: "batch"}


@pytest.mark.parametrize(("fields", "tier"), TIERS)
async def test_service_tier_and_priority_choose_the_tier(wire: Wire, engine: FakeEngineClient, fields: dict[str, Any], tier: Tier) -> None:
    answers = [await wire.chat(**fields), await wire.post(COMPLETIONS, {"prompt": "x", **fields})]
    assert [submit.tier for submit in engine.submits] == [tier, tier]
    asked = any(value is not None for value in fields.values())
    assert [answer.json.get("service_tier") for answer in answers] == [NAMES[tier] if asked else None] * 2


async def test_stream_names_the_tier_in_its_last_chunk(wire: Wire) -> None:
    assert [chunk.get("service_tier") for chunk in (await wire.chat(stream=True, priority=3)).chunks if chunk.get("service_tier")] == [
        "flex"
    ]


LOWERED = [
    ("s-plain", "priority", Tier.NORMAL),
    ("s-plain", "flex", Tier.LOW),
    ("s-high", "priority", Tier.HIGH),
    ("s-low", "auto", Tier.LOW),
]


@pytest.mark.parametrize(("key", "asked", "given"), LOWERED)
async def test_tier_better_than_the_key_allows_becomes_its_best(engine: FakeEngineClient, key: str, asked: str, given: Tier) -> None:
    keys = (ApiKey(secret="s-high", name="a", best_tier="high"), ApiKey(secret="s-low", name="b", best_tier="low"))
    async with serving(engine, api_keys=("s-plain",), file_keys=keys) as wire:
        answer = await wire.post(COMPLETIONS, {"prompt": "x", "service_tier": asked}, Authorization=f"Bearer {key}")
    assert [submit.tier for submit in engine.submits] == [given]
    assert answer.json["service_tier"] == NAMES[given]
