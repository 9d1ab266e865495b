"""A study as its TOML file describes it. Any mistake in the file is refused before the first run starts."""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sortedrl.core.configuration import ConfigurationError
from sortedrl.studies.compare.grid import Settings, arms_of
from sortedrl.studies.compare.outcomes import NEEDS_EVALUATIONS, NEEDS_THRESHOLD, OUTCOMES
from sortedrl.training.settings import TrainSettings

KEYS = ("question", "seeds", "threshold", "metrics", "keep_models", "settings", "arms", "grid", "contrasts")
CONTRAST_KEYS = ("name", "arm", "minus", "outcome", "primary")
COHORT = ("prompts_per_cohort", "rollouts_per_prompt")  # settings whose product is its number of rollouts
MOST_SEEDS = 10_000
Validate = Callable[[Settings], None]


@dataclass(frozen=True, slots=True)
class Contrast:
    """`arm` minus `minus`, paired by seed."""

    name: str
    arm: str
    minus: str
    outcome: str
    primary: bool


@dataclass(frozen=True, slots=True)
class Study:
    """`arms` has the settings that each arm adds to the common `settings`. Exactly one contrast is primary."""

    name: str
    question: str
    seeds: tuple[int, ...]
    threshold: float | None
    metrics: tuple[str, ...]
    keep_models: bool
    settings: Settings
    arms: dict[str, Settings]
    contrasts: tuple[Contrast, ...]
    text: str  # of the file

    @property
    def primary(self) -> Contrast:
        return next(contrast for contrast in self.contrasts if contrast.primary)

    @property
    def outcomes(self) -> tuple[str, ...]:
        """All outcomes that the runs of this study have."""
        known = [name for name in OUTCOMES if self.threshold is not None or name not in NEEDS_THRESHOLD]
        return (*known, *self.metrics)

    @property
    def plan(self) -> Settings:
        """What could be chosen to suit the results, once they are known."""
        primary = self.primary
        named = f"{primary.arm} minus {primary.minus}, {primary.outcome}"
        return {"seeds": list(self.seeds), "threshold": self.threshold, "primary": named, "arms": list(self.arms)}

    @property
    def digest(self) -> str:
        """Of the plan and of all settings."""
        return digest_of([self.plan, [self.settings_of(arm) for arm in self.arms]])

    def settings_of(self, arm: str) -> Settings:
        """As the file has them: common settings and those of the arm, without what the study sets for each run."""
        return {"threads": 1, **self.settings, **self.arms[arm]}

    def cohort_rollouts(self, arm: str) -> int:
        """Rollouts that are loaded together."""
        fields, settings = TrainSettings.model_fields, self.settings_of(arm)
        return math.prod(int(settings.get(name, fields[name].default)) for name in COHORT)


def digest_of(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value, sort_keys=True, default=str).encode(), digest_size=8).hexdigest()


def read_study(path: Path) -> Study:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise ConfigurationError("study", str(path), why, "Name a TOML file; docs/compare.md has one.") from None
    return parsed_study(text, path.stem)


def parsed_study(text: str, name: str) -> Study:
    try:
        values = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigurationError("study", name, f"not TOML: {error}", "Fix that line.") from None
    _refuse_unknown(values, KEYS, "no such key of a study")
    arms = arms_of(_table(values, "settings"), _table(values, "arms"), _table(values, "grid"))
    study = Study(
        name=name,
        question=_question(values.get("question", "")),
        seeds=_seeds(values.get("seeds")),
        threshold=_threshold(values.get("threshold")),
        metrics=_metrics(values.get("metrics", [])),
        keep_models=_switch(values.get("keep_models", False)),
        settings=_table(values, "settings"),
        arms=arms,
        contrasts=_contrasts(values.get("contrasts", []), arms),
        text=text,
    )
    for contrast in study.contrasts:
        _check_outcome(contrast, study)
    return study


def validate_runs(
    study: Study, validate: Validate, arms: Iterable[str] | None = None, seeds: Iterable[int] | None = None
) -> None:
    """Check the settings of runs as `sortedrl train` would, without running them; default: of all runs."""
    for arm in study.arms if arms is None else arms:
        for seed in study.seeds if seeds is None else seeds:
            try:
                validate({**study.settings_of(arm), "seed": seed})
            except ConfigurationError as error:
                why = f"{error.why} (arm {arm})"
                raise ConfigurationError(error.key, error.value, why, error.fix) from None


# The keys of the file


def _refuse_unknown(values: Mapping[str, Any], known: Iterable[str], why: str) -> None:
    for key, value in values.items():
        if key not in known:
            raise ConfigurationError(key, value, why, nearest(key, known))


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint: the most similar of the known words, or all of them."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"Did you mean {close[0]}?" if close else f"Known: {', '.join(known)}."


def _table(values: Mapping[str, Any], key: str) -> Settings:
    found = values.get(key, {})
    if not isinstance(found, dict):
        raise ConfigurationError(key, found, "not a table", f"Write [{key}] and its keys below.")
    return found


def _question(value: Any) -> str:
    if not isinstance(value, str):
        raise ConfigurationError("question", value, "not text", 'Use question = "...".')
    return value.strip()


def _seeds(value: Any) -> tuple[int, ...]:
    fix = "Use a count, as in seeds = 8, or a list, as in seeds = [0, 1, 5]."
    if type(value) is int and 1 <= value <= MOST_SEEDS:
        return tuple(range(value))
    if not isinstance(value, list) or not value or any(type(seed) is not int or seed < 0 for seed in value):
        raise ConfigurationError("seeds", value, "a study needs the seeds of its runs", fix)
    if len(set(value)) < len(value):
        raise ConfigurationError("seeds", value, "one is named twice", "Name each one once.")
    return tuple(value)


def _threshold(value: Any) -> float | None:
    if value is None:
        return None
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ConfigurationError("threshold", value, "not a held-out score", "Use a number, as in threshold = 0.6.")
    return float(value)


def _metrics(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or any(not isinstance(name, str) for name in value):
        fix = 'Use metrics = ["grad_norm"], with keys of metrics.jsonl.'
        raise ConfigurationError("metrics", value, "not a list of names", fix)
    taken = [name for name in value if name in OUTCOMES or value.count(name) > 1]
    if taken:
        raise ConfigurationError("metrics", taken[0], "an outcome has this name already", "Leave it out.")
    return tuple(value)


def _switch(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigurationError("keep_models", value, "neither true nor false", "Use keep_models = true.")
    return value


# Contrasts


def _contrasts(values: Any, arms: Mapping[str, Settings]) -> tuple[Contrast, ...]:
    if not isinstance(values, list) or not values or any(not isinstance(value, dict) for value in values):
        fix = "Add [[contrasts]] with arm, minus and outcome."
        raise ConfigurationError("contrasts", values, "the study names nothing to compare", fix)
    found = [_contrast(value, arms, primary=len(values) == 1) for value in values]
    named = [contrast.name for contrast in found if contrast.primary]
    if len(named) != 1:
        why = "several contrasts are primary" if named else "no contrast is primary"
        fix = "Set primary = true on the one that answers the question."
        raise ConfigurationError("contrasts", named, why, fix)
    compared = [(contrast.arm, contrast.minus, contrast.outcome) for contrast in found]
    for contrast, pair in zip(found, compared, strict=True):
        if compared.count(pair) > 1:
            raise ConfigurationError("contrasts", contrast.name, "it is there twice", "Leave one out.")
    return tuple(found)


def _contrast(values: dict[str, Any], arms: Mapping[str, Settings], *, primary: bool) -> Contrast:
    _refuse_unknown(values, CONTRAST_KEYS, "no such key of a contrast")
    for key in ("arm", "minus", "outcome"):
        if not isinstance(values.get(key), str):
            raise ConfigurationError(f"contrasts: {key}", values.get(key), "every contrast needs one", "Add it.")
    arm, minus = values["arm"], values["minus"]
    for key in ("arm", "minus"):
        if values[key] not in arms:
            raise ConfigurationError(f"contrasts: {key}", values[key], "no such arm", nearest(values[key], arms))
    if arm == minus:
        raise ConfigurationError("contrasts: minus", minus, "an arm minus itself is 0", "Name another arm.")
    marked = values.get("primary", primary)
    if not isinstance(marked, bool):
        raise ConfigurationError("contrasts: primary", marked, "neither true nor false", "Use primary = true.")
    return Contrast(str(values.get("name", f"{arm} minus {minus}")), arm, minus, values["outcome"], marked or primary)


def _check_outcome(contrast: Contrast, study: Study) -> None:
    outcome = contrast.outcome
    if outcome in NEEDS_THRESHOLD and study.threshold is None:
        fix = "Set threshold, as in threshold = 0.6."
        raise ConfigurationError("contrasts: outcome", outcome, "the study has no threshold", fix)
    if outcome not in study.outcomes:
        hint = f"{nearest(outcome, study.outcomes)} Keys of metrics.jsonl are listed in metrics = [...]."
        raise ConfigurationError("contrasts: outcome", outcome, "no such outcome", hint)
    for arm in (contrast.arm, contrast.minus):
        if outcome in NEEDS_EVALUATIONS and not study.settings_of(arm).get("eval_every"):
            why = f"{outcome} needs evaluations during the run (arm {arm})"
            raise ConfigurationError("eval_every", 0, why, "Set eval_every in [settings], for example 5.")
