"""Moves of rollouts between states, each made in the buffer and recorded in the event log by one call."""

from __future__ import annotations

from collections.abc import Sequence

from sortedrl.core import events
from sortedrl.core.batch import Batch
from sortedrl.core.buffer import Group, Key
from sortedrl.core.events import EventLog
from sortedrl.core.rejections import NO_REWARD
from sortedrl.core.rollout import Rollout
from sortedrl.core.scoring import Scored, as_reward
from sortedrl.core.slot_clock import SlotClock
from sortedrl.core.strategies.base import SchedulerState, Strategy


class RolloutMoves:
    """Invariant: the buffer, the slot clock and the event log agree after every call."""

    def __init__(self, state: SchedulerState, strategy: Strategy, clock: SlotClock, log: EventLog) -> None:
        self.state = state
        self._strategy = strategy
        self._clock = clock
        self._log = log

    def key(self, rollout: Rollout) -> Key:
        """The rollout's place in the queue of waiting rollouts."""
        return self._strategy.key(rollout, self.state)

    # Into the engine and out of it

    def start(self) -> Rollout:
        """The first waiting rollout goes to the engine."""
        s = self.state
        rollout, key = s.buffer.start()
        self._strategy.started(rollout, key, s)
        rollout.expected = s.expected(rollout)
        self._clock.submit(rollout)
        self._log.append(
            events.Submitted(
                self._clock.now(),
                rollout.id,
                rollout.attempt,
                len(rollout.prompt.tokens),
                len(rollout),
                rollout.expected,
            )
        )
        return rollout

    def finish(self, rollout: Rollout, at: float, *, truncated: bool) -> None:
        made = self._clock.leave(rollout)
        self.state.buffer.finish(rollout, truncated=truncated)
        self._log.append(events.Finished(at, rollout.id, made, len(rollout), truncated))
        self.state.expectation.observe(rollout)

    def abort(self, rollout: Rollout, at: float) -> None:
        """The engine stopped it: it waits again, with its tokens if the mode keeps them."""
        made, length = self._clock.leave(rollout), len(rollout)
        dropped = self.state.buffer.put_back(rollout, keep=self._strategy.keeps_tokens, key=self.key)
        self._log.append(events.Aborted(at, rollout.id, made, length, dropped))

    def fail(self, rollout: Rollout, at: float, reason: str, *, keep: bool = True) -> None:
        """The engine lost it: it waits again, or is rejected after `max_retries`. `keep`: its tokens are valid."""
        schedule = self.state.schedule
        made = self._clock.leave(rollout)
        rollout.failures += 1
        can_resume = keep and self._strategy.keeps_tokens and len(rollout) < schedule.max_response_tokens
        dropped = self.state.buffer.put_back(rollout, keep=can_resume, key=self.key)
        self._log.append(events.Failed(at, rollout.id, made, dropped, reason))
        if rollout.failures > schedule.max_retries:
            self.reject(rollout, f"failed {rollout.failures} times, last: {reason}")

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
        buffer.score(rollout, reward, scored.detail)
        self._log.append(events.Scored(self._clock.now(), rollout.id, reward))
        self._note_if_complete(buffer.group_of(rollout))

    def regenerate(self, rollout: Rollout, reason: str) -> None:
        """Drop the tokens of a finished rollout; it waits again."""
        dropped = self.state.buffer.regenerate(rollout, self.key)
        self._log.append(events.Regenerated(self._clock.now(), rollout.id, dropped, reason))

    def reject(self, rollout: Rollout, reason: str) -> None:
        """For good."""
        group = self.state.buffer.group_of(rollout)
        dropped = self.state.buffer.reject(rollout)
        self._log.append(events.Rejected(self._clock.now(), rollout.id, dropped, reason))
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
                lengths=tuple(map(len, rollouts)),
                rewards=tuple([r.reward or 0.0 for r in rollouts]),
                segments=tuple([tuple([(g.version, len(g)) for g in r.segments]) for r in rollouts]),
                waited=tuple([batch.update - r.loaded_at_update for r in rollouts]),
            )
        )
        for group in groups:
            self.state.buffer.train(group)

    def _note_if_complete(self, group: Group) -> None:
        if not group.missing:
            self.state.must_finish.discard(group.id)
