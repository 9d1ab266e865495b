"""The append-only event log. Every metric, report and trace is computed from these events and nothing else.

Times are seconds on the engine's clock. Events that count are ordered by time; a `RolledBack` may go back in time, to
the last event that counts. Slot-time can be computed exactly: `Started` takes a slot; `Preempted`, `TurnEnded`,
`Finished`, `Aborted` and `Failed` free it, if the rollout had one.

`length` counts all tokens of a response. `made` and `dropped` count what the policy sampled. A rollout is in its
environment from `TurnEnded` until `Observed` (it waits for a slot, with its tokens), `Finished`, `Regenerated` or
`Rejected`.
"""

from __future__ import annotations

import io
import json
import math
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO, get_args, get_origin, get_type_hints

from sortedrl.core.event_format import FORMAT, SeveralRuns, require_known_format

if TYPE_CHECKING:
    from pathlib import Path


GATES = ("open", "drain", "held back")


class RunBegan(NamedTuple):
    at: float
    slots: int
    mode: str
    settings: dict[str, Any]
    format: int = FORMAT


class Phase(NamedTuple):
    """The phase that starts: start, harvest, scores, learner, weights, checkpoint, evaluation or end."""

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
    """A rollout was submitted to the engine; `prefix` tokens generated so far are prefilled with the prompt."""

    at: float
    rollout: int
    attempt: int
    prompt_tokens: int
    prefix: int
    expected: float


class Gate(NamedTuple):
    """Whether free slots get work from now on: open (yes), drain (no rollout waits), held back (by the strategy)."""

    at: float
    why: str


class Started(NamedTuple):
    at: float
    rollout: int
    slot: int


class Preempted(NamedTuple):
    """`recompute`: tokens of prompt and response to prefill again."""

    at: float
    rollout: int
    recompute: int


class TurnEnded(NamedTuple):
    """The policy's turn ended: the rollout left its slot for its environment. `made`: tokens since it was submitted."""

    at: float
    rollout: int
    made: int
    length: int


class Observed(NamedTuple):
    """Its environment answered with `tokens` tokens; `length` includes them."""

    at: float
    rollout: int
    tokens: int
    length: int


class EnvironmentFailed(NamedTuple):
    """Its environment raised an error or did not answer in time. A new instance is asked, unless `Rejected` or
    `Regenerated` follows."""

    at: float
    rollout: int
    reason: str


class Finished(NamedTuple):
    """`made`: tokens since it was submitted (0 if its environment ended it); `length`: tokens of the whole response.
    `truncated`: a limit ended it."""

    at: float
    rollout: int
    made: int
    length: int
    truncated: bool


class Aborted(NamedTuple):
    """`dropped`: tokens discarded (0 in partial modes)."""

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


class Regenerated(NamedTuple):
    """The tokens of a rollout that is not in the engine were discarded, and it waits again."""

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


class Streamed(NamedTuple):
    """During the harvest, the learner computed the gradient of these rollouts for the coming update. It took `seconds`
    and ended just before this event."""

    at: float
    update: int
    seconds: float
    rollouts: tuple[int, ...]


class Updated(NamedTuple):
    """A batch went to the learner, which held `version`. Columns are parallel, one entry per rollout.

    `segments`: per rollout, its segments as (version, tokens); version -1: from its environment, not trained on.
    `waited`: updates since it was loaded.
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
    """The run went back to a checkpoint: the `events` events before this one are void. No metric counts them, nor the
    time between the last event that counts and this one."""

    at: float
    events: int


class Lost(NamedTuple):
    """Placeholder for an unreadable event: checkpoints count the events of the log."""

    at: float


Event = (
    RunBegan
    | Phase
    | Loaded
    | HarvestBegan
    | Submitted
    | Gate
    | Started
    | Preempted
    | TurnEnded
    | Observed
    | EnvironmentFailed
    | Finished
    | Aborted
    | Failed
    | Regenerated
    | Scored
    | Rejected
    | Streamed
    | Updated
    | Published
    | RolledBack
    | Lost
)
Sink = Callable[[Any], None]

_TYPES: dict[str, type] = {kind.__name__: kind for kind in get_args(Event)}


def _template(kind: type) -> str:
    """Format of an event of plain numbers: the most frequent events bypass the JSON encoder."""
    fields = ",".join(f'"{name}":%r' for name in kind._fields)  # type: ignore[attr-defined]
    return f'{{"event":"{kind.__name__}",{fields}}}\n'


_OF_NUMBERS: dict[type, str] = {kind: _template(kind) for kind in (Submitted, Started, Aborted, TurnEnded, Observed)}
_SCORED = _template(Scored)
_FINISHED = _template(Finished).removesuffix("%r}\n")


class EventLog:
    """Passes every event to its sinks and counts events."""

    def __init__(self, *sinks: Sink) -> None:
        self.sinks = list(sinks)
        self.count = 0

    def append(self, event: Event) -> None:
        self.count += 1
        for sink in self.sinks:
            sink(event)


class Batched:
    """A sink that passes events on in batches: at each phase change, after `seconds`, or when `most` are waiting.
    Between the steps of a model, handling events one by one costs several times as much because of cold caches."""

    def __init__(self, *sinks: Sink, most: int = 1024, seconds: float = 0.5) -> None:
        self.sinks = list(sinks)
        self._most = most
        self._seconds = seconds
        self._due = -math.inf
        self._waiting: list[Event] = []

    def __call__(self, event: Event) -> None:
        self._waiting.append(event)
        if type(event) is Phase or event.at >= self._due or len(self._waiting) >= self._most:
            self._due = event.at + self._seconds
            self.flush()

    def flush(self) -> None:
        """Pass on all waiting events."""
        waiting, self._waiting = self._waiting, []
        for sink in self.sinks:
            for event in waiting:
                sink(event)


class JsonLines:
    """A sink that writes one JSON object per line: the event's name, then its fields."""

    def __init__(self, file: TextIO) -> None:
        self._write = file.write
        self._encode = json.JSONEncoder(separators=(",", ":")).encode

    def __call__(self, event: Event) -> None:
        template = _OF_NUMBERS.get(type(event))
        if template is not None:
            self._write(template % event)
        elif isinstance(event, Finished):
            truncated = "true" if event.truncated else "false"
            self._write(f"{_FINISHED % event[:-1]}{truncated}}}\n")
        elif isinstance(event, Scored):
            self._write(_SCORED % (event.at, event.rollout, float(event.reward)))  # a reward may be any kind of number
        else:
            self._write(self._encode({"event": type(event).__name__} | event._asdict()) + "\n")


def written(log: Iterable[Event]) -> str:
    """The log as text, one line per event."""
    file = io.StringIO()
    write = JsonLines(file)
    for event in log:
        write(event)
    return file.getvalue()


def decode(line: str) -> Event:
    fields = json.loads(line)
    event: Event = _TYPES[fields.pop("event")](**{name: _frozen(value) for name, value in fields.items()})
    return event


def read_events(path: Path) -> Iterator[Event]:
    """The events of a log file, including those that a rollback made void. Stops at a torn last line."""
    require_known_format(path)
    with path.open(encoding="utf-8") as file:
        for line in file:
            if not line.endswith("\n"):
                return
            yield decode(line)


def without_rolled_back(events: Iterable[Event]) -> list[Event]:
    """The events that count, without void events, the `RolledBack` marks and the void time.

    Events after a mark move back in time by the gap between the last event that counts and the mark. Raises
    `SeveralRuns`.
    """
    kept, earlier_runs = last_run(events)
    if earlier_runs:
        raise SeveralRuns(
            f"the event log has the events of {earlier_runs + 1} runs: give each run a log of its own. "
            "`sortedrl report` shows the last one"
        )
    return [event for event in kept if not isinstance(event, Damage)]


def last_run(lines: Iterable[Event | Damage]) -> tuple[list[Event | Damage], int]:
    """What counts of the last run, and how many runs before it are in the log and were not rolled back."""
    kept: list[Event | Damage] = []
    earlier_runs = 0
    void = VoidTime()
    for line in lines:
        if isinstance(line, RolledBack):
            del kept[max(0, len(kept) - line.events) :]  # a damaged log may have fewer
            void = VoidTime.between(kept, line)
            continue
        if isinstance(line, RunBegan) and not all(isinstance(one, Damage) for one in kept):
            kept.clear()
            void = VoidTime()
            earlier_runs += 1
        elif isinstance(line, HarvestBegan):
            _drop_what_a_lost_mark_made_void(kept, line.harvest)
        kept.append(line if isinstance(line, Damage) else void.taken_from(line))
    return kept, earlier_runs


class VoidTime(NamedTuple):
    """Time that a rollback made void: events after the mark are `seconds` late. None of them may precede `earliest`,
    the last event that counts, not even by rounding."""

    seconds: float = 0.0
    earliest: float = -math.inf

    @classmethod
    def between(cls, counted: Sequence[Event | Damage], mark: RolledBack) -> VoidTime:
        last = next((event for event in reversed(counted) if not isinstance(event, Damage)), mark)
        return cls(max(0.0, mark.at - last.at), last.at)

    def taken_from(self, event: Event) -> Event:
        return event._replace(at=max(self.earliest, event.at - self.seconds)) if self.seconds else event


class Damage(NamedTuple):
    """A line of a log that cannot be read; `line` counts from 1."""

    line: int
    why: str
    is_torn: bool = False  # the log ends within it, as that of a killed run may


class IntactLog(NamedTuple):
    """Of the last run in a log: the events that count, and the unreadable lines. Earlier runs are only counted."""

    events: list[Event]
    damage: list[Damage]
    earlier_runs: int

    @property
    def notice(self) -> str:
        """Empty if the log has one run."""
        several = f"it has the events of {self.earlier_runs + 1} runs, of which only the last one counts"
        return several if self.earlier_runs else ""


def read_intact(path: Path) -> IntactLog:
    """The readable part of a damaged log.

    An unreadable line keeps its place while reading: it was an event, and `RolledBack` counts events.
    """
    kept, earlier_runs = last_run(_lines(path))
    intact: list[Event] = [line for line in kept if not isinstance(line, Damage | Lost)]
    return IntactLog(intact, [line for line in kept if isinstance(line, Damage)], earlier_runs)


def counting_lines(path: Path) -> list[Event | Damage]:
    """The last run in the log without void events; unreadable lines keep their places."""
    return last_run(_lines(path))[0]


def _lines(path: Path) -> Iterator[Event | Damage]:
    require_known_format(path)
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        for number, line in enumerate(file, start=1):
            yield decoded_or_damage(number, line)


def _drop_what_a_lost_mark_made_void(kept: list[Event | Damage], harvest: int) -> None:
    """If a harvest starts a second time after damage, the run was resumed there and its mark is unreadable."""
    saved = damaged = None  # last checkpoint before the harvest first started; last damage after it
    began_before = False
    for place in range(len(kept) - 1, -1, -1):
        line = kept[place]
        if isinstance(line, Damage) and damaged is None:
            damaged = place
        elif isinstance(line, HarvestBegan):
            if line.harvest < harvest:
                break
            began_before, saved = True, None
        elif isinstance(line, Phase) and line.phase == "checkpoint" and saved is None:
            saved = place
    if began_before and saved is not None and damaged is not None and saved < damaged:
        del kept[saved + 1 : damaged + 1]


def decoded_or_damage(number: int, line: str) -> Event | Damage:
    """The event in a line, with every field checked; `number` counts from 1."""
    if not line.endswith("\n"):
        return Damage(number, "the line is torn: the log ends within it", is_torn=True)
    try:
        event = decode(line)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return Damage(number, "not an event")
    for value, fits in zip(event, _checks()[type(event)], strict=True):
        if not fits(value):
            return Damage(number, f"{type(event).__name__} with a wrong value")
    if isinstance(event, Gate) and event.why not in GATES:
        return Damage(number, "Gate with a wrong value")
    if not math.isfinite(event.at):
        return Damage(number, f"{type(event).__name__} without a time")
    if isinstance(event, Updated) and len({len(column) for column in event[4:]}) != 1:
        return Damage(number, "Updated with columns of different lengths")
    return event


@cache
def _checks() -> dict[type, tuple[Callable[[Any], bool], ...]]:
    """One test per field, by event type."""
    return {kind: tuple(map(_check_of, get_type_hints(kind).values())) for kind in _TYPES.values()}


def _check_of(hint: Any) -> Callable[[Any], bool]:
    """A test of a decoded value against a field's type."""
    if hint is float:
        return lambda value: type(value) in (float, int)
    if hint is Any:
        return lambda value: True
    origin, inner = get_origin(hint), get_args(hint)
    if origin is types.UnionType:
        options = [_check_of(option) for option in inner]
        return lambda value: any(fits(value) for fits in options)
    if origin is tuple:
        fits = _check_of(inner[0])
        count = None if inner[1:] == (...,) else len(inner)
        return lambda value: type(value) is tuple and (count is None or len(value) == count) and all(map(fits, value))
    plain = origin or hint
    return lambda value: type(value) is plain


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
