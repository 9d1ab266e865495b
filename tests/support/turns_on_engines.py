"""Rollouts of several turns on a real engine, token by token against the learner's model."""

from typing import Any

from instant_environments import InstantEnvironments
from sortedrl.core import Controller, Engine, Prompt, Prompts, Rollout, Schedule
from sortedrl.core.scoring import ScoreAtOnce
from tiny_llama import logprobs_of, shake

OBSERVATION = [11, 12, 13, 14, 15, 16, 17, 18, 19]
TURNS = 3


def largest_gap_of_turns(engine: Engine, model: Any, mode: str = "partial+elevator") -> float:
    return max(gaps_of_turns(engine, model, mode))


def gaps_of_turns(engine: Engine, model: Any, mode: str = "partial+elevator") -> list[float]:
    """The differences, in all turns under weights that change with every update, between the engine's
    log-probabilities and those of the weights that sampled the token, on the same context.

    `model` is changed. Its eos token ends a turn at random; the environment answers all but the last one.
    """
    states = [_copy_of(model)]
    engine.update_weights(dict(model.named_parameters()), 0)
    prompts = [Prompt(f"p{n}", [5 + n, 6, 7, 8 + n]) for n in range(6)]
    schedule = Schedule(
        mode=mode, rollouts_per_update=4, rollouts_per_prompt=2, prompts_per_cohort=6, max_response_tokens=90
    )
    environments = InstantEnvironments(lambda r: None if r.observations + 1 == TURNS else OBSERVATION)
    scorer = ScoreAtOnce(lambda rollout: float(len(rollout)))
    controller = Controller(engine, Prompts(prompts), scorer, schedule, environments=environments)
    gaps, turns, versions = list[float](), 0, 0
    for batch in controller:
        for rollout in batch:
            gaps += _gaps(rollout, states, model)
            turns = max(turns, rollout.observations + 1)
            versions = max(versions, len(set(rollout.versions)))
        model.load_state_dict(states[-1])
        shake(model, seed=batch.update)
        states.append(_copy_of(model))
        controller.publish(dict(model.named_parameters()))
    assert turns > 1, "no rollout has several turns"
    assert versions > 1 or mode == "on-policy", "no rollout was resumed under new weights"
    return gaps


def _gaps(rollout: Rollout, states: list[Any], model: Any) -> list[float]:
    context, gaps = list(rollout.prompt.tokens), list[float]()
    for segment in rollout.segments:
        if segment.is_environment:
            assert list(segment.tokens) == OBSERVATION
        else:
            model.load_state_dict(states[segment.version])
            expected = logprobs_of(model)(context, segment.tokens)
            gaps += (abs(a - b) for a, b in zip(expected, segment.logprobs, strict=True))
        context += segment.tokens
    return gaps


def _copy_of(model: Any) -> dict[str, Any]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
