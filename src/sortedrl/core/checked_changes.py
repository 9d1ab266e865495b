"""Refuses what is not a list of changes, before any other code sees it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from sortedrl.core.engine import Change, Engine, Tokens
from sortedrl.core.engine_base import ForwardingEngine
from sortedrl.core.errors import UserError
from sortedrl.core.rollout import Segment
from sortedrl.core.wording import kind_of

KINDS = frozenset(get_args(Change))
NAMES = "Started, Tokens, Finished, Failed or Preempted"


class NoChanges(UserError, TypeError):
    """A method of an engine returned something other than a list of changes."""


def checked_changes(engine: Engine, method: str, returned: Any) -> Sequence[Change]:
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
    return returned


def _error(engine: Engine, method: str, what: str) -> NoChanges:
    while isinstance(engine, ForwardingEngine):
        engine = engine.inner
    return NoChanges(
        f"{type(engine).__name__}.{method} returned {what}: it must return a list of changes ({NAMES}), which is empty "
        "if nothing changed. See docs/engine_authors.md"
    )
