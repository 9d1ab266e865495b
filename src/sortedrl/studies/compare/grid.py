"""The arms of a study: `[settings]`, overridden by `[arms.NAME]`, at every point of `[grid]`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

from sortedrl.core.configuration import ConfigurationError

Settings = dict[str, Any]
ARM_NAME = re.compile(r"[\w+\-.=,]+", re.ASCII)
LONGEST_NAME = 200  # file systems take 255 bytes
SET_BY_THE_STUDY = ("seed", "out", "resume", "config", "dry_run", "json_output")


def arms_of(settings: Mapping[str, Any], arms: Mapping[str, Any], grid: Mapping[str, Any]) -> dict[str, Settings]:
    """Every arm with the settings that it adds to the common ones. Each name and each set of settings is unique."""
    _refuse_what_the_study_sets(settings)
    points = list(_points(grid))
    if not arms and not grid:
        raise ConfigurationError("arms", {}, "the study compares nothing", "Add [arms.NAME] tables or a [grid].")
    found: dict[str, Settings] = {}
    for arm, own in (arms or {"": {}}).items():
        _require_table(f"arms.{arm}", own)
        for names, point in points:
            _refuse_what_the_study_sets(own | point)
            name = ",".join([arm] * bool(arms) + names)
            _refuse_name(name, found)
            _refuse_overridden(arm, own, point)
            found[name] = {**own, **point}
    _refuse_equal_arms(found)
    return found


def _points(grid: Mapping[str, Any]) -> Iterator[tuple[list[str], Settings]]:
    """The cartesian product of the axes: the names of the values, and their settings. One empty point without axes."""
    axes = [list(_axis(key, values)) for key, values in grid.items()]
    for combination in product(*axes):
        merged: Settings = {}
        for _, settings in combination:
            for key in settings.keys() & merged.keys():
                why = "two keys of the grid set it"
                raise ConfigurationError(f"grid: {key}", settings[key], why, "Leave it out of one of them.")
            merged |= settings
        yield [name for name, _ in combination], merged


def _axis(key: str, values: Any) -> Iterator[tuple[str, Settings]]:
    if isinstance(values, list) and values:
        for value in values:
            yield _value_name(key, value), {key: value}
    elif isinstance(values, dict) and values:
        for name, settings in values.items():
            _require_table(f"grid.{key}.{name}", settings)
            yield name, settings
    else:
        fix = f"Use {key} = [1, 2], or [grid.{key}] with NAME = {{ setting = value }}."
        raise ConfigurationError(f"grid.{key}", values, "neither a list of values nor a table of settings", fix)


def _value_name(key: str, value: Any) -> str:
    if isinstance(value, str):
        return re.sub(r"[^\w+\-.=]", "-", value, flags=re.ASCII)
    if isinstance(value, bool | int | float):
        return f"{key}={str(value).lower()}"
    fix = f"Use [grid.{key}] with NAME = {{ {key} = ... }}."
    raise ConfigurationError(f"grid.{key}", value, "such a value cannot name an arm", fix)


def _require_table(key: str, value: Any) -> None:
    if not isinstance(value, dict):
        raise ConfigurationError(key, value, "not a table of settings", "Use NAME = { setting = value }.")


def _refuse_what_the_study_sets(settings: Mapping[str, Any]) -> None:
    for key in SET_BY_THE_STUDY:
        if key in settings:
            fix = "Use seeds = [...] at the top." if key == "seed" else "Leave it out."
            raise ConfigurationError(key, settings[key], "the study sets it for each run", fix)


def _refuse_name(name: str, taken: Mapping[str, Settings]) -> None:
    if len(name) > LONGEST_NAME:
        why = f"the name is that of a folder: at most {LONGEST_NAME} characters"
        raise ConfigurationError("arms", name, why, "Shorten it, or name points of the grid in tables.")
    if not ARM_NAME.fullmatch(name) or name in (".", ".."):
        raise ConfigurationError("arms", name, "the name is that of a folder", "Use letters, digits and +-._=, only.")
    if name in taken:
        raise ConfigurationError("arms", name, "two arms have this name", "Name each one once.")


def _refuse_overridden(arm: str, own: Settings, point: Settings) -> None:
    for key in own.keys() & point.keys():
        why = f"arm {arm} and the grid both set it"
        raise ConfigurationError(key, own[key], why, "Leave it out of one of them.")


def _refuse_equal_arms(arms: Mapping[str, Settings]) -> None:
    """With the same seeds they would be the same runs."""
    names = list(arms)
    for i, name in enumerate(names):
        for other in names[:i]:
            if arms[name] == arms[other]:
                why = f"it has the same settings as arm {other}"
                raise ConfigurationError("arms", name, why, "Leave one of them out.")
