"""Short runs of the toy model: their settings as flags, and what they leave behind."""

import json
from pathlib import Path
from typing import Any

from sortedrl.core import events
from sortedrl.log.reading import read_events, without_rolled_back

SMALL: dict[str, Any] = {
    **{"task": "toy:SayA", "slots": 8, "max_prompt_tokens": 16, "max_response_tokens": 16, "eval_problems": 4},
    **{"threads": 1, "reward_workers": 0},  # a worker is a new interpreter; test_train_rewards.py has them
}
SMALL_TRAINING: dict[str, Any] = SMALL | {"rollouts_per_update": 8, "prompts_per_cohort": 8, "rollouts_per_prompt": 4}


def flags(settings: dict[str, Any]) -> list[str]:
    """`{"max_turns": 3}` as `--max-turns 3`."""
    return [word for key, value in settings.items() for word in (f"--{key.replace('_', '-')}", str(value))]


def metrics_of(run: Path, key: str = "update") -> list[dict[str, Any]]:
    """The lines of metrics.jsonl that have this key: `reward` those of updates, `held_out` those of evaluations."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if key in line]


def updates_of(run: Path) -> list[events.Updated]:
    log = without_rolled_back(read_events(run / "events.jsonl"))
    return [event for event in log if isinstance(event, events.Updated)]


def without_times(updates: list[events.Updated]) -> list[events.Updated]:
    return [update._replace(at=0.0) for update in updates]
