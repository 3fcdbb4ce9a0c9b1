"""Prometheus' text format, version 0.0.4: counters, gauges and histograms as they are scraped.

Format: https://prometheus.io/docs/instrumenting/exposition_formats/. Written here and not taken from prometheus_client because that imports
TLS and an HTTP client on sight, a tenth of the time to the first token (docs/decisions/0005-libraries.md); the tests read it with
that package's parser.
"""

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Sample:
    """One line: the family's name with `suffix`, label pairs, a value."""

    value: float
    labels: tuple[tuple[str, str], ...] = ()
    suffix: str = ""


@dataclass(frozen=True, slots=True)
class Family:
    """One metric with all its samples. `kind`: counter, gauge or histogram; a counter's name ends with `_total`."""

    name: str
    kind: str
    help_text: str
    samples: Sequence[Sample]


class Counter:
    """A sum that only grows, one for each combination of label values that has occurred (without labels: one from the start)."""

    def __init__(self, name: str, help_text: str, labels: tuple[str, ...] = ()) -> None:
        self._name, self._help_text, self._labels = name, help_text, labels
        self._sums: dict[tuple[str, ...], float] = {} if labels else {(): 0.0}

    def inc(self, *label_values: str, by: float = 1.0) -> None:
        """Add to the sum of these label values."""
        assert len(label_values) == len(self._labels)
        self._sums[label_values] = self._sums.get(label_values, 0.0) + by

    def family(self) -> Family:
        """As of now."""
        samples = [Sample(value, tuple(zip(self._labels, values, strict=True))) for values, value in self._sums.items()]
        return Family(self._name, "counter", self._help_text, samples)


class Histogram:
    """Observations counted by `bounds`, which ascend; each bucket counts what is no greater than its bound."""

    def __init__(self, name: str, help_text: str, bounds: tuple[float, ...]) -> None:
        self._name, self._help_text, self._bounds = name, help_text, bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def family(self) -> Family:
        """As of now."""
        return histogram(self._name, self._help_text, self._bounds, self._counts, self._sum)


def gauge(name: str, help_text: str, value: float) -> Family:
    """A value that goes up and down."""
    return Family(name, "gauge", help_text, [Sample(value)])


def counter(name: str, help_text: str, value: float) -> Family:
    """A sum that is kept elsewhere."""
    return Family(name, "counter", help_text, [Sample(value)])


def histogram(name: str, help_text: str, bounds: Sequence[float], counts: Sequence[int], total: float) -> Family:
    """Counts that are kept elsewhere: not cumulative, one for each bound and one beyond the last; `total` is the values' sum."""
    assert len(counts) == len(bounds) + 1
    cumulative = list(itertools.accumulate(counts))
    buckets = [Sample(count, (("le", _number(bound)),), "_bucket") for bound, count in zip((*bounds, math.inf), cumulative, strict=True)]
    return Family(name, "histogram", help_text, [*buckets, Sample(cumulative[-1], suffix="_count"), Sample(total, suffix="_sum")])


def render(families: Iterable[Family]) -> bytes:
    """The text that Prometheus reads."""
    return "".join(itertools.chain.from_iterable(map(_lines, families))).encode()


def _lines(family: Family) -> Iterator[str]:
    help_text = family.help_text.replace("\\", r"\\").replace("\n", r"\n")
    yield f"# HELP {family.name} {help_text}\n# TYPE {family.name} {family.kind}\n"
    for sample in family.samples:
        labels = ",".join(f'{name}="{_escaped(value)}"' for name, value in sample.labels)
        yield (
            f"{family.name}{sample.suffix}{{{labels}}} {_number(sample.value)}\n"
            if labels
            else (f"{family.name}{sample.suffix} {_number(sample.value)}\n")
        )


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _number(value: float) -> str:
    """Go's way of writing infinities and NaN."""
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return "NaN" if math.isnan(value) else repr(float(value))
