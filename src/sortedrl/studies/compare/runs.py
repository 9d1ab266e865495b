"""The runs of a study: one `sortedrl train` process each, several at once, each pinned to its share of the cores.

FOLDER/
  study.toml          the study
  results.jsonl       one line per run that ended (results.py)
  runs/ARM/seed-N/    the run folder
  runs/ARM/seed-N.toml, seed-N.log    the settings of the run, and what it printed

The state of a study is on disk, so it survives any kill: a run with a summary is finished, a run with a
checkpoint is resumed, any other is started from the beginning. This process starts no threads for the runs and reads
their files only.
"""

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from sortedrl.core.wording import printable
from sortedrl.log.atomic_write import write_atomically
from sortedrl.observe.console import clock
from sortedrl.studies.compare.study import Settings, Study

PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>
_LIBC = ctypes.CDLL(None)  # loaded before a process is forked
POLL_SECONDS = 0.2
SAVE_SECONDS = 120.0  # that an interrupted run gets to save, before it is killed


@dataclass(frozen=True, slots=True)
class StudyRun:
    arm: str
    seed: int
    settings: Settings  # all that the study sets
    folder: Path

    @property
    def name(self) -> str:
        return f"{self.arm} seed {self.seed}"

    @property
    def config(self) -> Path:
        return self.folder.with_suffix(".toml")

    @property
    def log(self) -> Path:
        return self.folder.with_suffix(".log")

    @property
    def is_finished(self) -> bool:
        return (self.folder / "summary.json").is_file()

    @property
    def can_resume(self) -> bool:
        return any(self.folder.glob("checkpoints/update-*"))

    def settings_when_started(self) -> Settings | None:
        """None if it was not, or if they cannot be read: `sortedrl train --resume` compares them with its own."""
        with suppress(OSError, ValueError, RecursionError):
            started = tomllib.loads(self.config.read_text(encoding="utf-8")) if self.folder.exists() else {}
            return {key: value for key, value in started.items() if key != "out"} or None
        return None


def runs_of(study: Study, folder: Path) -> list[StudyRun]:
    """All arms of the first seed, then of the second: pairs are complete early, and a slowdown hits all arms."""
    return [
        StudyRun(arm, seed, {**study.settings_of(arm), "seed": seed}, folder / "runs" / arm / f"seed-{seed}")
        for seed in study.seeds
        for arm in study.arms
    ]


def start(run: StudyRun, cores: Sequence[int]) -> subprocess.Popen[bytes]:
    """A process of its own session: Ctrl-C in the terminal reaches this process alone, which stops the runs."""
    run.folder.parent.mkdir(parents=True, exist_ok=True)
    if run.folder.exists() and not run.can_resume:
        shutil.rmtree(run.folder)  # killed before its first checkpoint
    words = ["--resume", str(run.folder)]
    if not run.folder.exists():
        write_atomically(run.config, toml_of({**run.settings, "out": str(run.folder)}))
        words = ["--config", str(run.config)]
    threads = {"OMP_NUM_THREADS": str(run.settings["threads"] or len(cores))}
    with run.log.open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "sortedrl", "train", *words, "--json"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=os.environ | threads,
            preexec_fn=partial(_pin, os.getpid(), cores),
        )


def _pin(parent: int, cores: Sequence[int]) -> None:
    """In the new process: it keeps to these cores, and gets SIGTERM when its parent ends, however that ends. A training
    run then saves and ends, too, and leaves a folder that can be resumed. Both outlive `exec`. Where a core is absent
    or not allowed, the run is not pinned."""
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it ended before the line above
        os._exit(1)
    with suppress(OSError):
        os.sched_setaffinity(0, cores)


def toml_of(settings: Mapping[str, Any]) -> str:
    """One key per line, tables inline. Texts, lists and finite numbers are written as in JSON."""
    as_toml = json.JSONEncoder(ensure_ascii=False, separators=(", ", " = "), default=str, allow_nan=False).encode
    return "".join(f"{as_toml(key)} = {as_toml(value)}\n" for key, value in settings.items()).replace("\x7f", "\\u007f")


def error_of(run: StudyRun, exit_code: int) -> str | None:
    """None if the run finished; otherwise how it ended and the last line that it printed."""
    if exit_code == 0 and run.is_finished:
        return None
    how = signal.Signals(-exit_code).name if exit_code < 0 else f"exit code {exit_code}"
    lines = run.log.read_text(encoding="utf-8", errors="replace").split("\n") if run.log.exists() else []
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f"{last} ({how})" if last else how


# All runs


def run_all(
    runs: Sequence[StudyRun],
    jobs: int,
    on_end: Callable[[StudyRun, str | None], str],
    log: Callable[[str], None],
    finished_before: int = 0,
) -> None:
    """Run all, at most `jobs` at once, and return when they have ended. `on_end` gets the error of a run, and returns
    what to log beside the time that is left.

    Raises `KeyboardInterrupt` on SIGINT, SIGTERM and SIGHUP. Also after an error, all runs save and end.
    """
    waiting = deque(runs)
    running: list[tuple[StudyRun, subprocess.Popen[bytes], tuple[int, ...]]] = []  # with its cores
    free = deque(core_shares(sorted(os.sched_getaffinity(0)), jobs))
    began, total, finished = time.monotonic(), finished_before + len(runs), 0
    with _signals_interrupt():
        try:
            while running or waiting:
                while waiting and free:
                    run, cores = waiting.popleft(), free.popleft()
                    running.append((run, start(run, cores), cores))
                time.sleep(POLL_SECONDS)
                for process in [one for one in running if one[1].poll() is not None]:
                    run, popen, cores = process
                    _kill_group(popen)
                    running.remove(process)
                    free.append(cores)
                    error = error_of(run, popen.returncode)
                    finished += error is None
                    left = len(waiting) + len(running)
                    pace = f", {clock((time.monotonic() - began) / finished * left)} left" if finished and left else ""
                    text = printable(f"{run.name}: {on_end(run, error)}")
                    log(f"[{total - left}/{total}] {text}; {len(running)} running{pace}")
        except BaseException:
            _let_save([popen for _, popen, _ in running])
            raise
        finally:
            for _, popen, _ in running:
                _kill_group(popen)
                popen.wait()


def _let_save(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """A second interrupt ends the wait."""
    for popen in processes:
        popen.send_signal(signal.SIGTERM)
    until = time.monotonic() + SAVE_SECONDS
    with suppress(KeyboardInterrupt, subprocess.TimeoutExpired):
        for popen in processes:
            popen.wait(max(0.0, until - time.monotonic()))


def core_shares(cores: Sequence[int], jobs: int) -> list[tuple[int, ...]]:
    """An equal share of the cores for each job; more jobs than cores share them."""
    each = max(1, len(cores) // jobs)
    return [tuple(cores[(job * each + i) % len(cores)] for i in range(each)) for job in range(jobs)]


def _kill_group(popen: subprocess.Popen[bytes]) -> None:
    """The run and its own processes, such as those of an engine: they would keep the GPU's memory."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(popen.pid, signal.SIGKILL)


@contextmanager
def _signals_interrupt() -> Iterator[None]:
    """SIGTERM and SIGHUP end the study as Ctrl-C does; under nohup SIGHUP stays ignored."""
    numbers = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, signal.default_int_handler) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
