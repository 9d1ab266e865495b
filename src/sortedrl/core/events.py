"""The append-only event log. Every metric, report and trace is computed from these events and nothing else.

Times are seconds on the engine's clock. Events that count are ordered by time; a `RolledBack` may go back in time, to
the last event that counts. Slot-time can be computed exactly: `Started` takes a slot; `Preempted`, `TurnEnded`,
`Finished`, `Aborted` and `Failed` free it, if the rollout had one.

`length` counts all tokens of a response. `made` and `dropped` count what the policy sampled. A rollout is in its
environment from `TurnEnded` until `Observed` (it waits for a slot, with its tokens), `Finished`, `Regenerated` or
`Rejected`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from sortedrl.core.batch import Batch

FORMAT = 3  # changes with any change of the events; 2 was that of sortedrl 0.2, without `Filtered`, `Skipped`
READABLE_FORMATS = (2, FORMAT)
GATES = ("open", "drain", "held back")
NO_REWARD = "no reward: "  # how a reason of `Rejected` starts if the scorer gave none


class RunBegan(NamedTuple):
    at: float
    slots: int
    mode: str
    settings: dict[str, Any]
    format: int = FORMAT
    gated: bool = False  # of the mode: a cohort is trained on only after the one before it


class SlotsChanged(NamedTuple):
    """The run was resumed on an engine with another number of slots. All of them are empty."""

    at: float
    slots: int


class SettingsChanged(NamedTuple):
    """The run was resumed with other settings than those of its checkpoint: `[old, new]` by name. The number of slots
    has an event of its own."""

    at: float
    changes: dict[str, Any]


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


class Skipped(NamedTuple):
    """Prompts that are not loaded in this epoch, because their last group was filtered (`revisit_filtered`). They use
    up the ids from `first` on. `ages`: epochs since their last visit."""

    at: float
    first: int
    prompts: tuple[str, ...]
    ages: tuple[int, ...]


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


class Filtered(NamedTuple):
    """A complete group is not trained on (`filter_groups`). `tokens`: what the policy sampled for it. `reason`: right,
    wrong or equal for rewards that are all the same, "too few members", surplus (kept, but more than an update in
    rounds), or the name of your filter. `reward`: the shared one, or the mean."""

    at: float
    rollouts: tuple[int, ...]
    tokens: int
    reason: str
    reward: float


class Streamed(NamedTuple):
    """During the harvest, the learner computed the gradient of these rollouts for the coming update. It took `seconds`
    and ended just before this event."""

    at: float
    update: int
    seconds: float
    rollouts: tuple[int, ...]


class Drafted(NamedTuple):
    """Only with drafts (speculative decoding), once per update: tokens since the last one. Of those that the engine
    sampled, `accepted` were drafted; each of the others took a step of its request."""

    at: float
    drafted: int
    accepted: int
    sampled: int


class Updated(NamedTuple):
    """A batch went to the learner, which held `version`. Columns are parallel, one entry per rollout.

    `segments`: per rollout, its segments as (version, tokens); version -1: from its environment, not trained on.
    `waited`: updates since it was loaded."""

    at: float
    update: int
    harvest: int
    version: int
    rollouts: tuple[int, ...]
    lengths: tuple[int, ...]
    rewards: tuple[float, ...]
    segments: tuple[tuple[tuple[int, int], ...], ...]
    waited: tuple[int, ...]


def updated(at: float, batch: Batch) -> Updated:
    """The event of its hand-out."""
    return Updated(
        at,
        batch.update,
        batch.harvest,
        batch.version,
        rollouts=tuple([r.id for r in batch]),
        lengths=tuple([r.length for r in batch]),
        rewards=tuple([r.reward or 0.0 for r in batch]),
        segments=tuple([tuple([(g.version, len(g.tokens)) for g in r.segments]) for r in batch]),
        waited=tuple([batch.update - r.loaded_at_update for r in batch]),
    )


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


OfRun = RunBegan | SlotsChanged | SettingsChanged | Phase | RolledBack | Lost
OfUpdate = Loaded | Skipped | HarvestBegan | Gate | Streamed | Drafted | Updated | Published
InEngine = Submitted | Started | Preempted | TurnEnded | Finished | Aborted | Failed
AfterEngine = Observed | EnvironmentFailed | Regenerated | Scored | Rejected | Filtered
Event = OfRun | OfUpdate | InEngine | AfterEngine
Sink = Callable[[Any], None]


class EventLog:
    """Passes every event to its sinks and counts events."""

    def __init__(self, *sinks: Sink) -> None:
        self.sinks = list(sinks)
        self.count = 0

    def append(self, event: Event) -> None:
        self.count += 1
        for sink in self.sinks:
            sink(event)
