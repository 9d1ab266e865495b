"""The built-in models: small Llamas that reason aloud about small Knights & Knaves puzzles, the second in dialogues.

`scripts/warm_start.py` and `scripts/warm_start_dialogue.py` make them; `recipe.json` in each folder has the settings
and the measured scores.
"""

from __future__ import annotations

import logging
import os
import re
import socket
from pathlib import Path
from urllib.parse import urlsplit

from sortedrl.core.schedule import ConfigurationError

_HUB_NAME = re.compile(r"(?!.*(--|\.\.))\w[\w.-]*(/\w[\w.-]*)?")  # name or owner/name
_FIX = "Name a folder with config.json and weights, a hub name that this machine can reach, or built-in."
_PROXIES = ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")
HUB_SECONDS = 5.0  # to open a connection
BUILT_IN_MODEL = Path(__file__).parent / "knights-tiny"
DIALOGUE_TASK = "knights_and_knaves:dialogue"
DIALOGUE_MODEL = Path(__file__).parent / "knights-dialogue"


def model_named(name: str, task: str = "") -> str:
    """The folder or hub name for a user's `model`; `task` decides between the built-in ones.

    A path without a model is refused at once.

    For a hub name, the hub's own log lines about retries are turned off: one error follows. If the hub cannot be
    reached, only its cache is read.
    """
    if name == "built-in":
        return str(DIALOGUE_MODEL if task == DIALOGUE_TASK else BUILT_IN_MODEL)
    if Path(name).is_dir():
        if not (Path(name) / "config.json").is_file():
            raise ConfigurationError("model", name, "this folder has no config.json", _FIX)
        return name
    if not _HUB_NAME.fullmatch(name):
        raise ConfigurationError("model", name, "there is no such folder", _FIX)
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    if not _hub_can_be_reached():
        _read_from_cache_only()
    return name


def _hub_can_be_reached() -> bool:
    """Whether a connection to the hub opens soon. Its client tries for about a minute before it gives up."""
    if any(os.environ.get(name) for name in _PROXIES):
        return True  # a connection through a proxy is the client's business
    hub = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    try:
        with socket.create_connection((hub.hostname or "", hub.port or 443), timeout=HUB_SECONDS):
            return True
    except OSError:
        return False


def _read_from_cache_only() -> None:
    """A model in the cache still loads; any other fails at once."""
    import huggingface_hub.constants

    os.environ["HF_HUB_OFFLINE"] = "1"  # for processes of the engine
    huggingface_hub.constants.HF_HUB_OFFLINE = True


def unreadable_model(name: str, error: Exception) -> ConfigurationError:
    """Why a model could not be read, in one line."""
    if name == "built-in" or Path(name).is_dir():
        why = f"no causal language model can be read there ({str(error).strip().splitlines()[0].rstrip('.')})"
    else:
        why = "there is no such folder, and no such model could be loaded from the Hugging Face hub"
    return ConfigurationError("model", name, why, _FIX)
