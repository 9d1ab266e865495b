"""Loading: prompts become waiting rollouts. Also how many updates the prompts of a run give."""

from collections.abc import Iterable, Sequence
from typing import Any

from sortedrl.core import events
from sortedrl.core.buffer import Buffer
from sortedrl.core.expectation import SensedLengths
from sortedrl.core.ledger import Ledger
from sortedrl.core.prompts import Prompts
from sortedrl.core.rollout import Prompt, Rollout
from sortedrl.core.schedule import Schedule
from sortedrl.core.seeds import mixing
from sortedrl.core.strategies.base import SchedulerState, Strategy, updates_left


class PromptLoader:
    """Loads as many prompts as the strategy asks for. Rollout ids count from 0 in load order."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._state = ledger.state
        self._seed_state = mixing(0, ledger.state.schedule.seed)
        self.next_id = 0
        self.prompts_loaded = 0
        self.cohorts_loaded = 0

    def load(self) -> bool:
        """Whether anything was loaded."""
        s = self._state
        count = self._ledger.strategy.to_load(s) if s.prompts.remaining else 0
        if count <= 0:
            return False
        prompts = s.prompts.take(count, within_epoch=self._ledger.strategy.gated)
        cohort = self._next_cohort()
        self.cohorts_loaded += 1
        self._load_prompts(prompts, cohort)
        return True

    def _load_prompts(self, prompts: Sequence[Prompt], cohort: int) -> None:
        self.prompts_loaded += len(prompts)
        rollouts = len(prompts) * self._state.schedule.rollouts_per_prompt
        ids = tuple([prompt.id for prompt in prompts])
        self._ledger.log.append(events.Loaded(self._ledger.clock.now(), cohort, self.next_id, rollouts, ids))
        for prompt in prompts:
            self._load_group(prompt, cohort)

    def _next_cohort(self) -> int:
        """That of the next prompt. Without a gate, prompts are numbered into cohorts in load order, for statistics."""
        if self._ledger.strategy.gated:
            return self.cohorts_loaded
        return self.prompts_loaded // self._state.prompts_per_cohort

    def complete_cohorts(self, batch: Sequence[Rollout]) -> int:
        """Cohorts of which nothing is left but this batch: all before that of the oldest other rollout."""
        now = set(batch)
        oldest = next((rollout for rollout in self._state.buffer.live.values() if rollout not in now), None)
        return self._next_cohort() if oldest is None else oldest.cohort

    def _load_group(self, prompt: Prompt, cohort: int) -> None:
        s, schedule = self._state, self._state.schedule
        ids = range(self.next_id, self.next_id + schedule.rollouts_per_prompt)
        members = [
            Rollout(id, prompt, index, cohort, mixing(self._seed_state, id) >> 1, s.updates)
            for index, id in enumerate(ids)
        ]
        self.next_id += len(members)
        s.buffer.load(members, self._gate_of(cohort), whole_groups=schedule.whole_groups, key=self._ledger.key)
        self.reject_too_long(members)

    def reject_too_long(self, rollouts: Iterable[Rollout]) -> None:
        """Those whose prompts are longer than the schedule allows, or leave no room for a response."""
        longest, context = self._state.schedule.max_prompt_tokens, self._state.schedule.max_context_tokens
        for rollout in list(rollouts):  # a copy: a group's own list shrinks with each rejection
            tokens = len(rollout.prompt.tokens)
            if longest is not None and tokens > longest:
                self._ledger.reject(rollout, f"prompt of {tokens} tokens, max_prompt_tokens is {longest}")
            elif context is not None and tokens >= context:
                limit = f"max_context_tokens is {context}, for prompt and response together"
                self._ledger.reject(rollout, f"prompt of {tokens} tokens, {limit}")

    def _gate_of(self, cohort: int) -> int:
        return cohort if self._ledger.strategy.gated else 0


def updates_in_all(strategy: Strategy, schedule: Schedule, prompts: int, epochs: int) -> int:
    """Updates of a whole run. Fewer come if rollouts are rejected, or if updates have more rollouts than they need,
    as in on-policy modes and under a staleness bound."""
    per_prompt = schedule.rollouts_per_prompt
    if not strategy.gated:
        return updates_left(prompts * epochs * per_prompt, schedule.rollouts_needed)
    epoch: Any = Prompts(range(prompts), shuffle=False)  # type: ignore[arg-type]  # none of them is read
    nothing_loaded = SchedulerState(schedule, 1, Buffer(), epoch, SensedLengths())
    updates = 0
    while epoch.remaining:
        cohort = epoch.take(strategy.to_load(nothing_loaded), within_epoch=True)
        updates += updates_left(len(cohort) * per_prompt, schedule.rollouts_needed)
    return epochs * updates
