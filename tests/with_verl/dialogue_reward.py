"""verl's custom reward function for the dialogue: the last turn counts."""

import json
from typing import Any

from sortedrl.tasks.knights_answers import reward_function


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **unused: Any
) -> dict[str, float]:
    answer = solution_str[max(0, solution_str.rfind("<think>")) :]
    reward = reward_function(answer, json.loads(ground_truth))
    return {"score": reward.value, "acc": float(reward.correct)}
