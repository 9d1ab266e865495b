"""verl's custom reward function: our Knights & Knaves scorer."""

from __future__ import annotations

import json
from typing import Any

from sortedrl.tasks.knights_and_knaves import judge


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **unused: Any
) -> dict[str, float]:
    verdict = judge(solution_str, json.loads(ground_truth))
    return {"score": verdict.reward, "acc": float(verdict.correct)}
