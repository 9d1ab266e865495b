"""Generation while the learner works: its work runs in its own thread, the engine stays in the calling thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


def run_beside(step: Callable[[], Result], generate: Callable[[], None]) -> Result:
    """Call `generate` again and again until `step`, in its own thread, has ended; returns the result of `step`.

    An error of `generate` is raised after the step has ended, with an error of the step as a note. A
    KeyboardInterrupt is raised at once.
    """
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
