"""The Hugging Face hub: one error at once where it cannot be reached, instead of a minute of retries."""

import logging
import os
import socket
from urllib.parse import urlsplit

PROXIES = ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")
HUB_SECONDS = 5.0  # to open a connection


def prepare_hub() -> bool:
    """Call it before a model or a dataset is loaded by its hub name. Returns whether the hub can be reached.

    The hub's own log lines about retries are turned off: one error follows. If the hub cannot be reached, only its
    cache is read.
    """
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    can_be_reached = _can_be_reached()
    if not can_be_reached:
        _read_from_cache_only()
    return can_be_reached


def _can_be_reached() -> bool:
    """Whether a connection to the hub opens soon. Its client tries for about a minute before it gives up."""
    if any(os.environ.get(name) for name in PROXIES):
        return True  # a connection through a proxy is the client's business
    hub = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    try:
        with socket.create_connection((hub.hostname or "", hub.port or 443), timeout=HUB_SECONDS):
            return True
    except OSError:
        return False


def _read_from_cache_only() -> None:
    """A model or dataset in the cache still loads; any other fails at once."""
    import huggingface_hub.constants

    os.environ["HF_HUB_OFFLINE"] = "1"  # for processes of the engine
    huggingface_hub.constants.HF_HUB_OFFLINE = True
