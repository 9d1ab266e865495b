"""Tools and environments in SortedGRPOTrainer: what the trainer's hooks need of the episodes of an update."""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from sortedrl.core.rollout import Rollout
from sortedrl.core.schedule import Schedule
from sortedrl.integrations.trl.environments import ToolSuffix, TrlEnvironments
from sortedrl.integrations.trl.rows import Row
from sortedrl.integrations.trl.tools import Episode, Example, ToolBox, different_observation


class _AlreadyReset:
    """Takes the place of an instance where TRL resets it: the rollout's own has already been through its turns."""

    def __init__(self, observation: Any) -> None:
        self._observation = observation

    def reset(self, **example: Any) -> Any:
        return self._observation


class ToolUse:
    """`grpo`: TRL's GRPOTrainer, whose tools and environments these are. `example_of`: a row of the dataset."""

    def __init__(
        self,
        grpo: Any,
        example_of: Callable[[int], Example],
        schedule: Schedule,
        *,
        threads: int,
        limit_seconds: float,
    ) -> None:
        self._grpo = grpo
        self._example_of = example_of
        self._schedule = schedule
        self._suffix = ToolSuffix(grpo)
        self._episode_of: dict[int, Episode] = {}  # of the update in hand, by rollout id
        self.box = ToolBox(
            tools=grpo._standalone_tools,
            factories=grpo.environment_factories,
            several=grpo._multi_environment,
            max_iterations=grpo.max_tool_calling_iterations if grpo.tools else 0,
            limit_seconds=limit_seconds,
            threads=threads,
            async_loop=getattr(grpo, "async_loop", None),
        )

    def new_environments(self) -> TrlEnvironments:
        """For a run."""
        self.box.start_run()
        limit_seconds = self._schedule.max_environment_seconds
        return TrlEnvironments(self._grpo, self.box, self._example_of, limit_seconds=limit_seconds)

    def with_observation(self, row: int, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The prompt of a row: with environments, it ends with what `reset` returns. One instance per environment is
        used for all prompts, as in TRL."""
        if self.box.factories is None:
            return messages
        example = self._example_of(row)
        name = self.box.name_of(example)
        self._grpo._batch_environments = [name]  # TRL's own: the prompt shows the tools of this environment
        instance = self._grpo._environment_pool[name][0]
        observation = self.box.reset(instance, example)
        if self.box.observations.setdefault(row, observation) != observation:
            raise different_observation(instance, row)
        return _ending_with(messages, observation)

    # A group that is scored before its update is composed

    def of_group(self, group: Sequence[Rollout]) -> ToolUse:
        """A copy that has the episodes of these rollouts in hand. They keep their turns after `release`."""
        made = copy.copy(self)
        made._episode_of = {rollout.id: self.box.episodes[rollout.id] for rollout in group}
        return made

    def prompts(self, rows: Sequence[Row], messages: Sequence[list[dict[str, Any]]]) -> list[list[dict[str, Any]]]:
        """As `with_observation`, without another reset."""
        if self.box.factories is None:
            return list(messages)
        places = [row.rollout.prompt.payload for row in rows]
        self._grpo._batch_environments = [self.box.name_of(self._example_of(place)) for place in places]
        observations = [self.box.observations[place] for place in places]
        return [_ending_with(prompt, seen) for prompt, seen in zip(messages, observations, strict=True)]

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
        pool = self._grpo._environment_pool
        prepared: dict[Any, list[Any]] = {name: [] for name in pool}
        for row in rows:
            place = row.rollout.prompt.payload
            name = self.box.name_of(self._example_of(place))
            prepared[name].append(_AlreadyReset(self.box.observations[place]))
        self._grpo._environment_pool = prepared
        try:
            yield
        finally:
            self._grpo._environment_pool = pool

    def loop_result(self, rows: Sequence[Row]) -> tuple[Any, ...]:
        """What TRL's `_tool_call_loop` returns: masks, completions, tokens, log-probabilities, calls, failures,
        images."""
        episodes = [self._episode_of[row.rollout.id] for row in rows]
        made = [self._row(row.rollout, episode) for row, episode in zip(rows, episodes, strict=True)]
        calls, failures = (sum(getattr(episode, name) for episode in episodes) for name in ("calls", "failures"))
        return (*map(list, zip(*made, strict=True)), calls, failures, [[] for _ in rows])

    def _row(self, rollout: Rollout, episode: Episode) -> tuple[list[int], list[Any], list[int], list[float]]:
        last = self._results_without_turn(rollout, episode)
        return (
            [*rollout.mask, *[0] * len(last)],
            episode.messages(rollout.observations + bool(last)),
            [*rollout.tokens, *last],
            [*rollout.logprobs, *[0.0] * len(last)],
        )

    def _results_without_turn(self, rollout: Rollout, episode: Episode) -> list[int]:
        """The results of the last turn if they end exactly at `max_completion_length`: TRL keeps them. Empty if not."""
        place, schedule = rollout.observations, self._schedule
        results = episode.turns[place].results if place < len(episode.turns) else None
        if not results:
            return []
        tokens = self._suffix.observation(results, ())
        length = len(rollout) + len(tokens)
        assert schedule.max_context_tokens is not None
        fits = length == schedule.max_response_tokens
        return tokens if fits and len(rollout.prompt.tokens) + length < schedule.max_context_tokens else []


def _ending_with(messages: list[dict[str, Any]], observation: Any) -> list[dict[str, Any]]:
    """As TRL does it: added to the last message."""
    if observation is None:
        return messages
    content = messages[-1]["content"]
    if isinstance(observation, list) and isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if isinstance(observation, str) and isinstance(content, list):
        observation = [{"type": "text", "text": observation}]
    return [*messages[:-1], {**messages[-1], "content": content + observation}]
