"""What an engine may offer beyond the five methods of the protocol: a base class with defaults for all of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sortedrl.core.engine import Change, Engine, Request


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine reports about itself. None: unknown."""

    kv_tokens: int | None = None  # capacity of the KV cache
    prefill_tokens_per_step: int | None = None
    vocabulary: int | None = None  # number of token ids


class EngineBase(Engine):
    """Derive an engine from this class to offer more than the protocol; every default means "not offered"."""

    inside_seconds: float | None = None  # total time in the inference library's own code; the rest is overhead
    copies_weights: bool = False  # it never sees the learner's weights: `publish` without weights is an error
    has_own_device: bool = False  # the learner may compute while it generates, as beside the client of a server

    @property
    def is_available(self) -> bool:
        """Whether a new request would be started soon. A pool prefers available engines. Thread-safe."""
        return True

    def info(self) -> EngineInfo:
        return EngineInfo()

    def sleep(self) -> None:
        """Free GPU memory until the next call. Called while no request is submitted."""

    def sleep_until_update(self) -> None:
        """As `sleep`, but the next call is `update_weights` with weights, so those of now need not be kept."""
        self.sleep()

    def close(self) -> None:
        """Free everything. No call follows."""


class ForwardingEngine(EngineBase):
    """Passes the protocol's methods on to `inner`: the base of wrappers, which override what they change."""

    def __init__(self, inner: Engine) -> None:
        self.inner = inner
        self.slots = inner.slots
        self.copies_weights = getattr(inner, "copies_weights", False)
        self.has_own_device = getattr(inner, "has_own_device", False)

    def now(self) -> float:
        return self.inner.now()

    def submit(self, requests: Sequence[Request]) -> None:
        self.inner.submit(requests)

    def poll(self, until: float | None = None) -> list[Change]:
        return self.inner.poll(until)

    def abort(self, ids: Sequence[int]) -> list[Change]:
        return self.inner.abort(ids)

    def update_weights(self, weights: Any, version: int) -> None:
        self.inner.update_weights(weights, version)


def with_defaults(engine: Engine) -> EngineBase:
    """The engine itself if it derives from EngineBase; otherwise the engine with all defaults."""
    return engine if isinstance(engine, EngineBase) else ForwardingEngine(engine)
