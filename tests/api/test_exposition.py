"""The metrics' text, read back with the format's own parser."""

import math

import pytest
from prometheus_client.parser import text_string_to_metric_families

from runner.api.exposition import Counter, Histogram, counter, gauge, histogram, render

AWKWARD = 'a "quoted"\nback\\slash é'


def read(text: bytes) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Sample name -> labels -> value."""
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sample.labels.items())] = sample.value
    return found


def test_kinds_names_and_help_are_told() -> None:
    kept = Counter("requests_total", AWKWARD, ("route",))
    kept.inc("/")
    families = [kept.family(), gauge("up", "is it", 1), Histogram("seconds", "how long", (1.0,)).family()]
    told = [(family.name, family.type, family.documentation) for family in text_string_to_metric_families(render(families).decode())]
    # The parser takes the suffix off a counter's name.
    assert told == [("requests", "counter", AWKWARD), ("up", "gauge", "is it"), ("seconds", "histogram", "how long")]


def test_a_counter_sums_by_label_values_whatever_they_hold() -> None:
    kept = Counter("requests_total", "requests", ("method", "route"))
    for route in ("/", AWKWARD, AWKWARD):
        kept.inc("GET", route)
    kept.inc("PUT", "/", by=2.5)
    assert read(render([kept.family()])) == {
        "requests_total": {
            (("method", "GET"), ("route", "/")): 1,
            (("method", "GET"), ("route", AWKWARD)): 2,
            (("method", "PUT"), ("route", "/")): 2.5,
        }
    }


def test_a_counter_without_labels_is_there_before_anything_was_counted() -> None:
    assert read(render([Counter("tokens_total", "tokens").family()])) == {"tokens_total": {(): 0}}
    assert read(render([Counter("requests_total", "requests", ("route",)).family()])) == {}


@pytest.mark.parametrize(
    ("value", "buckets"),
    [(0.5, (1, 1, 1)), (1.0, (1, 1, 1)), (1.5, (0, 1, 1)), (2.0, (0, 1, 1)), (99.0, (0, 0, 1)), (math.inf, (0, 0, 1))],
)
def test_a_value_is_counted_by_every_bound_that_is_not_below_it(value: float, buckets: tuple[int, ...]) -> None:
    kept = Histogram("seconds", "how long", (1.0, 2.0))
    kept.observe(value)
    found = read(render([kept.family()]))
    assert found["seconds_bucket"] == {(("le", le),): n for le, n in zip(("1.0", "2.0", "+Inf"), buckets, strict=True)}
    assert (found["seconds_count"], found["seconds_sum"]) == ({(): 1}, {(): value})


def test_counts_kept_elsewhere_become_cumulative() -> None:
    found = read(render([histogram("seconds", "how long", (0.1, 1.0), [3, 0, 4], 9.5)]))
    assert list(found["seconds_bucket"].values()) == [3, 3, 7]
    assert (found["seconds_count"], found["seconds_sum"]) == ({(): 7}, {(): 9.5})


@pytest.mark.parametrize("value", [0.0, 1e-9, 1e21, 123456789.123, math.inf, -math.inf])
def test_values_come_back_as_they_were(value: float) -> None:
    assert read(render([counter("x_total", "x", value), gauge("y", "y", value)])) == {"x_total": {(): value}, "y": {(): value}}


def test_not_a_number_is_written_so() -> None:
    assert math.isnan(read(render([gauge("y", "y", math.nan)]))["y"][()])
