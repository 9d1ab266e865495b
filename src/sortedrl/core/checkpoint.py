"""What a checkpoint holds of rollouts, and whether it fits this run. Each part saves and restores its own state."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

from sortedrl.core.configuration import ConfigurationError
from sortedrl.core.prompts import Prompts
from sortedrl.core.rollout import Prompt, Rollout, Segment, State

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
