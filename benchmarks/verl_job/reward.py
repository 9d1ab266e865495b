"""verl's custom reward function: our Knights & Knaves scorer."""

from __future__ import annotations

import json
from typing import Any

from sortedrl.tasks.knights_and_knaves import reward_function


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **unused: Any
) -> dict[str, float]:
    reward = reward_function(solution_str, json.loads(ground_truth))
    return {"score": reward.value, "acc": float(reward.correct)}
