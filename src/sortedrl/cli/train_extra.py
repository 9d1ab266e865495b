"""Imports that need the `train` extra: PyTorch and transformers."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from sortedrl.core.errors import UserError
from sortedrl.settings.install_hint import install_hint
from sortedrl.training.cpu_threads import let_waiting_threads_sleep


class MissingPackage(UserError):
    """A package of an extra is not installed."""


def require() -> None:
    """Refuse to start if a package is missing; imports nothing."""
    for name in ("torch", "transformers", "safetensors"):
        if importlib.util.find_spec(name) is None:
            raise MissingPackage(f"{name} is not installed: {install_hint('train')}")


def module(name: str) -> Any:
    """A module of `training`. PyTorch is imported here, with threads that sleep while they wait."""
    let_waiting_threads_sleep()
    try:
        return importlib.import_module(f"sortedrl.training.{name}")
    except ImportError as error:
        raise MissingPackage(f"{error.name} is not installed: {install_hint('train')}") from None
