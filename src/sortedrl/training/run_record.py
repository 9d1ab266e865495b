"""What a run writes and shows while it trains: events, lines about updates and evaluations, sampled rollouts."""

import time
from statistics import fmean
from typing import Any

from transformers import PreTrainedTokenizerBase

from sortedrl.core.batch import Batch
from sortedrl.core.controller import Controller
from sortedrl.core.events import EventLog
from sortedrl.core.rollout import Rollout
from sortedrl.core.wording import counted
from sortedrl.log.file import Batched, EventFile
from sortedrl.log.recorder import Recorder
from sortedrl.observe.console import PlainConsole
from sortedrl.observe.metrics import Metrics
from sortedrl.observe.run_state import is_metrics_line
from sortedrl.observe.trackers import Trackers
from sortedrl.tasks.evaluation import Evaluation, mean_at_k, mean_parts, pass_at_k
from sortedrl.training.run_dir import RunFolder, cannot_write

_OF_SNAPSHOT = ("bubble", "idle", "goodput", "waste", "filtered_fraction")  # in every line about an update


class RunRecord:
    """Each line goes to the run folder, the trackers and the console; each event to the metrics, the console and,
    after `record`, the run folder."""

    def __init__(
        self, folder: RunFolder, console: PlainConsole, tokenizer: PreTrainedTokenizerBase, *, rollouts_per_update: int
    ) -> None:
        self._folder = folder
        self._console = console
        self._tokenizer = tokenizer
        self._rollouts_per_update = rollouts_per_update  # to write
        self._updates_in_all = 0
        self._seconds_before = 0.0  # of earlier parts of a resumed run
        self._began = time.perf_counter()
        self.metrics = Metrics()
        self._batched = Batched(self.metrics)
        self.log = EventLog(self._batched)
        self.trackers = Trackers(console.log)

    def flush(self) -> None:
        """Pass on all waiting events."""
        self._batched.flush()

    @property
    def seconds(self) -> float:
        """Duration of the run, with its earlier parts."""
        return self._seconds_before + time.perf_counter() - self._began

    def show(self, updates_in_all: int) -> None:
        """From now on the console shows the run, and its time counts. Its folder must be there: before that its name
        may change."""
        self._began = time.perf_counter()
        self._updates_in_all = updates_in_all
        self._batched.sinks.append(self._console.begin(self.metrics, str(self._folder.path), updates_in_all))

    def record(self, controller: Controller, saved: dict[str, Any] | None = None) -> None:
        """From now on events go to the run folder. `saved`: the controller's state in a checkpoint to go back to."""
        self._folder.require_in_place()
        path = self._folder.path / "events.jsonl"
        sinks, log = self._batched.sinks, self._console.log
        try:
            Recorder(controller, path, saved=saved, folds=sinks, warn=log, open_file=self._event_file)
        except OSError as error:
            raise cannot_write(path, error) from error

    def _event_file(self) -> EventFile:
        return EventFile(self._folder.stream("events.jsonl"))

    def roll_back(self, updates: int, seconds: float) -> None:
        """Go back to a checkpoint after `updates` updates, `seconds` after the start: later lines are dropped."""
        for name in ("rollouts.jsonl", "metrics.jsonl"):
            kept = self._folder.keep_lines(name, lambda line: line["update"] <= updates, self._console.log)
        self._console.state.resumed(updates)
        for line in filter(is_metrics_line, kept):
            self._console.line(line, old=True)
        self._seconds_before = seconds

    def drop_evaluation(self, update: int) -> None:
        """Drop the held-out score after `update`: a run that is resumed after its last update is evaluated again."""
        self._folder.keep_lines(
            "metrics.jsonl", lambda line: line["update"] != update or "held_out" not in line, self._console.log
        )

    # Lines

    def update(self, batch: Batch, stats: dict[str, float], *, scoring_backlog: int) -> None:
        """`stats` are the learner's metrics."""
        self._folder.require_in_place()
        self.flush()
        run_metrics = self.metrics.snapshot()
        done = batch.update + 1
        rewards = [rollout.reward or 0.0 for rollout in batch] + [reward for _, reward in batch.filtered_rewards]
        for rollout in sampled(batch, self._rollouts_per_update):
            self._folder.append("rollouts.jsonl", line_of(rollout, done, self._tokenizer))
        self._append(
            {
                "update": done,
                "updates_in_all": self._updates_in_all,
                "seconds": self.seconds,
                "version": batch.version,
                "rollouts": len(batch),
                "tokens": batch.tokens,
                "reward": fmean(rewards),
                "correct": fmean(float((rollout.detail or {}).get("correct", False)) for rollout in batch),
                "length": batch.tokens / len(batch),
                **{name: getattr(run_metrics, name) for name in _OF_SNAPSHOT},
                "run_staleness_mean": run_metrics.staleness_mean,
                "rejected": run_metrics.rejected,
                "reward_parts": mean_parts((rollout.detail or {}).get("parts", {}) for rollout in batch),
                "scoring_backlog": scoring_backlog,
                **({"rejected_most": run_metrics.rejected_most} if run_metrics.rejected else {}),
                **({} if run_metrics.tokens_per_step is None else {"tokens_per_step": run_metrics.tokens_per_step}),
                **stats,
            }
        )

    def evaluation(self, done: int, found: Evaluation, *, samples: int, has_turns: bool) -> None:
        score = mean_at_k(found.correct)
        line: dict[str, Any] = {"update": done, "seconds": self.seconds, "held_out": score._asdict()}
        if samples > 1:
            line["pass_at_k"] = pass_at_k(found.correct, samples)._asdict()
        if found.parts:
            line["held_out_parts"] = dict(found.parts)
        self._append(line)
        parts = ""
        if has_turns and found.parts:
            parts = "; " + ", ".join(f"{name} {value:.2f}" for name, value in found.parts.items())
        self._console.log(
            f"held-out score after {counted(done, 'update')}: {score.value:.3f} [{score.low:.3f}, {score.high:.3f}]"
            f" ({counted(len(found.correct), 'problem')}{parts})"
        )

    def _append(self, line: dict[str, Any]) -> None:
        self._folder.append("metrics.jsonl", line)
        self.trackers.line(line)
        self._console.line(line)


def sampled(batch: Batch, count: int) -> list[Rollout]:
    """At most `count` rollouts of the batch, evenly from its shortest to its longest."""
    count = min(count, len(batch))
    return [batch.rollouts[place * (len(batch) - 1) // max(1, count - 1)] for place in range(count)]


def line_of(rollout: Rollout, update: int, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """`update`: how many were done with the one that it is in."""
    return {
        "update": update,
        "rollout": rollout.id,
        "prompt": rollout.prompt.id,
        "question": rollout.prompt.payload.question,
        "response": str(tokenizer.decode(rollout.tokens)),
        "reward": rollout.reward,
        "detail": rollout.detail,
        "truncated": rollout.truncated,
        "segments": [[segment.version, len(segment)] for segment in rollout.segments],
    }
