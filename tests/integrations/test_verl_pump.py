"""The thread that owns the scheduler in verl's trainer: needs neither verl nor Ray."""

import errno
import threading
from collections.abc import Callable
from functools import partial

import pytest

from sortedrl.integrations.verl.pump import Pump


class Scheduler:
    """Notes which thread does what, and how often it generates."""

    def __init__(self, fails_after: int | None = None) -> None:
        self.threads: set[str] = set()
        self.rounds = 0
        self.fails_after = fails_after
        self.has_generated = threading.Event()

    def generate(self) -> None:
        self.threads.add(threading.current_thread().name)
        self.rounds += 1
        self.has_generated.set()
        if self.rounds == self.fails_after:
            raise ValueError("the engine died")

    def work(self) -> int:
        self.threads.add(threading.current_thread().name)
        return self.rounds


def pump_of(scheduler: Scheduler, on_error: Callable[[], None] = lambda: None) -> Pump:
    return Pump(scheduler.generate, on_error)


def test_one_thread_does_all_and_generates_between_two_pieces_of_work() -> None:
    scheduler = Scheduler()
    pump = pump_of(scheduler)
    assert pump.call(scheduler.work) == 0, "nothing is generated before the first batch"
    pump.call(scheduler.work, then_generate=True)
    assert scheduler.has_generated.wait(10)
    rounds = pump.call(scheduler.work, then_generate=False)
    assert rounds > 0 and pump.call(scheduler.work) == rounds, "a validation has the servers to itself"
    assert scheduler.threads == {"sortedrl-pump"}


def test_in_turn_nothing_is_generated() -> None:
    scheduler = Scheduler()
    pump = Pump(None, lambda: None)
    pump.call(scheduler.work, then_generate=True)
    assert pump.call(scheduler.work) == 0


def test_an_error_between_two_pieces_of_work_reaches_the_trainer_and_stays() -> None:
    scheduler, flushed = Scheduler(fails_after=3), threading.Event()
    pump = pump_of(scheduler, flushed.set)
    pump.call(scheduler.work, then_generate=True)
    assert flushed.wait(10), "the log is on the disk before the trainer hears of it"
    for _ in range(2):
        with pytest.raises(ValueError, match="the engine died"):
            pump.call(scheduler.work)
    assert scheduler.rounds == 3


def test_an_error_of_the_work_is_raised_where_it_was_asked_for() -> None:
    """Also if the log cannot be written then."""

    def full_disk() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    pump = Pump(None, full_disk)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError) as seen:
            pump.call(partial(divmod, 1, 0))
    assert "No space left" in seen.value.__notes__[0]
