"""Reuse of stale KV cache: by default the KV cache is cleared at every weight update; `reuse_kv_cache` keeps it.

The cache salt of a request is the weight version under which its response started. So stale KV is used only by
responses that started under its version: a resumed response finds its own KV, and responses to one prompt that started
under one version share the KV of the prompt. A new response, a weight check or an evaluation only sees KV of the
current weights.
"""

from __future__ import annotations

import time

from sortedrl.core.engine import Request


class KVCacheReuse:
    """The rule for one engine. `keep=False`: no salts, and every weight update clears the cache."""

    def __init__(self, *, keep: bool) -> None:
        self._keep = keep
        self._engine = f"{time.time_ns():x}"  # a server may hold KV cache of an earlier engine with the same versions
        self._loaded: int | None = None

    def survives_update_to(self, version: int) -> bool:
        """Whether cached KV may stay. Not when versions start over: stale KV could be mistaken for another run's."""
        is_newer = self._loaded is not None and version > self._loaded
        self._loaded = version
        return self._keep and is_newer

    def salt(self, request: Request, version: int) -> str | None:
        """The cache salt of a request submitted under this version."""
        return f"{self._engine}-{request.prefix[0].version if request.prefix else version}" if self._keep else None
