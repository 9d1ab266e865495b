"""Worker processes: what a function does in one never reaches this process, and none is left behind."""

import gc
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from full_disk import fill, small_file_system
from processes import PATIENCE_SECONDS, is_running, wait_for_end, wait_until
from sortedrl.core.configuration import ConfigurationError
from sortedrl.settings.api_key import VARIABLE
from sortedrl.tasks.worker_process import MAX_LIMIT_SECONDS, WorkerError
from sortedrl.tasks.worker_server import Answer
from sortedrl.tasks.workers import WorkerPool

HERE = Path(__file__).parent
LIMIT_SECONDS = 3.0  # beside a call that is to be killed, another one must be answered on a busy machine


def multiply(factor: int, number: int) -> int:
    return factor * number


def multiplier(factor: int) -> Callable[[int], int]:
    return partial(multiply, factor)


def counter() -> Callable[[], int]:
    """Which call this is. Beside 20 ms, what the callers take on a busy machine does not matter."""
    numbers = itertools.count(1)

    def number() -> int:
        time.sleep(0.02)
        return next(numbers)

    return number


def no_multiplier() -> Callable[[int], int]:
    raise ImportError("no such library")


def dies_at_import() -> Callable[[int], int]:
    print("the driver is missing", file=sys.stderr, flush=True)
    os._exit(4)


def act(what: str) -> Any:
    """What a test asks a worker to do."""
    if what.startswith("spin"):
        if at := what.removeprefix("spin").strip():
            Path(at).touch()  # it has started
        while True:
            pass
    if what == "exit":
        os._exit(3)
    if what == "exit later":
        threading.Timer(0.1, os._exit, [3]).start()
    if what == "daemon":
        shell = subprocess.run(["setsid", "sh", "-c", "sleep 600 >&- & echo $!"], stdout=subprocess.PIPE, check=True)
        return int(shell.stdout)
    if what in SPOILS:
        SPOILS[what]()
    if what == "short sleep":
        time.sleep(0.5)
        return "slept"
    if what == "key":
        return os.environ.get(VARIABLE)
    if what == "where":
        return os.getcwd()
    if what == "move":
        os.chdir("/")
    if what == "print":
        print("x" * 3_000_000, flush=True)
        print("y" * 3_000_000, file=sys.stderr, flush=True)
    return os.getpid()


def forge() -> None:
    """Answer this call, and the next three."""
    frame = sys._getframe()
    while "request" not in frame.f_locals:
        assert frame.f_back is not None
        frame = frame.f_back
    number, connection = frame.f_locals["request"].number, frame.f_locals["connection"]
    for forged in (number, number, number + 1, 0):
        connection.send(Answer(forged, "returned", "forged"))


SPOILS = {
    "forges": forge,
    "clears modules": sys.modules.clear,
    "exits in a thread": lambda: threading.Timer(0.2, os._exit, [3]).start(),
    "holds the GIL": lambda: threading.Thread(target=lambda: all(itertools.repeat(True))).start(),
    "closes": lambda: threading.Timer(0.2, os.closerange, [3, 1024]).start(),
}


def actor() -> Callable[[str], Any]:
    return act


@pytest.fixture
def pool() -> Any:
    made = WorkerPool(actor, workers=1, limit_seconds=20)
    yield made
    made.close()


def test_a_pool_serves_many_threads() -> None:
    pool = WorkerPool(partial(multiplier, 3), workers=2, limit_seconds=20)
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(pool, range(100))) == [3 * n for n in range(100)]
    assert pool(5) == 15  # workers outlive the threads that called them
    assert len(pool.process_ids()) <= 3
    pool.close()


def test_a_worker_that_cannot_start_says_why() -> None:
    with pytest.raises(WorkerError, match="could not start: ImportError: no such library"):
        WorkerPool(no_multiplier, workers=1, limit_seconds=20)(1)
    with pytest.raises(WorkerError, match="exit code 4 before it was ready: the driver is missing"):
        WorkerPool(dies_at_import, workers=1, limit_seconds=20).wait_until_ready()


def test_one_that_died_after_its_last_call_is_not_held_against_the_next(pool: WorkerPool) -> None:
    first = pool("exit later")
    wait_for_end(first)
    assert pool("pid") != first


@pytest.mark.parametrize("end", ["exit", "spin", "close"])
def test_what_left_its_session_ends_with_its_worker_too(end: str) -> None:
    pool = WorkerPool(actor, workers=1, limit_seconds=LIMIT_SECONDS)
    daemon = pool("daemon")
    assert is_running(daemon)
    if end != "close":
        with pytest.raises((WorkerError, TimeoutError)):
            pool(end)
    pool.close()
    wait_for_end(daemon)


SLOW = ("holds the GIL", "closes")


@pytest.mark.parametrize(
    "what", [pytest.param(what, marks=[pytest.mark.slow] if what in SLOW else []) for what in SPOILS]
)
def test_what_a_call_did_to_its_worker_is_not_held_against_the_next(what: str) -> None:
    pool = WorkerPool(actor, workers=1, limit_seconds=LIMIT_SECONDS)
    with suppress(WorkerError, TimeoutError):
        pool(what)
    assert [pool("short sleep") for _ in range(3)] == ["slept"] * 3
    pool.close()


def test_a_worker_without_memory_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that leaks fails in the end; the next one has all the memory again."""
    monkeypatch.setattr("sortedrl.tasks.worker_process.memory_per_worker", lambda: 2**29)
    pool = WorkerPool(partial(partial, take), workers=1, limit_seconds=20)
    assert [pool(2**28, False), pool(2**27, True), pool(2**27, True)] == [2**28, 2**27, 2**27]
    assert pool(2**28, False) == 2**28
    with pytest.raises(WorkerError, match="MemoryError"):
        pool(2**30, False)
    pool.close()


def test_workers_need_no_disk_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with small_file_system(tmp_path / "disk", "64k") as disk:
        monkeypatch.setattr(tempfile, "tempdir", str(disk))
        fill(disk)
        pool = WorkerPool(actor, workers=1, limit_seconds=20)
        assert pool("where") == os.getcwd()
        pool.close()


KEPT: list[bytearray] = []


def take(size: int, keep: bool) -> int:
    taken = bytearray(size)
    if keep:
        KEPT.append(taken)
    return len(taken)


def test_a_worker_does_not_get_the_key_of_a_server(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "secret")
    assert pool("key") is None


def test_workers_end_with_their_pool_even_in_a_call(tmp_path: Path) -> None:
    pool = WorkerPool(actor, workers=2, limit_seconds=600)
    busy = ThreadPoolExecutor(1).submit(pool, f"spin {tmp_path / 'spins'}")
    wait_until((tmp_path / "spins").exists)
    idle = pool("pid")
    ids = pool.process_ids()
    assert idle in ids and len(ids) == 2
    pool.close()
    with pytest.raises(WorkerError, match=r"died|lost|closed"):
        busy.result(PATIENCE_SECONDS)
    wait_for_end(*ids)


def test_workers_of_a_forgotten_pool_end() -> None:
    pool = WorkerPool(actor, workers=1, limit_seconds=20)
    worker = pool("pid")
    del pool
    gc.collect()
    wait_for_end(worker)


def test_the_working_directory_is_that_of_the_run(pool: WorkerPool) -> None:
    pool("move")
    assert pool("where") == os.getcwd()


def test_a_function_that_cannot_be_sent_is_refused() -> None:
    with pytest.raises(ValueError, match=r"cannot be sent to a worker process: .*top level of a module"):
        WorkerPool(lambda: act, workers=1, limit_seconds=1)


@pytest.mark.parametrize("limit", [0.0, -1.0, 1e10, float("inf"), float("nan")])
def test_a_limit_that_no_wait_can_have_is_refused(limit: float) -> None:
    with pytest.raises(ConfigurationError, match=r"limit_seconds = .* above 0 and at most 1,000,000"):
        WorkerPool(actor, workers=1, limit_seconds=limit)


def test_the_longest_limit_works() -> None:
    pool = WorkerPool(actor, workers=1, limit_seconds=MAX_LIMIT_SECONDS)
    assert pool("where") == os.getcwd()
    pool.close()


def in_a_process(script: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_what_workers_print_is_not_in_the_output_of_the_run() -> None:
    script = """
        from test_workers import actor
        from sortedrl.tasks.workers import WorkerPool
        pool = WorkerPool(actor, workers=1, limit_seconds=60)
        pool("print")
        print("{}")
    """
    out, err = in_a_process(script).communicate(timeout=120)
    assert (out, err) == ("{}\n", "")


BUSY = """
    import threading, time
    from pathlib import Path
    from test_workers import actor
    from sortedrl.tasks.workers import WorkerPool
    pool = WorkerPool(actor, workers=2, limit_seconds=600)

    def print_ids():
        while not Path("{spins}").exists():
            time.sleep(0.01)
        pool("pid")
        print(*pool.process_ids(), flush=True)

    threading.Thread(target=print_ids, daemon=True).start()
    if {in_thread}:
        threading.Thread(target=pool, args=["spin {spins}"], daemon=True).start()
        time.sleep(600)
    else:
        pool("spin {spins}")
"""


@pytest.mark.parametrize("in_thread", [False, True])
@pytest.mark.parametrize("ended_by", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_workers_end_with_their_run_however_it_ends(ended_by: signal.Signals, in_thread: bool, tmp_path: Path) -> None:
    run = in_a_process(BUSY.format(in_thread=in_thread, spins=tmp_path / "spins"))
    assert run.stdout is not None
    workers = [int(word) for word in run.stdout.readline().split()]
    assert len(workers) == 2
    run.send_signal(ended_by)
    run.communicate(timeout=PATIENCE_SECONDS)
    assert run.returncode != 0
    wait_for_end(*workers)


def test_callers_take_turns() -> None:
    """A thread with a long list of calls does not keep another one waiting until its list is done."""
    pool = WorkerPool(counter, workers=1, limit_seconds=PATIENCE_SECONDS)
    pool.wait_until_ready()
    is_over = threading.Event()

    def many_calls() -> None:
        while not is_over.is_set():
            pool()

    threads = [threading.Thread(target=many_calls) for _ in range(2)]
    for thread in threads:
        thread.start()
    ours = [pool() for _ in range(16)]
    is_over.set()
    for thread in threads:
        thread.join()
    pool.close()
    gaps = sorted(after - before for before, after in itertools.pairwise(ours))
    # The median: between two of our calls the machine may let the other two go on.
    assert gaps[7] == 3, "between two of ours, the other two have one call each"
