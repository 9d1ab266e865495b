"""Takes in the changes that an engine reports, and refuses those that break the engine protocol."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from sortedrl.core import events
from sortedrl.core.checkpoint import fault_of, invalid_part, plain
from sortedrl.core.configuration import ConfigurationError
from sortedrl.core.engine import Change, Engine, RequestFinished, RequestPreempted, RequestStarted, Tokens
from sortedrl.core.ledger import Ledger
from sortedrl.core.rollout import Rollout, Segment
from sortedrl.core.wording import counted

_log = logging.getLogger(__name__)


class EngineReports:
    """Applies changes to the running rollouts. `ended(rollout, at, truncated)` takes those that the engine ended.

    A change that breaks the protocol costs its rollout, not the run: the request is aborted, and the rollout fails
    without its tokens. A change about a request that is not running is ignored and counted. Only tokens of weights from
    before a restored checkpoint end the run: the caller forgot to update the engine, and every rollout would fail."""

    def __init__(self, engine: Engine, ledger: Ledger, ended: Callable[[Rollout, float, bool], None]) -> None:
        self._engine = engine
        self._ledger = ledger
        self._clock = ledger.clock
        self._ended = ended
        self._running = ledger.state.buffer.running
        self.ignored = 0
        self.restored_version = 0  # of the checkpoint: no new token is older
        self.engine_version = 0  # of the last weight update, which found nothing submitted: every new token has it

    def poll(self, until: float | None) -> None:
        self.apply(self._engine.poll(until))

    def abort(self, ids: Sequence[int]) -> None:
        self.apply(self._engine.abort(ids))

    def regenerate_invalid(self) -> None:
        """Drop the tokens of restored rollouts that must not be trained on."""
        state = self._ledger.state
        reasons: list[str] = []
        for rollout in list(state.buffer.live.values()):
            fault = invalid_part(rollout, state.version)
            if fault is not None:
                self._ledger.regenerate(rollout, f"the checkpoint has {fault}")
                reasons.append(f"rollout {rollout.id}, {fault}")
        if reasons:
            count = counted(len(reasons), "rollout")
            _log.warning("%s of the checkpoint cannot be trained on and will be regenerated: %s", count, reasons[0])

    def apply(self, changes: Sequence[Change]) -> None:
        broken: dict[int, str] = {}  # by rollout id: what is wrong
        for change in changes:
            rollout = self._running.get(change.id)
            if rollout is None:
                self._ignore(change, "it does not run")
            elif change.id not in broken:
                fault = self._apply_one(rollout, change)
                if fault is not None:
                    broken[change.id] = fault
        if not broken:
            return
        later = self._engine.abort(list(broken))
        self.apply([change for change in later if change.id not in broken])
        for id, fault in broken.items():
            self._ledger.fail(self._running[id], self._clock.now(), f"the engine reported {fault}", keep=False)

    def _apply_one(self, rollout: Rollout, change: Change) -> str | None:
        """Returns what is wrong with the change; None: it was applied or ignored."""
        try:
            at = self._clock.stamp(change.at)
        except TypeError:
            return f"a change at {change.at!r}, which is not a time"
        if isinstance(change, Tokens):
            return self._append(rollout, change.segment)
        if isinstance(change, RequestStarted):
            return self._start(rollout, change, at)
        if isinstance(change, RequestFinished):
            self._ended(rollout, at, change.truncated)
        elif isinstance(change, RequestPreempted):
            if self._clock.slot_of(rollout) is None:
                self._ignore(change, "it has no slot")
                return None
            self._clock.free_slot(rollout)
            self._ledger.log.append(events.Preempted(at, rollout.id, change.recompute))
        else:
            self._ledger.fail(rollout, at, change.reason)
        return None

    def _append(self, rollout: Rollout, reported: Segment) -> str | None:
        try:
            segment = plain(reported)
        except ValueError as error:
            return str(error)
        if 0 <= segment.version < self.restored_version:
            raise self._old_weights(segment.version)
        fault = self._fault_of(rollout, segment)
        if fault is None:
            rollout.append(segment)
        return fault

    def _start(self, rollout: Rollout, change: RequestStarted, at: float) -> str | None:
        if self._clock.slot_of(rollout) is not None:
            self._ignore(change, "it has a slot")
            return None
        slot = self._clock.take_slot(rollout)
        if slot is None:
            return f"a start, and all {self._engine.slots} slots are taken"
        self._ledger.log.append(events.Started(at, rollout.id, slot))
        return None

    def _old_weights(self, version: int) -> ConfigurationError:
        return ConfigurationError(
            "version",
            version,
            f"the engine samples with weights of this version, but the checkpoint has version {self.restored_version}",
            f"Call engine.update_weights(weights, {self.restored_version}) before controller.restore(state).",
        )

    def _fault_of(self, rollout: Rollout, segment: Segment) -> str | None:
        """Why this segment cannot be part of this rollout; None if it can."""
        schedule, made = self._ledger.state.schedule, len(segment.tokens)
        if made > (room := schedule.room_for(rollout)):
            limits = f"max_response_tokens is {schedule.max_response_tokens}"
            if schedule.max_context_tokens is not None:
                limits += f", max_context_tokens is {schedule.max_context_tokens}"
            return f"{made} tokens where {room} were left: {limits}"
        if segment.version < 0:
            return f"tokens of version {segment.version}, and versions count from 0"
        now = max(self.engine_version, self.restored_version)
        if segment.version != now:
            return f"tokens of version {segment.version}, and the last update_weights was to version {now}"
        newest = rollout.newest_version
        if newest is not None and segment.version < newest:
            return f"tokens of version {segment.version} after tokens of version {newest}"
        return fault_of(segment)

    def _ignore(self, change: Change, reason: str) -> None:
        self.ignored += 1
        if self.ignored == 1:  # one line is enough to find a broken engine
            _log.warning("%s of request %s is ignored: %s", type(change).__name__, change.id, reason)
