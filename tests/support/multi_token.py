"""A simulated engine whose steps yield several tokens per request, as with drafts: responses end within a step, and
several of them in the same one."""

import heapq

from scenarios import WatchedEngine
from sortedrl.engines.simulated import Run


class MultiTokenEngine(WatchedEngine):
    tokens_per_step = 3

    def _steps_of(self, run: Run) -> int:
        return -(-run.to_make // self.tokens_per_step)

    def _is_current(self, end: tuple[int, int, Run]) -> bool:
        step, _, run = end
        return self._running.get(run.request.id) is run and step == run.began_step + self._steps_of(run)

    def _made(self, run: Run) -> int:
        return run.made + min(run.to_make, self.tokens_per_step * (self._step - run.began_step))

    def _growing(self) -> int:
        return self.tokens_per_step * super()._growing()

    def _decode_from_now_on(self, run: Run) -> None:
        super()._decode_from_now_on(run)
        self._ends.remove((self._step + run.to_make, self._starts, run))
        self._ends.append((self._step + self._steps_of(run), self._starts, run))
        heapq.heapify(self._ends)

    def _pass_steps(self, steps: int) -> None:
        before = sum(map(self._made, self._running.values()))
        self._step += steps
        made = sum(map(self._made, self._running.values())) - before
        self._cached += made
        self.tokens_made += made
