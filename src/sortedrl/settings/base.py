"""The base class of a command's settings: one typed, flat model, read from flags and files by cli/parse.py."""

import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, ClassVar

import pydantic
from pydantic import BaseModel, ConfigDict, Field

from sortedrl.core.configuration import ConfigurationError


class SettingsGroup(BaseModel):
    """Settings of one component, with the title `help_group` in the help. The text below a field describes it there."""

    model_config = ConfigDict(use_attribute_docstrings=True)


class Settings(SettingsGroup):
    """What all commands share. A command is composed of such groups. Flags are in cli/parse.py."""

    help_group: ClassVar[str] = "output"
    file_only: ClassVar[frozenset[str]] = frozenset()  # rare settings: no flag, only a key of the TOML file
    positional: ClassVar[tuple[str, ...]] = ()
    why_absent: ClassVar[Mapping[str, str]] = {}  # settings of similar commands: why this one does not have them

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    config: Path | None = None
    """TOML file with settings; flags win over it"""
    json_output: Annotated[bool, Field(alias="json")] = False
    """print one JSON object instead of tables"""
    dry_run: bool = False
    """print the resolved settings and derived values, and run nothing"""

    def check(self) -> None:
        """Refuse settings that cannot work together or be saved, with a ConfigurationError."""
        as_json(self)


def first_error(error: pydantic.ValidationError, fix_for: Callable[[str], str]) -> ConfigurationError:
    """The first setting that pydantic refused. `fix_for(key)` is the fix if the check itself has none."""
    first = error.errors()[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, ConfigurationError):
        return cause
    key = str(first["loc"][0]) if first["loc"] else "configuration"
    why = first["msg"].replace("Input should", "it should")
    for theirs, ours in (("be greater than or equal to", "be at least"), ("be less than or equal to", "be at most")):
        why = why.replace(theirs, ours)
    if first["type"] == "too_short":
        why = "it needs at least one value"
    return ConfigurationError(key, first.get("input"), why[:1].lower() + why[1:], fix_for(key))


def as_json(settings: Settings) -> dict[str, Any]:
    """Raises a ConfigurationError for a path that is not UTF-8: some files of a model could not be written there."""
    plain = settings.model_dump(mode="json", exclude={"config", "json_output", "dry_run"})
    for key, value in plain.items():
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ConfigurationError(key, str(value), "this is not UTF-8 text", "Rename it.") from None
    return plain


def values_for(kind: Any, settings: BaseModel, **derived: Any) -> dict[str, Any]:
    """For each field of a dataclass, the setting of the same name; `derived` ones win."""
    names = {field.name for field in fields(kind)} & type(settings).model_fields.keys()
    return {name: getattr(settings, name) for name in names} | derived


def literal(text: str) -> Any:
    """A value in JSON or Python notation; any other text stays text."""
    try:
        return json.loads({"True": "true", "False": "false", "None": "null"}.get(text, text))
    except (ValueError, RecursionError):
        return text


def _texts(options: Any) -> Any:
    """Options as flags give them: a TOML file may have numbers, switches and lists, too."""
    if not isinstance(options, Mapping):
        return options
    return {key: value if isinstance(value, str) else json.dumps(value, default=str) for key, value in options.items()}


OptionTexts = Annotated[dict[str, str], pydantic.BeforeValidator(_texts)]  # their values: `literal`


def plain_reason(error: Exception) -> str:
    return f"{error.strerror}" if isinstance(error, OSError) and error.strerror else str(error)
