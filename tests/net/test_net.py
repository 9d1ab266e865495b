"""What must not change while the house gets smaller: event logs of random schedules, and every flag and TOML key.

`python tests/net/test_net.py` records today's values in recorded.json. Delete this folder when the layout is settled.
"""

import hashlib
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from random_runs import case_of, play
from sortedrl.cli.main import COMMANDS
from sortedrl.core.events import RunBegan

RECORDED = Path(__file__).parent / "recorded.json"
SEEDS = 200
BLOCK = 50


def event_log_digest(seed: int, *, with_turns: bool) -> str:
    """Of all events without their times, with what was rolled back. The first one changes with the settings."""
    log = [event for event in play(case_of(seed, with_turns=with_turns)).raw if not isinstance(event, RunBegan)]
    text = json.dumps([[type(event).__name__, *event[1:]] for event in log], default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def digests(first: int, *, with_turns: bool) -> list[str]:
    return [event_log_digest(seed, with_turns=with_turns) for seed in range(first, first + BLOCK)]


def flags() -> dict[str, list[str]]:
    return {name: sorted(importlib.import_module(f"sortedrl.cli.{name}").SETTINGS.model_fields) for name in COMMANDS}


def recorded() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RECORDED.read_text())
    return found


@pytest.mark.parametrize("with_turns", [False, True])
@pytest.mark.parametrize("first", range(0, SEEDS, BLOCK))
def test_event_logs_are_those_recorded(first: int, with_turns: bool) -> None:
    kind = "turns" if with_turns else "single"
    assert digests(first, with_turns=with_turns) == recorded()[kind][first : first + BLOCK]


def test_flags_and_keys_are_those_recorded() -> None:
    assert flags() == recorded()["flags"]


if __name__ == "__main__":
    both = {
        kind: [d for first in range(0, SEEDS, BLOCK) for d in digests(first, with_turns=kind == "turns")]
        for kind in ("single", "turns")
    }
    RECORDED.write_text(json.dumps({**both, "flags": flags()}, indent=0) + "\n")
