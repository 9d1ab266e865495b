"""The help of a command: its flags, grouped by the model that has them, each with its type, meaning and default."""

import inspect
import shutil
import textwrap
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from sortedrl.settings.base import Settings

OWN_GROUP = "the run"  # title of what a model without `help_group` declares, such as that of a command
MAX_WIDTH = 120
COLUMN = 34  # where the text beside the flags starts
_FLAGS = {"json_output": "json", "all_modes": "all", "from_results": "from"}
_TYPE_NAMES = {int: "INT", float: "FLOAT", str: "TEXT", Path: "PATH", bool: ""}


def help_page(kind: type[Settings], program: str) -> str:
    width = min(MAX_WIDTH, shutil.get_terminal_size((100, 24)).columns)
    fields = kind.model_fields
    words = [key.upper() if fields[key].is_required() else f"[{key.upper()}]" for key in kind.positional]
    lines = [" ".join(["usage:", program, *words, "[flags]"]), "", *_paragraphs(inspect.getdoc(kind) or "", width)]
    for title, keys in grouped(kind).items():
        shown = [key for key in keys if key not in kind.file_only]
        lines += ["", title] if shown else []
        lines += [line for key in shown for line in _entry(key, kind, width)]
    if kind.file_only:
        names = ", ".join(sorted(kind.file_only))
        rare = f"Rare settings have no flag. Set them in a TOML file with --config: {names}."
        lines += ["", *textwrap.wrap(rare, width, break_on_hyphens=False)]
    return "\n".join(lines)


def grouped(kind: type[Settings]) -> dict[str, list[str]]:
    """The settings of a command by title: those of the command first, those of all commands last."""
    models = [model for model in kind.__mro__ if issubclass(model, BaseModel)]
    first_declared = {key: model for model in models for key in model.__annotations__ if key in kind.model_fields}
    groups: dict[str, list[str]] = {}
    for model in sorted(models, key=lambda model: model is Settings):
        keys = [key for key in kind.model_fields if first_declared[key] is model]
        if keys:
            groups.setdefault(vars(model).get("help_group", OWN_GROUP), []).extend(keys)
    return groups


def flag_of(key: str) -> str:
    return _FLAGS.get(key, key.replace("_", "-"))


def type_text(annotation: Any) -> str:
    """What a flag expects, such as INT or {auto,cpu,cuda}; empty for a switch."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_text(inner[0])
    if origin is Literal:
        return "{" + ",".join(map(str, inner)) + "}"
    if origin in (Union, UnionType):
        return "|".join(type_text(one) for one in inner if one is not NoneType)
    if origin is tuple:
        return f"{type_text(inner[0])} ..."
    if origin is dict:
        return "KEY VALUE pairs"
    return _TYPE_NAMES[annotation]


def meaning_of(field: FieldInfo) -> str:
    """Its description in one line."""
    return " ".join((field.description or "").split())


def _entry(key: str, kind: type[Settings], width: int) -> list[str]:
    field = kind.model_fields[key]
    flag = f"--{flag_of(key)} {type_text(field.annotation)}".rstrip()
    head = f"  {key.upper() if key in kind.positional else flag}"
    meaning = f"{meaning_of(field)}{_default_text(field)}"
    text = textwrap.wrap(meaning, max(width - COLUMN, 30), break_on_hyphens=False)
    indented = [" " * COLUMN + line for line in text]
    if text and len(head) < COLUMN - 1:
        return [head.ljust(COLUMN) + text[0], *indented[1:]]
    return [head, *indented]


def _default_text(field: FieldInfo) -> str:
    default = field.default
    if field.is_required() or default is None or default is False or default in ((), {}, ""):
        return ""
    return f" (default: {' '.join(map(str, default)) if isinstance(default, tuple) else default})"


def _paragraphs(text: str, width: int) -> list[str]:
    wrapped = (textwrap.wrap(" ".join(part.split()), width, break_on_hyphens=False) for part in text.split("\n\n"))
    return [line for lines in wrapped for line in [*lines, ""]][:-1]
