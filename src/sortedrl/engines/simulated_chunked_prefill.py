"""The simulated engine with chunked prefill, as vLLM's scheduler does it.

A step has room for `prefill_tokens_per_step` tokens. Each decoding request takes one of them. The rest goes to prefills
in the order of submission: one prefill may take several steps, and one step may serve several prefills.

- Other requests go on decoding in the steps that prefill.
- Requests that arrive during a step wait for the next one and share it. They pay its fixed cost, `per_prefill_step`,
  once for all of them.
- A request generates its first token in the step that completes its prefill. It prefills one token or more, even if
  the KV cache has all of them.
- With `prefix_cache`, the rollouts of a group share their prompt: the first of them prefills it for all, until the next
  weight update. With `reuse_kv_cache`, a response finds the prompt of those that started under the same weights. Shared
  prompts take no less memory here, and they are not evicted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sortedrl.core.engine import Change, RequestPreempted, RequestStarted
from sortedrl.engines.simulated import Run, SimulatedEngine


class ChunkedPrefillEngine(SimulatedEngine):
    """`step_time` needs `prefill_tokens_per_step`. The other options are those of SimulatedEngine."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        tokens_per_step = self._step_time.prefill_tokens_per_step
        if tokens_per_step is None:
            raise ValueError("step_time has no prefill_tokens_per_step, which chunked prefill needs")
        self._tokens_per_step = tokens_per_step
        self._prefills: dict[int, _Prefill] = {}  # by request id, in the order of their starts
        self._preempted_at: int | None = None  # the last step with a preemption
        self._prompts: set[tuple[str, int]] = set()  # in the prefix cache: id and weight version

    @property
    def running(self) -> int:
        return len(self._running) + len(self._prefills)

    def abort(self, ids: Sequence[int]) -> list[Change]:
        changes = super().abort(ids)
        for prefill in [self._prefills.pop(id) for id in ids if id in self._prefills]:
            self._cached -= prefill.context
            self._deliver(prefill.run, prefill.run.made, self._clock, changes)
        self._preempted_at = None  # the step is lost
        return changes

    def _admit(self) -> None:
        """Nothing: requests start at the start of a step."""

    def next_event(self) -> float:
        self._start_step()
        return super().next_event()

    def _advance(self, limit: float) -> bool:
        self._start_step()
        return self._has_ended or super()._advance(limit)

    def _start_step(self) -> None:
        if not self.running:
            self._clock = self.now()  # no step is under way
        if self._preempted_at != self._step:  # as in vLLM, a step with a preemption starts no request
            self._start_prefills()

    def _start_prefills(self) -> None:
        room = self._room() - sum(prefill.left for prefill in self._prefills.values())
        following = self._next_in_queue()
        while room > 0 and (run := next(following, None)) is not None:
            context = run.size + run.made
            prefill = self._prefills[run.request.id] = _Prefill(run, context, self._uncached(run, context))
            self._cached += context
            self._undelivered.append(RequestStarted(run.request.id, self._clock))
            room -= prefill.left

    def _uncached(self, run: Run, context: int) -> int:
        uncached = super()._uncached(run, context)
        if self._prefix_cache:
            request = run.request
            version = request.prefix[0].version if self._reuse_kv_cache and request.prefix else self._version
            prompt = request.prompt.id, version
            if prompt in self._prompts:
                tokens = len(request.prompt.tokens)
                uncached = min(uncached, context - self._in_blocks(tokens, tokens))
            self._prompts.add(prompt)
        return max(1, uncached)

    # A step with prefills

    def _room(self) -> int:
        """For tokens to prefill in the next step. One fits in any case: more slots than tokens must not halt it."""
        return max(1, self._tokens_per_step - len(self._running))

    def _chunks(self) -> dict[int, int]:
        """Tokens that the next step prefills, by request id."""
        room = self._room()
        chunks = {}
        for id, prefill in self._prefills.items():
            chunks[id] = min(prefill.left, room)
            room -= chunks[id]
            if not room:
                break
        return chunks

    def _steps_ahead(self) -> int:
        misses_this_step = self._preempted_at == self._step and self._has_slot_for_next()
        return 1 if self._prefills or misses_this_step else super()._steps_ahead()

    def _next_start(self) -> int:
        is_within_step = self.running > 0 and self._now > self._clock
        return max(super()._next_start(), self._step + is_within_step)

    def _growing(self) -> int:
        return len(self._running) + sum(chunk == self._prefills[id].left for id, chunk in self._chunks().items())

    def _seconds(self, steps: int) -> float:
        if not self._prefills or not steps:
            return super()._seconds(steps)
        prefilling = sum(prefill.context for prefill in self._prefills.values())
        self._cached -= prefilling  # they are not decoding
        decode = super()._seconds(steps)
        self._cached += prefilling
        return decode + self._step_time.prefill(sum(self._chunks().values()))

    def _pass_steps(self, steps: int) -> None:
        for id, chunk in (self._chunks() if steps else {}).items():
            prefill = self._prefills[id]
            prefill.left -= chunk
            if not prefill.left:
                del self._prefills[id]
                self._cached -= prefill.context
                self._decode_from_now_on(prefill.run)
        super()._pass_steps(steps)

    def _make_room(self) -> None:
        """Preempt the request that started last: one that is still in its prefill, if there is any."""
        self._preempted_at = self._step
        if not self._prefills:
            super()._make_room()
            return
        id, prefill = self._prefills.popitem()
        self._cached -= prefill.context
        self._turns.evicted.add(id)
        self._undelivered.append(RequestPreempted(id, self._clock, prefill.context))
        self._queue.appendleft(prefill.run)


@dataclass(slots=True, eq=False)
class _Prefill:
    """A request whose prefill is not complete."""

    run: Run
    context: int  # tokens in the KV cache when it is complete
    left: int  # tokens still to prefill
