"""Tools and environments in SortedGRPOTrainer: what the trainer's hooks need of the episodes of an update."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from sortedrl.core.rollout import Rollout
from sortedrl.integrations.trl.environments import ToolSuffix, TrlEnvironments
from sortedrl.integrations.trl.loop_host import LoopHost
from sortedrl.integrations.trl.rows import Row
from sortedrl.integrations.trl.tools import Episode, ToolBox, limited
from sortedrl.tasks.environment_host import Host, LocalHost

if TYPE_CHECKING:
    from sortedrl.integrations.trl.trainer import SortedGRPOTrainer


class ToolLoop(NamedTuple):
    """What TRL's `_tool_call_loop` returns."""

    tool_mask: list[list[int]]
    completions: list[list[dict[str, Any]]]
    completion_ids: list[list[int]]
    logprobs: list[list[float]]
    calls: int
    failures: int
    images: list[list[Any]]


class _AlreadyReset:
    """Takes the place of an instance where TRL resets it: the rollout's own has already been through its turns."""

    def __init__(self, observation: Any) -> None:
        self._observation = observation

    def reset(self, **example: Any) -> Any:
        return self._observation


class ToolUse:
    def __init__(self, trainer: SortedGRPOTrainer, *, threads: int, limit_seconds: float) -> None:
        self._trainer = trainer
        self._suffix = ToolSuffix(trainer)
        self._episode_of: dict[int, Episode] = {}  # of the update in hand, by rollout id
        self.box = ToolBox(
            tools=trainer._standalone_tools,
            factories=trainer.environment_factories,
            several=trainer._multi_environment,
            max_iterations=trainer.max_tool_calling_iterations if trainer.tools else 0,
            limit_seconds=limit_seconds,
            threads=threads,
            async_loop=getattr(trainer, "async_loop", None),
        )

    def new_environments(self) -> TrlEnvironments:
        """For a run."""
        limit_seconds = self._trainer.schedule.max_environment_seconds
        self.box.start_run()
        make: type[LoopHost | LocalHost] = LoopHost if self.box.threads else LocalHost
        host: Host = make(self.box.episode, limit_seconds=limit_seconds)
        return TrlEnvironments(self._trainer, self.box, host)

    # An update

    def take(self, rows: Sequence[Row], live: Container[int]) -> None:
        """The episodes of an update that is handed out; those of rejected rollouts are forgotten."""
        ids = {row.rollout.id for row in rows}
        self._episode_of = {id: self.box.episodes.pop(id) for id in ids}
        self.box.keep_only(live)

    def release(self) -> None:
        """The rewards are known."""
        for episode in self._episode_of.values():
            episode.release()
        self._episode_of = {}

    def instances(self, rows: Sequence[Row]) -> list[Any] | None:
        """One per row, as TRL's `environments`."""
        if self.box.factories is None:
            return None
        return [self._episode_of[row.rollout.id].instance for row in rows]

    @contextmanager
    def nothing_to_reset(self, rows: Sequence[Row]) -> Iterator[None]:
        """TRL takes instances from its pool, in the order of the rows, and resets them. Here it gets what the reset of
        each rollout's own instance returned."""
        if self.box.factories is None:
            yield
            return
        pool = self._trainer._environment_pool
        prepared: dict[Any, list[Any]] = {name: [] for name in pool}
        for row in rows:
            name = self.box.name_of(self._trainer.example(row.rollout.prompt.payload))
            prepared[name].append(_AlreadyReset(self.box.observations[row.rollout.prompt.payload]))
        self._trainer._environment_pool = prepared
        try:
            yield
        finally:
            self._trainer._environment_pool = pool

    def loop_result(self, rows: Sequence[Row]) -> ToolLoop:
        made = [self._row(row.rollout, self._episode_of[row.rollout.id]) for row in rows]
        episodes = [self._episode_of[row.rollout.id] for row in rows]
        return ToolLoop(
            tool_mask=[mask for mask, _, _, _ in made],
            completions=[completion for _, completion, _, _ in made],
            completion_ids=[tokens for _, _, tokens, _ in made],
            logprobs=[logprobs for _, _, _, logprobs in made],
            calls=sum(episode.calls for episode in episodes),
            failures=sum(episode.failures for episode in episodes),
            images=[[] for _ in rows],
        )

    def _row(self, rollout: Rollout, episode: Episode) -> tuple[list[int], list[Any], list[int], list[float]]:
        observations = rollout.observations
        last = self._results_without_turn(rollout, episode)
        return (
            [*rollout.mask, *[0] * len(last)],
            episode.messages(observations + bool(last)),
            [*rollout.tokens, *last],
            [*rollout.logprobs, *[0.0] * len(last)],
        )

    def _results_without_turn(self, rollout: Rollout, episode: Episode) -> list[int]:
        """The results of the last turn if they end exactly at `max_completion_length`: TRL keeps them. Empty if not."""
        place, schedule = rollout.observations, self._trainer.schedule
        results = episode.turns[place].results if place < len(episode.turns) else None
        if not results:
            return []
        tokens = self._suffix.observation(results, ())
        length = len(rollout) + len(tokens)
        assert schedule.max_context_tokens is not None
        fits = length == schedule.max_response_tokens
        return tokens if fits and len(rollout.prompt.tokens) + length < schedule.max_context_tokens else []

    # An evaluation

    def limit_tools(self) -> None:
        """TRL runs the tools of an evaluation itself. It gets them with the time limit."""
        if not self.box.threads:
            return
        for name in ("_sync_tool_dicts", "_async_tool_dicts"):
            dicts = getattr(self._trainer, name)
            limits = [{key: limited(tool, self.box.limit_seconds) for key, tool in tools.items()} for tools in dicts]
            setattr(self._trainer, name, limits)
