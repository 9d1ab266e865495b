"""Generation while the learner steps: the step runs in its own thread, the engine stays in the calling thread."""

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
    stepping: Future[Result] = Future()
    threading.Thread(target=_run, args=(step, stepping), name="learner", daemon=True).start()
    try:
        while not stepping.done():
            generate()
    except Exception as error:
        failure = stepping.exception()  # waits for the step
        if failure is not None:
            error.add_note(f"The learner's step failed, too: {failure!r}")
        raise
    return stepping.result()


def _run(step: Callable[[], Result], stepping: Future[Result]) -> None:
    try:
        stepping.set_result(step())
    except BaseException as error:
        stepping.set_exception(error)
