"""From the words of a command line to settings: flags win over a TOML file, the file wins over the defaults.

Every wrong word is refused in one line. pydantic converts the values, those of flags as those of files.
"""

import difflib
import tomllib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin

import pydantic

from sortedrl.cli.help_page import flag_of, help_page, meaning_of, type_text
from sortedrl.core.configuration import ConfigurationError
from sortedrl.core.errors import UserError
from sortedrl.settings.base import Settings, first_error, plain_reason
from sortedrl.training.settings import saved_settings

S = TypeVar("S", bound=Settings)
# Names that vLLM, SGLang, TRL and verl users know for a setting of ours, to name ours in the error.
OTHER_NAMES = {
    "slots": ("max_num_seqs", "max_running_requests"),
    "rollouts_per_prompt": ("num_generations", "group_size"),
    "rollouts_per_update": ("train_batch_size", "batch_size", "generation_batch_size", "per_device_train_batch_size"),
    "max_response_tokens": ("max_completion_length", "max_response_length", "max_new_tokens", "max_tokens"),
    "max_prompt_tokens": ("max_prompt_length",),
    "max_context_tokens": ("max_model_len", "max_length", "context_length"),
    "model": ("model_name_or_path", "model_path"),
    "data": ("dataset", "dataset_name", "train_files"),
    "updates": ("max_steps", "steps", "total_training_steps"),
    "epochs": ("num_train_epochs", "total_epochs"),
    "learning_rate": ("lr",),
    "lora_rank": ("lora_r",),
    "clip_low": ("epsilon", "clip_ratio_low"),
    "clip_high": ("epsilon_high", "clip_ratio_high"),
    "ratio_level": ("importance_sampling_level",),
    "importance_cap": ("vllm_importance_sampling_cap",),
    "aggregation": ("loss_type", "loss_agg_mode"),
    "truncated_rollouts": ("mask_truncated_completions",),
    "kl_coefficient": ("beta", "kl_loss_coef"),
    "entropy_coefficient": ("entropy_coeff",),
    "max_grad_norm": ("grad_clip",),
    "warmup_updates": ("warmup_steps", "lr_warmup_steps"),
    "gae_lambda": ("lam",),
    "eval_every": ("eval_steps", "test_freq"),
    "checkpoint_every": ("save_steps", "save_freq"),
    "tracker": ("report_to",),
    "out": ("output_dir",),
    "resume": ("resume_from_checkpoint",),
}

_OTHER_TYPE = ("_parsing", "_type", "literal_error")  # ends of pydantic's names of such errors


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
    flags = _flags(kind, args, program)
    run, path = flags.get("resume"), flags.get("config")
    values = {} if run is None else {**saved_settings(Path(run)), "out": run}
    named = {} if path is None else _read_toml(Path(path))
    _refuse_unknown_keys(kind, named)
    named |= flags
    if named.get("engine", values.get("engine")) != values.get("engine"):
        values = {key: value for key, value in values.items() if key not in ("engine_urls", "engine_options")}
    return _validated(kind, values | named, flags, program)


def validated(kind: type[S], values: dict[str, Any]) -> S:
    """The settings that the values of a file give, checked as those of a command are."""
    _refuse_unknown_keys(kind, values)
    settings = _validated(kind, values)
    settings.check()
    return settings


def located(error: ConfigurationError, kind: type[Settings], args: Sequence[str]) -> str:
    """The error as a user reads it: key, value, where it was set, why, and a fix."""
    flags = _flags(kind, args, "")
    flag = f"--{flag_of(error.key)}"
    is_flag = error.key not in kind.positional or any(word.startswith(flag) for word in args)
    found = "" if error.key not in flags else f"flag {flag}" if is_flag else "an argument"
    if not found and flags.get("config") and error.key != "config" and error.key in _read_toml(Path(flags["config"])):
        found = str(flags["config"])
    return error.text(set_by=found)


def _validated(kind: type[S], values: dict[str, Any], flags: dict[str, Any] | None = None, program: str = "") -> S:
    fields = kind.model_fields
    by_alias = {
        fields[key].alias or key: None if _is_no_number(value, fields[key].annotation) else value
        for key, value in values.items()
    }
    try:
        return kind.model_validate(by_alias)
    except pydantic.ValidationError as refused:
        first = refused.errors()[0]
        key = str(first["loc"][0]) if first["loc"] else ""
        if flags and key in flags and first["type"].endswith(_OTHER_TYPE):
            value = first["input"] if isinstance(first["input"], str) else flags[key]
            raise FlagError(_expected(kind, key, f" {value}", program)) from None
        in_file = f"Its meaning: {meaning_of(kind.model_fields[key])}." if key in kind.file_only else ""
        raise first_error(refused, lambda key: in_file or f"See the help of --{flag_of(key)}.") from None


def _is_no_number(value: Any, annotation: Any) -> bool:
    """`none` for an optional number: TOML has no word of its own for it."""
    is_number = NoneType in get_args(annotation) and {"INT", "FLOAT"} & {*type_text(annotation).split("|")}
    return bool(is_number) and isinstance(value, str) and value.lower() == "none"


# Flags


def _flags(kind: type[Settings], args: Sequence[str], program: str) -> dict[str, Any]:
    """What each flag says, by the key of its setting: text, or lists and pairs of it."""
    by_flag = {flag_of(key): key for key in kind.model_fields}
    switches = {flag: key for flag, key in by_flag.items() if kind.model_fields[key].annotation is bool}
    found: dict[str, Any] = {}
    words = [word for word in args if word != "--"]
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            _take_argument(kind, word, found, program)
            continue
        name, given, value = word.removeprefix("--").partition("=")
        flag = name.replace("_", "-")
        key = by_flag.get(flag) or switches.get(flag.removeprefix("no-"))
        if key is None:
            raise FlagError(_unknown_flag(flag, kind, program))
        if key in kind.file_only:
            raise FlagError(f"--{flag} is not a flag: set {key} in a TOML file with --config")
        annotation = kind.model_fields[key].annotation
        if annotation is bool:
            if given:
                raise FlagError(_expected(kind, key, f"={value}", program))
            found[key] = flag in by_flag
        elif (origin := get_origin(annotation)) in (tuple, dict):
            several = [value] if given else []
            while words and not words[0].startswith("--"):
                several.append(words.pop(0))
            values = tuple(_value(text, annotation) for text in several)
            found[key] = values if origin is tuple else _pairs(kind, key, several, program)
        elif given or (words and not words[0].startswith("--")):
            found[key] = _value(value if given else words.pop(0), annotation)
        else:
            raise FlagError(f"--{flag} needs a value: {type_text(annotation)}. See {program} --help.")
    return found


def _value(text: str, annotation: Any) -> Any:
    """None and numbers, where the setting takes them; pydantic converts and refuses the rest.

    Bytes that are not UTF-8 are surrogates, which no file of ours can hold.
    """
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise FlagError(f"{text!r} is not UTF-8: use a name that is")
    kinds = {annotation, *get_args(annotation)}
    if text == "None" and NoneType in kinds:
        return None
    for number in (int, float) if {int, float} & kinds else ():
        with suppress(ValueError):
            return number(text)
    return text


def _take_argument(kind: type[Settings], word: str, found: dict[str, Any], program: str) -> None:
    key = next(iter(kind.positional), None)
    is_tuple = key is not None and get_origin(kind.model_fields[key].annotation) is tuple
    if key is None or (key in found and not is_tuple):
        raise FlagError(f"no such argument: {word}. See {program} --help.")
    found[key] = [*found.get(key, ()), word] if is_tuple else word


def _pairs(kind: type[Settings], key: str, words: list[str], program: str) -> dict[str, str]:
    if len(words) % 2:
        raise FlagError(_expected(kind, key, f" {' '.join(words)}", program))
    return {name: _value(value, str) for name, value in zip(words[::2], words[1::2], strict=True)}


def _expected(kind: type[Settings], key: str, value: str, program: str) -> str:
    expected = type_text(kind.model_fields[key].annotation) or "no value"
    return f"--{flag_of(key)}{value}: expected {expected}. See {program} --help."


def _unknown_flag(flag: str, kind: type[Settings], program: str) -> str:
    key = flag.replace("-", "_")
    if (ours := _our_name_for(key, kind)) is not None:
        use = f"set {ours} in a TOML file with --config" if ours in kind.file_only else f"use --{flag_of(ours)}"
        return f"no such flag: --{flag}. Here it has another name: {use}"
    if key in kind.why_absent:
        return f"no such flag: --{flag}. Reason: {kind.why_absent[key]}"
    known = [flag_of(key) for key in kind.model_fields if key not in kind.file_only]
    near = difflib.get_close_matches(flag, known, n=1)
    return f"no such flag: --{flag}. " + (f"Did you mean --{near[0]}?" if near else f"See {program} --help.")


def _our_name_for(key: str, kind: type[Settings]) -> str | None:
    """The setting of a command that another tool calls `key`."""
    return next((ours for ours, others in OTHER_NAMES.items() if key in others and ours in kind.model_fields), None)


# The file


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError("config", str(path), plain_reason(error), "Name a TOML file that exists.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigurationError("config", str(path), f"not TOML: {error}", "Fix that line.") from None


def _refuse_unknown_keys(kind: type[Settings], values: dict[str, Any]) -> None:
    known = [name for name in kind.model_fields if name != "json_output"]
    for key, value in values.items():
        if key in known:
            continue
        near = difflib.get_close_matches(key, known, n=1)
        why, fix = "no such key", f"Did you mean {near[0]}?" if near else f"Keys: {', '.join(known)}."
        if isinstance(value, dict) and not near:
            why, fix = "no such table", "Put its keys at the top level of the file."
        elif key in kind.why_absent:
            fix = f"Reason: {kind.why_absent[key]}."
        elif (ours := _our_name_for(key, kind)) is not None:
            why, fix = "no such key: here it has another name", f"Use {ours}."
        raise ConfigurationError(key, value, why, fix)
