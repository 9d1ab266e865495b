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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from sortedrl.core.configuration import ConfigurationError
from sortedrl.log.atomic_write import write_atomically
from sortedrl.studies.compare.grid import Settings
from sortedrl.studies.compare.study import Study
from sortedrl.studies.compare.toml_text import toml_of
from sortedrl.training.run_lock import FolderInUse, refuse_if_in_use
from sortedrl.training.settings import TrainSettings

POLL_SECONDS = 0.2
SAVE_SECONDS = 120.0  # that an interrupted run gets to save, before it is killed
PAUSE_SECONDS = 30.0  # before runs that failed at their start are tried again
NEW_PLACE = "Use another --out, or a new name for the arm."  # for changed settings
_WRONG_SETTING = re.compile(r"sortedrl: (\w+) = ")  # how a ConfigurationError starts on the command line
TAIL_BYTES = 16_384  # of a file that only its last lines are wanted of


@dataclass(frozen=True, slots=True)
class Run:
    arm: str
    seed: int
    settings: Settings  # all that the study sets
    folder: Path

    @property
    def name(self) -> str:
        return f"{self.arm} seed {self.seed}"

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

    def set_aside(self) -> Path:
        """Rename the run folder, so that the run starts again; returns its new name."""
        damaged = self.folder.with_name(f"damaged-{self.folder.name}")
        shutil.rmtree(damaged, ignore_errors=True)
        return self.folder.rename(damaged)

    def fraction_done(self) -> float:
        """Of its updates; 0 before the first one."""
        if self.is_finished:
            return 1.0
        for text in reversed(_last_lines(self.folder / "metrics.jsonl")):
            with suppress(ValueError, KeyError, TypeError, RecursionError):
                line = json.loads(text)
                return float(line["update"] / line["updates_in_all"])
        return 0.0


@dataclass(frozen=True, slots=True)
class Ended:
    """A run that ended; `error` is None if it finished."""

    run: Run
    error: str | None

    @property
    def would_fail_again(self) -> bool:
        """A setting of it is wrong. A server may come up, and a port may become free."""
        named = _WRONG_SETTING.match(self.error or "")
        return named is not None and named[1] in TrainSettings.model_fields.keys() - {"engine_urls", "prometheus_port"}


def runs_of(study: Study, folder: Path) -> list[Run]:
    """All arms of the first seed, then of the second: pairs are complete early, and a slowdown hits all arms."""
    return [
        Run(arm, seed, {**study.settings_of(arm), "seed": seed}, folder / "runs" / arm / f"seed-{seed}")
        for seed in study.seeds
        for arm in study.arms
    ]


def refuse_changed_settings(runs: Iterable[Run]) -> None:
    """A run that was started keeps its settings; a study may add arms and seeds."""
    for run in runs:
        if not run.folder.exists():
            continue
        try:
            started = tomllib.loads(run.config.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            continue  # `sortedrl train --resume` compares them with its own
        started.pop("out", None)
        changed = sorted(
            key for key in started.keys() | run.settings.keys() if started.get(key) != run.settings.get(key)
        )
        if changed:
            key = changed[0]
            why = f"{run.folder} was started with {key} = {started.get(key)!r}"
            raise ConfigurationError(key, run.settings.get(key), why, NEW_PLACE)


def wait_for_earlier_runs(runs: Iterable[Run], log: Callable[[str], None], patience: float = SAVE_SECONDS) -> None:
    """Runs of an earlier call that was killed may still be saving."""
    until, noticed = time.monotonic() + patience, False
    for run in runs:
        while True:
            try:
                refuse_if_in_use(run.folder)
                break
            except FolderInUse:
                if time.monotonic() > until:
                    raise
            if not noticed:
                log("waiting for the runs of an earlier call to save and end")
                noticed = True
            time.sleep(POLL_SECONDS)


# One run


def start(run: Run, cores: Sequence[int]) -> subprocess.Popen[bytes]:
    """A process of its own session: Ctrl-C in the terminal reaches this process alone, which stops the runs."""
    run.folder.parent.mkdir(parents=True, exist_ok=True)
    if run.folder.exists() and not run.can_resume:
        shutil.rmtree(run.folder)  # killed before its first checkpoint
    if run.folder.exists():
        words = ["--resume", str(run.folder)]
    else:
        write_atomically(run.config, toml_of({**run.settings, "out": str(run.folder)}))
        words = ["--config", str(run.config)]
    train = [sys.executable, "-m", "sortedrl", "train", *words, "--json"]
    pinned = [sys.executable, "-m", "sortedrl.studies.compare.pinned", str(os.getpid()), ",".join(map(str, cores))]
    with run.log.open("ab") as log:
        return subprocess.Popen(
            [*pinned, *train],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=os.environ | {"OMP_NUM_THREADS": str(run.settings["threads"] or len(cores))},
        )


def error_of(run: Run, exit_code: int) -> str | None:
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


class Progress(Protocol):
    def started(self, run: Run) -> None: ...

    def ended(self, ended: Ended) -> None: ...

    def tick(self) -> None: ...

    def note(self, text: str) -> None: ...


@dataclass(slots=True)
class _Process:
    run: Run
    popen: subprocess.Popen[bytes]
    cores: tuple[int, ...]
    done_before: float  # fraction of its updates, from an earlier call

    @property
    def made_an_update(self) -> bool:
        return self.run.fraction_done() > self.done_before


@dataclass
class _FailuresInARow:
    """The runs that failed since the last one that finished."""

    many: int
    runs: list[Run] = field(default_factory=list)
    at_start: list[Run] = field(default_factory=list)  # those without a single update, and no setting is wrong

    def add(self, ended: Ended, *, at_start: bool) -> None:
        if ended.error is None:
            self.clear()
            return
        self.runs.append(ended.run)
        self.at_start += [ended.run] * (at_start and not ended.would_fail_again)

    def clear(self) -> None:
        self.runs.clear()
        self.at_start.clear()

    def are_everywhere(self, waiting: Iterable[Run]) -> bool:
        """Many, and in every arm that still has runs to start: an arm that always fails does not stop the others."""
        return len(self.runs) >= self.many and {run.arm for run in waiting} <= {run.arm for run in self.runs}


@dataclass
class Runner:
    """Runs what is waiting, at most `jobs` at once. `run_all` returns when all have ended.

    If runs of all arms fail one after another, no more are started. The cause may be temporary, such as a full disk or
    a GPU in use: those that failed before their first update are tried once more, as soon as another run makes an
    update, or after a pause. Those with a wrong setting are not.
    """

    jobs: int
    progress: Progress
    on_end: Callable[[Ended], None]
    most_failures: int  # in a row
    pause_seconds: float = PAUSE_SECONDS
    _running: list[_Process] = field(default_factory=list)

    def run_all(self, runs: Iterable[Run]) -> None:
        """Raises `KeyboardInterrupt` on SIGINT, SIGTERM and SIGHUP. Also after an error, all runs save and end."""
        waiting = deque(runs)
        free = deque(core_shares(sorted(os.sched_getaffinity(0)), self.jobs))
        failures, has_paused = _FailuresInARow(self.most_failures), False
        with _signals_interrupt():
            try:
                while waiting or self._running:
                    while waiting and free and not failures.are_everywhere(waiting):
                        self._start(waiting.popleft(), free.popleft())
                    time.sleep(POLL_SECONDS)
                    for ended, process in self._ended():
                        free.append(process.cores)
                        failures.add(ended, at_start=not process.made_an_update)
                        has_paused = has_paused and bool(failures.runs)
                        self.on_end(ended)
                        self.progress.ended(ended)
                    works = any(process.made_an_update for process in self._running)
                    if failures.are_everywhere(waiting) and (works or not self._running):
                        again = [] if has_paused else failures.at_start
                        waiting = self._after_failures(failures, deque([*again, *waiting]), again, works=works)
                        has_paused = True
                        failures.clear()
                    self.progress.tick()
            except BaseException:
                self._stop()
                raise
            finally:
                self._kill()

    def _start(self, run: Run, cores: tuple[int, ...]) -> None:
        done_before = run.fraction_done() if run.can_resume else 0.0
        self._running.append(_Process(run, start(run, cores), cores, done_before))
        self.progress.started(run)

    def _ended(self) -> Iterator[tuple[Ended, _Process]]:
        for process in list(self._running):
            exit_code = process.popen.poll()
            if exit_code is not None:
                _kill_group(process.popen)
                self._running.remove(process)
                yield Ended(process.run, error_of(process.run, exit_code)), process

    def _after_failures(
        self, failures: _FailuresInARow, waiting: deque[Run], again: Sequence[Run], *, works: bool
    ) -> deque[Run]:
        """The runs to start now, those that are tried again among them; none if it stops."""
        if works:  # another run makes updates
            return waiting
        if again:
            text = f"{len(again)} runs failed before their first update, one after another"
            self.progress.note(f"{text}: they are tried again in {self.pause_seconds:.0f} s")
            time.sleep(self.pause_seconds)
            return waiting
        if waiting:
            self.progress.note(
                f"STOPPED: {len(failures.runs)} runs of all arms failed one after another, so {len(waiting)} others "
                f"are not started. Fix the cause ({failures.runs[-1].log} has the last error); the same command "
                "continues."
            )
        return deque()

    def _stop(self) -> None:
        """Every run saves. A second interrupt ends the wait."""
        for process in self._running:
            process.popen.send_signal(signal.SIGTERM)
        until = time.monotonic() + SAVE_SECONDS
        with suppress(KeyboardInterrupt, subprocess.TimeoutExpired):
            for process in self._running:
                process.popen.wait(max(0.0, until - time.monotonic()))

    def _kill(self) -> None:
        for process in self._running:
            _kill_group(process.popen)
            process.popen.wait()
        self._running.clear()


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

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    numbers = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
