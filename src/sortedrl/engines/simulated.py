"""A discrete-event engine in virtual time: continuous batching without a model.

Between two events only the contexts change: they grow by one token per step. So the time to the next event has a closed
form, and the cost of a run depends on the number of rollouts, never on the number of tokens.

A token is its position in the response, and its log-probability is -(position + 1), so an off-by-one error anywhere in
the scheduler shows as a wrong token. With a limit on KV cache tokens, the request that started last is preempted when
memory is full, and pays for the prefill of all its tokens when it restarts. With `reuse_kv_cache` a resumed request
finds the KV cache of its prefix and pays nothing.

With `prefix_cache` the KV cache of a finished turn stays until the next weight update (across updates with
`reuse_kv_cache`), so that the next turn prefills only what is new. It takes KV cache memory, and the oldest goes first
when memory is needed: before a request waits for memory or is preempted. With `kv_block_tokens` it holds whole blocks
only, and never the last token of a turn, whose KV no step has computed.

With `schedules_ahead` a step is scheduled before the one before it has ended (vLLM's asynchronous scheduling, SGLang's
overlapped scheduling): a request that is submitted while others decode misses the step that comes next.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sortedrl.core.configuration import checked_bool, checked_float, checked_int, checked_slots
from sortedrl.core.engine import (
    Change,
    Request,
    RequestFailed,
    RequestFinished,
    RequestPreempted,
    RequestStarted,
    Tokens,
)
from sortedrl.core.rollout import Segment
from sortedrl.engines.step_time import StepTime
from sortedrl.engines.virtual_time import VirtualTimeEngine

WATERMARK = 0.01  # fraction of KV cache memory that stays free when a request is admitted, as in vLLM


@dataclass(slots=True, eq=False)
class Run:
    """A request in the engine."""

    request: Request
    first: int  # position of the first token to generate
    to_make: int  # tokens still to generate when it last started
    truncated: bool
    first_step: int  # it may start after so many steps, while others decode
    size: int  # its context without generated tokens
    made: int = 0  # tokens generated before it last started
    began_step: int = 0


class SimulatedEngine(VirtualTimeEngine):
    def __init__(
        self,
        *,
        slots: int,
        step_time: StepTime,
        length_of: Callable[[Request], int],
        kv_tokens: int | None = None,
        weight_update_seconds: float = 0.0,
        reuse_kv_cache: bool = False,
        prefix_cache: bool = False,
        kv_block_tokens: int | None = None,
        schedules_ahead: bool = False,
        lost_after: Callable[[Request], int | None] = lambda request: None,  # tokens after which it fails
    ) -> None:
        super().__init__()  # `_now` may be within a step
        self.slots = checked_slots(slots)
        self._step_time = step_time
        self._length_of = length_of
        self._kv_tokens = None if kv_tokens is None else checked_int("kv_tokens", kv_tokens, 1)
        self._weight_update_seconds = checked_float(
            "weight_update_seconds", weight_update_seconds, lambda x: 0 <= x < math.inf, "of seconds, 0 or more"
        )
        self._reuse_kv_cache = checked_bool("reuse_kv_cache", reuse_kv_cache)
        self._prefix_cache = checked_bool("prefix_cache", prefix_cache)
        self._kv_block_tokens = None if kv_block_tokens is None else checked_int("kv_block_tokens", kv_block_tokens, 1)
        self._schedules_ahead = checked_bool("schedules_ahead", schedules_ahead)
        self._turns = _CachedTurns()
        self._lost_after = lost_after
        self.tokens_made = 0  # by all requests
        self._version = 0
        self._clock = 0.0  # end of the last whole step
        self._step = 0
        self._cached = 0  # sum of the running contexts
        self._running: dict[int, Run] = {}
        self._ends: list[tuple[int, int, Run]] = []  # (step, start, run); entries of runs that left earlier are stale
        self._starts = 0
        self._queue: deque[Run] = deque()
        self._speed_at: Callable[[int], float] | None = None

    @property
    def running(self) -> int:
        return len(self._running)

    # The protocol

    def now(self) -> float:
        return self._now if self._now > self._clock else self._clock

    def submit(self, requests: Sequence[Request]) -> None:
        now, first_step = self.now(), self._next_start()
        for request in requests:
            first, max_new_tokens = request.prefix_length, request.max_new_tokens
            wanted = max(1, self._length_of(request) - first)
            lost = self._lost_after(request)
            if max_new_tokens < 1 or lost == 0:
                self._fail(request.id, now, "max_new_tokens is 0" if max_new_tokens < 1 else "lost by the engine")
                continue
            to_make = min(wanted, max_new_tokens) if lost is None else min(wanted, max_new_tokens, lost)
            size = len(request.prompt.tokens) + first
            self._queue.append(Run(request, first, to_make, wanted >= max_new_tokens, first_step, size))
        self._admit()

    def abort(self, ids: Sequence[int]) -> list[Change]:
        changes = self.take_changes()
        self._clock = at = self.now()  # the current step is lost
        for id in ids:
            run = self._running.pop(id, None)
            if run is not None:
                made = self._made(run)
                self._cached -= run.size + made
                self._deliver(run, made, at, changes)
        if not self._running:
            self._ends.clear()
        wanted = set(ids)
        for run in [run for run in self._queue if run.request.id in wanted]:
            self._queue.remove(run)
            self._deliver(run, run.made, at, changes)
        self._admit()
        return changes

    def update_weights(self, weights: Any, version: int) -> None:
        if self._has_work():
            raise RuntimeError("weight update while requests are in the engine: abort them first")
        self._version = version
        if not self._reuse_kv_cache:
            self._turns.clear()
        self.pass_time(self._weight_update_seconds)

    def _has_work(self) -> bool:
        return bool(self.running or self._queue)

    # Virtual time

    def pass_time(self, seconds: float) -> None:
        self._clock = self._now = self.now() + seconds

    def slow_down(self, speed_at: Callable[[int], float] | None) -> None:
        self._speed_at = speed_at

    def _idle_until(self, time: float) -> None:
        self._clock = self._now = max(self.now(), time)

    def next_event(self) -> float:
        """When it changes next, if nothing is submitted or aborted before; infinite: it has no work."""
        if self._has_ended:
            return self.now()
        return self._clock + self._seconds(self._steps_to_event()) if self._has_work() else math.inf

    def miss_kv_cache(self, id: int) -> None:
        """This request comes from another engine, which has its KV cache."""
        self._turns.evicted.add(id)

    def _advance(self, limit: float) -> bool:
        steps = self._steps_to_event()
        if not steps:
            if not self._turns.evict_oldest():
                self._make_room()
            return True
        end = self._clock + self._seconds(steps)
        if end > limit:
            steps = self._steps_until(limit, steps)
            self._clock += self._seconds(steps)
            self._pass_steps(steps)
            self._now = max(self._now, limit)
            return False
        self._clock = end
        self._pass_steps(steps)
        self._finish_due()
        return True

    def _steps_to_event(self) -> int:
        """0: memory is full."""
        steps = self._steps_ahead()
        if self._kv_tokens is None:
            return steps
        return min(steps, (self._kv_tokens - self._cached - self._turns.tokens) // max(1, self._growing()))

    def _next_start(self) -> int:
        """After how many steps a request may start that is submitted now."""
        if not (self._schedules_ahead and self.running):
            return self._step
        return self._step + (2 if self._now > self._clock else 1)

    def _has_slot_for_next(self) -> bool:
        return bool(self._queue) and self.running < self.slots

    def _next_must_wait(self) -> bool:
        """Whether the next request misses the coming step."""
        return self.running > 0 and self._queue[0].first_step > self._step

    def _steps_ahead(self) -> int:
        """Steps until the first running request ends, or the next one may start."""
        if self._has_slot_for_next() and self._next_must_wait():
            return 1
        while self._ends and not self._is_current(self._ends[0]):
            heapq.heappop(self._ends)
        return self._ends[0][0] - self._step

    def _growing(self) -> int:
        """Requests that get a token in the next step."""
        return len(self._running)

    def _seconds(self, steps: int) -> float:
        """Duration of the next `steps` steps, while the running requests stay the same."""
        running = len(self._running)
        cached_in_all = self._cached * steps + running * steps * (steps - 1) / 2
        seconds = steps * self._step_time.at(running) + self._step_time.per_cached(running) * cached_in_all
        return seconds if self._speed_at is None else seconds / self._speed_at(running)

    def _steps_until(self, limit: float, most: int) -> int:
        """How many complete steps end by `limit`."""
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            if self._clock + self._seconds(middle) <= limit:
                low = middle
            else:
                high = middle - 1
        return low

    def _pass_steps(self, steps: int) -> None:
        made = steps * len(self._running)
        self._step += steps
        self._cached += made
        self.tokens_made += made

    # Requests

    def _is_current(self, end: tuple[int, int, Run]) -> bool:
        step, _, run = end
        return self._running.get(run.request.id) is run and step == run.began_step + run.to_make

    def _made(self, run: Run) -> int:
        return run.made + self._step - run.began_step

    def _admit(self) -> None:
        if not self._queue:
            return
        prefill, at, at_once = 0, self.now(), self._step_time.prefill_tokens_per_step
        for run in self._next_in_queue():
            # It takes its slot after full steps for the tokens to prefill before it.
            wait = self._step_time.prefill(prefill // at_once * at_once) if at_once is not None else 0.0
            self._decode_from_now_on(run)
            self._undelivered.append(RequestStarted(run.request.id, at + wait))
            prefill += self._uncached(run, run.size + run.made)
        self._clock += self._step_time.prefill(prefill)

    def _next_in_queue(self) -> Iterator[Run]:
        """Takes those out of the queue that may start now. One that is too large for the KV cache fails."""
        while self._has_slot_for_next() and not self._next_must_wait():
            run = self._queue[0]
            if self._kv_tokens is None or self._makes_room_for(run, self._kv_tokens):
                yield self._queue.popleft()
            elif self.running:
                return
            else:
                self._queue.popleft()
                self._deliver(run, run.made, self.now(), self._undelivered)
                self._fail(run.request.id, self.now(), self._too_large(run.size + run.made))

    def _uncached(self, run: Run, context: int) -> int:
        """Tokens to prefill when the run starts."""
        id = run.request.id
        was_evicted = id in self._turns.evicted
        cached = min(self._turns.take(id), context)  # a regenerated response has nothing beyond its prompt
        if run.made:  # it was preempted
            return context
        if self._reuse_kv_cache and run.first and not cached and not was_evicted:
            cached = context
        return context - self._in_blocks(cached - 1, cached)

    def _in_blocks(self, computed: int, all: int) -> int:
        """Tokens that the prefix cache serves, if the KV of `computed` of them exists."""
        block = self._kv_block_tokens
        return all if block is None else max(0, computed) // block * block

    def _makes_room_for(self, run: Run, kv_tokens: int) -> bool:
        """Whether the run fits into memory, if need be after dropping cached turns of others."""
        spare = kv_tokens * WATERMARK if self.running else 0
        needed = self._cached + run.size + run.made + 1 + spare
        while needed + self._turns.tokens - self._turns.of(run.request.id) > kv_tokens:
            if not self._turns.evict_oldest(but=run.request.id):
                return False
        return True

    def _too_large(self, context: int) -> str:
        return f"a context of {context} tokens does not fit into the KV cache of {self._kv_tokens} tokens"

    def _decode_from_now_on(self, run: Run) -> None:
        run.began_step = self._step
        self._running[run.request.id] = run
        self._cached += run.size + run.made
        self._starts += 1
        heapq.heappush(self._ends, (self._step + run.to_make, self._starts, run))

    def _make_room(self) -> None:
        """Preempt the request that started last."""
        id, run = self._running.popitem()
        made = self._made(run)
        context = run.size + made
        self._cached -= context
        run.to_make -= made - run.made
        run.made = made
        if not self._running:
            self._deliver(run, made, self.now(), self._undelivered)
            self._fail(id, self._clock, self._too_large(context + 1))
            self._admit()
            return
        self._undelivered.append(RequestPreempted(id, self._clock, context))
        self._queue.appendleft(run)

    def _finish_due(self) -> None:
        at = self.now()
        while self._ends and self._ends[0][0] <= self._step:
            end = heapq.heappop(self._ends)
            if not self._is_current(end):
                continue
            run = end[2]
            id = run.request.id
            del self._running[id]
            made = self._made(run)
            self._cached -= run.size + made
            if self._prefix_cache:
                self._turns.keep(id, run.size + made)
            self._deliver(run, made, at, self._undelivered)
            lost = self._lost_after(run.request)
            if lost is not None and made >= lost:
                self._fail(id, at, "lost by the engine")
            else:
                self._undelivered.append(RequestFinished(id, at, run.truncated))
                self._has_ended = True
        if self._has_ended or self._schedules_ahead:
            self._admit()

    def _fail(self, id: int, at: float, reason: str) -> None:
        self._undelivered.append(RequestFailed(id, at, reason))
        self._has_ended = True

    def _deliver(self, run: Run, made: int, at: float, changes: list[Change]) -> None:
        first = run.first
        if made:
            tokens, logprobs = range(first, first + made), range(-first - 1, -first - made - 1, -1)
            changes.append(Tokens(run.request.id, at, Segment(tokens, logprobs, self._version)))


class _CachedTurns:
    """KV cache of requests that finished, by request id, oldest first: a later turn of the same rollout may use it."""

    def __init__(self) -> None:
        self.tokens = 0
        self.evicted: set[int] = set()
        self._of: dict[int, int] = {}

    def of(self, id: int) -> int:
        return self._of.get(id, 0)

    def keep(self, id: int, tokens: int) -> None:
        self._of[id] = tokens
        self.tokens += tokens

    def take(self, id: int) -> int:
        """The request starts again: its cached tokens are its own from now on."""
        self.evicted.discard(id)
        tokens = self._of.pop(id, 0)
        self.tokens -= tokens
        return tokens

    def evict_oldest(self, but: int | None = None) -> bool:
        """Drop the oldest, but not that of request `but`; False if there is none."""
        oldest = next((id for id in self._of if id != but), None)
        if oldest is None:
            return False
        self.take(oldest)
        self.evicted.add(oldest)
        return True

    def clear(self) -> None:
        self.tokens = 0
        self._of.clear()
        self.evicted.clear()
