"""The scheduler's side of a training run in TRL: controller, engine, event log and checkpoint of one process.

TRL requests batches, so the controller's loop is inverted:

    next_batch      runs a harvest and returns its batch
    score           receives the rewards, which TRL computes for the whole batch
    publish         after the optimizer step: the engine continues under the new weights

Because rewards come late, a finished rollout counts as ready, and the events after a batch are held back until its
rewards can be written into them. The log is complete whenever no batch is in use.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sortedrl.core.controller import Batch, Controller
from sortedrl.core.engine import Engine, Sampling
from sortedrl.core.events import (
    Event,
    EventLog,
    JsonLines,
    Rejected,
    RolledBack,
    Scored,
    Sink,
    Updated,
    read_events,
    without_rolled_back,
)
from sortedrl.core.prompts import Prompts
from sortedrl.core.rollout import Prompt
from sortedrl.core.schedule import ConfigurationError, Schedule
from sortedrl.core.scoring import ScoreAtOnce
from sortedrl.observe.metrics import Metrics

# Settings that a resumed run may change. All others must match the checkpoint.
_MAY_CHANGE = frozenset({"max_retries", "score_wait_seconds"})


class LateRewards:
    """A sink in front of others. Holds events back between a batch and `release`, and counts the events passed on."""

    def __init__(self, *sinks: Sink) -> None:
        self.sinks = list(sinks)
        self.count = 0
        self._held: list[Event] = []

    def __call__(self, event: Event) -> None:
        if isinstance(event, Scored):  # it only means finished: the reward is not known yet
            return
        if self._held or isinstance(event, Updated):
            self._held.append(event)
        else:
            self._pass_on(event)

    def release(self, reward_of: dict[int, float]) -> None:
        held, self._held = self._held, []
        for event in held:
            if isinstance(event, Updated):
                rewards = tuple(reward_of[rollout] for rollout in event.rollouts)
                for rollout, reward in zip(event.rollouts, rewards, strict=True):
                    self._pass_on(Scored(event.at, rollout, reward))
                event = event._replace(rewards=rewards)
            self._pass_on(event)

    def _pass_on(self, event: Event) -> None:
        self.count += 1
        for sink in self.sinks:
            sink(event)


class ScheduledRun:
    """See the module docstring. `saved` is the saved state of the run to resume."""

    def __init__(
        self,
        engine: Engine,
        prompts: Sequence[Prompt],
        schedule: Schedule,
        *,
        sampling: Sampling,
        shuffle: bool,
        updates: int,
        log_path: Path,
        saved: dict[str, Any] | None = None,
    ) -> None:
        self.metrics = Metrics()
        self._schedule = schedule
        self._last_rejection = ""
        self._log = LateRewards(self.metrics, self._note)
        self._in_hand: Batch | None = None
        self._controller = Controller(
            engine,
            Prompts(prompts, epochs=_epochs(len(prompts), schedule, updates), seed=schedule.seed, shuffle=shuffle),
            ScoreAtOnce(lambda rollout: 0.0),
            schedule,
            sampling=sampling,
            log=EventLog(self._log),
        )
        if saved is None:
            self._file = _new_log(log_path)
            self._log.sinks.append(JsonLines(self._file))
        else:
            self._go_on(saved, log_path)
        self._batches: Iterator[Batch] = iter(self._controller)

    def _go_on(self, saved: dict[str, Any], log_path: Path) -> None:
        """Mark later events in the log as rolled back, so that no metric counts them."""
        _refuse_changes(saved["schedule"], asdict(self._schedule))
        events = _events_so_far(log_path)
        counted = events[: saved["events"]]
        last_time = max((event.at for event in counted), default=0.0)
        self._log.count = saved["events"]
        self.metrics.fold(counted)
        self._file = log_path.open("a", encoding="utf-8")
        write = JsonLines(self._file)
        write(RolledBack(last_time, len(events) - saved["events"]))
        self._log.sinks.append(write)
        self._controller.restore(saved["controller"], last_time=last_time)

    @property
    def version(self) -> int:
        return self._controller.scheduler_state.version

    @property
    def has_batch_in_hand(self) -> bool:
        return self._in_hand is not None

    def next_batch(self) -> Batch:
        for batch in self._batches:
            self._in_hand = batch
            return batch
        rejected = self.metrics.snapshot().rejected
        why = f": {rejected} rollouts were rejected, the last for {self._last_rejection}" if rejected else ""
        raise RuntimeError(f"ran out of prompts before the last step{why}")

    def score(self, reward_of: dict[int, float]) -> None:
        self._log.release(reward_of)
        self._file.flush()  # so that `sortedrl watch` sees whole updates

    def publish(self, weights: Any) -> None:
        self._in_hand = None
        self._controller.publish(weights)

    def mark_phase(self, phase: str) -> None:
        self._controller.mark_phase(phase)

    def state(self) -> dict[str, Any]:
        """JSON-ready. Only valid between two batches, when the log is complete."""
        if self._in_hand is not None:
            raise RuntimeError("a batch has not been published yet: call publish first")
        self._flush()
        return {
            "schedule": asdict(self._schedule),
            "controller": self._controller.state(),
            "events": self._log.count,
        }

    def end(self) -> None:
        """End the run. After an error, abort all requests so that the engine can be used again."""
        running = list(self._controller.scheduler_state.buffer.running)
        if running:
            self._controller.engine.abort(running)
        self.mark_phase("end")
        self._flush()
        self._file.close()

    def _flush(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())

    def _note(self, event: Event) -> None:
        if isinstance(event, Rejected):
            self._last_rejection = event.reason


def _epochs(prompts: int, schedule: Schedule, updates: int) -> int:
    """Enough for `updates` even if half of the rollouts are rejected: TRL ends the run after a number of steps."""
    per_epoch = max(1, prompts * schedule.rollouts_per_prompt)
    return 2 * -(-updates * schedule.rollouts_per_update // per_epoch) + 2


def _new_log(path: Path) -> Any:
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        return path.open("x", encoding="utf-8")
    except FileExistsError:
        raise ConfigurationError(
            "output_dir", str(path.parent), f"it has the {path.name} of an earlier run, which is never overwritten",
            "Use another folder, or continue with trainer.train(resume_from_checkpoint=True).",
        ) from None  # fmt: skip


def _events_so_far(path: Path) -> list[Event]:
    """The valid events. A partial line at the end, left by a killed run, is cut off."""
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        raise ConfigurationError(
            "output_dir", str(path.parent), f"it has no {path.name} of the run to resume",
            "Set output_dir to the folder in which the run started.",
        ) from None  # fmt: skip
    if not text.endswith(b"\n"):
        path.write_bytes(text[: text.rfind(b"\n") + 1])
    return without_rolled_back(read_events(path))


def _refuse_changes(saved: dict[str, Any], wanted: dict[str, Any]) -> None:
    changed = [key for key in wanted if key not in _MAY_CHANGE and saved.get(key) != wanted[key]]
    if changed:
        listed = ", ".join(f"{key}: {saved.get(key)!r} -> {wanted[key]!r}" for key in changed)
        raise ConfigurationError(
            changed[0], wanted[changed[0]], f"the checkpoint was made with another schedule ({listed})",
            "Use the same settings, or start again in another output_dir.",
        )  # fmt: skip


def write_state(path: Path, state: dict[str, Any]) -> None:
    """Write atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(json.dumps(state), encoding="utf-8")
    temporary.replace(path)
