"""Dynamic sampling in the scheduler. Which groups are filtered is decided in group_filter.py; here is what follows.

    complete group --decide--> kept: stays ready
                               filtered: leaves the buffer; its reward goes with the next batch

- If filtered groups leave fewer rollouts behind the gate than an update needs (`Strategy.is_short`), the next cohort
  joins it. The coming update then waits for the older ones: no update has a rollout of a cohort before all of the
  cohorts before it are trained on.
- A prompt whose last group was filtered is loaded again with the probability `revisit_filtered`.
- Strategies see it in `SchedulerState`: `filters`, `kept_fraction` and `joined_cohort`.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from sortedrl.core import events
from sortedrl.core.buffer import Group
from sortedrl.core.group_filter import GroupFilter
from sortedrl.core.ledger import Ledger
from sortedrl.core.loading import PromptLoader
from sortedrl.core.rollout import Prompt

SURPLUS = "surplus"  # a reason of `Filtered`


class DynamicSampling:
    """Judges every group when it is complete."""

    def __init__(self, group_filter: GroupFilter, ledger: Ledger) -> None:
        self.filter = group_filter
        self._ledger = ledger
        self._state = ledger.state
        ledger.on_complete = self._judge
        ledger.state.filters = True
        self._state.kept_fraction = self.filter.kept_fraction

    def note_joined(self) -> None:
        """Note which cohort has joined others behind the current gate: the coming update waits for these others."""
        s = self._state
        here = [group for group in s.buffer.groups() if group.gate == s.buffer.gate]
        s.joined_cohort = max((group.cohort for group in here), default=0) if self._ledger.strategy.gated else 0
        s.must_finish.update(group for group in here if group.missing and group.cohort < s.joined_cohort)
        s.buffer.rekey(self._ledger.key)  # they start before all others

    def discard_surplus(self, batches: Sequence[Sequence[Group]]) -> None:
        """Filter the ready groups that are in no batch."""
        taken = {group.id for batch in batches for group in batch}
        for group in self._state.buffer.ready_groups():
            if group.id not in taken:
                self._discard(group, SURPLUS)

    def _judge(self, group: Group) -> None:
        reason = self.filter.decide(group.members)
        epoch = self._state.prompts.epoch_of(group.id // self._state.schedule.rollouts_per_prompt)
        self.filter.note(group.members[0].prompt.id, epoch, is_kept=not reason)
        self._state.kept_fraction = self.filter.kept_fraction
        if reason:
            self._discard(group, reason)
            self.filter.check_fraction()

    def _discard(self, group: Group, reason: str) -> None:
        s, rollouts = self._state, tuple(group.members)
        rewards = [rollout.reward or 0.0 for rollout in rollouts]
        s.filtered_rewards += [(rollout.cohort, reward) for rollout, reward in zip(rollouts, rewards, strict=True)]
        s.buffer.filter(group)
        ids = tuple([rollout.id for rollout in rollouts])
        tokens = sum(rollout.policy_length for rollout in rollouts)
        self._ledger.note(events.Filtered, ids, tokens, reason, sum(rewards) / len(rewards))
        self._ledger.forget_expectations(rollouts)

    def restore(self, state: dict[str, Any] | None) -> None:
        """Call it after the buffer was restored. None: there was no filter, so no group was judged."""
        if state is None:
            for group in self._state.buffer.ready_groups():
                self._judge(group)
        else:
            self.filter.restore(state)
            self._state.kept_fraction = self.filter.kept_fraction
        self.note_joined()


class FilteredLoader(PromptLoader):
    """Loads the next cohort also if too few rollouts are left of this one, and skips prompts."""

    def __init__(self, ledger: Ledger, sampling: DynamicSampling) -> None:
        super().__init__(ledger)
        self._sampling = sampling
        self._gate_to_join: int | None = None

    def load(self) -> bool:
        s, strategy = self._state, self._ledger.strategy
        joins = strategy.gated and strategy.is_short(s) and s.buffer.untrained > 0
        if joins and len(s.buffer.gates) > 1:
            s.buffer.join_next_gate()
        else:
            self._gate_to_join = s.buffer.gate if joins else None
            if not super().load():
                return False
        if joins:
            self._sampling.note_joined()
        return True

    def _gate_of(self, cohort: int) -> int:
        return super()._gate_of(cohort) if self._gate_to_join is None else self._gate_to_join

    def _load_prompts(self, prompts: Sequence[Prompt], cohort: int) -> None:
        """Skipped ones use up their ids: a rollout's id tells its prompt's place in the order of training."""
        s, per_prompt = self._state, self._state.schedule.rollouts_per_prompt
        epochs = [s.prompts.epoch_of(self.next_id // per_prompt + place) for place in range(len(prompts))]
        ages = map(self._sampling.filter.age_if_skipped, [prompt.id for prompt in prompts], epochs)
        for is_skipped, run in groupby(zip(prompts, ages, strict=True), lambda one: one[1] is not None):
            some, ages_of_some = zip(*run, strict=True)
            if is_skipped:
                self._ledger.note(events.Skipped, self.next_id, tuple(prompt.id for prompt in some), ages_of_some)
                self.next_id += len(some) * per_prompt
            else:
                super()._load_prompts(some, cohort)
