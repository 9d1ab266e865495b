"""For all tests: interruptible commands, one PyTorch thread, the same examples at each run and no limit of their time,
no garbage collection of modules, and engines that are closed after the test."""

import contextlib
import gc
import os
import signal
from collections.abc import Callable, Generator, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import closing

# A shell's background job ignores SIGINT, and so would every process that a test starts there.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Before PyTorch is imported. The models are tiny, and two workers with two spinning threads each slow each other down.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# TRL's telemetry thread resolves a host name, which reads the environment in C while accelerate changes it: that can
# crash the process before glibc 2.41.
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"

with contextlib.suppress(ImportError):  # some environments for peers' packages do without it
    from hypothesis import HealthCheck, settings

    settings.register_profile("steady", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("steady")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Without garbage collection: importing makes hardly any garbage, and looking for it took a quarter of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of commands come first: of several workers, only the first one then needs the server of forked.py."""
    items.sort(key=lambda item: not _is_in_a_module_with_commands(item.path))


@cache
def _is_in_a_module_with_commands(path: Path) -> bool:
    lines = path.read_text(encoding="utf-8").splitlines()
    return any(line.startswith(("import forked", "from forked", "from terminal")) for line in lines)


def pytest_collection_finish() -> None:
    import frozen  # noqa: F401 (all test modules are imported by now)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy model, which no test changes."""
    import toy

    return toy.make_model(tmp_path_factory.mktemp("model") / "toy")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """The models are tiny: with more threads they would be slower, and slow down the tests that run beside them."""
    import torch  # takes seconds, and most tests need none of it

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Runs a command in this process, which must end with the exit code; returns what it printed: `out` and `err`."""
    from sortedrl.cli import main

    def run(*words: Any, code: int = 0) -> Any:
        capsys.readouterr()
        ended = main([*map(str, words)])
        printed = capsys.readouterr()
        assert ended == code, printed
        return printed

    return run


@pytest.fixture
def refused(told: Callable[..., Any]) -> Callable[..., str]:
    """Runs a command in this process that is refused; returns the one line that says why."""

    def run(*words: Any) -> str:
        error: str = told(*words, code=2).err
        assert error.startswith("sortedrl: ") and error.count("\n") == 1, error
        return error

    return run


@pytest.fixture
def closes_all() -> Iterator[None]:
    """Closes what the test passed to `closing.closed_after`."""
    yield
    closing.close_all()
