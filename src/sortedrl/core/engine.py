"""For those who write an engine: the protocol (engine_protocol.py), what an engine may offer beyond it (`EngineBase`),
and what its factory gets (`EngineSpec`)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sortedrl.core.engine_protocol import UNCHANGED as UNCHANGED
from sortedrl.core.engine_protocol import Change as Change
from sortedrl.core.engine_protocol import Engine as Engine
from sortedrl.core.engine_protocol import EngineDied as EngineDied
from sortedrl.core.engine_protocol import Request as Request
from sortedrl.core.engine_protocol import RequestFailed as RequestFailed
from sortedrl.core.engine_protocol import RequestFinished as RequestFinished
from sortedrl.core.engine_protocol import RequestPreempted as RequestPreempted
from sortedrl.core.engine_protocol import RequestStarted as RequestStarted
from sortedrl.core.engine_protocol import Sampling as Sampling
from sortedrl.core.engine_protocol import Tokens as Tokens
from sortedrl.core.engine_protocol import Unchanged as Unchanged


def missing_members(engine: object) -> list[str]:
    """What the protocol requires and this object lacks."""
    methods = ("now", "submit", "poll", "abort", "update_weights")
    missing = [name for name in methods if not callable(getattr(engine, name, None))]
    return missing if hasattr(engine, "slots") else [*missing, "slots"]


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
    virtual_time: bool = False  # its clock is simulated, so waiting costs nothing
    # In place of `poll`, for a pool. What it delivers has lists that it does not use again.
    deliver_to: Callable[[Callable[[Sequence[Change]], None]], None] | None = None

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
        self.virtual_time = getattr(inner, "virtual_time", False)

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


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """A factory may ignore what it does not need. Measurements and the contract suite set only the first three."""

    model: str  # folder or hub name
    slots: int
    max_length: int  # prompt plus response, in tokens
    eos_token_ids: frozenset[int] = frozenset()
    module: Any = None  # the PyTorch model; the embedded engine decodes with it, and shares it with the learner
    tokenizer: Any = None  # for stop strings
    vocabulary: int | None = None
    urls: tuple[str, ...] = ()
    dtype: str | None = None
    seed: int | None = None
    beside_learner: bool = False  # in the learner's process, on the same device
    options: Mapping[str, Any] = field(default_factory=dict)  # --engine-options, as numbers, booleans or text
