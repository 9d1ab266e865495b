"""The scheduler's side of a training run in TRL: controller, engine, event log and checkpoint of one process.

TRL asks for a batch when it wants one, so the controller's loop is turned inside out:

    next_batch      runs a harvest and hands its batch out
    score           the rewards, which TRL computes for the whole batch, are known
    publish         the optimizer has stepped: the engine continues under the new weights

Because rewards come late, a finished rollout counts as ready, and the events from a batch's hand-out on are held back
until its rewards can be written into them. The log is complete whenever no batch is in hand. With `filter_groups` each
group is scored when it is complete (group_rewards.py), and no event is held back.
"""

import json
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from datetime import timedelta
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import torch.distributed as dist
from datasets import Dataset
from trl.trainer.grpo_config import GRPOConfig

from sortedrl.core.configuration import ConfigurationError
from sortedrl.core.controller import Batch, Controller
from sortedrl.core.engine import Engine
from sortedrl.core.events import Event, EventLog, Filtered, Scored, Sink, Updated
from sortedrl.core.prompts import Prompts
from sortedrl.core.rejections import RejectionWatch, TooManyRejected
from sortedrl.core.rollout import Prompt, Rollout
from sortedrl.core.schedule import Schedule
from sortedrl.core.scoring import ScoreAtOnce
from sortedrl.core.strategies.registry import group_filter
from sortedrl.core.user_values import reason_of
from sortedrl.core.wording import counted
from sortedrl.engines.speculative import LoggedDrafts
from sortedrl.integrations.trl.environments import TrlEnvironments
from sortedrl.integrations.trl.group_rewards import ScoredGroups, score_group
from sortedrl.log.atomic_write import write_atomically
from sortedrl.log.recorder import Recorder
from sortedrl.observe.metrics import Metrics
from sortedrl.settings.slots import too_many_slots
from sortedrl.tasks.datasets import digests, why_changed

_logger = logging.getLogger(__name__)

# What a resumed run may change: the rest of the schedule is part of what the checkpoint holds.
_MAY_CHANGE = frozenset({"max_retries", "score_wait_seconds", "max_prompt_tokens", "max_context_tokens"})
_HARVEST = timedelta(days=7)  # how long other ranks wait for rank 0: the default would end a long harvest


class DatasetPrompts(Sequence[Prompt]):
    """These rows of the dataset as prompts, tokenized lazily. Warns once if one leaves less room than responses may
    need; one without any room is rejected when it is loaded."""

    def __init__(
        self, dataset: Any, rows: range, args: GRPOConfig, tokens_of: Callable[[int], Sequence[int]], schedule: Schedule
    ) -> None:
        self._dataset = dataset
        self._rows = rows
        self._args = args
        self._tokens_of = tokens_of  # by row
        self._schedule = schedule
        self._has_warned = False

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, place: Any) -> Any:
        row = self._rows[place]
        tokens = tuple(self._tokens_of(row))
        wanted, context = self._schedule.max_response_tokens, self._schedule.max_context_tokens or math.inf
        if 0 < context - len(tokens) < wanted and not self._has_warned:
            self._has_warned = True
            _logger.warning(
                "the prompt of row %s has %s tokens, and prompt and response together at most %s: responses are cut at "
                "%s tokens, not at max_completion_length = %s. Other such rows are not named",
                *(row, len(tokens), context, context - len(tokens), wanted),
            )
        return Prompt(str(row), tokens, row)

    @property
    def ids(self) -> list[str]:
        return list(map(str, self._rows))

    @cached_property
    def row_digests(self) -> str:
        """Digests of the columns in use."""
        return digests(columns_in_use(row, self._args) for row in self._stored_rows())

    def _stored_rows(self) -> Iterator[dict[str, Any]]:
        """Without the dataset's transform: it may add something on reading, such as today's date."""
        dataset = self._dataset
        if not isinstance(dataset, Dataset):
            yield from (dict(dataset[row]) for row in self._rows)
            return
        for columns in dataset.with_format(None).select(self._rows).iter(batch_size=1000):  # far faster than by row
            yield from (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))


def columns_in_use(row: dict[str, Any], args: GRPOConfig) -> dict[str, Any]:
    """Those that TRL passes on to reward functions and environments."""
    return {key: row[key] for key in row if key == "prompt" or not args.remove_unused_columns}


class LateRewards:
    """A sink before others. Holds events back from a batch's hand-out until `release`, unless groups are scored before
    (`by_group`): then `note` gets their rewards."""

    def __init__(self, *sinks: Sink, by_group: bool = False) -> None:
        self.sinks = list(sinks)
        self._by_group = by_group
        self._held: list[Event] = []
        self._last_time = 0.0

    def __call__(self, event: Event) -> None:
        self._last_time = event.at
        if isinstance(event, Scored):  # finished is all that it says: the reward is not known yet
            return
        if self._held or (isinstance(event, Updated) and not self._by_group):
            self._held.append(event)
        else:
            self._pass_on(event)

    def note(self, group: Sequence[Rollout]) -> None:
        for rollout in group:
            self._pass_on(Scored(self._last_time, rollout.id, rollout.reward or 0.0))

    def release(self, reward_of: dict[int, float]) -> None:
        held, self._held = self._held, []
        for event in held:
            if isinstance(event, Updated):
                rewards = tuple(reward_of[rollout] for rollout in event.rollouts)
                for rollout, reward in zip(event.rollouts, rewards, strict=True):
                    self._pass_on(Scored(event.at, rollout, reward))
                event = event._replace(rewards=rewards)
            self._pass_on(event)

    def _pass_on(self, event: Event) -> None:
        for sink in self.sinks:
            sink(event)


class ScheduledRun:
    """See the module's docstring. `saved` is the state that an earlier run wrote down, to go on from."""

    def __init__(
        self,
        trainer: Any,
        engine: Engine,
        prompts: DatasetPrompts,
        *,
        updates: int,
        log_path: Path,
        environments: TrlEnvironments | None = None,
        saved: dict[str, Any] | None = None,
    ) -> None:
        schedule: Schedule = trainer.schedule
        if notice := too_many_slots(engine.slots, schedule.rollouts_needed):
            _logger.warning("slots: %s", notice)
        self.metrics = Metrics()
        self._trainer = trainer
        self._schedule = schedule
        self._prompts = prompts
        self._updates = updates
        self._data = Prompts(prompts, seed=schedule.seed, shuffle=bool(trainer.shuffle_dataset))
        self._log = LateRewards(self.metrics, by_group=schedule.filter_groups is not None)
        self._rejections = RejectionWatch(
            schedule.rollouts_needed, max_fraction=trainer.max_rejected_fraction, log=_logger.warning
        )
        self.has_batch_in_hand = False
        self._drafts = LoggedDrafts(engine)
        self._environments = environments
        chosen = group_filter(schedule)
        self.controller = Controller(
            engine,
            self._data,
            ScoreAtOnce(lambda rollout: 0.0) if environments is None else environments.ends,
            schedule,
            environments=environments,
            filter_groups=None if chosen is None else ScoredGroups(chosen, schedule, self._score),
            sampling=trainer.sampling,
            # In this order: an event is in the file before the run stops.
            log=EventLog(self._log, self._rejections, self._replace_filtered),
        )
        if saved is not None:
            _refuse_changes(saved["schedule"], asdict(schedule))
            _refuse_other_rows(saved.get("rows"), prompts)
        self._recorder = Recorder(
            self.controller, log_path, saved=None if saved is None else controller_state(saved), folds=self._log.sinks
        )
        self._batches: Iterator[Batch] = iter(self.controller)

    def next_batch(self) -> Batch:
        self._extend_data()
        for batch in self._batches:
            self.has_batch_in_hand = True
            self._drafts.mark(self.controller)
            rewards = [rollout.reward or 0.0 for rollout in batch] + [reward for _, reward in batch.filtered_rewards]
            self.reward_mean = sum(rewards) / len(rewards)
            return batch
        rejected = counted(self.metrics.snapshot().rejected, "rollout")
        raise TooManyRejected(
            f"the prompts are used up before the last step. Rejected: {rejected}, {self._rejections.most_frequent()}"
        )

    def _extend_data(self) -> None:
        """Enough for the rest even if half of it is rejected: TRL counts in steps, and ends the run by them."""
        prompts = 2 * self._schedule.prompts_for(self._updates - self.controller.updates)
        self._data.extend(math.ceil(prompts / self.controller.kept_fraction))

    def _replace_filtered(self, event: Event) -> None:
        if isinstance(event, Filtered):
            self._extend_data()

    def _score(self, group: Sequence[Rollout]) -> None:
        score_group(self._trainer, group)
        self._log.note(group)

    def score(self, reward_of: dict[int, float]) -> None:
        self._log.release(reward_of)
        self._recorder.flush()  # whoever watches the log sees whole updates

    @property
    def version(self) -> int:
        return self.controller.version

    def mark_phase(self, phase: str) -> None:
        self.controller.mark_phase(phase)

    def publish(self, weights: Any, *, at_once: bool) -> None:
        """`at_once`: the engine gets them now and not at the next harvest, while all ranks gather them."""
        self.has_batch_in_hand = False
        self.controller.publish(weights)
        if at_once:
            self.controller.update_engine()
            self.mark_phase("learner")

    def state(self) -> dict[str, Any]:
        """JSON-ready. Only between two batches, when all that happened is in the log."""
        assert not self.has_batch_in_hand
        return {
            "schedule": asdict(self._schedule),
            "rows": self._prompts.row_digests,
            "controller": self._recorder.state(),
        }

    def end(self) -> None:
        """The last step is done, or something went wrong: then the engine is emptied, so that it can be used again.
        Everything is closed, whatever fails."""
        with ExitStack() as at_last:
            at_last.callback(self._recorder.close)
            at_last.callback(self.controller.mark_phase, "end")
            if self._environments is not None:
                at_last.callback(self._environments.close)
            if running := list(self.controller.running):
                self.controller.engine.abort(running)


def controller_state(saved: dict[str, Any]) -> dict[str, Any]:
    """sortedrl 0.2 saved the number of events in the log beside the controller's state."""
    state: dict[str, Any] = saved["controller"]
    return state | {"events": saved.get("events", state["events"])}


def _refuse_changes(saved: dict[str, Any], wanted: dict[str, Any]) -> None:
    changed = [key for key in wanted if key not in _MAY_CHANGE and saved.get(key) != wanted[key]]
    if changed:
        listed = ", ".join(f"{key}: {saved.get(key)!r} -> {wanted[key]!r}" for key in changed)
        why = f"the checkpoint was made with another schedule ({listed})"
        fix = "Use the same settings, or start again in another output_dir."
        raise ConfigurationError(changed[0], wanted[changed[0]], why, fix)


def _refuse_other_rows(saved: str | None, prompts: DatasetPrompts) -> None:
    """`saved`: the digests of the rows; the first checkpoints of 0.2 have none."""
    reason = None if saved is None else why_changed(prompts.ids, prompts.row_digests, saved, "rows")
    if reason is not None:
        fix = "Restore the data of the run, or use another output_dir."
        raise ConfigurationError("train_dataset", f"{len(prompts)} rows", reason, fix)


def read_state(folder: Path, rank: int, processes: int) -> dict[str, Any]:
    """What `rank` has saved. Another number of processes is refused on all ranks for the same reason."""
    for name in (state_name(0), state_name(rank)):
        why, fix = "", "Choose a checkpoint that SortedGRPOTrainer saved."
        try:
            saved: dict[str, Any] = json.loads((folder / name).read_text(encoding="utf-8"))
            if saved["processes"] != processes:
                why = f"it was saved by {saved['processes']} processes, but there are {processes}"
                fix = "Launch the same number."
        except FileNotFoundError:
            why = f"it has no {name}: it was saved by another trainer, or in the middle of an update"
        except (OSError, ValueError, LookupError, TypeError) as error:
            why, fix = f"its {name} is damaged ({reason_of(error)})", "Choose an earlier one."
        if why:
            raise ConfigurationError("resume_from_checkpoint", str(folder), why, fix)
    return saved


def state_name(rank: int) -> str:
    return f"sortedrl-{rank}.json"


def write_state(path: Path, state: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(state, default=_plain))


def _plain(logged: Any) -> Any:
    """For JSON: a value that a reward function has logged (`log_extra`)."""
    return logged.tolist() if hasattr(logged, "tolist") else str(logged)


# Several ranks. If one fails, the launcher (torchrun, accelerate) ends the others.


class Ranks:
    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._group: Any = None

    def scatter(self, parts: Sequence[Any] | None) -> Any:
        """This rank's part of what rank 0 gives."""
        received: list[Any] = [None]
        dist.scatter_object_list(received, None if parts is None else list(parts), src=0, group=self._objects())
        return received[0]

    def on_rank_0(self, do: Callable[[list[Any]], list[Any]], asked: list[Any]) -> list[Any]:
        """What rank 0 makes of each of the values that this rank asks for; it gets those of all ranks at once."""
        values: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(asked, values, dst=0, group=self._objects())
        if values is None:
            return list(self.scatter(None))
        made = iter(do([value for part in values for value in part]))
        return list(self.scatter([list(islice(made, len(part))) for part in values]))

    def _objects(self) -> Any:
        """A group on the CPU: with NCCL, a rank that waits would keep its GPU busy."""
        if self._group is None:
            self._group = dist.new_group(backend="gloo", timeout=_HARVEST)
        return self._group


class FollowedRun:
    """In the place of a `ScheduledRun` on the ranks that rank 0 schedules for."""

    has_batch_in_hand = False
    metrics = None
    reward_mean = 0.0
    version = 0

    def mark_phase(self, phase: str) -> None: ...

    def score(self, reward_of: dict[int, float]) -> None: ...

    def publish(self, weights: Iterable[Any] | None, *, at_once: bool) -> None: ...

    def end(self) -> None: ...
