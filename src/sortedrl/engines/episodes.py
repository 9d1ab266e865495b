"""Episodes for the simulated engine: how long each turn of a response is, what its environment answers, and when.

Drawn from distributions, or replayed from the event log of a run. An episode depends only on the prompt and the
request's seed, as lengths do (lengths.py).
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from sortedrl.core import events
from sortedrl.core.engine import Request
from sortedrl.core.events import Event
from sortedrl.core.rollout import Prompt, Segment
from sortedrl.core.seeds import derive_seed
from sortedrl.engines.lengths import LengthOf, ReplayedLengths, cached, normal, number_of
from sortedrl.log.reading import read_intact


class Episode(NamedTuple):
    """`turns`: policy tokens of each turn. `observations`: tokens of the answer to each turn but the last. `seconds`:
    until the environment answered each turn; the last one is the time until it ended the episode."""

    turns: tuple[int, ...]
    observations: tuple[int, ...] = ()
    seconds: tuple[float, ...] = (0.0,)

    @property
    def length(self) -> int:
        """Policy tokens of the whole response."""
        return sum(self.turns)

    @property
    def has_environment(self) -> bool:
        return len(self.turns) > 1 or self.seconds[-1] > 0


EpisodeOf = Callable[[Prompt, int], Episode]  # prompt, seed -> episode


@dataclass(frozen=True, kw_only=True)
class DrawnEpisodes:
    """Responses of `turns` turns, each as long as `lengths` has it. The environment answers all but the last one with
    `observation_tokens` tokens, after a log-normal time with this mean; `sigma` is the standard deviation of its
    logarithm. It ends the episode at once."""

    lengths: LengthOf
    turns: int = 5
    observation_tokens: int = 128
    seconds_mean: float = 5.0
    sigma: float = 1.0

    def __call__(self, prompt: Prompt, seed: int) -> Episode:
        answers = range(self.turns - 1)
        return Episode(
            tuple([self.lengths(prompt, derive_seed(seed, turn)) for turn in range(self.turns)]),
            (self.observation_tokens,) * len(answers),
            (*[self._seconds(seed, turn) for turn in answers], 0.0),
        )

    def _seconds(self, seed: int, turn: int) -> float:
        return self.seconds_mean * math.exp(self.sigma * normal(derive_seed(seed, turn, 5)) - self.sigma**2 / 2)


@dataclass(frozen=True)
class ReplayedEpisodes:
    """Episodes by prompt; the seed picks one of a prompt's episodes. `rewards`: of the first group of each prompt.
    `run_limit`: where the run cut its responses; 0: unknown."""

    by_prompt: tuple[tuple[Episode, ...], ...]
    rewards: tuple[tuple[float, ...], ...] | None = None
    run_limit: int = 0

    def __call__(self, prompt: Prompt, seed: int) -> Episode:
        episodes = self.by_prompt[number_of(prompt) % len(self.by_prompt)]
        return episodes[derive_seed(seed) % len(episodes)]

    @property
    def has_environment(self) -> bool:
        return any(episode.has_environment for episodes in self.by_prompt for episode in episodes)

    @property
    def most_observed(self) -> int:
        """Tokens of the environment in one response."""
        return max(sum(episode.observations) for episodes in self.by_prompt for episode in episodes)

    def lengths(self) -> ReplayedLengths:
        """Policy tokens of whole responses."""
        lengths = tuple(tuple(episode.length for episode in episodes) for episodes in self.by_prompt)
        return ReplayedLengths(lengths, self.rewards, self.run_limit)


# The turn that a request runs


def place_of(segments: Iterable[Segment]) -> tuple[int, int]:
    """The turn that a response is in, from 0, and the position at which it started."""
    turn = start = position = 0
    for segment in segments:
        position += len(segment)
        if segment.is_environment:
            turn, start = turn + 1, position
    return turn, start


def end_of_turn(episodes: EpisodeOf) -> Callable[[Request], int]:
    """For the simulated engine: the length of the response at the end of the turn that a request runs."""
    drawn = cached(episodes)

    def end(request: Request) -> int:
        turn, start = place_of(request.prefix)
        return start + drawn(request.prompt, request.seed).turns[turn]

    return end


# The log of a run


def event_log_at(path: Path) -> Path | None:
    """The event log, if `path` is a run folder or an event log."""
    if path.is_dir():
        log = path / "events.jsonl"
        if not log.exists():
            raise ValueError("this folder is not a run: it has no events.jsonl")
        return log
    with path.open(encoding="utf-8", errors="replace") as file:
        return path if file.readline().startswith('{"event"') else None


def read_episodes(path: Path) -> ReplayedEpisodes:
    """Every finished response of an event log. A regenerated one counts once, as it ended."""
    read = read_intact(path)
    if read.notice:
        raise ValueError(f"{path}: {read.notice}; give each run a log of its own")
    for line in read.damage:
        if not line.is_torn:
            raise ValueError(f"{path}, line {line.line} cannot be read: {line.why}")
    recorder = _Recorder()
    for event in read.events:
        try:
            recorder(event)
        except (ArithmeticError, LookupError) as error:
            raise ValueError(
                f"{path}: {type(event).__name__} at {event.at:g} s contradicts the events before it ({error!r}); "
                "the log is incomplete"
            ) from None
    if not recorder.ended:
        raise ValueError(f"{path}: no response is finished in this log")
    by_prompt: dict[str, list[Episode]] = {}
    for rollout, episode in recorder.ended.items():
        if rollout not in recorder.prompt_of:
            raise ValueError(f"{path}: rollout {rollout} finishes, but was never loaded; the log is incomplete")
        by_prompt.setdefault(recorder.prompt_of[rollout], []).append(episode)
    rewards = [recorder.rewards_of_first_group(prompt) for prompt in by_prompt]
    episodes = tuple(map(tuple, by_prompt.values()))
    return ReplayedEpisodes(episodes, tuple(rewards) if all(rewards) else None, recorder.run_limit)


class _Attempt:
    """A rollout's present attempt: its turns so far."""

    def __init__(self) -> None:
        self.turns: list[int] = []
        self.observations: list[int] = []
        self.seconds: list[float] = []
        self.start = 0  # position at which the present turn started
        self.asked_at: float | None = None  # its environment, which has not answered yet


class _Recorder:
    """Follows the turns of every rollout in an event log."""

    def __init__(self) -> None:
        self.run_limit = 0
        self.prompt_of: dict[int, str] = {}
        self.ended: dict[int, Episode] = {}
        self._first_groups: dict[str, range] = {}
        self._rewards: dict[int, float] = {}
        self._attempts: dict[int, _Attempt] = {}

    def __call__(self, event: Event) -> None:
        match event:
            case events.RunBegan(settings={"max_response_tokens": int(limit)}):
                self.run_limit = limit
            case events.Loaded(first=first, rollouts=rollouts, prompts=prompts):
                per_prompt = rollouts // len(prompts)
                self.prompt_of |= {first + i: prompts[i // per_prompt] for i in range(rollouts)}
                for place, prompt in enumerate(prompts):
                    begin = first + place * per_prompt
                    self._first_groups.setdefault(prompt, range(begin, begin + per_prompt))
            case events.Scored(rollout=rollout, reward=reward):
                self._rewards[rollout] = reward
            case events.TurnEnded(at=at, rollout=rollout, length=length):
                attempt = self._attempts.setdefault(rollout, _Attempt())
                attempt.turns.append(length - attempt.start)
                attempt.asked_at = at
            case events.Observed(at=at, rollout=rollout, tokens=tokens, length=length):
                attempt = self._attempts[rollout]
                attempt.observations.append(tokens)
                attempt.seconds.append(0.0 if attempt.asked_at is None else at - attempt.asked_at)
                attempt.start, attempt.asked_at = length, None
            case events.Finished(at=at, rollout=rollout, length=length):
                self.ended[rollout] = self._end(rollout, at, length)
            case events.Aborted(rollout=rollout, dropped=dropped) | events.Failed(rollout=rollout, dropped=dropped):
                if dropped:
                    self._attempts.pop(rollout, None)
            case events.Regenerated(rollout=rollout) | events.Rejected(rollout=rollout):
                self._attempts.pop(rollout, None)

    def rewards_of_first_group(self, prompt: str) -> tuple[float, ...]:
        return tuple(self._rewards[rollout] for rollout in self._first_groups[prompt] if rollout in self._rewards)

    def _end(self, rollout: int, at: float, length: int) -> Episode:
        attempt = self._attempts.pop(rollout, None) or _Attempt()
        if attempt.asked_at is None:  # a limit cut the last turn, or there is no environment
            attempt.turns.append(length - attempt.start)
            attempt.seconds.append(0.0)
        else:
            attempt.seconds.append(at - attempt.asked_at)
        return Episode(tuple(attempt.turns), tuple(attempt.observations), tuple(attempt.seconds))
