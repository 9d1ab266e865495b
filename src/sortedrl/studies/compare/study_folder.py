"""A study in its folder: runs what is missing in its folder, then writes the page and compare.json."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from sortedrl.core.configuration import ConfigurationError
from sortedrl.log.atomic_write import write_atomically
from sortedrl.log.process_lock import RUN_LOCK
from sortedrl.observe.report.self_contained import write_page
from sortedrl.studies.compare.comparison import Comparison, as_json, compare
from sortedrl.studies.compare.outcomes import IncompleteRun
from sortedrl.studies.compare.page import page
from sortedrl.studies.compare.progress import StudyProgress
from sortedrl.studies.compare.results import (
    Key,
    Line,
    Results,
    append,
    failed_line,
    finished_line,
    read_results,
    record_plan,
)
from sortedrl.studies.compare.runs import (
    NEW_PLACE,
    Ended,
    Run,
    Runner,
    refuse_changed_settings,
    runs_of,
    wait_for_earlier_runs,
)
from sortedrl.studies.compare.study import Study, Validate, read_study, validate_runs
from sortedrl.training.run_lock import locked

STUDY, RESULTS, PAGE, JSON = "study.toml", "results.jsonl", "compare.html", "compare.json"
LARGE = ("checkpoints", "model")  # of a finished run: the study needs neither
Log = Callable[[str], None]


def run_study(study: Study, folder: Path, jobs: int, validate: Validate, stream: TextIO, version: str) -> Comparison:
    """Everything that is finished in `folder` stays; the rest is run.

    Raises `KeyboardInterrupt` if interrupted, after all runs have saved and the page has been written.
    """
    validate_runs(study, validate)
    runs = runs_of(study, folder)
    log: Log = lambda line: print(line, file=stream, flush=True)  # noqa: E731
    refuse_other_folder(folder)
    with locked(folder, log):
        return _StudyInFolder(study, folder, runs, log, version).run(jobs, stream)


def check_runs(study: Study, folder: Path, check: Validate) -> None:
    """Check that runs in the folder have the settings of the study, and the arms that have runs to start; nothing is
    written."""
    known = _results_so_far(folder).runs
    runs = runs_of(study, folder)
    _refuse_changed_results(study, known, NEW_PLACE)
    refuse_changed_settings(runs)
    waiting = _waiting(runs, known)
    validate_runs(study, check, arms=dict.fromkeys(run.arm for run in waiting), seeds=study.seeds[:1])


def _waiting(runs: Sequence[Run], known: dict[Key, Line]) -> list[Run]:
    return [run for run in runs if not run.is_finished and not _is_good(known.get((run.arm, run.seed)))]


@dataclass(frozen=True)
class _StudyInFolder:
    study: Study
    folder: Path
    runs: Sequence[Run]
    log: Log
    version: str

    @property
    def results(self) -> Path:
        return self.folder / RESULTS

    def run(self, jobs: int, stream: TextIO) -> Comparison:
        known = _results_so_far(self.folder).runs
        _refuse_changed_results(self.study, known, NEW_PLACE)
        refuse_changed_settings(self.runs)
        wait_for_earlier_runs(self.runs, self.log)
        write_atomically(self.folder / STUDY, self.study.text)
        record_plan(self.results, self.study)
        for run in self.runs:
            before = known.get((run.arm, run.seed))
            if run.is_finished and _lacks_results(self.study, before):
                self._read_again(run, known)
        waiting = _waiting(self.runs, known)
        finished = len(self.runs) - len(waiting)
        self.log(f"{self.folder}: {finished} of {len(self.runs)} runs are finished, {min(jobs, len(waiting))} at once")
        progress = StudyProgress(waiting, stream, finished_before=finished)
        runner = Runner(jobs, progress, self._record, most_failures=max(2, len(self.study.arms)))
        try:
            runner.run_all(waiting)
        finally:
            progress.close()
            comparison = compare(self.study, _results_so_far(self.folder))
            write_outputs(comparison, self.folder / PAGE, self.folder / JSON, self.version, self.log)
        return comparison

    def _read_again(self, run: Run, known: dict[Key, Line]) -> None:
        """Add the line of a run that finished in an earlier call. If its files are damaged, it has to run again."""
        before = known.get((run.arm, run.seed))
        try:
            line = finished_line(self.study, run, before if _is_good(before) else None)
        except IncompleteRun as damage:
            known.pop((run.arm, run.seed), None)
            self.log(f"{run.name} is run again, and its folder is now {run.set_aside()}: {damage}")
        else:
            self._add(run, line)

    def _record(self, ended: Ended) -> None:
        run, error = ended.run, ended.error
        try:
            line = finished_line(self.study, run) if error is None else failed_line(self.study, run, error)
        except IncompleteRun as incomplete:
            line = failed_line(self.study, run, str(incomplete))
        self._add(run, line)

    def _add(self, run: Run, line: Line) -> None:
        """Add the line of a run that ended, and make room."""
        append(self.results, line)
        if "error" not in line and not self.study.keep_models:
            for name in LARGE:
                shutil.rmtree(run.folder / name, ignore_errors=True)


def _results_so_far(folder: Path) -> Results:
    return read_results(folder / RESULTS) if (folder / RESULTS).exists() else Results({}, ())


def results_in(source: Path) -> Path:
    return source / RESULTS if source.is_dir() else source


def study_of(source: Path, study_file: Path | None) -> Study:
    """The study of stored results: as named, or the one beside them."""
    return read_study(study_file or _study_beside(results_in(source)))


def rebuild(source: Path, study_file: Path | None, out: Path | None, log: Log, version: str) -> Comparison:
    """Page and numbers from results alone. `source` is the folder of a study or its results.jsonl."""
    results = results_in(source)
    study, known = study_of(source, study_file), read_results(results)
    _refuse_changed_results(study, known.runs, "Name the study of these results.")
    comparison = compare(study, known)
    folder = out or results.parent
    name = Path(PAGE).stem if results.name == RESULTS else results.stem
    write_outputs(comparison, folder / f"{name}.html", folder / f"{name}.json", version, log)
    return comparison


def write_outputs(comparison: Comparison, html: Path, plain: Path, version: str, log: Log) -> None:
    """Both files. Without jinja2 there is no page, and a line that names the package."""
    try:
        write_page(html, page(comparison, version))
        written = f"{html} and {plain}"
    except ConfigurationError as error:
        log(f"no page: {error}")
        written = str(plain)
    try:
        plain.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(plain, json.dumps(as_json(comparison, version), indent=1) + "\n")
    except OSError as error:
        why = f"{plain.name} cannot be written there ({error.strerror})"
        raise ConfigurationError("out", str(plain.parent), why, "Name a folder that you may write to.") from None
    log(f"written: {written}")


def _is_good(line: Line | None) -> bool:
    return line is not None and "error" not in line


def _lacks_results(study: Study, line: Line | None) -> bool:
    return line is None or "error" in line or not set(study.metrics) <= line["series"].keys()


def _refuse_changed_results(study: Study, known: dict[Key, Line], fix: str) -> None:
    for (arm, seed), line in known.items():
        if arm not in study.arms or "error" in line:
            continue
        now, then = study.settings_of(arm), line["settings"]
        for key in sorted(now.keys() | then.keys()):
            if now.get(key) != then.get(key):
                why = f"{arm} seed {seed} was run with {key} = {then.get(key)!r}"
                raise ConfigurationError(key, now.get(key), why, fix)


def refuse_other_folder(folder: Path) -> None:
    """A folder that has files, but no study."""
    inside = {path.name for path in folder.iterdir()} - {RUN_LOCK} if folder.is_dir() else set()
    if inside and not inside & {STUDY, RESULTS}:
        why = "the folder is not empty, and no study is in it"
        raise ConfigurationError("out", str(folder), why, "Name a new folder, or that of the study to continue.")


def _study_beside(results: Path) -> Path:
    for path in (results.with_name(STUDY), results.with_suffix(".toml")):
        if path.is_file():
            return path
    why = f"no {STUDY} beside it"
    raise ConfigurationError("from", str(results), why, "Name the study, too: sortedrl compare STUDY.toml --from FILE.")
