"""Streaming: the learner works on the coming update while the rest of it is generated.

During a harvest, every ready group that is certain to be in the coming update (`Strategy.certain`) goes to the learner:

    Buffer --certain--> learner.accumulate, in its own thread        gradients add up, the weights stay
    Buffer --take-----> batch --> learner.step                       the rest of the batch, then the optimizer step

Invariants:
- the learner works on one part at a time, and on none while a batch is handed out or after a harvest has ended;
- only the learner's work leaves this thread: the engine, the buffer and the log stay with the caller;
- a rollout stays in the buffer until it is in a batch. So an interrupt, a dead engine or a kill loses a gradient at
  most, never a rollout.
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Protocol, TypeVar

from sortedrl.core import events
from sortedrl.core.configuration import ConfigurationError
from sortedrl.core.ledger import Ledger
from sortedrl.core.rollout import Rollout
from sortedrl.core.strategies.base import Strategy

# A learner on the engine's GPU slows it down, so it works only while the engine drains, and only up to as many running
# rollouts as the two speeds were measured with (benchmarks/LOG.md, section 10).
MOST_RUNNING_BESIDE_LEARNER = 64
CHECK_SECONDS = 0.05  # between two checks whether the learner is free, while the engine has nothing to report
Accumulate = Callable[[Sequence[Rollout], int], object]  # rollouts, and the version of the learner's weights


class StreamedLearner(Protocol):
    """A learner that works beside the engine, on one part of the coming update at a time."""

    def takes_part(self, running: int, slots: int) -> bool:
        """Whether it would take a part now, while the engine runs `running` rollouts and no other one could start."""

    @property
    def is_working(self) -> bool: ...

    def next_check(self, now: float) -> float:
        """When to check again whether it is free, on the engine's clock, while it works."""

    def start(self, rollouts: Sequence[Rollout], version: int) -> None:
        """Start to work on these rollouts; returns immediately."""

    def wait(self) -> None:
        """Block until its work has ended."""

    def result(self) -> float:
        """How many seconds the work took that has ended; raises the error that ended it."""


def check_can_stream(strategy: Strategy) -> None:
    if not strategy.can_stream:
        late = "decides at the end of a harvest which update a rollout belongs to, so the learner cannot start earlier"
        fix = "Leave it out, or use baseline, an on-policy or a partial mode."
        raise ConfigurationError("stream", True, f"mode {strategy.name} {late}", fix)


def is_draining(running: int, slots: int) -> bool:
    """Whether an engine with `running` rollouts, beside which none could start, may share its GPU with the learner."""
    return running < slots and running <= MOST_RUNNING_BESIDE_LEARNER


class LearnerThread:
    """Calls `accumulate` in a thread of its own."""

    def __init__(self, accumulate: Accumulate) -> None:
        self._accumulate = accumulate
        self._work: Future[float] | None = None

    def takes_part(self, running: int, slots: int) -> bool:
        return not self.is_working

    @property
    def is_working(self) -> bool:
        return self._work is not None and not self._work.done()

    def next_check(self, now: float) -> float:
        return now + CHECK_SECONDS

    def start(self, rollouts: Sequence[Rollout], version: int) -> None:
        self._work = in_learner_thread(lambda: self._timed(rollouts, version))

    def _timed(self, rollouts: Sequence[Rollout], version: int) -> float:
        began = time.perf_counter()
        self._accumulate(rollouts, version)
        return time.perf_counter() - began

    def wait(self) -> None:
        if self._work is not None:
            self._work.exception()

    def result(self) -> float:
        assert self._work is not None
        return self._work.result()


class Streaming:
    """Hands certain groups to the learner during a harvest. Without a learner it does nothing.

    As a context manager around a harvest it lets the learner end its work when the harvest ends with an error; a
    KeyboardInterrupt does not wait."""

    def __init__(self, learner: Accumulate | StreamedLearner | None, ledger: Ledger) -> None:
        self._learner = LearnerThread(learner) if callable(learner) else learner
        self._ledger = ledger
        self._state = ledger.state
        self._handed_over: set[int] = set()  # ids of groups, in this harvest
        self._in_work: tuple[Rollout, ...] = ()
        if learner is not None:
            check_can_stream(ledger.strategy)

    def __enter__(self) -> None:
        self._handed_over.clear()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._learner is None or not isinstance(error, Exception):
            return
        try:
            self.wait()
        except Exception as failure:
            if failure is not error:
                error.add_note(f"The learner failed, too: {failure!r}")

    @property
    def is_working(self) -> bool:
        return self._learner is not None and self._learner.is_working

    def hand_over(self) -> None:
        """Give the learner, if it is free, all certain groups that it has not seen."""
        if self._learner is None:
            return
        self._note_result()
        if self._in_work:  # even if it has ended since: the next part would hide its result, or its error
            return
        if not self._learner.takes_part(len(self._state.buffer.running), self._state.slots):
            return
        groups = [group for group in self._ledger.strategy.certain(self._state) if group.id not in self._handed_over]
        if groups:
            self._handed_over.update(group.id for group in groups)
            self._in_work = tuple(member for group in groups for member in group.members)
            self._learner.start(self._in_work, self._state.version)

    def next_check(self, now: float) -> float:
        """When to check again whether the learner has ended its work."""
        return now if self._learner is None else self._learner.next_check(now)

    def deadline(self, now: Callable[[], float], until: float | None) -> float | None:
        """Until when to poll the engine, at most `until`: the learner may be free before the engine reports."""
        if not self._in_work:
            return until
        check = self.next_check(now())
        return check if until is None else min(check, until)

    def wait(self) -> None:
        """Until the learner has ended its work; raises its error."""
        if self._learner is not None and self._in_work:
            self._learner.wait()
            self._note_result()

    def _note_result(self) -> None:
        if self._learner is None or not self._in_work or self._learner.is_working:
            return
        rollouts, self._in_work = self._in_work, ()
        seconds = self._learner.result()
        self._ledger.note(events.Streamed, self._state.updates, seconds, tuple(rollout.id for rollout in rollouts))


Result = TypeVar("Result")


def run_beside(step: Callable[[], Result], generate: Callable[[], None]) -> Result:
    """Call `generate` again and again until `step`, in its own thread, has ended; returns the result of `step`.

    An error of `generate` is raised after the step has ended, with an error of the step as a note. A
    KeyboardInterrupt is raised at once."""
    stepping = in_learner_thread(step)
    try:
        while not stepping.done():
            generate()
    except Exception as error:
        failure = stepping.exception()  # waits for the step
        if failure is not None:
            error.add_note(f"The learner's step failed, too: {failure!r}")
        raise
    return stepping.result()


def in_learner_thread(work: Callable[[], Result]) -> Future[Result]:
    """Starts `work` in a thread of its own; the future gets its result or its error."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="learner", daemon=True).start()
    return future
