"""The measurement of planning: that it measures what it says, never its figures."""

import pytest

from runner.config import PolicyName
from runner.simulate.planning import measure, planning_json, planning_table


@pytest.mark.parametrize("policy", ["fair", "priority", "fcfs"])
def test_planning_is_measured_with_few_and_with_many_waiting(policy: PolicyName) -> None:
    found = measure([policy], waiting=(3, 50), n_steps=20)
    assert [(row.policy, row.n_waiting) for row in found] == [(policy, 3), (policy, 50)]
    assert all(min(row.plan_us, row.fill_us, row.cancel_us) > 0 for row in found)
    assert len(planning_table(found).splitlines()) == 3
    assert planning_json(found).startswith("[")
