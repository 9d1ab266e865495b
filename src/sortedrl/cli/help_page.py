"""The help of a command: its flags in groups, each with its type, meaning and default."""

from __future__ import annotations

import inspect
import shutil
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from sortedrl.settings.base import Settings

GROUPS = {
    "what to read": ("run", "runs", "study", "from_results"),
    "model and task": ("model", "task", "task_options", "data", "tools", "max_turns"),
    "prompts and responses": (
        *("lengths", "median_length", "length_sd_between", "length_sd_within", "prompt_tokens", "max_prompt_tokens"),
        *("max_response_tokens", "max_context_tokens", "turns", "observation_tokens", "environment_seconds"),
        "temperature",
    ),
    "schedule": (
        *("mode", "modes", "all_modes", "rollouts_per_update", "prompts_per_cohort", "rollouts_per_prompt"),
        *("whole_groups", "max_staleness", "overlap", "oversubscribe", "keep_seed", "expectation", "expectations"),
        *("max_cohort_updates", "max_length_bias", "max_staleness_mean"),
    ),
    "engine": (
        *("engine", "engine_urls", "engine_options", "slots", "step_time", "prefill_seconds_per_token", "kv_tokens"),
        *("reuse_kv_cache", "weight_update_seconds", "device", "dtype", "threads", "steps", "repeats"),
    ),
    "learner": (
        *("algorithm", "advantage_baseline", "off_policy_correction", "learning_rate", "lora_rank"),
        *("gradient_checkpointing", "learner_seconds_per_update", "learner_seconds_per_token"),
        *("stream", "share_gpu"),
    ),
    "rewards": ("scoring", "reward_workers", "score_limit_seconds", "score_seconds"),
    "the run": ("updates", "epochs", "cohorts", "seed", "seeds", "jobs", "stopped_after_seconds", "full"),
    "evaluation and checkpoints": ("eval_every", "eval_problems", "eval_samples", "eval_seed", "checkpoint_every"),
    "output": (
        *("out", "resume", "events", "limit", "details", "tracker", "prometheus_port", "json_output", "dry_run"),
        "config",
    ),
}  # of all commands, in the order of the help
_FLAGS = {"json_output": "json", "all_modes": "all", "from_results": "from"}
MAX_WIDTH = 120
COLUMN = 34  # where the text beside the flags starts
_TYPE_NAMES = {int: "INT", float: "FLOAT", str: "TEXT", Path: "PATH", bool: ""}


def help_page(kind: type[Settings], program: str) -> str:
    width = min(MAX_WIDTH, shutil.get_terminal_size((100, 24)).columns)
    fields = kind.model_fields
    arguments = [key for key in kind.positional if key in fields]
    words = " ".join(f"[{key.upper()}]" if not fields[key].is_required() else key.upper() for key in arguments)
    lines = [f"usage: {program} {words}{' ' * bool(words)}[flags]", "", *_paragraphs(inspect.getdoc(kind) or "", width)]
    for title, keys in _grouped(kind):
        lines += ["", title]
        for key in keys:
            lines += _entry(key, kind, width)
    if kind.file_only:
        rare = (
            f"Rare settings have no flag. Set them in a TOML file with --config: {', '.join(sorted(kind.file_only))}."
        )
        lines += ["", *textwrap.wrap(rare, width, break_on_hyphens=False)]
    return "\n".join(lines)


def help_position(key: str) -> int:
    """Where a setting is in the help; settings without a flag are last."""
    keys = [key for members in GROUPS.values() for key in members]
    return keys.index(key) if key in keys else len(keys)


def flag_of(key: str) -> str:
    return _FLAGS.get(key, key.replace("_", "-"))


def type_text(field: FieldInfo) -> str:
    """What a flag expects, such as INT or {auto,cpu,cuda}; empty for a switch."""
    return _type_text(field.annotation)


def _type_text(annotation: Any) -> str:
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return "{" + ",".join(map(str, inner)) + "}"
    if origin in (Union, UnionType):
        return "|".join(_type_text(one) for one in inner if one is not NoneType)
    if origin is tuple:
        return f"{_type_text(inner[0])} ..."
    if origin is dict:
        return "KEY VALUE pairs"
    if origin is not None and inner:  # Annotated
        return _type_text(inner[0])
    return _TYPE_NAMES[annotation]


def _grouped(kind: type[Settings]) -> Iterator[tuple[str, list[str]]]:
    shown = [key for key in kind.model_fields if key not in kind.file_only]
    for title, members in GROUPS.items():
        keys = [key for key in members if key in shown]
        if keys:
            yield title, keys


def _entry(key: str, kind: type[Settings], width: int) -> list[str]:
    field = kind.model_fields[key]
    name = key.upper() if key in kind.positional else f"--{flag_of(key)}"
    head = f"  {name} {type_text(field)}".rstrip() if key not in kind.positional else f"  {name}"
    text = textwrap.wrap(
        f"{field.description or ''}{_default_text(field)}".strip(), max(width - COLUMN, 30), break_on_hyphens=False
    )
    indented = [" " * COLUMN + line for line in text]
    if text and len(head) < COLUMN - 1:
        return [head.ljust(COLUMN) + text[0], *indented[1:]]
    return [head, *indented]


def _default_text(field: FieldInfo) -> str:
    default = field.default
    if field.is_required() or default is None or default is False or default in ((), {}, ""):
        return ""
    text = " ".join(map(str, default)) if isinstance(default, tuple) else str(default)
    return f" (default: {text})"


def _paragraphs(text: str, width: int) -> list[str]:
    wrapped = (textwrap.wrap(" ".join(part.split()), width, break_on_hyphens=False) for part in text.split("\n\n"))
    return [line for lines in wrapped for line in [*lines, ""]][:-1]
