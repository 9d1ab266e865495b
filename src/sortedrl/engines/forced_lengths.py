"""Any engine, with response lengths imposed: for measurements that compare schedules on equal lengths.

The model computes every token; only where a response ends is decided here. So time, memory and preemptions are real,
and two schedules can be given the same work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from sortedrl.core.engine import Change, Engine, Finished, Request


class ForcedLengths:
    """`inner` with the lengths of `length_of`: of the whole response, kept tokens included."""

    def __init__(self, inner: Engine, length_of: Callable[[Request], int]) -> None:
        self.inner = inner
        self.slots = inner.slots
        self._length_of = length_of
        self._truncated: dict[int, bool] = {}  # by request id: ends by its max_new_tokens, not by its forced length

    def now(self) -> float:
        return self.inner.now()

    def submit(self, requests: Sequence[Request]) -> None:
        self.inner.submit([self._forced(request) for request in requests])

    def poll(self, until: float | None = None) -> list[Change]:
        return [self._told(change) for change in self.inner.poll(until)]

    def abort(self, ids: Sequence[int]) -> list[Change]:
        changes = [self._told(change) for change in self.inner.abort(ids)]
        for id in ids:
            self._truncated.pop(id, None)
        return changes

    def update_weights(self, weights: Any, version: int) -> None:
        self.inner.update_weights(weights, version)

    def _forced(self, request: Request) -> Request:
        # A kept response that is as long as it should be already gets one token more: an engine cannot make none.
        left = max(1, self._length_of(request) - request.prefix_length)
        self._truncated[request.id] = left >= request.max_new_tokens
        sampling = replace(request.sampling, ignore_eos=True)
        return request._replace(max_new_tokens=min(left, request.max_new_tokens), sampling=sampling)

    def _told(self, change: Change) -> Change:
        if isinstance(change, Finished):
            return change._replace(truncated=self._truncated.pop(change.id))
        return change
