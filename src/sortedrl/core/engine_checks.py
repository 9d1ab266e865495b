"""What an engine returns must be lists of changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from sortedrl.core.engine import Change, Engine, ForwardingEngine, Tokens
from sortedrl.core.errors import UserError
from sortedrl.core.rollout import Segment
from sortedrl.core.wording import kind_of

KINDS = frozenset(get_args(Change))


class NoChanges(UserError, TypeError):
    """A method of an engine returned something other than a list of changes."""


class CheckedEngine(ForwardingEngine):
    """Refuses everything that an engine returns but lists of changes. Their content is checked in engine_reports.py."""

    def poll(self, until: float | None = None) -> list[Change]:
        return checked_changes(self.inner, "poll", self.inner.poll(until))

    def abort(self, ids: Sequence[int]) -> list[Change]:
        return checked_changes(self.inner, "abort", self.inner.abort(ids))


def checked_changes(engine: Engine, method: str, returned: Any) -> list[Change]:
    """What `method` of the engine returned, if it is a list of changes. Raises `NoChanges`."""
    if not isinstance(returned, list | tuple) or type(returned) in KINDS:  # a change is a tuple
        raise _error(engine, method, kind_of(returned))
    if not KINDS.issuperset(map(type, returned)):
        for change in returned:
            if not isinstance(change, Change):
                raise _error(engine, method, f"a list with {kind_of(change)} in it")
    for change in returned:
        if isinstance(change, Tokens) and not isinstance(change.segment, Segment):
            raise _error(engine, method, f"Tokens with {kind_of(change.segment)} in place of a Segment")
    return returned  # type: ignore[return-value]  # a tuple is as good


def _error(engine: Engine, method: str, what: str) -> NoChanges:
    while isinstance(engine, ForwardingEngine):
        engine = engine.inner
    return NoChanges(
        f"{type(engine).__name__}.{method} returned {what}: it must return a list of changes (RequestStarted, "
        "Tokens, RequestFinished, RequestFailed or RequestPreempted), which is empty if nothing changed. "
        "See docs/engine_authors.md"
    )
