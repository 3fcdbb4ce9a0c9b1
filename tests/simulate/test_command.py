"""`slotfile simulate`: what it prints, its options, and what it refuses."""

import json
from pathlib import Path

import pytest

from runner.cli.simulate import POLICY_NAMES, TRACE_NAMES
from runner.engine.policies import POLICIES
from runner.simulate.traces import TRACES
from tests.cli.program import run

SMALL = ("simulate", "--requests", "60", "--clients", "5")


def test_choices_are_those_there_are() -> None:
    assert tuple(TRACES) == TRACE_NAMES
    assert tuple(POLICIES) == POLICY_NAMES


def test_table_has_a_line_for_each_policy_and_number_of_slots(tmp_path: Path) -> None:
    done = run(*SMALL, "--slots", "2,4", home=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    head, table, legend = done.stdout.rstrip().split("\n\n")
    assert head == "poisson: 60 requests of 5 clients, load 0.9, seed 1"
    assert [line.split()[:2] for line in table.splitlines()] == [
        ["policy", "slots"],
        ["fair", "2"],
        ["fcfs", "2"],
        ["fair", "4"],
        ["fcfs", "4"],
    ]
    assert legend.startswith("Times in seconds")


def test_tiers_have_a_table_of_their_own(tmp_path: Path) -> None:
    done = run(*SMALL, "--trace", "tiers", "--slots", "2", "--policy", "priority", home=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    tiers = done.stdout.split("\n\n")[2].splitlines()
    assert [line.split()[2] for line in tiers[1:]] == ["high", "normal", "low", "batch"]


def test_json_is_one_object_with_the_same_rows(tmp_path: Path) -> None:
    done = run(*SMALL, "--json", "--slots", "2", "--costs", '{"byte_s": 0}', home=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert (report["n_requests"], report["costs"]["byte_s"]) == (60, 0)
    assert [(row["policy"], row["n_slots"], row["n_served"]) for row in report["rows"]] == [("fair", 2, 60), ("fcfs", 2, 60)]
    assert all(0 < row["busy"] <= 1 and row["ttft_s"]["p50"] <= row["ttft_s"]["max"] for row in report["rows"])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--slots", "4,x"), "'x' is not a valid integer range."),
        (("--slots", "0"), "0 is not in the range 1<=x<=256."),
        (("--policy", "fair,lifo"), "'lifo' is not one of 'fair', 'priority', 'fcfs'."),
        (("--costs", "{"), "The costs cannot be read"),
        (("--batching", "--trace", "tails"), "--batching takes no --trace"),
        (("--batching", "--slots", "4"), "--batching takes no --slots"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_cannot_be_simulated_is_said_in_one_sentence(arguments: tuple[str, ...], says: str, tmp_path: Path) -> None:
    done = run("simulate", *arguments, home=tmp_path)
    assert (done.returncode != 0, done.stdout) == (True, "")
    assert says in done.stderr
    assert "Traceback" not in done.stderr
