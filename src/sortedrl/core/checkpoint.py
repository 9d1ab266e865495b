"""What a checkpoint holds of rollouts, and whether it fits this run. Each part saves and restores its own state.
It holds plain data that may be trained on, so what an engine reports passes `plain` and `fault_of`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import fields
from operator import index
from typing import Any

from sortedrl.core.configuration import ConfigurationError
from sortedrl.core.prompts import Prompts
from sortedrl.core.rollout import Prompt, Rollout, Segment, State

HIGHEST_LOGPROB = 1e-3  # a probability of 1, with room for rounding
LOWEST_LOGPROB = -1e4  # far below any token that was sampled, and far from overflow in the learner's float32
NO_LOGPROB = f"a log-probability that is not a finite number from {LOWEST_LOGPROB:g} to 0"
_PLAIN_FIELDS = [f.name for f in fields(Rollout) if f.init and f.name not in ("prompt", "state", "segments")]


def rollout_state(rollout: Rollout) -> dict[str, Any]:
    state = {name: getattr(rollout, name) for name in _PLAIN_FIELDS}
    state["state"] = str(rollout.state)
    state["prompt"] = rollout.prompt.id
    state["segments"] = [
        [list(s.tokens), list(s.logprobs), s.version, None if s.mask is None else list(s.mask)]
        for s in rollout.segments
    ]
    return state


def restored_rollout(state: dict[str, Any], prompts: dict[str, Prompt]) -> Rollout:
    """The rollout as it was saved, valid or not. Segments that cannot be made become one that is invalid."""
    try:
        segments = [Segment(*saved).copy() for saved in state["segments"]]  # a segment grows in place
    except (TypeError, ValueError):
        segments = [Segment([0], [math.nan], 0)]
    return Rollout(
        prompt=prompts[state["prompt"]],
        state=State(state["state"]),
        segments=segments,
        **{name: state[name] for name in _PLAIN_FIELDS if name != "has_environment"},
        has_environment=state.get("has_environment", False),  # older versions did not save it
    )


def prompts_of_saved(buffer: dict[str, Any], prompts: Prompts, rollouts_per_prompt: int) -> dict[str, Prompt]:
    """The prompts of saved rollouts, by id. Others are not read: a dataset may tokenize them, or reset an environment
    for them."""
    place_of = {
        rollout["prompt"]: rollout["id"] // rollouts_per_prompt
        for _, _, members in buffer["groups"]
        for rollout in members
    }
    taken = prompts.taken_at(set(place_of.values()))
    for name, place in place_of.items():
        if taken[place].id != name:
            raise ConfigurationError(
                "prompts",
                taken[place].id,
                f"number {place} in the order of training was {name!r} when the checkpoint was written",
                "Resume with the same data in the same order.",
            )
    return {name: taken[place] for name, place in place_of.items()}


def check_state(state: Any, mode: str, rollouts_per_prompt: int) -> None:
    """Raise a ValueError if `state` is not the controller's, or that of a run with another mode or group size."""
    if not isinstance(state, dict) or not {"mode", "version"} <= state.keys():
        found = f"a {type(state).__name__} with {[*state]}" if isinstance(state, dict) else repr(state)
        raise ValueError(f"not a state of a controller: {found[:200]}. Pass what controller.state() returned")
    if state["mode"] != mode:
        raise ValueError(f"the checkpoint was made in mode {state['mode']}, this run is {mode}")
    made = state.get("rollouts_per_prompt", rollouts_per_prompt)  # older checkpoints do not have it
    if made != rollouts_per_prompt:
        raise ValueError(
            f"the checkpoint was made with rollouts_per_prompt = {made}, this run has {rollouts_per_prompt}"
        )


def invalid_part(rollout: Rollout, version: int) -> str | None:
    """What of a restored rollout must not be trained on, at the learner's `version`; None if all may. An older version
    checked less of what an engine reports."""
    newest = max((segment.version for segment in rollout.segments), default=0)
    if newest > version:
        return f"tokens of version {newest}, and the newest is {version}"
    return next((fault for segment in rollout.segments if (fault := fault_of(segment))), None)


def fault_of(segment: Segment) -> str | None:
    """What in it must not be trained on; None if all may. Only lists are checked: they come from real engines."""
    if not isinstance(segment.logprobs, list) or not segment.logprobs:
        return None
    try:
        highest, lowest = max(segment.logprobs), min(segment.logprobs)
        is_valid = math.isfinite(sum(segment.logprobs)) and lowest >= LOWEST_LOGPROB and highest <= HIGHEST_LOGPROB
    except (TypeError, OverflowError):
        is_valid = False
    return None if is_valid else NO_LOGPROB


def plain(segment: Segment) -> Segment:
    """The segment with Python's numbers in lists, since a checkpoint cannot hold arrays. A range is the simulator's.

    Raises a ValueError, which names what was reported, for anything but token ids, log-probabilities, a mask of 0 and
    1, and an integer as version."""
    if type(segment.tokens) is range:
        return segment
    tokens, logprobs, version, mask = segment.tokens, segment.logprobs, segment.version, segment.mask
    if type(tokens) is not list or set(map(type, tokens)) - {int}:
        tokens = _numbers(tokens, _integer, "a token id that is not an integer")
    if tokens and min(tokens) < 0:
        raise ValueError(f"token id {min(tokens)}, and ids count from 0")
    if type(logprobs) is not list or set(map(type, logprobs)) - {float, int}:
        logprobs = _numbers(logprobs, float, NO_LOGPROB)
    if mask is not None:
        mask = _numbers(mask, _bit, "a mask that is not made of 0 and 1")
    if type(version) is not int:
        (version,) = _numbers([version], _integer, "a version that is not an integer")
    return Segment(tokens, logprobs, version, mask)


def _numbers(values: Sequence[Any], convert: Callable[[Any], Any], fault: str) -> list[Any]:
    try:
        return [convert(value) for value in values]
    except (TypeError, ValueError, OverflowError):
        raise ValueError(fault) from None


def _integer(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError
    return index(value)


def _bit(value: Any) -> int:
    if value not in (0, 1):
        raise ValueError
    return int(value)
