"""A checkpoint: all that the scheduler saves between two batches, and how it is restored.

The format is one JSON object. What the engine, the scorer and the learner hold is not in it: no rollout runs while it
is written, finished rollouts are scored again, and weights are the caller's."""

import logging
import math
from dataclasses import fields
from typing import Any

from sortedrl.core import events
from sortedrl.core.buffer import Buffer, Group
from sortedrl.core.configuration import ConfigurationError
from sortedrl.core.engine_checks import fault_of
from sortedrl.core.generation import Generation
from sortedrl.core.ledger import Ledger
from sortedrl.core.prompts import Prompts
from sortedrl.core.rollout import Prompt, Rollout, Segment, State
from sortedrl.core.schedule import Schedule
from sortedrl.core.strategies.base import SchedulerState, Sweep, updates_left
from sortedrl.core.turns import limit_of_cut
from sortedrl.core.wording import counted

_PLAIN_FIELDS = [f.name for f in fields(Rollout) if f.init and f.name not in ("prompt", "state", "segments")]
_LOADER_COUNTS = ("next_id", "prompts_loaded", "cohorts_loaded")
_MUST_STAY = ("rollouts_per_prompt", "whole_groups", "seed")  # of the settings
_log = logging.getLogger(__name__)


def saved(generation: Generation) -> dict[str, Any]:
    """JSON-ready. Raises an error while rollouts are in the engine."""
    ledger, sampling, turns = generation.ledger, generation.dynamic_sampling, generation.turns
    s = ledger.state
    return {
        "mode": ledger.strategy.name,
        **{name: getattr(s.schedule, name) for name in _MUST_STAY},
        "slots": s.slots,
        "buffer": _saved_buffer(s.buffer),
        "prompts": saved_cursor(s.prompts),
        "expectation": s.expectation.state(),
        "version": s.version,
        "updates": s.updates,
        "harvests": s.harvests,
        "sweep": list(s.sweep),
        "filter": None if sampling is None else sampling.filter.state(),
        "filtered_rewards": s.filtered_rewards,
        **{name: getattr(generation.loader, name) for name in _LOADER_COUNTS},
        "environments": {} if turns is None else turns.state(),
        "events": ledger.log.count,
    }


def restore(state: dict[str, Any], generation: Generation) -> None:
    """The inverse of `saved`, for a run that has not started."""
    ledger, sampling, turns = generation.ledger, generation.dynamic_sampling, generation.turns
    s = ledger.state
    generation.engine.expect_version(state["version"])
    ledger.log.count = state["events"]
    for name in _LOADER_COUNTS:
        setattr(generation.loader, name, state[name])
    s.version, s.updates, s.harvests = state["version"], state["updates"], state["harvests"]
    s.sweep = Sweep(*state["sweep"])
    s.filtered_rewards = [(cohort, reward) for cohort, reward in state.get("filtered_rewards", ())]
    restore_cursor(s.prompts, state["prompts"])
    s.expectation.restore(state["expectation"])
    _restore_buffer(state["buffer"], ledger)  # after all that the order of waiting rollouts depends on
    on_complete, ledger.on_complete = ledger.on_complete, lambda group: None
    generation.loader.reject_too_long(s.buffer.live.values())  # all members of a group: what is left is not judged
    ledger.on_complete = on_complete
    _regenerate_invalid(ledger)
    if sampling is not None:
        sampling.restore(state.get("filter"))  # sortedrl 0.2 had no filter
    if turns is not None:
        turns.restore(state["environments"])
    if state.get("slots", s.slots) != s.slots:  # older checkpoints do not have it
        ledger.log.append(events.SlotsChanged(ledger.clock.now(), s.slots))


def saved_cursor(prompts: Prompts) -> dict[str, Any]:
    """Where it is, and what the order of the prompts depends on, besides the dataset itself."""
    order = {"size": len(prompts.dataset), "seed": prompts.seed, "shuffle": prompts.shuffle}
    return {"epoch": prompts.epoch, "position": prompts.position, **order}


def restore_cursor(prompts: Prompts, state: dict[str, Any]) -> None:
    own = saved_cursor(prompts) | {"epoch": state["epoch"], "position": state["position"]}
    before = {key: state.get(key, own[key]) for key in own}  # older versions did not save `shuffle`
    if before != own:
        then, now = (f"{o['size']} prompts, seed = {o['seed']} and shuffle = {o['shuffle']}" for o in (before, own))
        raise ValueError(f"the checkpoint was made with {then}, this run has {now}: resume with the same order")
    prompts.go_to(state["epoch"], state["position"])


def _saved_buffer(buffer: Buffer) -> dict[str, Any]:
    if buffer.running:
        inside = f"{counted(len(buffer.running), 'rollout')} in the engine"
        fix = "save after publish(), which aborts them, or after the loop (interrupt() ends it)"
        raise RuntimeError(f"{inside}: {fix}")
    return {
        "counts": [buffer.loaded, buffer.trained, buffer.rejected, buffer.filtered],
        "groups": [[group.id, group.gate, [rollout_state(m) for m in group.members]] for group in buffer.groups()],
        "ready": [group.id for group in buffer.ready_groups()],
        "returning": list(buffer.returning),
    }


def _restore_buffer(state: dict[str, Any], ledger: Ledger) -> None:
    s, buffer = ledger.state, ledger.state.buffer
    prompts = _prompts_of_saved(state, s.prompts, s.schedule.rollouts_per_prompt)
    groups = [
        Group(group_id, gate, [restored_rollout(fields, prompts) for fields in members])
        for group_id, gate, members in state["groups"]
    ]
    buffer.take_in(groups, ledger.key)
    buffer.loaded, buffer.trained, buffer.rejected, *filtered = state["counts"]
    buffer.filtered = sum(filtered)  # sortedrl 0.2 did not save it
    gate_of = {group.id: buffer.gates[group.gate] for group in groups}
    for group_id in state["ready"]:  # in the order in which they became ready
        ready_groups = gate_of[group_id].ready_groups
        ready_groups[group_id] = ready_groups.pop(group_id)
    for rollout_id in state["returning"]:
        buffer.returning[rollout_id] = buffer.returning.pop(rollout_id)


def _regenerate_invalid(ledger: Ledger) -> None:
    """Drop the tokens of restored rollouts that must not be trained on."""
    reasons: list[str] = []
    for rollout in list(ledger.state.buffer.live.values()):
        if fault := _fault_in(rollout, ledger.state):
            ledger.regenerate(rollout, f"the checkpoint has {fault}")
            reasons.append(f"rollout {rollout.id}, {fault}")
    if reasons:
        count = counted(len(reasons), "rollout")
        _log.warning("%s of the checkpoint cannot be trained on and will be regenerated: %s", count, reasons[0])


def rollout_state(rollout: Rollout) -> dict[str, Any]:
    segments = [
        [list(s.tokens), list(s.logprobs), s.version, None if s.mask is None else list(s.mask)]
        for s in rollout.segments
    ]
    state = {name: getattr(rollout, name) for name in _PLAIN_FIELDS}
    return state | {"state": str(rollout.state), "prompt": rollout.prompt.id, "segments": segments}


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
        **{name: state[name] for name in _PLAIN_FIELDS if name in state},  # older versions had fewer
    )


def _prompts_of_saved(buffer: dict[str, Any], prompts: Prompts, rollouts_per_prompt: int) -> dict[str, Prompt]:
    """The prompts of saved rollouts, by id. Others are not read: a dataset may tokenize them, or reset an environment
    for them."""
    rollouts = [rollout for _, _, members in buffer["groups"] for rollout in members]
    place_of = {rollout["prompt"]: rollout["id"] // rollouts_per_prompt for rollout in rollouts}
    taken = prompts.taken_at(set(place_of.values()))
    for name, place in place_of.items():
        if taken[place].id != name:
            why = f"number {place} in the order of training was {name!r} when the checkpoint was written"
            raise ConfigurationError("prompts", taken[place].id, why, "Resume with the same data in the same order.")
    return {name: taken[place] for name, place in place_of.items()}


def check_state(state: Any, mode: str, schedule: Schedule) -> None:
    """Raise a ValueError if `state` is not the controller's, or that of a run with other settings that must stay."""
    if not isinstance(state, dict) or not {"mode", "version"} <= state.keys():
        found = f"a {type(state).__name__} with {[*state]}" if isinstance(state, dict) else repr(state)
        raise ValueError(f"not a state of a controller: {found[:200]}. Pass what controller.state() returned")
    if state["mode"] != mode:
        raise ValueError(f"the checkpoint was made in mode {state['mode']}, this run is {mode}")
    for name in _MUST_STAY:
        own = getattr(schedule, name)
        made = state.get(name, own)  # older checkpoints do not have all of them
        if made != own:
            raise ValueError(f"the checkpoint was made with {name} = {made}, this run has {own}: resume with {made}")


def _fault_in(rollout: Rollout, s: SchedulerState) -> str | None:
    """What of a restored rollout must not be trained on; None if all may. An older version checked less of what engines
    report, and the settings may be others now."""
    if not rollout.segments:
        return None
    oldest, newest = rollout.segments[0].version, max(segment.version for segment in rollout.segments)
    if newest > s.version:
        return f"tokens of version {newest}, and the newest is {s.version}"
    if fault := next(filter(None, map(fault_of, rollout.segments)), None):
        return fault
    is_later = s.buffer.group_of(rollout).gate != s.buffer.gate
    updates_before = updates_left(s.untrained_here, s.update_size) if is_later else 0
    schedule = s.schedule
    if schedule.max_staleness is not None and s.version + updates_before - oldest > schedule.max_staleness:
        return f"tokens of version {oldest}, and max_staleness is {schedule.max_staleness}"
    if schedule.room_for(rollout) < rollout.resumable:  # one that will be resumed needs room for a token
        return f"{rollout.length} tokens, too many for {limit_of_cut(schedule, rollout)}"
    if schedule.max_turns is not None and rollout.observations >= schedule.max_turns:
        return f"{rollout.observations + 1} turns, and max_turns is {schedule.max_turns}"
    return None
