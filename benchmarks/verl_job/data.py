"""Knights & Knaves as the parquet files that verl reads.

python data.py OUT [--compact] [--count 2000] [--characters 2 3]
python data.py OUT --mixed --loading-order SEED      the prompts of `sortedrl train --seed SEED`, in its order
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas

from sortedrl.core.prompts import Prompts
from sortedrl.core.rollout import Prompt
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


def in_loading_order(problems: Sequence[Problem], seed: int) -> list[Problem]:
    """As `sortedrl train` reads them in its first epoch. The order does not depend on the tokens."""
    cursor = Prompts([Prompt(problem.id, [0], problem) for problem in problems], seed=seed)
    return [prompt.payload for prompt in cursor.take(len(problems), within_epoch=True)]


def write(out: Path, task: KnightsAndKnaves, held_out: int, loading_order: int | None = None) -> None:
    out.mkdir(parents=True, exist_ok=True)
    train = task.train() if loading_order is None else in_loading_order(task.train(), loading_order)
    parts: dict[str, Sequence[Problem]] = {"train": train, "held_out": task.held_out()[:held_out]}
    for name, problems in parts.items():
        pandas.DataFrame([row(i, p) for i, p in enumerate(problems)]).to_parquet(out / f"{name}.parquet")


def task_of(asked: argparse.Namespace) -> KnightsAndKnaves:
    if asked.mixed:
        return KnightsAndKnaves.mixed()
    if asked.compact:
        return KnightsAndKnaves.small(count=asked.count)
    return KnightsAndKnaves(asked.characters, count=asked.count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--compact", action="store_true", help="the wording of the built-in model")
    parser.add_argument("--mixed", action="store_true", help="the task knights_and_knaves:mixed")
    parser.add_argument("--loading-order", type=int, metavar="SEED", help="of `sortedrl train`; verl must not shuffle")
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--held-out", type=int, default=64)
    parser.add_argument("--characters", type=int, nargs="+", default=[2, 3])
    asked = parser.parse_args()
    write(asked.out, task_of(asked), asked.held_out, asked.loading_order)


if __name__ == "__main__":
    main()
