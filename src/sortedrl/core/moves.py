"""Moves of rollouts between states, each made in the buffer and recorded in the event log by one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sortedrl.core import events
from sortedrl.core.batch import Batch
from sortedrl.core.buffer import RUNNING, Group, Key
from sortedrl.core.events import EventLog
from sortedrl.core.rejections import NO_REWARD
from sortedrl.core.rollout import Rollout
from sortedrl.core.scoring import Scored, as_reward
from sortedrl.core.slot_clock import SlotClock
from sortedrl.core.strategies.base import SchedulerState, Strategy
from sortedrl.core.wording import counted


class RolloutMoves:
    """Invariant: the buffer, the slot clock and the event log agree after every call.

    `release(rollout id)` is called when a rollout needs its environment no longer: it has a reward, its tokens were
    dropped, or it was rejected.
    """

    def __init__(
        self,
        state: SchedulerState,
        strategy: Strategy,
        clock: SlotClock,
        log: EventLog,
        release: Callable[[int], None] | None = None,
    ) -> None:
        self.state = state
        self._strategy = strategy
        self._clock = clock
        self._log = log
        self._release = release

    def key(self, rollout: Rollout) -> Key:
        """The rollout's place in the queue of waiting rollouts."""
        return self._strategy.key(rollout, self.state)

    # Into the engine and out of it

    def start(self) -> Rollout:
        """The first waiting rollout goes to the engine."""
        s = self.state
        rollout, key = s.buffer.start()
        self._strategy.started(rollout, key, s)
        return self._submit(rollout)

    def resume(self) -> Rollout:
        """The rollout whose environment answered first goes back to the engine. No strategy decides on it."""
        return self._submit(self.state.buffer.resume())

    def _submit(self, rollout: Rollout) -> Rollout:
        rollout.expected = float(self.state.expected(rollout))  # an expectation may return any kind of number
        self._clock.submit(rollout)
        self._log.append(
            events.Submitted(
                self._clock.now(),
                rollout.id,
                rollout.attempt,
                len(rollout.prompt.tokens),
                rollout.length,
                rollout.expected,
            )
        )
        return rollout

    def end_turn(self, rollout: Rollout, at: float) -> None:
        """It leaves its slot and goes to its environment."""
        made = self._clock.leave(rollout)
        self.state.buffer.end_turn(rollout)
        self._log.append(events.TurnEnded(at, rollout.id, made, rollout.length))

    def finish(self, rollout: Rollout, at: float, *, truncated: bool) -> None:
        """It ended in the engine, or in its environment."""
        made = self._clock.leave(rollout) if rollout.state is RUNNING else 0
        self.state.buffer.finish(rollout, truncated=truncated)
        self._log.append(events.Finished(at, rollout.id, made, rollout.length, truncated))
        self.state.expectation.observe(rollout)

    def abort(self, rollout: Rollout, at: float) -> None:
        """The engine stopped it: it waits again, with its tokens if the mode keeps them."""
        made, length = self._clock.leave(rollout), rollout.length
        dropped = self.state.buffer.put_back(rollout, keep=self._strategy.keeps_tokens, key=self.key)
        self._log.append(events.Aborted(at, rollout.id, made, length, dropped))
        if dropped:
            self._release_environment(rollout)

    def fail(self, rollout: Rollout, at: float, reason: str, *, keep: bool = True) -> None:
        """The engine lost it: it waits again, or is rejected after `max_retries`. `keep`: its tokens are valid."""
        schedule = self.state.schedule
        made = self._clock.leave(rollout)
        rollout.failures += 1
        can_resume = keep and self._strategy.keeps_tokens and schedule.room_for(rollout) > 0
        dropped = self.state.buffer.put_back(rollout, keep=can_resume, key=self.key)
        self._log.append(events.Failed(at, rollout.id, made, dropped, reason))
        if dropped:
            self._release_environment(rollout)
        if rollout.failures > schedule.max_retries:
            self.reject(rollout, f"failed {counted(rollout.failures, 'time')}, last: {reason}")

    # In its environment

    def observe(self, rollout: Rollout, tokens: Sequence[int]) -> None:
        """Its environment answered: it waits for a slot."""
        self.state.buffer.observe(rollout, tokens)
        self._log.append(events.Observed(self._clock.now(), rollout.id, len(tokens), rollout.length))

    def fail_environment(self, rollout: Rollout, reason: str, *, counts: bool = True) -> bool:
        """Its environment failed. Whether it may be asked again: after `max_retries` failures it is rejected."""
        rollout.failures += counts
        self._log.append(events.EnvironmentFailed(self._clock.now(), rollout.id, reason))
        self._release_environment(rollout)
        if rollout.failures <= self.state.schedule.max_retries:
            return True
        self.reject(rollout, f"failed {counted(rollout.failures, 'time')}, last: {reason}")
        return False

    def _release_environment(self, rollout: Rollout) -> None:
        if self._release is not None:
            self._release(rollout.id)

    # After the engine

    def score(self, scored: Scored) -> None:
        """Take in a score. Without a usable reward the rollout is rejected; the score of an old attempt is ignored."""
        buffer = self.state.buffer
        rollout = buffer.awaiting_score(scored.rollout_id, scored.attempt)
        if rollout is None:
            return
        try:
            reward, error = as_reward(scored.reward), scored.error
        except (TypeError, ValueError) as unfit:
            reward, error = 0.0, scored.error or str(unfit)
        if error is not None:
            self.reject(rollout, f"{NO_REWARD}{error}")
            return
        group = buffer.score(rollout, reward, scored.detail)
        self._log.append(events.Scored(self._clock.now(), rollout.id, reward))
        self._release_environment(rollout)
        self._note_if_complete(group)

    def regenerate(self, rollout: Rollout, reason: str) -> None:
        """Drop the tokens of a rollout that is not in the engine; it waits again."""
        dropped = self.state.buffer.regenerate(rollout, self.key)
        self._log.append(events.Regenerated(self._clock.now(), rollout.id, dropped, reason))
        self._release_environment(rollout)

    def reject(self, rollout: Rollout, reason: str) -> None:
        """For good."""
        group = self.state.buffer.group_of(rollout)
        dropped = self.state.buffer.reject(rollout)
        self._log.append(events.Rejected(self._clock.now(), rollout.id, dropped, reason))
        self._release_environment(rollout)
        self._note_if_complete(group)

    def train(self, batch: Batch, groups: Sequence[Group]) -> None:
        """`groups` go to the learner as `batch`."""
        rollouts = batch.rollouts
        self._log.append(
            events.Updated(
                at=self._clock.now(),
                update=batch.update,
                harvest=batch.harvest,
                version=batch.version,
                rollouts=tuple([r.id for r in rollouts]),
                lengths=tuple([r.length for r in rollouts]),
                rewards=tuple([r.reward or 0.0 for r in rollouts]),
                segments=tuple([tuple([(g.version, len(g.tokens)) for g in r.segments]) for r in rollouts]),
                waited=tuple([batch.update - r.loaded_at_update for r in rollouts]),
            )
        )
        for group in groups:
            self.state.buffer.train(group)
        self._forget_expectations(batch)

    def _forget_expectations(self, batch: Batch) -> None:
        """Of prompts that are not loaded again."""
        s, per_prompt = self.state, self.state.schedule.rollouts_per_prompt
        if per_prompt == 1 or s.schedule.whole_groups:
            for rollout in batch:
                if s.prompts.is_in_last_epoch(rollout.id // per_prompt):
                    s.expectation.forget(rollout.prompt.id)

    def _note_if_complete(self, group: Group) -> None:
        if not group.missing:
            self.state.must_finish.discard(group.id)
