"""Who shares computed prompts with whom: digests that no two different callers have, and that tell nobody's key, salt or name."""

import re
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from runner.api.domains import Domains, Trust, domain_of, session_name, session_of
from runner.api.identity import Client
from runner.config import ApiKey, ServerConfig
from runner.errors import InvalidRequest
from runner.serving.protocol import Submit
from tests.api.test_guard import serving
from tests.api.wire import CHAT, COMPLETIONS, HELLO, Wire
from tests.fakes import FakeEngineClient

DIGEST = re.compile(r"[0-9a-f]{32}")
TEXTS = st.text(st.characters(), max_size=6)  # surrogates too: a header may bring them
THREE = st.tuples(TEXTS, TEXTS, TEXTS)
ANNA, BERT = Client("anna"), Client("bert")


@given(THREE, THREE)
def test_no_two_different_callers_have_one_domain_or_session(one: tuple[str, str, str], other: tuple[str, str, str]) -> None:
    assume(one != other)
    assert domain_of(*one) != domain_of(*other)
    assert session_of(*one) != session_of(*other) or not (one[2] or other[2])


@given(st.text(max_size=12), st.integers(0, 12), st.integers(0, 12))
def test_parts_that_make_up_the_same_text_are_different_all_the_same(text: str, cut: int, other: int) -> None:
    assume(text[:cut] != text[:other])
    assert domain_of(text[:cut], text[cut:], "") != domain_of(text[:other], text[other:], "")
    assert domain_of("", text[:cut], text[cut:]) != domain_of("", text[:other], text[other:])


@given(THREE)
def test_digest_is_empty_or_sixteen_bytes_of_the_same_every_time(parts: tuple[str, str, str]) -> None:
    for digest in (domain_of, session_of):
        assert digest(*parts) == digest(*parts)
        assert digest(*parts) == "" or DIGEST.fullmatch(digest(*parts))
    assert domain_of(*parts) != session_of(*parts) or not any(parts)


def trust(client: Client, salt: str = "", session: str = "", **config: Any) -> Trust:
    return Domains(ServerConfig(**config)).trust(client, salt=salt, session=session)


def test_default_is_one_domain_for_all() -> None:
    assert trust(ANNA) == trust(BERT, api_keys=("k",)) == Trust("", "", is_stateless=False)


def test_isolated_clients_have_a_domain_each_that_a_salt_parts_further() -> None:
    domains = [trust(client, salt, isolate_clients=True).domain for client in (ANNA, BERT) for salt in ("", "a", "b")]
    assert len(set(domains)) == 6
    assert all(map(DIGEST.fullmatch, domains))
    assert domains[0] == trust(ANNA, isolate_clients=True).domain


def test_salt_alone_makes_a_domain_that_whoever_knows_it_shares() -> None:
    assert trust(ANNA, "a").domain == trust(BERT, "a").domain != trust(ANNA, "b").domain
    assert trust(ANNA, "a").domain != trust(ANNA, "a", isolate_clients=True).domain


def test_stateless_requests_never_share() -> None:
    found = [trust(ANNA, session="s", is_stateless=True) for _ in range(10)]
    assert all(each.is_stateless for each in found)
    assert len({each.domain for each in found}) == len({each.session for each in found}) == 10


def test_session_belongs_to_its_key_and_domain() -> None:
    keys: dict[str, Any] = {"api_keys": ("k",)}
    assert trust(ANNA, session="s").session == trust(BERT, session="s").session  # one person, wherever it asks from
    assert trust(ANNA, session="s", **keys).session == trust(ANNA, session="s", **keys).session
    assert trust(ANNA, session="s", **keys).session != trust(BERT, session="s", **keys).session
    assert trust(ANNA, session="s", isolate_clients=True).session != trust(BERT, session="s", isolate_clients=True).session
    assert trust(ANNA, "a", "s").session != trust(ANNA, "b", "s").session
    assert DIGEST.fullmatch(trust(ANNA, session="s").session)


@pytest.mark.parametrize(
    ("header", "field", "name"), [(None, "", ""), ("", "f", "f"), ("h", "f", "h"), ("h", "x" * 999, "h"), (None, "ключ 1", "ключ 1")]
)
def test_header_names_the_session_before_the_field(header: str | None, field: str, name: str) -> None:
    assert session_name(header, field) == name


@pytest.mark.parametrize("bad", ["x" * 129, "a\nb", "a\x00", "\u202e", "a\udcff"])
def test_session_name_that_is_none_is_refused_by_where_it_stood(bad: str) -> None:
    for header, field, param in ((bad, "", "X-Session-Id"), (None, bad, "prompt_cache_key")):
        with pytest.raises(InvalidRequest) as caught:
            session_name(header, field)
        assert caught.value.param == param
        assert len(caught.value.message) < 200


async def both(wire: Wire, fields: dict[str, Any] | None = None, **headers: str) -> list[int]:
    """The same to both endpoints."""
    bodies = ((CHAT, HELLO), (COMPLETIONS, {"prompt": "x"}))
    return [(await wire.post(path, body | (fields or {}), **headers)).status for path, body in bodies]


def shared(submits: list[Submit]) -> list[tuple[str, str, bool]]:
    return [(submit.domain, submit.session, submit.is_stateless) for submit in submits]


async def test_personal_machine_has_the_empty_domain_and_a_session_where_one_is_named(wire: Wire, engine: FakeEngineClient) -> None:
    assert await both(wire) == [200, 200]
    assert shared(engine.submits) == [("", "", False)] * 2
    await both(wire, {"prompt_cache_key": "my chat"})
    await both(wire, {"prompt_cache_key": "another"}, X_Session_Id="my chat")
    assert set(shared(engine.submits[2:])) == {("", session_of("", "", "my chat"), False)}


async def test_salt_reaches_the_engine_as_a_digest(wire: Wire, engine: FakeEngineClient) -> None:
    await both(wire, {"cache_salt": "tenant 7"})
    assert shared(engine.submits) == [(domain_of("", "tenant 7", ""), "", False)] * 2


@pytest.mark.parametrize(
    ("fields", "headers", "param"),
    [
        ({"cache_salt": "x" * 257}, {}, "cache_salt"),
        ({"cache_salt": 7}, {}, "cache_salt"),
        ({"prompt_cache_key": "x" * 129}, {}, "prompt_cache_key"),
        ({"prompt_cache_key": "a\nb"}, {}, "prompt_cache_key"),
        ({"prompt_cache_key": []}, {}, "prompt_cache_key"),
        ({}, {"X_Session_Id": "x" * 129}, "X-Session-Id"),
    ],
)
async def test_salt_or_name_that_is_none_is_a_400_that_names_it(
    wire: Wire, engine: FakeEngineClient, fields: dict[str, Any], headers: dict[str, str], param: str
) -> None:
    for path, body in ((CHAT, HELLO), (COMPLETIONS, {"prompt": "x"})):
        reply = await wire.post(path, body | fields, **headers)
        assert (reply.status, reply.error["param"]) == (400, param)
    assert not engine.submits


async def test_salt_and_name_at_their_limits_are_taken(wire: Wire) -> None:
    assert await both(wire, {"cache_salt": "é" * 256, "prompt_cache_key": "é" * 128}) == [200, 200]


async def test_isolated_keys_have_a_domain_each_and_keys_of_one_name_one(engine: FakeEngineClient) -> None:
    named = (ApiKey(secret="s-2", name="team"), ApiKey(secret="s-3", name="team"))
    async with serving(engine, api_keys=("s-1", "s-4"), file_keys=named, isolate_clients=True) as wire:
        for key in ("s-1", "s-2", "s-3", "s-4"):
            await both(wire, {"prompt_cache_key": "chat"}, Authorization=f"Bearer {key}")
    first, second, third, fourth = (shared(engine.submits[at : at + 2]) for at in (0, 2, 4, 6))
    assert len({first[0], second[0], fourth[0]}) == 3
    assert second == third
    assert first[0] == first[1]
    for domain, session, _ in (*first, *second, *fourth):
        assert DIGEST.fullmatch(domain)
        assert DIGEST.fullmatch(session)


async def test_without_keys_isolated_clients_are_addresses(engine: FakeEngineClient) -> None:
    async with serving(engine, isolate_clients=True, trusted_proxies=("127.0.0.0/8", "::1")) as wire:
        for address in ("203.0.113.7", "203.0.113.8", "203.0.113.7"):
            await wire.post(COMPLETIONS, {"prompt": "x", "user": "anna"}, X_Forwarded_For=address, X_Client_Id="part")
    domains = [submit.domain for submit in engine.submits]
    assert domains[0] == domains[2] == domain_of("203.0.113.7", "", "")
    assert domains[1] == domain_of("203.0.113.8", "", "")


async def test_stateless_request_shares_only_with_its_own_answers(engine: FakeEngineClient) -> None:
    async with serving(engine, is_stateless=True) as wire:
        for _ in range(2):  # the same id twice: it is the client's own word
            await wire.post(COMPLETIONS, {"prompt": ["a", "b"], "n": 2}, X_Request_Id="mine")
    first, second = shared(engine.submits[:4]), shared(engine.submits[4:])
    assert (len(set(first)), len(set(second))) == (1, 1)
    assert first[0][0] != second[0][0]
    assert all(is_stateless for _, _, is_stateless in first + second)
