"""The results of job.py side by side.

    python benchmarks/verl_job/table.py OUT/*/result.json
    python benchmarks/verl_job/table.py benchmarks/measured/h200-peers/verl.json

A file has the result of one job or a list of them, or (*.jsonl) the metrics that verl wrote of an interrupted one. The
first step of each, which compiles and warms up, is not counted. Seconds are per step; `last` of those of `generate`
pass until the last response, the others are polling. `log-probs` is a further forward pass of the trainer, before the
update (older files have it in `rest`). `ms/token`: of the update, per response token. `all`: seconds of all steps, with
the first. `made/s`: tokens generated per second of the counted steps; fewer than `tokens/s` if counted steps trained on
tokens of the first. It and staleness are SortedRL's own: verl's modes do not log them.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HEADER = (
    f"{'setting':16}{'counted':>8}{'rollouts/s':>11}{'ms/rollout':>11}{'tokens/s':>9}{'step':>7}{'generate':>10}{'last':>6}"
    f"{'log-probs':>10}{'update':>8}{'ms/token':>9}{'rest':>6}{'all':>7}{'bubble':>8}{'made/s':>8}{'stale':>7}  reward"
)


def by_step(steps: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Of verl's metrics, one mapping per step."""
    return {
        "step_seconds": [step["timing_s/step"] for step in steps],
        "generation_seconds": [step["timing_s/gen"] for step in steps],
        "old_log_prob_seconds": [step.get("timing_s/old_log_prob", 0.0) for step in steps],
        "update_seconds": [step["timing_s/update_actor"] for step in steps],
        "reward": [step["critic/score/mean"] for step in steps],
        "response_length": [step["response_length/mean"] for step in steps],
    }


def of_metrics(path: Path) -> dict[str, Any]:
    """What job.py would find without the requests at the servers."""
    lines = [json.loads(line)["data"] for line in path.read_text().splitlines()]
    steps = [line for line in lines if "training/global_step" in line]
    tokens_of_each = [step["prompt_length/mean"] + step["response_length/mean"] for step in steps]
    found: dict[str, Any] = {"setting": path.stem, **by_step(steps)}
    found["rollouts"] = [
        round(step["perf/total_num_tokens"] / each) for step, each in zip(steps, tokens_of_each, strict=True)
    ]
    found["last_response_seconds"] = [math.nan] * len(steps)
    return found | {"bubble_at_servers": math.nan, "sortedrl/staleness_mean": steps[-1].get("sortedrl/staleness_mean")}


def read(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".jsonl":
        return [of_metrics(path)]
    found = json.loads(path.read_text())
    return found if isinstance(found, list) else [found]


def row(result: Mapping[str, Any]) -> str:
    def mean(name: str) -> float:
        counted: Sequence[float] = result[name][1:]
        return sum(counted) / len(counted)

    step, generate, update = mean("step_seconds"), mean("generation_seconds"), mean("update_seconds")
    logprobs = mean("old_log_prob_seconds") if "old_log_prob_seconds" in result else 0.0
    known = result.get("sortedrl/staleness_mean")
    stale = "-" if known is None else f"{known:.2f}"
    seconds = sum(result["step_seconds"][1:])
    made = f"{sum(result['generated_tokens'][1:]) / seconds:,.0f}" if "generated_tokens" in result else "-"
    per_rollout = seconds / sum(result["rollouts"][1:])
    tokens = sum(a * b for a, b in zip(result["rollouts"][1:], result["response_length"][1:], strict=True))
    return (
        f"{result['setting']:16}{len(result['step_seconds']) - 1:8}{1 / per_rollout:11.2f}{1000 * per_rollout:11.1f}"
        f"{tokens / seconds:9,.0f}{step:7.1f}{generate:10.2f}"
        f"{mean('last_response_seconds'):6.2f}{logprobs:10.2f}{update:8.2f}"
        f"{1000 * sum(result['update_seconds'][1:]) / tokens:9.3f}{step - generate - logprobs - update:6.2f}"
        f"{sum(result['step_seconds']):7.1f}{result['bubble_at_servers']:8.1%}"
        f"{made:>8}{stale:>7}  " + " ".join(f"{reward:+.2f}" for reward in result["reward"])
    )


def main() -> None:
    paths = [Path(name) for name in sys.argv[1:]]
    if not paths:
        sys.exit(__doc__)
    print("\n".join([HEADER, *(row(result) for path in paths for result in read(path))]))


if __name__ == "__main__":
    main()
