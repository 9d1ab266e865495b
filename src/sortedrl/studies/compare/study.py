"""A study as its TOML file describes it. Any mistake in the file is refused before the first run starts."""

import difflib
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import pydantic
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from sortedrl.core.configuration import ConfigurationError
from sortedrl.settings.base import first_error, plain_reason
from sortedrl.settings.schedule import prompts_per_cohort
from sortedrl.studies.compare.results import NEEDS_EVALUATIONS, NEEDS_THRESHOLD, OUTCOMES, Key, digest_of
from sortedrl.training.settings import TrainSettings

Settings = dict[str, Any]
Validate = Callable[[Settings], object]
SET_BY_THE_STUDY = ("seed", "out", "resume", "config", "dry_run", "json_output")
ARM_NAME = re.compile(r"(?!\.{1,2}$)[\w+\-.=,]{1,200}", re.ASCII)  # file systems take 255 bytes
FIXES = {
    "seeds": "Use a count, as in seeds = 8, or a list, as in seeds = [0, 1, 5].",
    "threshold": "Use a number, as in threshold = 0.6.",
    "metrics": 'Use metrics = ["grad_norm"], with keys of metrics.jsonl.',
    "grid": "Use KEY = [1, 2], or [grid.KEY] with NAME = { setting = value }.",
    "contrasts": "Add [[contrasts]] with arm, minus and outcome.",
}


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Contrast(_Table):
    """`arm` minus `minus`, paired by seed."""

    name: str
    arm: str
    minus: str
    outcome: str
    primary: bool


def _seeds(value: Any) -> Any:
    """A count stands for the seeds from 0 on."""
    seeds = tuple(range(value)) if type(value) is int and value <= 10_000 else value
    return tuple(seeds) if isinstance(seeds, list) else seeds


def _contrasts(values: Any) -> Any:
    """A contrast is named by its arms. A single one is always primary; of several, the primary one comes first."""
    if not isinstance(values, list) or not values or any(not isinstance(value, dict) for value in values):
        raise ConfigurationError("contrasts", values, "the study names nothing to compare", FIXES["contrasts"])
    found = []
    for value in values:
        _refuse_unknown(value, Contrast.model_fields, "contrast")
        found.append({"name": f"{value.get('arm')} minus {value.get('minus')}", "primary": False} | value)
    if len(found) == 1:
        found[0]["primary"] = True
    return tuple(sorted(found, key=lambda one: one["primary"] is not True))


class Study(_Table):
    """The file, as it is. Exactly one contrast is primary; every arm has a name and settings of its own."""

    name: str
    text: str  # of the file
    question: str = ""
    seeds: Annotated[tuple[Annotated[int, Field(ge=0)], ...], BeforeValidator(_seeds)] = Field(min_length=1)
    threshold: float | None = None
    metrics: Annotated[tuple[str, ...], Field(strict=False)] = ()
    keep_models: bool = False
    settings: Settings = {}
    named_arms: dict[str, Settings] = Field(default={}, alias="arms")
    grid: dict[str, list[Any] | dict[str, Settings]] = {}
    contrasts: Annotated[tuple[Contrast, ...], BeforeValidator(_contrasts)] = Field(default=(), validate_default=True)

    @cached_property
    def arms(self) -> dict[str, Settings]:
        """The settings that each arm adds to the common ones."""
        return arms_of(self.settings, self.named_arms, self.grid)

    @property
    def primary(self) -> Contrast:
        return self.contrasts[0]

    @property
    def pairs_of_arms(self) -> list[tuple[str, str]]:
        return list(dict.fromkeys((contrast.arm, contrast.minus) for contrast in self.contrasts))

    @property
    def outcomes(self) -> tuple[str, ...]:
        """All outcomes that the runs of this study have."""
        known = [name for name in OUTCOMES if self.threshold is not None or name not in NEEDS_THRESHOLD]
        return (*known, *self.metrics)

    @property
    def plan(self) -> Settings:
        """What could be chosen to suit the results, once they are known."""
        primary = f"{self.primary.arm} minus {self.primary.minus}, {self.primary.outcome}"
        return {"seeds": list(self.seeds), "threshold": self.threshold, "primary": primary, "arms": list(self.arms)}

    @property
    def digest(self) -> str:
        """Of the plan and of all settings."""
        return digest_of([self.plan, [self.settings_of(arm) for arm in self.arms]])

    def settings_of(self, arm: str) -> Settings:
        """As the file has them: common settings and those of the arm, without what the study sets for each run."""
        return {"threads": 1, **self.settings, **self.arms[arm]}

    def cohort_rollouts(self, arm: str) -> int:
        """Rollouts that are loaded together."""
        settings = TrainSettings.model_construct(**self.settings_of(arm))
        return prompts_per_cohort(settings) * settings.rollouts_per_prompt


def read_study(path: Path) -> Study:
    try:
        return parsed_study(path.read_text(encoding="utf-8"), path.stem)
    except (OSError, UnicodeDecodeError) as error:
        fix = "Name a TOML file; docs/compare.md has one."
        raise ConfigurationError("study", str(path), plain_reason(error), fix) from None


def parsed_study(text: str, name: str) -> Study:
    try:
        values = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigurationError("study", name, f"not TOML: {error}", "Fix that line.") from None
    known = [field.alias or key for key, field in Study.model_fields.items() if key not in ("name", "text")]
    _refuse_unknown(values, known, "study")
    try:
        study = Study.model_validate(values | {"name": name, "text": text})
    except pydantic.ValidationError as error:
        raise first_error(error, lambda key: FIXES.get(key, "See docs/compare.md.")) from None
    if len(set(study.seeds)) < len(study.seeds):
        raise ConfigurationError("seeds", study.seeds, "one is named twice", "Name each one once.")
    for metric in study.metrics:
        if metric in OUTCOMES or study.metrics.count(metric) > 1:
            raise ConfigurationError("metrics", metric, "an outcome has this name already", "Leave it out.")
    _check_contrasts(study)
    return study


def validate_runs(study: Study, validate: Validate, runs: Iterable[Key] | None = None) -> None:
    """Check the settings of runs as `sortedrl train` would, without running them; default: of all runs."""
    for arm, seed in product(study.arms, study.seeds) if runs is None else runs:
        try:
            validate({**study.settings_of(arm), "seed": seed})
        except ConfigurationError as error:
            raise ConfigurationError(error.key, error.value, f"{error.why} (arm {arm})", error.fix) from None


def _refuse_unknown(values: Mapping[str, Any], known: Iterable[str], what: str) -> None:
    for key, value in values.items():
        if key not in known:
            raise ConfigurationError(key, value, f"no such key of a {what}", nearest(key, known))


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint: the most similar of the known words, or all of them."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"Did you mean {close[0]}?" if close else f"Known: {', '.join(known)}."


def arms_of(settings: Mapping[str, Any], arms: Mapping[str, Any], grid: Mapping[str, Any]) -> dict[str, Settings]:
    """`[settings]`, overridden by `[arms.NAME]`, at every point of `[grid]`: what each arm adds to the common ones."""
    if not arms and not grid:
        raise ConfigurationError("arms", {}, "the study compares nothing", "Add [arms.NAME] tables or a [grid].")
    found: dict[str, Settings] = {}
    for (arm, own), *point in product((arms or {"": {}}).items(), *(list(_axis(*one)) for one in grid.items())):
        name = ",".join([arm] * bool(arms) + [value for value, _ in point])
        if not ARM_NAME.fullmatch(name):
            fix = "Use letters, digits and +-._=, only."
            raise ConfigurationError("arms", name, "the name is that of a folder, of at most 200 characters", fix)
        merged = dict(item for values in (own, *(of for _, of in point)) for item in values.items())
        for key in SET_BY_THE_STUDY:
            if key in (both := {**settings, **merged}):
                fix = "Use seeds = [...] at the top." if key == "seed" else "Leave it out."
                raise ConfigurationError(key, both[key], "the study sets it for each run", fix)
        if name in found or merged in found.values():  # with the same seeds they would be the same runs
            raise ConfigurationError("arms", name, "another arm has its name or its settings", "Leave one of them out.")
        found[name] = merged
    return found


def _axis(key: str, values: Any) -> Iterator[tuple[str, Settings]]:
    """The values of a key of the grid: their names and settings."""
    if not values:
        raise ConfigurationError(f"grid.{key}", values, "it has no values", FIXES["grid"])
    for value in values:
        if isinstance(values, dict):
            yield value, values[value]
        elif isinstance(value, str):
            yield re.sub(r"[^\w+\-.=]", "-", value, flags=re.ASCII), {key: value}
        elif isinstance(value, bool | int | float):
            yield f"{key}={str(value).lower()}", {key: value}
        else:
            fix = f"Use [grid.{key}] with NAME = {{ {key} = ... }}."
            raise ConfigurationError(f"grid.{key}", value, "such a value cannot name an arm", fix)


def _check_contrasts(study: Study) -> None:
    primary = [contrast.name for contrast in study.contrasts if contrast.primary]
    if len(primary) != 1:
        why = "several contrasts are primary" if primary else "no contrast is primary"
        fix = "Set primary = true on the one that answers the question."
        raise ConfigurationError("contrasts", primary, why, fix)
    for contrast in study.contrasts:
        outcome = contrast.outcome
        for key, arm in (("arm", contrast.arm), ("minus", contrast.minus)):
            if arm not in study.arms:
                raise ConfigurationError(f"contrasts: {key}", arm, "no such arm", nearest(arm, study.arms))
            if outcome in NEEDS_EVALUATIONS and not study.settings_of(arm).get("eval_every"):
                why = f"{outcome} needs evaluations during the run (arm {arm})"
                raise ConfigurationError("eval_every", 0, why, "Set eval_every in [settings], for example 5.")
        if contrast.arm == contrast.minus:
            raise ConfigurationError("contrasts: minus", contrast.arm, "an arm minus itself is 0", "Name another arm.")
        if outcome not in study.outcomes:
            why, fix = "no such outcome", f"{nearest(outcome, study.outcomes)} {FIXES['metrics']}"
            if outcome in NEEDS_THRESHOLD:
                why, fix = "the study has no threshold", FIXES["threshold"]
            raise ConfigurationError("contrasts: outcome", outcome, why, fix)
