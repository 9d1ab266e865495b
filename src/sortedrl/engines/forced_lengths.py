"""Wraps any engine and forces response lengths, to compare schedules on equal work.

The model computes every token; only the end of each response is decided here. So time, memory and preemptions are
real.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from sortedrl.core.engine import Change, Engine, ForwardingEngine, Request, RequestFinished
from sortedrl.core.engine_checks import checked_changes


class ForcedLengths(ForwardingEngine):
    """Wraps `inner` with the lengths of `length_of`: of the whole response, including the prefix."""

    def __init__(self, inner: Engine, length_of: Callable[[Request], int]) -> None:
        super().__init__(inner)
        self._length_of = length_of
        self._truncated: dict[int, bool] = {}  # by request id: ends at max_new_tokens before its forced length

    def submit(self, requests: Sequence[Request]) -> None:
        self.inner.submit([self._forced(request) for request in requests])

    def poll(self, until: float | None = None) -> list[Change]:
        return [self._told(change) for change in checked_changes(self, "poll", self.inner.poll(until))]

    def abort(self, ids: Sequence[int]) -> list[Change]:
        changes = [self._told(change) for change in checked_changes(self, "abort", self.inner.abort(ids))]
        for id in ids:
            self._truncated.pop(id, None)
        return changes

    def _forced(self, request: Request) -> Request:
        # A prefix that already has the forced length gets one more token: engines cannot generate none.
        left = max(1, self._length_of(request) - request.prefix_length)
        self._truncated[request.id] = left >= request.max_new_tokens
        sampling = replace(request.sampling, ignore_eos=True)
        return request._replace(max_new_tokens=min(left, request.max_new_tokens), sampling=sampling)

    def _told(self, change: Change) -> Change:
        if isinstance(change, RequestFinished):
            return change._replace(truncated=self._truncated.pop(change.id))
        return change
