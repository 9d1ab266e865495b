"""Knights & Knaves as the parquet files that verl reads.

python data.py OUT [--compact] [--count 2000] [--characters 2 3]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas

from sortedrl.tasks.knights_and_knaves import KnightsAndKnaves
from sortedrl.tasks.task import Problem


def row(index: int, problem: Problem) -> dict[str, Any]:
    messages = [{"role": "user", "content": problem.question}]
    if problem.system:
        messages.insert(0, {"role": "system", "content": problem.system})
    return {
        "data_source": "knights_and_knaves",
        "prompt": messages,
        "reward_model": {"style": "rule", "ground_truth": json.dumps(problem.answer)},
        "extra_info": {"index": index, "id": problem.id},
    }


def write(out: Path, task: KnightsAndKnaves, held_out: int) -> None:
    out.mkdir(parents=True, exist_ok=True)
    parts: dict[str, Sequence[Problem]] = {"train": task.train(), "held_out": task.held_out()[:held_out]}
    for name, problems in parts.items():
        pandas.DataFrame([row(i, p) for i, p in enumerate(problems)]).to_parquet(out / f"{name}.parquet")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--compact", action="store_true", help="the wording of the built-in model")
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--held-out", type=int, default=64)
    parser.add_argument("--characters", type=int, nargs="+", default=[2, 3])
    asked = parser.parse_args()
    task = (
        KnightsAndKnaves.small(count=asked.count)
        if asked.compact
        else KnightsAndKnaves(asked.characters, count=asked.count)
    )
    write(asked.out, task, asked.held_out)


if __name__ == "__main__":
    main()
