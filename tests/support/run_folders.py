"""Run folders with all their files, as a finished training run leaves them."""

import json
from pathlib import Path
from typing import Any

from scenarios import run
from sortedrl.core import events
from sortedrl.log.lines import written

UPDATE: dict[str, Any] = {
    "update": 1, "updates_in_all": 4, "seconds": 2.0, "rollouts": 2, "tokens": 8, "reward": 0.5, "correct": 0.5,
    "length": 4.0, "bubble": 0.1, "idle": 0.2, "goodput": 9.0, "waste": 0.0, "run_staleness_mean": 0.0, "rejected": 1,
    "rejected_most": "1 time: no number", "scoring_backlog": 1, "mismatch_kl": 1e-3, "entropy": 0.1, "grad_norm": 1.0,
}  # fmt: skip
EVALUATION = {"update": 0, "seconds": 1.0, "held_out": {"value": 0.25, "low": 0.1, "high": 0.4}}
SCORE = {"value": 0.5, "low": 0.4, "high": 0.6}
SUMMARY = {
    "updates": 4, "seconds": 3.0, "score_before": SCORE, "score_after": SCORE, "gain": SCORE,
    "metrics": {"wall_parts": {"generation": 0.5, "learner": 0.25, "other": 0.25}},
}  # fmt: skip
SETTINGS = {"updates": 4, "mode": "partial", "seed": 0, "task": "knights", "task_options": {"characters": "3"}}


def run_folder(folder: Path, *, mode: str = "partial", reason: str = "", **settings: Any) -> Path:
    """A finished run with all its files. `reason`: of a rejection."""
    folder.mkdir(parents=True)
    log = list(run("partial", [3, 9, 2, 17, 5, 8, 1, 12], rollouts_per_update=2).events)
    log[0] = log[0]._replace(mode=mode)
    if reason:
        place = next(i for i, event in enumerate(log) if isinstance(event, events.Scored))
        log[place] = events.Rejected(log[place].at, log[place].rollout, 0, reason)
    log += [events.Phase(log[-1].at, "end"), events.Phase(log[-1].at, "evaluation")]
    (folder / "events.jsonl").write_text(written(log))
    for name, content in (("config.json", SETTINGS | {"mode": mode} | settings), ("summary.json", SUMMARY)):
        (folder / name).write_text(json.dumps(content))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (EVALUATION, UPDATE)))
    return folder
