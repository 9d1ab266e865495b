"""Cached KV cache of older weights: forgotten at every load, unless they are asked for by name.

Kept ones serve the responses that were made with them, and nobody else. Each request names the version that its
response began under as the salt of its cache; so a resumed response finds its keys, and a new one, a probe of the
weights or an evaluation meets only keys of the weights that are loaded.
"""

from __future__ import annotations

import time

from sortedrl.core.engine import Request


class KVCacheReuse:
    """The rule for one engine. `keep=False`: no salts, and no load keeps anything."""

    def __init__(self, *, keep: bool) -> None:
        self._keep = keep
        self._engine = f"{time.time_ns():x}"  # a server may hold keys that another engine of the same versions left
        self._loaded: int | None = None

    def survives_update_to(self, version: int) -> bool:
        """Whether cached keys may stay. Not when versions begin again: they would be taken for those of another run."""
        is_newer = self._loaded is not None and version > self._loaded
        self._loaded = version
        return self._keep and is_newer

    def salt(self, request: Request, version: int) -> str | None:
        """Of a request that is submitted under this version."""
        return f"{self._engine}-{request.prefix[0].version if request.prefix else version}" if self._keep else None
