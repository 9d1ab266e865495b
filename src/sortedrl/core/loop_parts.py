"""The objects that a user's own loop passes to the controller: a wrong one is refused with what to write instead."""

from __future__ import annotations


def check_parts(prompts: object, scorer: object, schedule: object, strategy: object, log: object) -> None:
    """Raises a TypeError. Objects of other classes are accepted if they have the methods."""
    for name, part, needed, instead in (
        ("prompts", prompts, "take", "Prompts(dataset), where the dataset is a list of Prompt(id, token_ids)"),
        ("scorer", scorer, "collect", "ScoreAtOnce(reward), where reward(rollout) returns a number"),
        ("schedule", schedule, "rollouts_needed", 'Schedule(mode="partial+elevator")'),
    ):
        _require(name, part, needed, instead)
    if strategy is not None:
        _require("strategy", strategy, "may_start", 'an instance with its name, such as MyStrategy("mine")')
    if log is not None:
        _require("log", log, "append", "EventLog(EventFile.open(path))")


def _require(name: str, part: object, needed: str, instead: str) -> None:
    if isinstance(part, type):
        raise TypeError(f"{name} is the class {part.__name__}: pass {instead}")
    if not hasattr(part, needed):
        raise TypeError(f"{name} is a {type(part).__name__}: pass {instead}")
