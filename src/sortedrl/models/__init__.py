"""The built-in model: a small Llama that reasons aloud about small Knights & Knaves puzzles.

`scripts/warm_start.py` makes it; `recipe.json` in its folder says how, and what it measured.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path

from sortedrl.core.schedule import ConfigurationError

_HUB_NAME = re.compile(r"(?!.*(--|\.\.))\w[\w.-]*(/\w[\w.-]*)?")  # name or owner/name
_FIX = "Name a folder with config.json and weights, a hub name that this machine can reach, or built-in."
BUILT_IN_MODEL = Path(__file__).parent / "knights-tiny"


def model_named(name: str) -> str:
    """The folder or hub name that a user's `model` stands for. A path without a model is refused at once.

    Where it is a hub name, the hub's own log lines about retries are turned off: one error follows.
    """
    if name == "built-in":
        return str(BUILT_IN_MODEL)
    if Path(name).is_dir():
        if not (Path(name) / "config.json").is_file():
            raise ConfigurationError("model", name, "this folder has no config.json", _FIX)
        return name
    if not _HUB_NAME.fullmatch(name):
        raise ConfigurationError("model", name, "there is no such folder", _FIX)
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    return name


def unreadable_model(name: str, error: Exception) -> ConfigurationError:
    """Why a model could not be read, in one line."""
    if name == "built-in" or Path(name).is_dir():
        why = f"no causal language model can be read there ({str(error).strip().splitlines()[0].rstrip('.')})"
    else:
        why = "there is no such folder, and no such model could be loaded from the Hugging Face hub"
    return ConfigurationError("model", name, why, _FIX)
