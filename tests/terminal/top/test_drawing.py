"""What the picture looks like, at each width, and that it fits."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from runner.terminal.top.drawing import Sheet, bar, draw, duration, rate, share_out, sparkline
from runner.terminal.top.view import Rates, SlotRow, View, view
from tests.terminal.top.samples import request, sample

URL = "http://127.0.0.1:8080"
METRICS = {"kv_cache_usage_perc": 0.25, "kv_parked_bytes": 3.5 * 1024 * 1024}
TRAIL = (Rates(10.0, 0.0), Rates(20.0, 512.0))


def picture(**changes: object) -> View:
    """Two looks, two seconds apart, after two others."""
    before = sample(10.0, metrics=METRICS | {"engine_decode_rows_total": 100.0, "engine_prompt_rows_total": 0.0})
    now = sample(12.0, metrics=METRICS | {"engine_decode_rows_total": 180.0, "engine_prompt_rows_total": 2048.0}, **changes)
    return view(before, now, TRAIL)


def lines(found: View | None, sheet: Sheet, trouble: str | None = None, keys: str = "", *, has_colour: bool = False) -> list[str]:
    """The picture as a terminal of this width gets it."""
    color_system = "standard" if has_colour else None
    console = Console(file=io.StringIO(), width=sheet.width, color_system=color_system, force_terminal=has_colour)  # type: ignore[arg-type]
    with console.capture() as captured:
        console.print(draw(found, URL, trouble, sheet, keys))
    return [line.rstrip() for line in captured.get().splitlines()]


def test_eighty_columns() -> None:
    assert lines(picture(), Sheet(80), keys="q leaves") == [
        "slotfile top  ● ok  tiny  http://127.0.0.1:8080",
        "decode   40.0 tokens/s              ▃▅█  prompt  1,024 tokens/s              ▁▅█",
        "running 2/3  waiting 2  parked 1  KV 25%  parked KV 3.5 MiB  from cache 0%",
        "",
        "SLOT  STATE         TOKENS  OF 1,000 TOKENS         TOK/S  TIER    CLIENT",
        "   0  decode           110  ━━────────────────────    0.0  normal  anna",
        "   1  prefill 25%       50  ━─────────────────────    0.0  normal  anna",
        "   2  idle              70  ━━────────────────────",
        "",
        "QUEUE  high 0  normal 1  low 1  batch 0  mean wait 3.0 s",
        "PLACE  TIER    STATE     AGE   WAIT  PROMPT  CLIENT",
        "    1  normal  queued  2.0 s  2.0 s     100  ben",
        "    2  low     parked  9.0 s  4.0 s     100  ben",
        "",
        "CLIENT                    RUNNING  WAITING  TOK/S  SHARE",
        "anna                            2        0    0.0      -",
        "ben                             0        2    0.0      -",
        "",
        "q leaves  ━━ cached  ━━ prompt  ━━ answer  ━━ kept",
    ]


def test_forty_columns_in_ascii() -> None:
    assert lines(picture(), Sheet(40, has_unicode=False), keys="q leaves") == [
        "slotfile top  * ok",
        "decode   40.0 tokens/s",
        "prompt  1,024 tokens/s",
        "running 2/3  waiting 2  parked 1  KV 25%",
        "",
        "SLOT  STATE    TOKENS  OF 1,000    TOK/S",
        "   0  decode      110  #---------    0.0",
        "   1  prefill      50  ----------    0.0",
        "   2  idle         70  #---------",
        "",
        "QUEUE  high 0  normal 1  low 1  batch 0",
        "mean wait 3.0 s",
        "PLACE  TIER    STATE     AGE   WAIT",
        "    1  normal  queued  2.0 s  2.0 s",
        "    2  low     parked  9.0 s  4.0 s",
        "",
        "CLIENT    RUNNING  WAITING  TOK/S  SHARE",
        "anna            2        0    0.0      -",
        "ben             0        2    0.0      -",
        "",
        "q leaves",
    ]


def test_wide_screens_show_ages_and_ids_too() -> None:
    found = lines(picture(), Sheet(120))
    assert found[4].split()[-4:] == ["TIER", "CLIENT", "AGE", "REQUEST"]
    assert found[5].split()[-5:] == ["normal", "anna", "3.0", "s", "a#1"]
    assert found[11].split()[-2:] == ["ben", "d#4"]


@pytest.mark.parametrize("width", [10, 20, 37, 40, 63, 64, 80, 99, 100, 120, 250])
@pytest.mark.parametrize("height", [5, 12, 24, 60])
def test_picture_fits(width: int, height: int) -> None:
    waiting = [request(f"{'x' * 60}#{n}", "queued", place=n, client="client-with-a-long-name" * 3) for n in range(1, 500)]
    found = lines(picture(requests=waiting, n_waiting=499), Sheet(width, height), "No server answers; asking on", "q leaves")
    assert max(map(len, found)) <= width
    if height >= 24 and width >= 64:
        assert len(found) == height
        assert found[-1].startswith("q leaves")
        assert any(line.startswith("and 4") and line.endswith(" more") for line in found)


@pytest.mark.parametrize("width", [40, 80, 120])
def test_ascii_is_ascii(width: int) -> None:
    assert "\n".join(lines(picture(), Sheet(width, has_unicode=False), keys="q leaves")).isascii()


def test_colour_is_all_that_changes_with_colour() -> None:
    plain, coloured = (lines(picture(), Sheet(80), has_colour=has_colour) for has_colour in (False, True))
    assert "\x1b[" not in "\n".join(plain)
    assert "\x1b[32m" in "\n".join(coloured)


def test_names_cannot_write_to_the_screen() -> None:
    found = picture(requests=[request("a\x1b[2J#1", "queued", place=1, client="[red]\x1b]0;title\x07x[/red]")])
    text = "\n".join(lines(found, Sheet(120)))
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "[red]]0;titlex[/red]" in text


def test_trouble_stands_above_the_last_picture() -> None:
    found = lines(picture(), Sheet(80), "No server answers at http://127.0.0.1:8080: Connection refused")
    assert found[0].startswith("slotfile top  ● not ready  tiny")
    assert found[1] == "No server answers at http://127.0.0.1:8080: Connection refused"
    assert found[5].startswith("SLOT")


def test_before_the_first_answer_there_is_trouble_alone() -> None:
    assert lines(None, Sheet(80), "The model is being loaded (37 %); asking on", "q leaves") == [
        "slotfile top  ● not ready  http://127.0.0.1:8080",
        "The model is being loaded (37 %); asking on",
        "",
        "q leaves",
    ]


def test_nobody_there_has_no_empty_tables() -> None:
    found = lines(picture(requests=[], clients={}, n_waiting=0), Sheet(80))
    assert [line.split()[0] for line in found if line][-1] == "QUEUE"


def slot(n_cached: int, n_computed: int, n_generated: int) -> SlotRow:
    """A slot of 100 tokens."""
    n_cells = n_cached + n_computed + n_generated
    return SlotRow(0, "decode", "", "", "", None, 100, n_cells, n_cached, n_computed, n_generated, None, None)


def test_bar_shows_what_lies_in_the_slot_in_its_order() -> None:
    text = bar(slot(20, 30, 10), 10, has_unicode=False)
    assert text.plain == "######----"
    assert [(span.start, span.end) for span in text.spans if span.end > span.start] == [(0, 2), (2, 5), (5, 6), (6, 10)]


@given(st.integers(1, 60), st.integers(0, 500), st.integers(0, 500), st.integers(0, 500))
def test_bar_has_its_width(width: int, n_cached: int, n_computed: int, n_generated: int) -> None:
    assert len(bar(slot(n_cached, n_computed, n_generated), width, has_unicode=True).plain) == width


@given(st.integers(-5, 100), st.lists(st.integers(0, 1000), min_size=1, max_size=5))
def test_rows_are_shared_out(room: int, wants: list[int]) -> None:
    given_rows = share_out(room, wants)
    assert all(0 <= got <= want for got, want in zip(given_rows, wants, strict=True))
    assert sum(given_rows) == min(max(0, room), sum(wants))
    short = [got for got, want in zip(given_rows, wants, strict=True) if got < want]
    assert all(got <= least + 1 for got in given_rows for least in short)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0.0 s"), (9.94, "9.9 s"), (9.96, "10 s"), (99.4, "99 s"), (99.6, "2 min"), (5969, "99 min"), (7200, "2.0 h")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(("tokens_per_s", "text"), [(None, "-"), (0.0, "0.0"), (99.94, "99.9"), (99.96, "100"), (12345.6, "12,346")])
def test_rates(tokens_per_s: float | None, text: str) -> None:
    assert rate(tokens_per_s) == text


def test_sparkline_is_as_wide_as_asked_and_the_newest_is_right() -> None:
    assert sparkline([None, 0.0, 5.0, 10.0], 6) == "   ▁▅█"
    assert sparkline([1.0, 2.0, 4.0], 2) == "▅█"
    assert sparkline([0.0, 0.0], 3) == " ▁▁"
    assert sparkline([1.0], 0) == ""
