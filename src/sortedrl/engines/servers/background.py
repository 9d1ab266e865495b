"""The background tasks of an engine, in its event loop. An error in one of them, or in a callback, is never lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

_log = logging.getLogger(__name__)


class BackgroundTasks:
    """`failed` gets the reason if a task fails: nothing else would notice, so the engine is dead then."""

    def __init__(self, name: str, failed: Callable[[str], None]) -> None:
        self._name = name
        self._failed = failed
        self.running: set[asyncio.Task[Any]] = set()
        self.loop = asyncio.new_event_loop()
        self.loop.set_exception_handler(self._note_unhandled)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        task = self.loop.create_task(work)
        self.running.add(task)
        task.add_done_callback(self.note_end_of)

    def note_end_of(self, task: asyncio.Task[Any]) -> None:
        self.running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failed(f"the engine's own task failed: {error!r}")

    def current(self) -> asyncio.Task[Any] | None:
        """The task that calls this; None in another thread."""
        try:
            return asyncio.current_task() if asyncio.get_running_loop() is self.loop else None
        except RuntimeError:
            return None

    def _note_unhandled(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if "handle" in context and "exception" in context:  # a callback of ours, or one that our streams rely on
            self._failed(f"the engine's own task failed: {context['exception']!r}")
        else:
            _log.debug("%s: %s", self._name, context.get("message"))
