"""The append-only event log. Every figure, report and trace is a fold over these events and nothing else.

All times are seconds on the engine's clock. Events are ordered by time. Slot-time can be rebuilt exactly:
`Started` takes a slot; `Preempted`, `Finished`, `Stopped` and `Failed` give it back (if it had one).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

if TYPE_CHECKING:
    from pathlib import Path


class RunBegan(NamedTuple):
    at: float
    slots: int
    mode: str
    settings: dict[str, Any]


class Phase(NamedTuple):
    """What the run does from now on: harvest, learner, weights, scores, checkpoint, start or end."""

    at: float
    phase: str


class Loaded(NamedTuple):
    """Rollouts `first` to `first + rollouts - 1` are waiting, `rollouts_per_prompt` of them for each prompt."""

    at: float
    cohort: int
    first: int
    rollouts: int
    prompts: tuple[str, ...]


class HarvestBegan(NamedTuple):
    at: float
    harvest: int
    version: int


class Submitted(NamedTuple):
    """A rollout went to the engine; `kept` cached tokens are prefilled with the prompt."""

    at: float
    rollout: int
    attempt: int
    prompt_tokens: int
    kept: int
    expected: float


class Gate(NamedTuple):
    """Why free slots are not given work from now on: open (they are), drain, or held back."""

    at: float
    why: str


class Started(NamedTuple):
    at: float
    rollout: int
    slot: int


class Preempted(NamedTuple):
    """`recompute`: tokens of prompt and response that must be prefilled again."""

    at: float
    rollout: int
    recompute: int


class Finished(NamedTuple):
    """`made`: tokens since it was last submitted; `length`: of the whole response."""

    at: float
    rollout: int
    made: int
    length: int
    truncated: bool


class Stopped(NamedTuple):
    """`dropped` tokens were thrown away (0 in partial mode)."""

    at: float
    rollout: int
    made: int
    length: int
    dropped: int


class Failed(NamedTuple):
    at: float
    rollout: int
    made: int
    dropped: int
    reason: str


class Redone(NamedTuple):
    """Tokens of a rollout outside the engine were thrown away, and it waits again."""

    at: float
    rollout: int
    dropped: int
    reason: str


class Scored(NamedTuple):
    at: float
    rollout: int
    reward: float


class Rejected(NamedTuple):
    at: float
    rollout: int
    dropped: int
    reason: str


class Updated(NamedTuple):
    """A batch went to the learner, which held `version`. Columns are parallel, one entry for each rollout.

    `segments`: for each rollout its runs of tokens as (version, tokens). `waited`: updates since it was loaded.
    """

    at: float
    update: int
    harvest: int
    version: int
    rollouts: tuple[int, ...]
    lengths: tuple[int, ...]
    rewards: tuple[float, ...]
    segments: tuple[tuple[tuple[int, int], ...], ...]
    waited: tuple[int, ...]


class Published(NamedTuple):
    at: float
    version: int


class RolledBack(NamedTuple):
    """The run went back to a checkpoint: the `events` events before this one are void, no figure counts them."""

    at: float
    events: int


Event = (
    RunBegan
    | Phase
    | Loaded
    | HarvestBegan
    | Submitted
    | Gate
    | Started
    | Preempted
    | Finished
    | Stopped
    | Failed
    | Redone
    | Scored
    | Rejected
    | Updated
    | Published
    | RolledBack
)
Sink = Callable[[Any], None]

_TYPES: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        RunBegan,
        Phase,
        Loaded,
        HarvestBegan,
        Submitted,
        Gate,
        Started,
        Preempted,
        Finished,
        Stopped,
        Failed,
        Redone,
        Scored,
        Rejected,
        Updated,
        Published,
        RolledBack,
    )
}


def _template(kind: type) -> str:
    """How an event of plain numbers is written: the most frequent ones need no encoder."""
    fields = ",".join(f'"{name}":%r' for name in kind._fields)  # type: ignore[attr-defined]
    return f'{{"event":"{kind.__name__}",{fields}}}\n'


_OF_NUMBERS: dict[type, str] = {kind: _template(kind) for kind in (Submitted, Started, Stopped)}


class EventLog:
    """Hands every event to its sinks and counts them."""

    def __init__(self, *sinks: Sink) -> None:
        self.sinks = list(sinks)
        self.count = 0

    def append(self, event: Event) -> None:
        self.count += 1
        for sink in self.sinks:
            sink(event)


class JsonLines:
    """A sink that writes one JSON object a line: the event's name, then its fields."""

    def __init__(self, file: TextIO) -> None:
        self._write = file.write
        self._encode = json.JSONEncoder(separators=(",", ":")).encode

    def __call__(self, event: Event) -> None:
        template = _OF_NUMBERS.get(type(event))
        if template is not None:
            self._write(template % event)
        else:
            self._write(self._encode({"event": type(event).__name__} | event._asdict()) + "\n")


def decode(line: str) -> Event:
    fields = json.loads(line)
    event: Event = _TYPES[fields.pop("event")](**{name: _frozen(value) for name, value in fields.items()})
    return event


def read_events(path: Path) -> Iterator[Event]:
    """The events of a log file, those that a roll-back made void included. Stops at a torn last line."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            if not line.endswith("\n"):
                return
            yield decode(line)


def without_rolled_back(events: Iterable[Event]) -> list[Event]:
    """The events that count: what a `RolledBack` made void is left out, the mark itself too."""
    kept: list[Event] = []
    for event in events:
        if isinstance(event, RolledBack):
            del kept[len(kept) - event.events :]
        else:
            kept.append(event)
    return kept


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
