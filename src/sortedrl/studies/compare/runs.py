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

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sortedrl.core.wording import printable
from sortedrl.log.atomic_write import write_atomically
from sortedrl.observe.console import clock
from sortedrl.studies.compare.study import Settings, Study
from sortedrl.training.run_lock import FolderInUse, refuse_if_in_use

POLL_SECONDS = 0.2
LINE_SECONDS = 60.0  # between lines if no run ends
SAVE_SECONDS = 120.0  # that an interrupted run gets to save, before it is killed
TAIL_BYTES = 16_384  # of a file that only its last lines are wanted of


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
    def key(self) -> tuple[str, int]:
        return self.arm, self.seed

    @property
    def config(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.toml")

    @property
    def log(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.log")

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

    def fraction_done(self) -> float:
        """Of its updates; 0 before the first one."""
        if self.is_finished:
            return 1.0
        for text in reversed(_last_lines(self.folder / "metrics.jsonl")):
            with suppress(ValueError, KeyError, TypeError, RecursionError):
                line = json.loads(text)
                return float(line["update"] / line["updates_in_all"])
        return 0.0


def runs_of(study: Study, folder: Path) -> list[StudyRun]:
    """All arms of the first seed, then of the second: pairs are complete early, and a slowdown hits all arms."""
    return [
        StudyRun(arm, seed, {**study.settings_of(arm), "seed": seed}, folder / "runs" / arm / f"seed-{seed}")
        for seed in study.seeds
        for arm in study.arms
    ]


def wait_for_earlier_runs(runs: Iterable[StudyRun], log: Callable[[str], None], patience: float = SAVE_SECONDS) -> None:
    """Runs of an earlier call that was killed may still be saving."""
    until = 0.0
    for run in runs:
        while True:
            try:
                refuse_if_in_use(run.folder)
                break
            except FolderInUse:
                if not until:
                    log("waiting for the runs of an earlier call to save and end")
                    until = time.monotonic() + patience
                elif time.monotonic() > until:
                    raise
            time.sleep(POLL_SECONDS)


def start(run: StudyRun, cores: Sequence[int]) -> subprocess.Popen[bytes]:
    """A process of its own session: Ctrl-C in the terminal reaches this process alone, which stops the runs."""
    run.folder.parent.mkdir(parents=True, exist_ok=True)
    if run.folder.exists() and not run.can_resume:
        shutil.rmtree(run.folder)  # killed before its first checkpoint
    words = ["--resume", str(run.folder)]
    if not run.folder.exists():
        write_atomically(run.config, toml_of({**run.settings, "out": str(run.folder)}))
        words = ["--config", str(run.config)]
    pinned = ["sortedrl.studies.compare.pinned", str(os.getpid()), ",".join(map(str, cores))]
    train = [sys.executable, "-m", "sortedrl", "train", *words, "--json"]
    threads = {"OMP_NUM_THREADS": str(run.settings["threads"] or len(cores))}
    with run.log.open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", *pinned, *train],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=os.environ | threads,
        )


def toml_of(settings: Mapping[str, Any]) -> str:
    """One key per line, tables inline."""
    return "".join(f"{_toml_key(key)} = {_toml(value)}\n" for key, value in settings.items())


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_toml_key(key)} = {_toml(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, float):
        return repr(value)
    plain = value if isinstance(value, bool | int) else str(value)
    return json.dumps(plain, ensure_ascii=False).replace("\x7f", "\\u007f")


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[\w-]+", key, re.ASCII) else _toml(key)


def error_of(run: StudyRun, exit_code: int) -> str | None:
    """None if the run finished; otherwise how it ended and the last line that it printed."""
    if exit_code == 0 and run.is_finished:
        return None
    how = signal.Signals(-exit_code).name if exit_code < 0 else f"exit code {exit_code}"
    lines = [line.strip() for line in _last_lines(run.log) if line.strip()]
    return f"{lines[-1]} ({how})" if lines else how


def _last_lines(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            return file.read().decode("utf-8", errors="replace").splitlines()
    except OSError:
        return []


# All runs


class StudyProgress:
    """One line per run that ends, and one per minute, with the time left."""

    def __init__(self, runs: Sequence[StudyRun], log: Callable[[str], None], *, finished_before: int = 0) -> None:
        self._log = log
        self._total, self._ended, self._failed = len(runs) + finished_before, finished_before, 0
        self._at_start = {run.name: run.fraction_done() for run in runs}
        self._done = dict(self._at_start)  # without runs that failed: they are neither left nor done
        self._began = self._last = time.monotonic()

    def ended(self, run: StudyRun, running: Sequence[StudyRun], text: str, *, failed: bool) -> None:
        self._ended += 1
        self._failed += failed
        self._done[run.name] = 1.0
        if failed:
            del self._done[run.name]
        self._line(f"{run.name}: {text}", running)

    def tick(self, running: Sequence[StudyRun]) -> None:
        if time.monotonic() - self._last >= LINE_SECONDS:
            self._done |= {run.name: run.fraction_done() for run in running}
            self._line("running", running)

    def seconds_left(self) -> float | None:
        """From the work of this call; None before anything was done."""
        done = sum(fraction - self._at_start[name] for name, fraction in self._done.items())
        left = len(self._done) - sum(self._done.values())
        return (time.monotonic() - self._began) * left / done if done > 0 else None

    def _line(self, text: str, running: Sequence[StudyRun]) -> None:
        self._last = time.monotonic()
        parts = [f"{len(running)} running"] + [f"{self._failed} failed"] * bool(self._failed)
        if self._ended < self._total and (seconds := self.seconds_left()) is not None:
            parts.append(f"{clock(seconds)} left")
        place = f"[{self._ended:{len(str(self._total))}}/{self._total}]"
        self._log(f"{place} {printable(text)}; {', '.join(parts)}")


OnEnd = Callable[[StudyRun, str | None], str]  # gets the error, returns what to tell the user
_Process = tuple[StudyRun, subprocess.Popen[bytes], tuple[int, ...]]  # with its cores


def run_all(runs: Iterable[StudyRun], jobs: int, progress: StudyProgress, on_end: OnEnd, most_failures: int) -> str:
    """Run all, at most `jobs` at once, and return when they have ended.

    If runs of all arms fail one after another, at least `most_failures`, no more are started, and the text returned
    says so: the same command tries them again. Raises `KeyboardInterrupt` on SIGINT, SIGTERM and SIGHUP. Also after an
    error, all runs save and end.
    """
    waiting, running = deque(runs), list[_Process]()
    failed: list[StudyRun] = []  # since the last run that finished
    free = deque(core_shares(sorted(os.sched_getaffinity(0)), jobs))

    def all_fail() -> bool:
        """Many, and in every arm that still has runs to start: an arm that always fails does not stop the others."""
        return len(failed) >= most_failures and {run.arm for run in waiting} <= {run.arm for run in failed}

    with _signals_interrupt():
        try:
            while running or (waiting and not all_fail()):
                while waiting and free and not all_fail():
                    run, cores = waiting.popleft(), free.popleft()
                    running.append((run, start(run, cores), cores))
                time.sleep(POLL_SECONDS)
                for process in [one for one in running if one[1].poll() is not None]:
                    run, popen, cores = process
                    _kill_group(popen)
                    running.remove(process)
                    free.append(cores)
                    error = error_of(run, popen.returncode)
                    failed = [] if error is None else [*failed, run]
                    progress.ended(run, [one[0] for one in running], on_end(run, error), failed=error is not None)
                progress.tick([one[0] for one in running])
        except BaseException:
            _let_save([popen for _, popen, _ in running])
            raise
        finally:
            for _, popen, _ in running:
                _kill_group(popen)
                popen.wait()
    if not waiting:
        return ""
    return (
        f"STOPPED: {len(failed)} runs of all arms failed one after another, so {len(waiting)} others are not started. "
        f"Fix the cause ({failed[-1].log} has the last error); the same command continues."
    )


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
    if jobs >= len(cores):
        return [(cores[job % len(cores)],) for job in range(jobs)]
    each = len(cores) // jobs
    return [tuple(cores[job * each : (job + 1) * each]) for job in range(jobs)]


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
