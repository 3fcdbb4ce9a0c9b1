"""What two looks say together."""

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.terminal.top.sample import Sample, Share, SlotNow, read_metrics
from runner.terminal.top.view import ANOTHER, MINE, OTHERS, TRAIL_LENGTH, ClientRow, QueueRow, Rates, SlotRow, client_rows, view
from tests.terminal.top.samples import REQUESTS, SLOTS, hidden, request, sample

COUNTERS = {"engine_decode_rows_total": 100.0, "engine_prompt_rows_total": 400.0}
LATER = {"engine_decode_rows_total": 130.0, "engine_prompt_rows_total": 400.0}


def test_rates_are_the_growth_of_the_engines_counters() -> None:
    assert view(sample(10.0, metrics=COUNTERS), sample(12.0, metrics=LATER)).rates == Rates(decode=15.0, prompt=0.0)


@pytest.mark.parametrize(
    "before",
    [None, sample(10.0), sample(12.0, metrics=COUNTERS), sample(10.0, metrics=dict.fromkeys(COUNTERS, 1e9))],
    ids=["first look", "engine was loading", "no time between", "engine has started again"],
)
def test_rates_that_cannot_be_told_are_none(before: Sample | None) -> None:
    assert view(before, sample(12.0, metrics=LATER)).rates == Rates(None, None)


def test_slot_holds_what_was_cached_what_was_computed_and_the_answer() -> None:
    earlier = [SlotNow(5, "decode", "a#1", 100, 100, 40, 1), SlotNow(1, "prefill", "b#2", 10, 200, 0, 0), SLOTS[2]]
    rows = view(sample(10.0, slots=earlier), sample(12.0)).slots
    decoding = SlotRow(0, "decode", "normal", "anna", "a#1", 3.0, 1000, 110, 40, 60, 10, None, 5.0)
    assert rows == (
        decoding,
        SlotRow(1, "prefill", "normal", "anna", "b#2", 3.0, 1000, 50, 0, 50, 0, 0.25, 20.0),
        SlotRow(2, "idle", "", "", "", None, 1000, 70, 0, 0, 0, None, None),
    )


def test_slot_with_another_sequence_than_before_has_no_rate_yet() -> None:
    earlier = [SlotNow(0, "decode", "z#9", 500, 100, 0, 400)]
    assert view(sample(10.0, slots=earlier), sample(12.0)).slots[0].tokens_per_s is None


def test_slot_of_a_request_that_ended_between_two_answers_belongs_to_nobody() -> None:
    row = view(None, sample(requests=[])).slots[0]
    assert (row.state, row.client, row.tier) == ("decode", "", "")


def test_queue_goes_by_place_with_age_and_wait() -> None:
    assert view(None, sample()).queue == (
        QueueRow(1, "queued", "normal", "ben", "d#4", 100, 2.0, 2.0),
        QueueRow(2, "parked", "low", "ben", "c#3", 100, 9.0, 4.0),
    )


def test_waiting_without_a_place_comes_last_and_the_oldest_first() -> None:
    waiting = [request(name, "queued", place=place, age_s=age) for name, place, age in (("x", None, 1.0), ("y", None, 5.0), ("z", 7, 0.0))]
    assert [row.request_id for row in view(None, sample(requests=waiting)).queue] == ["z", "y", "x"]


def test_clients_have_the_tokens_of_their_answers_and_their_part_of_all() -> None:
    grown = [msgspec.structs.replace(REQUESTS[0], n_generated=17), *REQUESTS[1:3], request("d#4", "decode", client="ben", n_generated=2)]
    rows = client_rows(sample(10.0), sample(12.0, requests=grown, clients={"anna": Share(1, 0), "ben": Share(2, 1), "eve": Share(0, 4)}))
    assert rows == (ClientRow("ben", 2, 1, 1.0, 0.25), ClientRow("anna", 1, 0, 3.0, 0.75), ClientRow("eve", 0, 4, None, None))


def test_key_without_admin_sees_itself_and_all_others_together() -> None:
    before, now = sample(10.0, metrics=COUNTERS), sample(12.0, metrics=LATER)
    found = view(sample(10.0, metrics=COUNTERS, **hidden(before)), sample(12.0, metrics=LATER, **hidden(now)))
    assert found.clients == (ClientRow(OTHERS, 2, 0, 15.0, 1.0), ClientRow(MINE, 0, 2, 0.0, 0.0))
    assert [row.client for row in found.slots] == [ANOTHER, ANOTHER, ""]
    assert [(row.place, row.client) for row in found.queue] == [(1, MINE), (2, MINE)]
    assert (found.n_running, found.n_waiting, found.n_hidden) == (2, 2, 0)


def test_hidden_slot_has_its_rate_by_its_number() -> None:
    earlier = [SlotNow(0, "decode", None, 100, 100, 40, 1)]
    assert view(sample(10.0, slots=earlier), sample(12.0, **hidden(sample()))).slots[0].tokens_per_s == 5.0


def test_waiting_requests_of_other_keys_are_counted() -> None:
    assert view(None, sample(n_waiting=9, **hidden(sample()))).n_hidden == 7


def test_trail_keeps_the_last_rates() -> None:
    trail = tuple(Rates(float(n), 0.0) for n in range(TRAIL_LENGTH))
    found = view(sample(10.0, metrics=COUNTERS), sample(12.0, metrics=LATER), trail).trail
    assert (len(found), found[0], found[-1]) == (TRAIL_LENGTH, trail[1], Rates(15.0, 0.0))


def test_share_of_prompts_that_came_from_the_cache() -> None:
    assert view(None, sample(metrics={"engine_cached_tokens_total": 30.0, "engine_prompt_rows_total": 90.0})).cached_share == 0.25
    assert view(None, sample()).cached_share is None


def test_metrics_without_labels_are_read() -> None:
    text = '# HELP slotfile_slots Slots\nslotfile_slots 4.0\nslotfile_http_requests_total{method="GET"} 2.0\npython_info 1\n'
    assert read_metrics(text) == {"slots": 4.0}


@pytest.mark.parametrize("text", ["slotfile_slots", "slotfile_slots four", "slotfile_slots 4 5 6"])
def test_what_is_no_metric_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        read_metrics(text)


COUNTS = st.integers(0, 5000)
ANY_SLOT = st.builds(
    SlotNow,
    id=st.integers(0, 3),
    state=st.sampled_from(["idle", "prefill", "decode"]),
    request_id=st.none() | st.sampled_from(["a#1", "b#2", "z#9"]),
    n_cells=COUNTS,
    n_prompt=COUNTS,
    n_cached=COUNTS,
    n_decoded=COUNTS,
)
ANY_REQUEST = st.builds(
    request,
    st.sampled_from(["a#1", "b#2", "c#3"]),
    st.sampled_from(["queued", "parked", "prefill", "decode"]),
    place=st.none() | st.integers(1, 2000),
    client=st.none() | st.sampled_from(["anna", "ben"]),
    n_generated=COUNTS,
)
ANY_SAMPLE = st.builds(
    sample,
    st.floats(0, 1e6),
    slots=st.lists(ANY_SLOT, max_size=4),
    requests=st.lists(ANY_REQUEST, max_size=4),
    n_waiting=COUNTS,
    mean_wait_s=st.none() | st.floats(0, 1e5),
    clients=st.none() | st.dictionaries(st.sampled_from(["anna", "ben", "eve"]), st.builds(Share, COUNTS, COUNTS)),
    metrics=st.dictionaries(st.sampled_from(sorted(COUNTERS)), st.floats(0, 1e9)),
)


@given(ANY_SAMPLE, ANY_SAMPLE)
def test_whatever_the_server_says_is_a_picture(before: Sample, now: Sample) -> None:
    found = view(before, now)
    assert [row.slot_id for row in found.slots] == [slot.id for slot in now.queue.slots]
    for row in found.slots:
        assert row.n_cached + row.n_computed + row.n_generated <= row.n_cells
        assert min(row.n_cached, row.n_computed, row.n_generated) >= 0
    rates = [slot.tokens_per_s for slot in found.slots] + [client.tokens_per_s for client in found.clients]
    rates += [found.rates.decode, found.rates.prompt]
    assert all(rate is None or rate >= 0 for rate in rates)
    shares = [row.share for row in found.clients if row.share is not None]
    assert sum(shares) <= 1 or math.isclose(sum(shares), 1)
