"""The objects that a user's own loop passes to the controller: a wrong one is refused with what to write instead.

Each check raises a TypeError. Objects of other classes are accepted if they have the methods.
"""

from __future__ import annotations

from sortedrl.core.wording import kind_of


def check_parts(prompts: object, scorer: object, schedule: object) -> None:
    _require("prompts", prompts, "take", "Prompts(dataset), where the dataset is a list of Prompt(id, token_ids)")
    _require("scorer", scorer, "collect", "ScoreAtOnce(reward), where reward(rollout) returns a number")
    _require("schedule", schedule, "rollouts_needed", 'Schedule(mode="partial+elevator")')


def check_optional_parts(
    environments: object, strategy: object, expectation: object, sampling: object, log: object, stream_to: object
) -> None:
    for name, part, needed, instead in (
        ("environments", environments, "cancel", "an object with the methods of sortedrl.core.Environments"),
        ("strategy", strategy, "may_start", 'an instance with its name, such as MyStrategy("mine")'),
        ("expectation", expectation, "estimate", "SensedLengths(), or another object with its methods"),
        ("sampling", sampling, "top_p", "Sampling(temperature=1.0)"),
        ("log", log, "append", "EventLog(EventFile.open(path))"),
    ):
        if part is not None:
            _require(name, part, needed, instead)
    if stream_to is not None and not callable(stream_to):
        _require("stream_to", stream_to, "takes_part", "a function, such as learner.accumulate")


def _require(name: str, part: object, needed: str, instead: str) -> None:
    if isinstance(part, type) or not hasattr(part, needed):
        raise TypeError(f"{name} is {kind_of(part)}: pass {instead}")
