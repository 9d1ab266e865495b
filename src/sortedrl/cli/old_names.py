"""Names of settings before they were renamed. Each is refused by naming the new one."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from sortedrl.core.configuration import ConfigurationError

SETTINGS = {
    "baseline": "advantage_baseline",
    "compare_siblings": "whole_groups",
    "keep_old_keys": "reuse_kv_cache",
    "stale_tokens": "off_policy_correction",
    "weights_seconds": "weight_update_seconds",
}
VALUES = {
    "advantage_baseline": {"siblings": "group"},
    "off_policy_correction": {"plain": "ppo_clip", "tis": "cispo", "truncated": "decoupled", "masked": "mask"},
}


def new_flag_for(old_key: str, known_keys: Container[str]) -> str | None:
    """What to use instead of an old flag, or None if it is no old flag of a command with these settings."""
    new_key = SETTINGS.get(old_key)
    if new_key is None or new_key not in known_keys:
        return None
    values = ", ".join(f"{old} is now {new}" for old, new in VALUES.get(new_key, {}).items())
    return f"--{new_key.replace('_', '-')}{f' ({values})' if values else ''}"


def refuse_old_keys(values: Mapping[str, Any], known_keys: Container[str]) -> None:
    """Refuse renamed settings and values in a file."""
    for key, value in values.items():
        new_key = SETTINGS.get(key)
        if key not in known_keys and new_key in known_keys:
            new_value = _new_value(new_key, value)
            fix = f"Use {new_key}." if new_value is None else f'Use {new_key} = "{new_value}".'
            raise ConfigurationError(key, value, "this setting was renamed", fix)
        refuse_old_value(key, value)


def refuse_old_value(key: str, value: Any) -> None:
    new_value = _new_value(key, value)
    if new_value is not None:
        raise ConfigurationError(key, value, "this value was renamed", f"Use {new_value}.")


def _new_value(key: str | None, value: Any) -> str | None:
    return VALUES.get(key or "", {}).get(value) if isinstance(value, str) else None
