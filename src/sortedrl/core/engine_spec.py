"""What an engine is made from: the argument of every engine factory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


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
