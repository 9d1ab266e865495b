"""Prompts, rollouts and the segments that they are made of.

A rollout consists of segments of two kinds. A policy segment is a run of tokens that one weight version sampled, with
the log-probability of each token; it is trained on. An environment segment is what the rollout's environment answered
between two turns of the policy (tool output, a user's reply): mask 0, log-probability 0.0, no version. It is part of
the context, never trained on, and never merged with another segment. The first segment is the policy's.

Invariant: tokens, log-probabilities, versions and the loss mask have equal length across any number of turns, aborts
and resumes. The staleness bound, `max_response_tokens` and expected lengths count policy tokens (`policy_length`);
sorting, prefill and micro-batches count all (`len`).

Token sequences are any `Sequence`: a list from a real engine, a `range` from the simulated one (where a token is its
position), so that simulation has no cost per token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

ENVIRONMENT = -1  # in place of a version: the tokens were not sampled


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt. `payload` is for the scorer, for example the reference answer."""

    id: str
    tokens: Sequence[int]
    payload: Any = None

    def __hash__(self) -> int:
        return hash(self.id)


class State(StrEnum):
    """The lifecycle of a rollout. The buffer owns all changes."""

    WAITING = "waiting"  # not in the engine: never started, to be regenerated, or resumable
    RUNNING = "running"  # in the engine, in a slot or in its queue
    ENVIRONMENT = "environment"  # a turn ended, and its environment works on the answer; it holds no slot
    RETURNING = "returning"  # its environment answered; it waits for a slot, before every WAITING rollout
    FINISHED = "finished"  # complete, not scored yet
    READY = "ready"  # finished and scored
    TRAINED = "trained"
    REJECTED = "rejected"
    FILTERED = "filtered"  # complete and scored, but its group teaches nothing


@dataclass(slots=True)
class Segment:
    """Tokens sampled under one weight version, or an answer of the environment (version `ENVIRONMENT`).

    `mask` is None if it is 1 for every token of a policy segment, 0 for every token of an environment segment."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    version: int
    mask: Sequence[int] | None = None

    def __post_init__(self) -> None:
        count = len(self.tokens)
        if count != len(self.logprobs):
            raise ValueError(f"{count} tokens but {len(self.logprobs)} log-probabilities: a Segment has one per token")
        if self.mask is not None and len(self.mask) != count:
            raise ValueError(f"{count} tokens but a mask of {len(self.mask)}: a Segment has one value per token")

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_environment(self) -> bool:
        return self.version == ENVIRONMENT

    def copy(self) -> Segment:
        """A copy that shares no list."""
        if type(self.tokens) is type(self.logprobs) is range:
            return self
        return Segment([*self.tokens], [*self.logprobs], self.version, None if self.mask is None else [*self.mask])


@dataclass(slots=True, eq=False)
class Rollout:
    """One response to a prompt, from the moment its prompt is loaded until it is trained on or rejected."""

    id: int
    prompt: Prompt
    index_in_group: int  # 0 .. rollouts_per_prompt - 1
    cohort: int
    seed: int
    loaded_at_update: int
    state: State = State.WAITING
    segments: list[Segment] = field(default_factory=list)
    attempt: int = 0  # how often it was regenerated
    failures: int = 0  # of its requests and of calls of its environment
    forced_regenerations: int = 0  # regenerations because its score was late
    reached: int = 0  # the most tokens of the policy that it had when it went back to waiting, over all attempts
    truncated: bool = False  # a limit ended it: see `ended_by`
    reward: float | None = None
    detail: Any = None  # from the scorer, for the learner or the log
    expected: float = 0.0  # its expected length when it was last started
    has_environment: bool = False  # which scores it if a limit ends it; known when its first turn has ended
    ended_by: str = ""  # the limit that ended it: max_response_tokens, max_turns or max_context_tokens
    # Sums over the segments, which change with them: they are read often.
    length: int = field(default=0, init=False, repr=False)  # all tokens: `len` of the rollout
    policy_length: int = field(default=0, init=False, repr=False)  # those that the policy sampled

    def __post_init__(self) -> None:
        for segment in self.segments:
            self.length += len(segment)
            self.policy_length += 0 if segment.is_environment else len(segment)

    def __len__(self) -> int:
        return self.length

    @property
    def observations(self) -> int:
        """How often its environment answered. While a turn of the policy runs, this is the number of turns before."""
        return sum(segment.is_environment for segment in self.segments) if self.policy_length < self.length else 0

    @property
    def group(self) -> int:
        """Id of the group: the responses to one prompt that were loaded together. It is the first member's id.

        Members have consecutive ids. A prompt that is loaded again in the next epoch gets a new group."""
        return self.id - self.index_in_group

    @property
    def resumable(self) -> bool:
        """Aborted, with its tokens kept, or back from its environment."""
        return self.state in (State.WAITING, State.RETURNING) and bool(self.segments)

    @property
    def oldest_version(self) -> int | None:
        return self.segments[0].version if self.segments else None

    @property
    def newest_version(self) -> int | None:
        """Version of the last token that the policy sampled."""
        if not self.segments:
            return None
        last = self.segments[-1].version
        return last if last != ENVIRONMENT else self.segments[-2].version  # a turn precedes every observation

    @property
    def tokens(self) -> list[int]:
        return [token for segment in self.segments for token in segment.tokens]

    @property
    def logprobs(self) -> list[float]:
        return [value for segment in self.segments for value in segment.logprobs]

    @property
    def versions(self) -> list[int]:
        """One per token. A token of the environment has none: the policy segment before it fills the place."""
        versions: list[int] = []
        for segment in self.segments:
            versions += [versions[-1] if segment.is_environment else segment.version] * len(segment)
        return versions

    @property
    def mask(self) -> list[int]:
        """1 where the policy sampled the token, 0 where it did not."""
        return [bit for segment in self.segments for bit in _mask_of(segment)]

    def append(self, segment: Segment) -> None:
        """Add tokens of the policy at the end, to lists of its own: an engine may use those it delivered again."""
        added = len(segment.tokens)
        if not added:
            return
        last = self.segments[-1] if self.segments else None
        newest = self.newest_version or 0
        if segment.version < newest:
            order = f"version {segment.version} after version {newest}"
            raise ValueError(f"rollout {self.id}: {order}; tokens of the environment are added with `observe`")
        self.length += added
        self.policy_length += added
        if last is None or segment.version != last.version:
            self.segments.append(segment.copy())
            return
        self.segments[-1] = Segment(
            tokens=_joined(last.tokens, segment.tokens),
            logprobs=_joined(last.logprobs, segment.logprobs),
            version=last.version,
            mask=None if last.mask is None and segment.mask is None else [*_mask_of(last), *_mask_of(segment)],
        )

    def observe(self, tokens: Sequence[int]) -> None:
        """Add an answer of the environment, after a turn of the policy."""
        if not self.segments or self.segments[-1].is_environment or not len(tokens):
            raise ValueError(f"rollout {self.id}: an observation has tokens, and a turn of the policy comes before it")
        self.length += len(tokens)
        self.segments.append(Segment(tokens[:], [0.0] * len(tokens), ENVIRONMENT))

    def drop_tokens(self) -> int:
        """Drop all tokens; returns how many the policy had sampled."""
        dropped = self.policy_length
        self.length = self.policy_length = 0
        self.segments.clear()
        self.truncated, self.ended_by = False, ""
        return dropped


def _mask_of(segment: Segment) -> Iterator[int]:
    return iter(segment.mask) if segment.mask is not None else iter([int(not segment.is_environment)] * len(segment))


def _joined(first: Sequence[Any], second: Sequence[Any]) -> Sequence[Any]:
    """Concatenate: in place for lists, as a range for adjacent ranges."""
    match first, second:
        case range(), range() if (first.stop, first.step) == (second.start, second.step):
            return range(first.start, second.stop, first.step)
    if isinstance(first, list):
        first.extend(second)
        return first
    return [*first, *second]
