"""Waiting for the engine, and for the work beside generation: scores and answers of environments. What a harvest does
about scores that do not come (docs/design.md, rule 8)."""

import logging
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from sortedrl.core.engine_protocol import Change, Engine
from sortedrl.core.ledger import Ledger
from sortedrl.core.rollout import Rollout
from sortedrl.core.scoring import Scorer, check_detail
from sortedrl.core.strategies.base import is_due
from sortedrl.core.wording import counted

POLL_SECONDS = 1.0  # the longest poll of an engine in real time before interrupts are checked
EMPTY_POLL_PAUSE_SECONDS = 0.002  # after an engine that returned nothing before its time was up
SILENCE_SECONDS = 300.0  # without any report, until the first warning
SCORE_CHECK_SECONDS = 0.05  # between two checks for scores while the engine generates
SCORE_WAIT_STEP_SECONDS = 0.25  # the longest wait for a score before interrupts are checked
_log = logging.getLogger(__name__)


class Awaited(Protocol):
    """A scorer or the environments: work that goes on beside generation."""

    @property
    def pending(self) -> int: ...

    def wait(self, timeout_seconds: float) -> None: ...


def poll_deadline(awaited: Awaited, now: Callable[[], float], until: float | None) -> float | None:
    """Until when to poll the engine, at most `until`: only briefly while something may arrive meanwhile."""
    if not awaited.pending or getattr(awaited, "wakes_engine", False):
        return until
    soon = now() + SCORE_CHECK_SECONDS
    return soon if until is None else min(soon, until)


def wait_briefly(awaited: Awaited, seconds: float) -> None:
    """Wait for something to arrive, in steps that are short enough to notice an interrupt."""
    seconds = max(0.0, seconds)  # the clock may have passed the deadline since it was checked
    wakes_engine = getattr(awaited, "wakes_engine", False)
    awaited.wait(seconds if wakes_engine else min(seconds, SCORE_WAIT_STEP_SECONDS))


class EnginePolls:
    """In real time a poll is short, so that interrupts are noticed, and long silence is reported. Nothing is done about
    it: an engine may report responses at their end only."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._silence, self._warn_at = 0.0, SILENCE_SECONDS

    def poll(self, until: float | None, inside: Mapping[int, object]) -> list[Change]:
        """`inside`: what it has, by id, oldest first."""
        if getattr(self._engine, "virtual_time", False):  # a deadline that nothing needs could change the events
            return self._engine.poll(until)
        began, soon = time.monotonic(), self._engine.now() + POLL_SECONDS
        until = soon if until is None else min(until, soon)
        changes = self._engine.poll(until)
        if not changes and self._engine.now() < until:
            time.sleep(EMPTY_POLL_PAUSE_SECONDS)
        if changes or not inside:
            self._silence, self._warn_at = 0.0, SILENCE_SECONDS
        else:
            self._silence += time.monotonic() - began  # the learner's steps between two polls are no silence
        if self._silence >= self._warn_at:
            self._warn_at *= 2
            _log.warning(
                f"the engine has reported nothing for {self._silence:.0f} s, with {counted(len(inside), 'request')} in "
                f"it, number {next(iter(inside))} for longest. If it reports responses at their end only, they may be "
                "long; else look at its log: it may have lost them. An interrupt and a resume of a run start them again"
            )
        return changes


class LateScores:
    def __init__(self, ledger: Ledger, scorer: Scorer) -> None:
        self._ledger = ledger
        self._scorer = scorer
        self._state = ledger.state
        self.late: list[int] = []  # ids of the rollouts whose scores alone the harvest waits for
        self._since = 0.0

    def collect(self) -> None:
        for scored in self._scorer.collect():
            check_detail(self._scorer, scored.rollout_id, scored.detail)
            self._ledger.score(scored)

    def settle(self, is_interrupted: Callable[[], bool]) -> None:
        """At the end of a harvest, modes that keep tokens leave these rollouts for a later batch. All others wait, then
        regenerate them, and with them the ready members of incomplete groups. After an interrupt no batch follows: the
        rollouts are saved, and scored on resume."""
        buffer, clock, schedule = self._state.buffer, self._ledger.clock, self._state.schedule
        self.collect()
        if self._ledger.strategy.keeps_tokens:
            return
        if buffer.unscored:
            self._ledger.mark_phase("scores")
            deadline = clock.now() + schedule.score_wait_seconds
            while buffer.unscored and clock.now() < deadline and self._scorer.pending:
                if is_interrupted():
                    return
                wait_briefly(self._scorer, deadline - clock.now())
                self.collect()
            for rollout in list(buffer.unscored.values()):
                self._ledger.regenerate(rollout, "no score in time")
        if schedule.whole_groups:
            incomplete = [group for group in buffer.groups() if group.missing]
            for rollout in [member for group in incomplete for member in group.members if member.reward is not None]:
                self._ledger.regenerate(rollout, "unfinished members of its group")

    def give_up(self) -> bool:
        """The last resort of a harvest that can only wait for scores, because nothing runs, or because only rollouts
        that this update must have are missing: if none of these scores arrives within `score_wait_seconds`, the
        rollouts are regenerated; one that was regenerated for this reason before is rejected.

        Returns whether this happened."""
        s = self._state
        if not (s.buffer.unscored or self.late):
            return False
        late = self._holding_up()
        ids = [rollout.id for rollout in late]
        if ids != self.late:
            self.late, self._since = ids, self._ledger.clock.now()
        if not late or self._ledger.clock.now() < self._since + s.schedule.score_wait_seconds:
            return False
        for rollout in late:
            if rollout.forced_regenerations:
                self._ledger.reject(rollout, "no score in time, twice")
                continue
            group = s.buffer.group_of(rollout)
            rollout.forced_regenerations += 1
            self._ledger.regenerate(rollout, "no score in time, and the harvest cannot end without it")
            if not is_due(group, s):
                s.must_finish.discard(group)
        s.buffer.rekey(self._ledger.key)
        return True

    def _holding_up(self) -> list[Rollout]:
        """Finished rollouts whose scores alone the harvest waits for."""
        s, buffer = self._state, self._state.buffer
        unscored = buffer.unscored.values()
        if s.ready >= self._ledger.strategy.next_update_size(s):
            return [r for r in unscored if self._ledger.strategy.waits_for(buffer.group_of(r), s)]
        if not (buffer.running or buffer.in_environment):
            return [r for r in unscored if buffer.group_of(r).gate == buffer.gate]
        return []
