"""Signals that end a run in order: what it has learned is saved."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sortedrl.core.controller import Controller


class Interrupted(KeyboardInterrupt):
    """A signal asked the run to end; what it has learned is saved."""


class Signals:
    """SIGINT, SIGTERM and SIGHUP: the first one ends the run in order, the second at once."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._seen = self._at_once = False

    def receive(self, number: int, frame: Any) -> None:
        if self._seen:
            raise KeyboardInterrupt
        self._seen = True
        self._controller.interrupt()
        if self._at_once:
            raise Interrupted

    def interrupt_at_once(self) -> None:
        """The controller no longer listens: from now on, and if it was interrupted before, raise `Interrupted`."""
        self._at_once = True
        if self._seen:
            raise Interrupted


@contextmanager
def interruptible(controller: Controller) -> Iterator[Signals]:
    signals = Signals(controller)
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup: the run is to outlive its terminal
        numbers.append(signal.SIGHUP)
    previous = {number: signal.signal(number, signals.receive) for number in numbers}
    try:
        yield signals
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
