"""Rewards that do what a reward must not do. Imported by worker processes: the standard library and the task alone.

`Faults` is a task whose problems say in `answer` which fault happens: to the responses in `faulty`, or to all.
"""

import asyncio
import ctypes
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from sortedrl.tasks.task import Problem, Reward


class Ask(NamedTuple):
    """`every`: the fault happens to every so-manieth problem."""

    fault: str
    number: int
    every: int = 1

    @property
    def is_faulty(self) -> bool:
        return self.number % self.every == 0


class Unshowable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class Untrue:
    def __bool__(self) -> bool:
        raise RuntimeError("neither")


class NotFloat(float):
    def __float__(self) -> float:
        raise RuntimeError("not today")


class Several:
    def item(self) -> float:
        raise RuntimeError("a tensor with 2 elements cannot be converted to a scalar")


def _raise(error: BaseException) -> Any:
    raise error


def _unpicklable_exception() -> Any:
    error = RuntimeError("holds a lock")
    error.lock = threading.Lock()  # type: ignore[attr-defined]
    raise error


async def _later() -> float:
    return 1.0


def _yielding() -> Any:
    yield 1.0


def _nested(depth: int) -> Any:
    value: Any = 1.0
    for _ in range(depth):
        value = [value]
    return value


def _recurse(depth: int = 0) -> int:
    return _recurse(depth + 1) + 1


def _overflow_stack() -> Any:
    sys.setrecursionlimit(10**9)
    return repr(_nested(10**6))


def _segfault() -> Any:
    return ctypes.string_at(0)


def _eat_memory() -> Any:
    chunks = []
    while True:
        chunks.append(bytearray(16 * 2**20))


def _close_everything() -> Any:
    os.closerange(0, 1024)
    return 1.0


def _write_everywhere(message: bytes = b"hello") -> Any:
    for descriptor in range(3, 1024):
        try:
            os.write(descriptor, len(message).to_bytes(8, "big") + message)
        except OSError:
            continue
    return 1.0


def _print_forever() -> Any:
    while True:
        print("x" * 100_000)


def _spin() -> Any:
    while True:
        pass


def _spin_in_c() -> Any:
    return all(itertools.repeat(True))  # holds the GIL and looks at no signal


def _spin_deaf() -> Any:
    for number in (signal.SIGALRM, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _spin()


def _deadlock() -> Any:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


# Each with a part of the reason that must be given.
QUICK: dict[str, tuple[Callable[[], Any], str]] = {
    "raises": (lambda: _raise(KeyError("answer")), "KeyError: 'answer'"),
    "raises_without_text": (lambda: _raise(ValueError()), "ValueError"),
    "raises_megabytes": (lambda: _raise(ValueError("x" * 10**6)), r"ValueError: x+\.\.\."),
    "raises_odd_text": (lambda: _raise(ValueError("\ud800\n\x00")), "ValueError"),
    "raises_unshowable": (lambda: _raise(Unshowable()), "Unshowable .*cannot be shown"),
    "raises_unpicklable": (_unpicklable_exception, "RuntimeError: holds a lock"),
    "raises_timeout": (lambda: _raise(TimeoutError("the judge is slow")), "TimeoutError: the judge is slow"),
    "exits": (sys.exit, "SystemExit"),
    "exits_with_0": (lambda: sys.exit(0), "SystemExit: 0"),
    "exits_with_text": (lambda: sys.exit("enough"), "SystemExit: enough"),
    "interrupts": (lambda: _raise(KeyboardInterrupt()), "KeyboardInterrupt"),
    "ends_generator": (lambda: _raise(GeneratorExit()), "GeneratorExit"),
    "imports_what_is_not_there": (lambda: __import__("a_library_that_nobody_has"), "ModuleNotFoundError"),
    "calls_wrongly": (lambda: _later(1), "TypeError"),  # type: ignore[call-arg]
    "recurses": (_recurse, "RecursionError"),
    "returns_text": (lambda: "good", "'good' of type str, not a number"),
    "returns_none": (lambda: None, "None, not a number"),
    "returns_list": (lambda: [1.0], "type list, not a number"),
    "returns_several": (Several, "type Several with several elements"),
    "returns_complex": (lambda: 1j, "type complex, not a number"),
    "returns_nan": (lambda: float("nan"), "nan of type float, not a finite number"),
    "returns_inf": (lambda: float("inf"), "inf of type float, not a finite number"),
    "returns_minus_inf": (lambda: float("-inf"), "-inf of type float"),
    "returns_1e308": (lambda: 1e308, r"1e\+308 of type float, its size must be at most 1e\+06"),
    "returns_beyond_float": (lambda: 10**400, "inf of type int, not a finite number"),
    "returns_no_float": (lambda: NotFloat(1.0), "RuntimeError: not today"),
    "returns_coroutine": (_later, "type coroutine, not a number; an async function is not awaited"),
    "returns_generator": (_yielding, "type generator, not a number; use return"),
    "returns_lambda": (lambda: lambda: 1.0, "type function, not a number"),
    "returns_module": (lambda: asyncio, "type module, not a number"),
    "returns_huge": (lambda: "x" * 10**8, "of type str, not a number"),
    "returns_nested": (lambda: _nested(10**5), "type list, not a number"),
    "reward_of_nan": (lambda: Reward(float("nan"), True), "nan of type float"),
    "reward_of_text": (lambda: Reward("1", True), "'1' of type str"),  # type: ignore[arg-type]
    "reward_untrue": (lambda: Reward(1.0, Untrue()), "RuntimeError: neither"),  # type: ignore[arg-type]
    "reward_with_text": (lambda: Reward(1.0, True, {"style": "bad"}), "part 'style' of the reward is 'bad'"),  # type: ignore[dict-item]
    "reward_without_parts": (lambda: Reward(1.0, True, None), "TypeError"),  # type: ignore[arg-type]
    "reward_with_many_parts": (lambda: Reward(1.0, True, {str(n): 1.0 for n in range(5000)}), "bytes; the maximum is"),
    "takes_all_memory": (lambda: bytearray(2**45), "MemoryError"),
    "eats_memory": (_eat_memory, "MemoryError"),
}
DEADLY: dict[str, tuple[Callable[[], Any], str]] = {
    "ends_process_with_0": (lambda: os._exit(0), "died with exit code 0"),
    "ends_process_with_7": (lambda: os._exit(7), "died with exit code 7"),
    "kills_itself": (lambda: os.kill(os.getpid(), signal.SIGKILL), "died with signal SIGKILL"),
    "terminates_itself": (lambda: os.kill(os.getpid(), signal.SIGTERM), "died with signal SIGTERM"),
    "kills_its_group": (lambda: os.killpg(0, signal.SIGKILL), "died with signal SIGKILL"),
    "aborts": (os.abort, "died with signal SIGABRT"),
    "segfaults": (_segfault, "died with signal SIGSEGV"),
    "overflows_stack": (_overflow_stack, "died with signal|RecursionError|MemoryError|not a number"),
    "closes_descriptors": (_close_everything, "its file descriptor was closed"),
    "writes_everywhere": (_write_everywhere, "sent an invalid message"),
    "writes_nested_json": (lambda: _write_everywhere(b"[" * 10_000), "sent an invalid message"),
}
HANGING: dict[str, tuple[Callable[[], Any], str]] = {
    "spins": (_spin, "no result within .* s; the worker process was killed"),
    "spins_in_c": (_spin_in_c, "no result within"),
    "spins_deaf": (_spin_deaf, "no result within"),
    "sleeps": (lambda: time.sleep(10**6), "no result within"),
    "deadlocks": (_deadlock, "no result within"),
    "stops_itself": (lambda: os.kill(os.getpid(), signal.SIGSTOP), "no result within"),
    "prints_forever": (_print_forever, "no result within"),
}
FAULTS = QUICK | DEADLY | HANGING


# What is odd, but no fault: the score counts.


class Scalar:
    """As a tensor of no dimension or a NumPy scalar."""

    def item(self) -> float:
        return 1.0


def _fork() -> Any:
    os.fork()  # parent and child both return
    return 1.0


def _start_process() -> Any:
    import subprocess

    subprocess.Popen(["sleep", "600"])
    return 1.0


def _start_thread() -> Any:
    threading.Thread(target=time.sleep, args=[600]).start()
    return 1.0


def _go_elsewhere() -> Any:
    os.chdir("/")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.alarm(1)  # for the next call
    signal.signal(signal.SIGALRM, lambda *_: None)
    return 1.0


def _print_much() -> Any:
    print("x" * 5_000_000)
    print("y" * 5_000_000, file=sys.stderr)
    return 1.0


def _close_output() -> Any:
    os.closerange(1, 3)
    return 1.0


HARMLESS: dict[str, Callable[[], Any]] = {
    "scalar": Scalar,
    "true": lambda: True,
    "int": lambda: 1,
    "forks": _fork,
    "leaves_a_process": _start_process,
    "leaves_a_thread": _start_thread,
    "goes_elsewhere": _go_elsewhere,
    "prints_much": _print_much,
    "closes_output": _close_output,
}


class Faults:
    """Scores 1, but for the fault that a problem asks for."""

    name = "faults"

    def __init__(self, fault: str = "raises", every: int = 1, problems: int = 64) -> None:
        self._fault, self._every, self._problems = fault, every, problems

    def train(self) -> Sequence[Problem]:
        asks = [Ask(self._fault, n, self._every) for n in range(self._problems)]
        return [Problem(f"train-{ask.number}", f"q{ask.number % 40} q{ask.number // 40}", ask) for ask in asks]

    def held_out(self) -> Sequence[Problem]:
        asks = [Ask(self._fault, n, self._every) for n in range(40)]
        return [Problem(f"held-out-{ask.number}", f"q{ask.number} q9", ask) for ask in asks]

    def score(self, problem: Problem, response: str) -> Reward:
        ask: Ask = problem.answer
        if not ask.is_faulty:
            return Reward(1.0, True)
        if ask.fault in HARMLESS:
            return HARMLESS[ask.fault]()  # type: ignore[no-any-return]
        fault = [*FAULTS][ask.number // ask.every % len(FAULTS)] if ask.fault == "each" else ask.fault
        return FAULTS[fault][0]()  # type: ignore[no-any-return]


class FaultsInTraining(Faults):
    """Its held-out problems are scored without a fault."""

    def held_out(self) -> Sequence[Problem]:
        return [Problem(f"held-out-{n}", f"q{n} q9", Ask(self._fault, n, every=1000)) for n in range(1, 40)]


class HoldsLock(Faults):
    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()


class FailsInWorker(Faults):
    def __setstate__(self, state: dict[str, Any]) -> None:
        raise ImportError("this library works in the first process alone")
