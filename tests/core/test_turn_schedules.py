"""Random runs with rollouts of several turns, with failures, hangs, late answers, deaths and interrupts."""

from collections import Counter
from collections.abc import Callable

import pytest

from random_runs import case_of, play
from schedule_rules import check_outcome
from sortedrl.core import Rollout, Segment, events
from sortedrl.core.ledger import Ledger
from sortedrl.core.strategies.base import Strategy
from sortedrl.core.strategies.paper import Partial
from sortedrl.core.turns import Turns

SEEDS_PER_TEST = 200
QUICK_BLOCKS = 4
BLOCKS = [pytest.param(n, marks=[] if n < QUICK_BLOCKS else [pytest.mark.slow]) for n in range(10)]


@pytest.mark.parametrize("block", BLOCKS)
def test_no_slot_is_held_while_an_environment_works_and_no_rollout_is_lost(block: int) -> None:
    """The same seeds in every run; fresh ones by the thousand: benchmarks/random_schedules.py --turns."""
    faults: Counter[str] = Counter()
    for seed in range(block * SEEDS_PER_TEST, (block + 1) * SEEDS_PER_TEST):
        try:
            outcome = play(case_of(seed, with_turns=True))
            check_outcome(outcome)
        except Exception as error:
            error.add_note(f"reproduce: python benchmarks/random_schedules.py --turns --reproduce {seed}")
            raise
        faults += outcome.faults
    assert all(
        faults[kind]
        for kind in (
            "environment answered",
            "environment hung",
            "environment failed",
            "between two turns, regenerated",
            "turns not brought back, regenerated",
            "died and resumed from a checkpoint",
            "interrupted and resumed",
        )
    ), faults


def keeps_old_tokens_on_policy(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Turns, "drop", lambda self: None)


def merges_observations(patch: pytest.MonkeyPatch) -> None:
    def observe(self: Rollout, tokens: range) -> None:
        self.append(Segment(tokens, [0.0] * len(tokens), self.segments[-1].version))

    patch.setattr(Rollout, "observe", observe)


def starts_new_ones_first(patch: pytest.MonkeyPatch) -> None:
    resume = Ledger.resume
    patch.setattr(Ledger, "resume", lambda self: self.start() if self.state.buffer.waiting else resume(self))


def opens_without_bound(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Partial, "has_backlog", Strategy.has_backlog)


@pytest.mark.parametrize(
    "damage", [keeps_old_tokens_on_policy, merges_observations, starts_new_ones_first, opens_without_bound]
)
def test_the_rules_notice(damage: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    damage(monkeypatch)
    failures = 0
    for seed in range(40):
        try:
            check_outcome(play(case_of(seed, with_turns=True)))
        except (AssertionError, RuntimeError, KeyError, ValueError):
            failures += 1
    assert failures


def test_the_rules_notice_a_slot_that_is_taken_in_an_environment() -> None:
    for seed in range(20):
        outcome = play(case_of(seed, with_turns=True))
        places = [place for place, event in enumerate(outcome.log) if isinstance(event, events.TurnEnded)]
        if places and not outcome.faults["engine died"]:
            break
    check_outcome(outcome)
    turn = outcome.log[places[0]]
    assert isinstance(turn, events.TurnEnded)
    outcome.log.insert(places[0] + 1, events.Started(turn.at, turn.rollout, 0))
    outcome.raw = list(outcome.log)
    with pytest.raises(AssertionError, match="is environment, not running"):
        check_outcome(outcome)
