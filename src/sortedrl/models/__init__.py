"""The built-in models: small Llamas that reason aloud about small Knights & Knaves puzzles, the second in dialogues.

`scripts/warm_start.py` and `scripts/warm_start_dialogue.py` make them; `recipe.json` in each folder has the settings
and the measured scores.
"""

import json
import logging
import os
import re
import socket
from pathlib import Path
from urllib.parse import urlsplit

from sortedrl.core.configuration import ConfigurationError
from sortedrl.core.user_values import one_line

PROXIES = ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")
HUB_SECONDS = 5.0  # to open a connection to the Hugging Face hub
_HUB_NAME = re.compile(r"(?!.*(--|\.\.))\w[\w.-]*(/\w[\w.-]*)?")  # name or owner/name
_FIX = "Name a folder with config.json and weights, a hub name that this machine can reach, or built-in."
BUILT_IN_MODEL = Path(__file__).parent / "knights-tiny"
DIALOGUE_TASK = "knights_and_knaves:dialogue"
DIALOGUE_MODEL = Path(__file__).parent / "knights-dialogue"


def model_named(name: str, task: str = "") -> str:
    """The folder or hub name for a user's `model`; `task` decides between the built-in ones.

    A path without a model is refused at once.
    """
    if name == "built-in":
        return str(DIALOGUE_MODEL if task == DIALOGUE_TASK else BUILT_IN_MODEL)
    check_model_path(name)
    if not Path(name).is_dir():
        prepare_hub()
    return name


def check_model_path(name: str) -> None:
    """Refuse a path without a model. A hub name is not looked up."""
    if Path(name).is_dir():
        if (Path(name) / "checkpoints").is_dir() and (Path(name) / "events.jsonl").is_file():
            fix = f"Name its model: {Path(name) / 'model'}."
            if not (Path(name) / "model").is_dir():
                fix = f"It has a model when it has ended: sortedrl train --resume {name}."
            raise ConfigurationError("model", name, "this is the folder of a run", fix)
        if not (Path(name) / "config.json").is_file():
            raise ConfigurationError("model", name, "this folder has no config.json", _FIX)
        if fault := _fault_of(Path(name) / "config.json"):
            raise ConfigurationError("model", name, f"its config.json {fault}", _FIX)
    elif not _HUB_NAME.fullmatch(name):
        raise ConfigurationError("model", name, "there is no such folder", _FIX)


def _fault_of(config: Path) -> str:
    """Why the file is no model's configuration; empty if it may be one."""
    try:
        found = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        return f"cannot be read ({one_line(str(error))})"
    return "" if isinstance(found, dict) else f"has a {type(found).__name__} in place of a JSON object"


def unreadable_model(name: str, error: Exception) -> ConfigurationError:
    """Why a model could not be read, in one line."""
    if name == "built-in" or Path(name).is_dir():
        reason = str(error).strip() or type(error).__name__
        why = f"no causal language model can be read there ({reason.splitlines()[0].rstrip('.')})"
    else:
        why = "there is no such folder, and no such model could be loaded from the Hugging Face hub"
    return ConfigurationError("model", name, why, _FIX)


def prepare_hub() -> bool:
    """Call it before a model or a dataset is loaded by its hub name. Returns whether the hub can be reached.

    If no connection opens soon, only the cache is read from now on: anything else fails at once, instead of after a
    minute of retries. The hub's own log lines about retries are turned off: one error follows.
    """
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    if any(os.environ.get(name) for name in PROXIES):
        return True  # a connection through a proxy is the client's business
    hub = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    try:
        socket.create_connection((hub.hostname or "", hub.port or 443), timeout=HUB_SECONDS).close()
    except OSError:
        import huggingface_hub.constants

        os.environ["HF_HUB_OFFLINE"] = "1"  # for processes of the engine
        huggingface_hub.constants.HF_HUB_OFFLINE = True
        return False
    return True
