"""A client's tokens a minute, on a clock of the test's own, and how a time is written."""

import pytest

from runner.api.bounds import duration
from runner.api.bucket import TokenBucket


def test_bucket_starts_full_and_fills_evenly() -> None:
    bucket = TokenBucket(600, 0.0)
    bucket.take(600, 0.0)
    assert [bucket.level(now) for now in (0.0, 1.0, 30.0, 60.0, 600.0)] == [0.0, 10.0, 300.0, 600.0, 600.0]
    assert bucket.is_full(600.0)


def test_overdrawn_bucket_pays_its_debt_first() -> None:
    bucket = TokenBucket(60, 0.0)
    bucket.take(90, 0.0)
    assert (bucket.level(0.0), bucket.wait_s(0.0, 1.0), bucket.reset_s(0.0)) == (-30.0, 31.0, 90.0)
    assert bucket.wait_s(31.0, 1.0) == 0.0


def test_tokens_that_were_not_used_come_back() -> None:
    bucket = TokenBucket(60, 0.0)
    bucket.take(50, 0.0)
    bucket.take(-50, 0.0)
    assert bucket.level(0.0) == 60.0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *[(0, "0s"), (-1, "0s"), (0.02, "20ms"), (0.0001, "1ms"), (0.9995, "1s"), (1, "1s"), (1.5, "1.5s"), (59.9999, "1m0s")],
        *[(60, "1m0s"), (360, "6m0s"), (61.25, "1m1.25s"), (3600, "1h0m0s"), (86_461, "24h1m1s")],
    ],
)
def test_duration_is_written_as_openai_writes_it(seconds: float, text: str) -> None:
    assert duration(seconds) == text
