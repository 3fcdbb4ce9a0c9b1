"""A short soak, so that it stays a soak; and that it would find what it looks for."""

from pathlib import Path

import pytest

from tests.soak.clients import Lost, Stream, error_code, whole_texts
from tests.soak.ledger import Ledger, Sent, access_fields, read_metrics
from tests.soak.server import Plan
from tests.soak.soak import Soak
from tests.soak.vitals import Holdings, Memory

OURS, THEIRS = "QABCDEFG", "QZYXWVUT"
ERROR = '{"error": {"message": "It took too long", "type": "server_error", "param": null, "code": "timeout"}}'


def sent(name: str = "a-1", word: str = OURS, **fields: object) -> Sent:
    return Sent(name, "ask", 1, word=word, **fields)  # type: ignore[arg-type]


def chunk(text: str, reason: str | None = None, index: int = 0) -> str:
    ending = f'"{reason}"' if reason else "null"
    return f'{{"choices": [{{"index": {index}, "text": "{text}", "finish_reason": {ending}}}]}}'


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
async def test_short_soak_ends_with_every_slot_free_memory_flat_and_no_request_lost(smollm2_path: Path, tmp_path: Path) -> None:
    told: list[str] = []
    plan = Plan(smollm2_path, seconds=8, seed=5, n_workers=6, deadline_s=6, hangs=False, n_still_readers=0)
    soak = Soak(plan, tmp_path, tell=told.append)
    ledger = await soak.run()
    assert ledger.violations == []
    assert ledger.outcomes["done"] > 0


# -- what it would find ----------------------------------------------------------------------------------------------------


def test_request_without_an_outcome_is_lost() -> None:
    ledger = Ledger()
    ledger.send(sent())
    ledger.check_all_ended()
    assert ledger.violations == ["ask a-1: no outcome"]


def test_request_has_one_outcome() -> None:
    ledger = Ledger()
    request = ledger.send(sent())
    ledger.close(request, "done", status=200)
    ledger.close(request, "refused", status=503, code="server_overloaded")
    assert ledger.violations == ["ask a-1: a second outcome: refused after done"]


@pytest.mark.parametrize(
    ("status", "code", "said"),
    [
        (500, "oops", "which the reference does not have"),
        (500, "timeout", "which the reference does not have"),
        (404, "not_found", "which nothing explains"),
        (504, "timeout", ""),
        (200, "timeout", ""),
        (400, "context_length_exceeded", ""),
    ],
)
def test_errors_are_those_of_the_reference(status: int, code: str, said: str) -> None:
    ledger = Ledger()
    ledger.close(ledger.send(sent(expects=frozenset({"context_length_exceeded"}))), "refused", status=status, code=code)
    assert ledger.n_violations == bool(said)
    assert all(said in what for what in ledger.violations)


def test_answer_in_the_wrong_hands_is_seen() -> None:
    ledger = Ledger()
    mine, other = ledger.send(sent("a-1")), ledger.send(sent("b-1", THEIRS))
    mine.texts = [f"{OURS} {OURS}"]
    ledger.close(mine, "done", status=200)
    assert ledger.violations == []
    other.texts = [f"{THEIRS} {OURS}"]
    ledger.close(other, "left")
    assert ledger.violations == [f"ask b-1: its answer holds {OURS}, which is a-1's"]


def test_words_that_are_never_seen_prove_nothing() -> None:
    ledger = Ledger()
    ledger.close(ledger.send(sent()), "done", status=200)
    ledger.check_words_live()
    assert ledger.n_violations == 0
    request = ledger.send(sent("a-2"))
    request.texts = ["something else altogether"]
    ledger.close(request, "done", status=200)
    ledger.check_words_live()
    assert ledger.violations == ["only 0 of 1 answers hold the word that their prompts repeat"]


def line(request_id: str, status: int, reason: str, n_prompt: str = "n_prompt=5 ") -> str:
    return f"2026-01-01T00:00:00.000Z INFO slotfile.access id={request_id} status={status} {n_prompt}reason={reason}"


@pytest.mark.parametrize(
    ("lines", "n_ended", "violations"),
    [
        ([line("a-1", 200, "stop")], 1, []),
        ([], 0, ["ask a-1: done, but no line in the access log"]),
        ([line("a-1", 504, "timeout")], 1, ["ask a-1: its client saw 200, the access log says 504"]),
        ([line("a-1", 200, "stop")], 0, ["the access log tells of 1 sequences that began, the metrics of 0 that ended"]),
        ([line("a-1", 200, "stop"), line("a-1", 200, "stop")], 1, ["a-1: two lines in the access log"]),
    ],
)
def test_log_and_metrics_agree_with_the_clients(lines: list[str], n_ended: int, violations: list[str]) -> None:
    ledger = Ledger()
    ledger.close(ledger.send(sent()), "done", status=200)
    metrics = {'slotfile_request_success_total{finished_reason="stop"}': float(n_ended)}
    ledger.check_log(["another line", *lines], metrics)
    assert ledger.violations == violations


def test_metrics_and_log_lines_are_read() -> None:
    assert read_metrics('# HELP x\nx_total{a="b c"} 3\ny 0.5\n') == {'x_total{a="b c"}': 3.0, "y": 0.5}
    assert access_fields(line("a-1", 200, "stop")) == {"id": "a-1", "status": "200", "n_prompt": "5", "reason": "stop"}
    assert access_fields("2026-01-01T00:00:00.000Z INFO slotfile a server") == {}


def test_stream_is_whole_with_its_reasons_and_done() -> None:
    stream = Stream(2, has_notices=True)
    for event, data in [
        ("queue", '{"place": 1}'),
        ("", chunk("a")),
        ("", chunk("b", "stop", 1)),
        ("", chunk("c", "length")),
        ("", "[DONE]"),
    ]:
        stream.take(event, data)
    stream.check_end()
    assert stream.texts == ["ac", "b"]


@pytest.mark.parametrize(
    "data",
    [
        [],
        [chunk("a", "stop")],
        [chunk("a"), "[DONE]"],
        [chunk("a", "cancelled"), "[DONE]"],
        [chunk("a", "stop"), chunk("b"), "[DONE]"],
        [chunk("a", "stop"), "[DONE]", chunk("b")],
        [ERROR, "[DONE]"],
        ['{"error": "oops"}'],
    ],
    ids=[
        "nothing",
        "no done",
        "no reason",
        "unknown reason",
        "text after the reason",
        "text after done",
        "done after an error",
        "no error object",
    ],
)
def test_stream_that_breaks_off_is_seen(data: list[str]) -> None:
    stream = Stream(1, has_notices=False)
    with pytest.raises(Lost):
        for each in data:
            stream.take("", each)
        stream.check_end()


def test_stream_may_end_with_an_error_event() -> None:
    stream = Stream(1, has_notices=False)
    stream.take("", chunk("a"))
    stream.take("", ERROR)
    stream.check_end()
    assert stream.error == "timeout"


def test_event_that_nobody_asked_for_is_seen() -> None:
    with pytest.raises(Lost):
        Stream(1, has_notices=False).take("queue", "{}")


def test_bodies_that_are_no_answers_are_seen() -> None:
    with pytest.raises(Lost):
        error_code({"detail": "Internal Server Error"})
    with pytest.raises(Lost):
        whole_texts({"choices": [{"index": 0, "text": "a", "finish_reason": "stop"}]}, 2)


def test_leak_is_growth_and_what_comes_and_goes_is_none() -> None:
    flat, leaking = Memory(), Memory()
    for second in range(240):
        parked = 16.0 * (second % 3 == 0)
        flat.add(second, 200 + parked)
        leaking.add(second, 200 + parked + second * 0.3)
    assert flat.growth_mib == 0
    assert leaking.growth_mib == pytest.approx(0.3 * 160, abs=2)
    assert Memory().growth_mib == 0


def test_descriptor_that_stays_open_is_seen() -> None:
    before, after = Holdings(2, 12, 2, 6, 5, 1), Holdings(2, 13, 2, 6, 4, 1)
    assert after.excess(before) == ["front_descriptors: 12 before the load, 13 after it"]
    assert before.excess(before) == []
