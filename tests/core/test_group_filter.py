"""Dynamic sampling: random runs with filters hold to the rules, and single rules by example."""

from __future__ import annotations

from collections import Counter

import pytest

from random_runs import case_of, play
from schedule_rules import check_outcome

SEEDS_PER_TEST = 250
BLOCKS = range(8)


@pytest.mark.parametrize("block", BLOCKS)
def test_random_runs_with_filters_hold_to_the_rules(block: int) -> None:
    """Every second one with several turns. Fresh ones by the thousand: benchmarks/random_schedules.py --filter."""
    faults: Counter[str] = Counter()
    for seed in range(block * SEEDS_PER_TEST, (block + 1) * SEEDS_PER_TEST):
        try:
            outcome = play(case_of(seed, with_turns=seed % 2 == 1, with_filter=True))
            check_outcome(outcome)
        except Exception as error:
            turns = "--turns " if seed % 2 else ""
            error.add_note(f"reproduce: python benchmarks/random_schedules.py --filter {turns}--reproduce {seed}")
            raise
        faults += outcome.faults
    assert faults["died and resumed from a checkpoint"] and faults["interrupted and resumed"], faults
