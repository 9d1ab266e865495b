"""From the words of a command line to settings: flags win over a TOML file, the file wins over the defaults.

Every wrong word is refused in one line. tyro converts the values; help and errors are ours.
"""

from __future__ import annotations

import difflib
import io
import re
import sys
import tomllib
from collections.abc import Sequence
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any, TypeVar

import pydantic
import tyro

from sortedrl.cli import old_names, other_names
from sortedrl.cli.help_page import flag_of, help_page, type_text
from sortedrl.core.configuration import ConfigurationError
from sortedrl.core.errors import UserError
from sortedrl.settings.base import InvalidSettings, Settings, first_error, plain_reason
from sortedrl.training.settings import saved_settings

S = TypeVar("S", bound=Settings)
_TERMINAL_COLORS = re.compile(r"\x1b\[[0-9;]*m")


class FlagError(UserError, ValueError):
    """A flag that the command does not have, or a value that it cannot take. The text is one line."""


def parsed(kind: type[S], args: Sequence[str], program: str) -> S:
    """The settings. Raises `FlagError` or `ConfigurationError`; prints the help and exits where it is asked for.

    A resumed run starts from the settings that it was started with, in the folder where it is now; a file is read over
    them. With another engine, the URLs and options of the one before do not count.
    """
    if "--help" in args or "-h" in args:
        print(help_page(kind, program))
        raise SystemExit(0)
    _refuse_unknown_flags(kind, args, program)
    path = _config_path(args)
    run = _value_of("--resume", args)
    try:
        values = {} if run is None else {**saved_settings(Path(run))[0], "resume": run, "out": run}
        old_names.refuse_old_keys(values, kind.model_fields)
        named: dict[str, Any] = {}
        if path is not None:
            named = _read_toml(path)
            _refuse_unknown_keys(kind, named)
            named["config"] = path
        if (_value_of("--engine", args) or named.get("engine") or values.get("engine")) != values.get("engine"):
            values = {key: value for key, value in values.items() if key not in ("engine_urls", "engine_options")}
        values |= named
        return _with_flags(kind, args, kind.model_validate(values) if values else None, program)
    except InvalidSettings as refused:
        raise _first_error(kind, refused.error) from None


def validated(kind: type[S], values: dict[str, Any]) -> S:
    """The settings that the values of a file give, checked as those of a command are."""
    _refuse_unknown_keys(kind, values)
    try:
        settings = kind.model_validate(values)
    except InvalidSettings as refused:
        raise _first_error(kind, refused.error) from None
    settings.check()
    return settings


def _origins(kind: type[Settings], args: Sequence[str]) -> dict[str, str]:
    """The file or flag that set each key."""
    path = _config_path(args)
    try:
        found = {} if path is None else dict.fromkeys(_read_toml(path), str(path))
    except ConfigurationError:
        found = {}
    given = {_flag_name(word) for word in args if word.startswith("--")}
    for key in kind.model_fields:
        if given & {flag_of(key), f"no-{flag_of(key)}"}:
            found[key] = f"flag --{flag_of(key)}"
    return found


def located(error: ConfigurationError, kind: type[Settings], args: Sequence[str]) -> str:
    """The error as a user reads it: key, value, where it was set, why, and a fix."""
    return error.text(set_by=_origins(kind, args).get(error.key, ""))


# Flags


def _refuse_unknown_flags(kind: type[Settings], args: Sequence[str], program: str) -> None:
    by_flag = {flag_of(key): key for key in kind.model_fields}
    for word in args:
        if not word.startswith("--") or word == "--":
            continue
        flag = _flag_name(word)
        key = by_flag.get(flag) or by_flag.get(flag.removeprefix("no-"))
        if key is None:
            raise FlagError(_unknown_flag(flag, kind, program))
        if key in kind.file_only:
            raise FlagError(f"--{flag} is not a flag: set {key} in a TOML file with --config")
        old_names.refuse_old_value(key, _value_of(f"--{flag}", args))


def _unknown_flag(flag: str, kind: type[Settings], program: str) -> str:
    new_flag = old_names.new_flag_for(flag.replace("-", "_"), kind.model_fields)
    if new_flag is not None:
        return f"--{flag} was renamed: use {new_flag}"
    if flag.replace("-", "_") in kind.not_here:
        return f"no such flag: --{flag}. Reason: {kind.not_here[flag.replace('-', '_')]}"
    ours = other_names.our_name_for(flag.replace("-", "_"), kind.model_fields)
    if ours is not None:
        use = f"set {ours} in a TOML file with --config" if ours in kind.file_only else f"use --{flag_of(ours)}"
        return f"no such flag: --{flag}. Here it has another name: {use}"
    known = [flag_of(key) for key in kind.model_fields if key not in kind.file_only]
    near = difflib.get_close_matches(flag, known, n=1)
    return f"no such flag: --{flag}. " + (f"Did you mean --{near[0]}?" if near else f"See {program} --help.")


def _with_flags(kind: type[S], args: Sequence[str], default: S | None, program: str) -> S:
    given: dict[str, Any] = {} if default is None else {"default": default}
    printed = io.StringIO()
    try:
        with redirect_stderr(printed):
            settings: S = tyro.cli(kind, args=list(args), prog=program, **given)
    except SystemExit:
        raise FlagError(_in_one_line(printed.getvalue(), kind, args, program)) from None
    sys.stderr.write(printed.getvalue())
    return settings


def _in_one_line(box: str, kind: type[Settings], args: Sequence[str], program: str) -> str:
    """What tyro draws as a box: its first paragraph, and what the flag expects."""
    rows = [line.strip("│| \t") for line in _TERMINAL_COLORS.sub("", box).splitlines()[1:-1]]
    end = next((place for place, row in enumerate(rows) if not row.strip("─- ")), len(rows))
    text = " ".join(row for row in rows[:end] if row)
    by_flag = {f"--{flag_of(key)}": key for key in kind.model_fields}
    found = re.search(r"--[\w-]+", text)
    flag = found.group() if found else ""
    help_hint = f"See {program} --help."
    if flag not in by_flag:
        unknown = text.removeprefix("Unrecognized options: ")
        return f"no such argument: {unknown}. {help_hint}" if unknown != text else f"{text} {help_hint}"
    expected = type_text(kind.model_fields[by_flag[flag]])
    if text.startswith("Missing value"):
        return f"{flag} needs a value: {expected}. {help_hint}"
    value = _value_of(flag, args)
    return f"{flag}{f' {value}' if value else ''}: expected {expected or 'no value'}. {help_hint}"


def _flag_name(word: str) -> str:
    return word.split("=")[0].removeprefix("--").replace("_", "-")


def _value_of(flag: str, args: Sequence[str]) -> str | None:
    for place, word in enumerate(args):
        if word == flag and place + 1 < len(args):
            return args[place + 1]
        if word.startswith(f"{flag}="):
            return word.removeprefix(f"{flag}=")
    return None


# The file


def _config_path(args: Sequence[str]) -> Path | None:
    value = _value_of("--config", args)
    return None if value is None else Path(value)


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError("config", str(path), plain_reason(error), "Name a TOML file that exists.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigurationError("config", str(path), f"not TOML: {error}", "Fix that line.") from None


def _refuse_unknown_keys(kind: type[Settings], values: dict[str, Any]) -> None:
    old_names.refuse_old_keys(values, kind.model_fields)
    known = [name for name in kind.model_fields if name != "json_output"]
    for key, value in values.items():
        if key in kind.not_here:
            raise ConfigurationError(key, value, "no such key", f"Reason: {kind.not_here[key]}.")
        if key not in known:
            ours = other_names.our_name_for(key, known)
            if ours is not None:
                raise ConfigurationError(key, value, "no such key: here it has another name", f"Use {ours}.")
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"Did you mean {near[0]}?" if near else f"Keys: {', '.join(known)}."
            raise ConfigurationError(key, value, "no such key", hint)


def _first_error(kind: type[Settings], error: pydantic.ValidationError) -> ConfigurationError:
    def fix_for(key: str) -> str:
        if key in kind.file_only:
            return f"Its meaning: {kind.model_fields[key].description}."
        return f"See the help of --{flag_of(key)}."

    return first_error(error, fix_for)
