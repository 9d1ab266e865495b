"""`sortedrl compare`: train several settings with the same seeds, and compare them pair by pair."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field

from sortedrl.cli.output import line_log, require_train_extra, stdout_reserved_for_json, table_console
from sortedrl.cli.parse import validated
from sortedrl.core.configuration import ConfigurationError
from sortedrl.core.wording import counted
from sortedrl.settings.base import Settings
from sortedrl.studies import tables
from sortedrl.studies.compare.comparison import Comparison, as_json
from sortedrl.studies.compare.page import parts
from sortedrl.studies.compare.study import Study, read_study, validate_runs
from sortedrl.studies.compare.study_folder import RESULTS, check_runs, rebuild, refuse_other_folder, run_study, study_of
from sortedrl.training.settings import TrainSettings, check_what_must_exist


class CompareSettings(Settings):
    """Run a study: train each arm with the same seeds, and compare them pair by pair.

    The study is a TOML file with settings, arms or a grid, seeds and contrasts; see docs/compare.md. The same command
    again continues an interrupted study and tries failed runs again.
    """

    positional: ClassVar[tuple[str, ...]] = ("study",)

    study: Path | None = None
    """TOML file of the study: what to train and to compare; --config has nothing but flags of this command"""
    jobs: Annotated[int, Field(ge=1, le=1024)] = 1
    """runs at once; each is pinned to its share of the CPU cores"""
    out: Path | None = None
    """folder of the study; default: runs/NAME of the study file"""
    from_results: Path | None = None
    """make the page and the tables from this results.jsonl or study folder, without training"""

    def check(self) -> None:
        if self.study is None and self.from_results is None:
            fix = "Use sortedrl compare STUDY.toml; docs/compare.md has an example."
            raise ConfigurationError("study", None, "there is no study to run", fix)


SETTINGS = CompareSettings


def run(settings: CompareSettings) -> int:
    """Exit code 2 if a run failed."""
    if (source := settings.from_results) is not None:
        results = source / RESULTS if source.is_dir() else source
        study = study_of(results, settings.study)
        if settings.dry_run:  # no settings are checked: that would import what the folder names
            return _print_plan(study, settings)
        return _show(settings, rebuild(study, results, settings.out, line_log(settings)))
    assert settings.study is not None
    with _set_by(settings.study):
        study = read_study(settings.study)
        validate_runs(study, partial(validated, TrainSettings))
    folder = settings.out or Path("runs") / study.name
    refuse_other_folder(folder)
    if not settings.dry_run:
        require_train_extra()
    with stdout_reserved_for_json(settings), _set_by(settings.study):
        check_runs(study, folder, partial(_check_what_must_exist, asks_engine=not settings.dry_run))
    if settings.dry_run:
        return _print_plan(study, settings)
    try:
        comparison = run_study(study, folder, settings.jobs, line_log(settings))
    except KeyboardInterrupt:
        print("interrupted and saved. The same command continues the study", file=sys.stderr)
        return 130
    return _show(settings, comparison)


@contextmanager
def _set_by(study: Path) -> Iterator[None]:
    """Errors are about what the file of the study sets. It may have keys with the names of flags of this command."""
    try:
        yield
    except ConfigurationError as error:
        if error.key != "study":  # the file itself
            error.set_by = str(study)
        raise


def _check_what_must_exist(settings: dict[str, Any], *, asks_engine: bool) -> None:
    check_what_must_exist(validated(TrainSettings, settings), import_user_code=True, asks_engine=asks_engine)


def _show(settings: CompareSettings, comparison: Comparison) -> int:
    if settings.json_output:
        print(json.dumps(as_json(comparison)))
    else:
        tables.show(table_console(), parts(comparison))
    return 2 if comparison.failures else 0


def _print_plan(study: Study, settings: CompareSettings) -> int:
    arms = {arm: study.settings_of(arm) for arm in study.arms}
    if settings.json_output:
        print(json.dumps({"arms": arms, "seeds": list(study.seeds), "runs": len(arms) * len(study.seeds)}))
        return 0
    for arm, values in arms.items():
        print(f"[{arm}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items()), sep="\n", end="\n\n")
    primary = study.primary
    runs = len(arms) * len(study.seeds)
    print(f"# {counted(len(arms), 'arm')} x {counted(len(study.seeds), 'seed')} = {counted(runs, 'run')}")
    print(f"# primary: {primary.name}, {primary.outcome}")
    return 0
