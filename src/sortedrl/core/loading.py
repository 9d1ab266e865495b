"""Turns prompts into waiting rollouts: ids, seeds, groups and cohorts."""

from __future__ import annotations

from typing import Any

from sortedrl.core import events
from sortedrl.core.events import EventLog
from sortedrl.core.moves import RolloutMoves
from sortedrl.core.rollout import Prompt, Rollout
from sortedrl.core.seeds import mixing
from sortedrl.core.slot_clock import SlotClock
from sortedrl.core.strategies.base import Strategy


class PromptLoader:
    """Loads as many prompts as the strategy asks for. Rollout ids count from 0 in load order."""

    def __init__(self, moves: RolloutMoves, strategy: Strategy, clock: SlotClock, log: EventLog) -> None:
        self._moves = moves
        self._state = moves.state
        self._strategy = strategy
        self._clock = clock
        self._log = log
        self._seed_state = mixing(0, moves.state.schedule.seed)
        self._next_id = 0
        self._prompts_loaded = 0
        self._cohorts_loaded = 0

    def load(self) -> bool:
        """Whether anything was loaded."""
        s = self._state
        count = self._strategy.to_load(s) if s.prompts.remaining else 0
        if count <= 0:
            return False
        prompts = s.prompts.take(count, within_epoch=self._strategy.gated)
        cohort = self._cohorts_loaded if self._strategy.gated else self._nominal_cohort()
        self._cohorts_loaded += 1
        self._prompts_loaded += len(prompts)
        rollouts = len(prompts) * s.schedule.rollouts_per_prompt
        ids = tuple([prompt.id for prompt in prompts])
        self._log.append(events.Loaded(self._clock.now(), cohort, self._next_id, rollouts, ids))
        for prompt in prompts:
            self._load_group(prompt, cohort)
        return True

    def _nominal_cohort(self) -> int:
        """Without a gate, prompts are numbered into cohorts in load order, for statistics over cohorts."""
        return self._prompts_loaded // self._state.prompts_per_cohort

    def _load_group(self, prompt: Prompt, cohort: int) -> None:
        s, schedule = self._state, self._state.schedule
        ids = range(self._next_id, self._next_id + schedule.rollouts_per_prompt)
        members = [
            Rollout(id, prompt, index, cohort, mixing(self._seed_state, id) >> 1, s.updates)
            for index, id in enumerate(ids)
        ]
        self._next_id += len(members)
        gate = cohort if self._strategy.gated else 0
        s.buffer.load(members, gate, whole_groups=schedule.whole_groups, key=self._moves.key)
        limit = self._limit_exceeded_by(len(prompt.tokens))
        if limit:
            for rollout in list(members):  # a copy: the group's own list shrinks with each rejection
                self._moves.reject(rollout, f"prompt of {len(prompt.tokens)} tokens, {limit}")

    def _limit_exceeded_by(self, prompt_tokens: int) -> str:
        """Empty if the prompt is short enough."""
        longest, context = self._state.schedule.max_prompt_tokens, self._state.schedule.max_context_tokens
        if longest is not None and prompt_tokens > longest:
            return f"max_prompt_tokens is {longest}"
        if context is not None and prompt_tokens >= context:
            return f"max_context_tokens is {context}, for prompt and response together"
        return ""

    def state(self) -> dict[str, Any]:
        return {
            "next_id": self._next_id,
            "prompts_loaded": self._prompts_loaded,
            "cohorts_loaded": self._cohorts_loaded,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self._next_id = state["next_id"]
        self._prompts_loaded = state["prompts_loaded"]
        self._cohorts_loaded = state["cohorts_loaded"]
