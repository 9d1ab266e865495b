"""The thread that owns the controller and the engine: verl's trainer hands it work and waits for the result.

With overlap it generates between two pieces of work, so the servers are busy while the learner computes. While
it composes a batch, publishes or saves, no other thread touches the scheduler.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from sortedrl.core.user_values import reason_of

Result = TypeVar("Result")


class Pump:
    """After an error every call raises it.

    generate  for a short while; None without overlap
    on_error  called in the thread, before the error is raised
    """

    def __init__(self, generate: Callable[[], None] | None, on_error: Callable[[], None]) -> None:
        self._generate = generate
        self._on_error = on_error
        self._is_generating = False
        self._work: SimpleQueue[tuple[Callable[[], Any], bool | None, Future[Any]]] = SimpleQueue()
        self._error: BaseException | None = None
        threading.Thread(target=self._run, name="sortedrl-pump", daemon=True).start()

    def call(self, work: Callable[[], Result], *, then_generate: bool | None = None) -> Result:
        """Run `work` in the thread. Afterwards it generates, or waits, or (None) does as before."""
        future: Future[Result] = Future()
        self._work.put((work, then_generate, future))
        return future.result()

    def _run(self) -> None:
        while True:
            try:
                work, then_generate, future = self._work.get(block=not self._is_generating)
            except Empty:  # no call waits for the result
                assert self._generate is not None
                work, then_generate, future = self._generate, None, Future()
            try:
                if self._error is not None:
                    raise self._error
                result = work()
                if then_generate is not None:
                    self._is_generating = then_generate and self._generate is not None
                future.set_result(result)
            except BaseException as error:
                self._is_generating = False
                if self._error is None:
                    self._error = error
                    try:
                        self._on_error()
                    except BaseException as later:  # the caller waits for the first error, and for this thread
                        error.add_note(f"Then writing the log failed: {reason_of(later)}")
                future.set_exception(error)
