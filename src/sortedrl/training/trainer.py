"""Wires a run together: model, task, engine, scheduler, learner, and the run folder (training/run_dir.py)."""

from __future__ import annotations

import time
from contextlib import ExitStack, closing
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from sortedrl.core.controller import Batch, Controller
from sortedrl.core.engine import EngineDied, Sampling
from sortedrl.core.engine_base import EngineBase
from sortedrl.core.errors import UserError
from sortedrl.core.event_file import EventFile
from sortedrl.core.events import Batched, EventLog
from sortedrl.core.log_recovery import CheckpointMark
from sortedrl.core.prompts import Prompts
from sortedrl.core.rejections import RejectionWatch, TooManyRejected
from sortedrl.core.rollout import Prompt
from sortedrl.core.schedule import ConfigurationError
from sortedrl.core.strategies.base import updates_in_all
from sortedrl.core.streaming import Accumulate, StreamedLearner
from sortedrl.engines.checked_weights import CheckedWeights, WeightsDiffer
from sortedrl.engines.embedded.engine import copy_weights
from sortedrl.learner import checkpoint
from sortedrl.learner.learner import Learner
from sortedrl.learner.shared_gpu import SharedGpuLearner, some_sms
from sortedrl.models import model_named
from sortedrl.observe.console import PlainConsole, RunConsole
from sortedrl.observe.metrics import Metrics
from sortedrl.observe.prometheus import Endpoint
from sortedrl.observe.report.repair import consistent
from sortedrl.observe.run_state import is_metrics_line
from sortedrl.observe.trackers import Trackers, open_tracker, require_login
from sortedrl.observe.wall_clock import bottleneck, bottleneck_line
from sortedrl.observe.watch import kept_readable
from sortedrl.settings.base import as_json
from sortedrl.tasks.evaluation import Evaluation, mean_at_k, mean_parts, paired_difference, pass_at_k
from sortedrl.training.build import (
    copy_on,
    dtype_of,
    learner_settings_of,
    learning_rate_notice,
    out_of_memory,
    out_of_memory_at_start,
    set_threads,
)
from sortedrl.training.engine import checked_engine, engine_of
from sortedrl.training.evaluate import evaluate, unscored_notice
from sortedrl.training.resources import Log, Resources, read_resources
from sortedrl.training.rewards import Rewards, RewardSource
from sortedrl.training.rollout_samples import line_of, sampled
from sortedrl.training.run_dir import RunFolder, replace_folder
from sortedrl.training.same_problems import problem_digests, why_other_problems
from sortedrl.training.settings import TrainSettings, schedule_of
from sortedrl.training.shuffled_rewards import RewardPool, shuffled
from sortedrl.training.signals import Interrupted, interruptible
from sortedrl.training.skipped_steps import SkippedSteps


class NothingLearned(UserError, RuntimeError):
    """A run that ended without a single update."""


class TrainingRun:
    """What it opens is closed by `to_close`, so that also a run that cannot start leaves no worker and no server."""

    def __init__(
        self,
        settings: TrainSettings,
        folder: RunFolder,
        resources: Resources,
        console: RunConsole,
        to_close: ExitStack,
    ) -> None:
        self.settings = settings
        self.folder = folder
        self.resources = resources
        self.console = console
        self.metrics = Metrics()
        self.sampling = Sampling(temperature=settings.temperature)
        self.trackers = to_close.enter_context(closing(Trackers(console.log)))
        # First of what takes time: its workers start meanwhile.
        self.rewards = to_close.enter_context(closing(Rewards(settings, resources, settings.scoring)))
        embedded = settings.engine == "embedded"
        self.has_plain_copy = settings.lora_rank > 0 or (embedded and settings.gradient_checkpointing)
        self.engine_shares_model = embedded and not self.has_plain_copy
        self.plain_model = resources.model
        if self.has_plain_copy:  # another engine has weights of its own: the copy is for the export, off the GPU
            self.plain_model = copy_on(resources.model.device if embedded else torch.device("cpu"), resources.model)
        self.learner = Learner(resources.model, learner_settings_of(settings))
        engine = to_close.enter_context(closing(self._engine()))
        self.checked = self._checked(engine)
        self.engine: EngineBase = self.checked or engine
        self.rewards.require_ready()
        self.reward_pool = RewardPool(settings.seed)  # for `shuffle_rewards`
        self.training_rewards = self._training_rewards()
        self.evaluation_rewards = self.rewards.source()
        self.batched = Batched(self.metrics)
        to_close.callback(self.batched.flush)
        self.log = EventLog(self.batched)
        self.controller = Controller(
            self.engine,
            Prompts(resources.train, epochs=settings.epochs, seed=settings.seed),
            self.training_rewards.scorer,
            schedule_of(settings),
            sampling=self.sampling,
            log=self.log,
            environments=self.training_rewards.environments,
            max_updates=settings.updates,
            stream_to=self._streamed_learner(),
        )
        self.rejections = self._rejection_watch()
        self.skipped_steps = SkippedSteps(settings.steps_per_update, settings.learning_rate, console.log)
        train, held_out = map(problem_digests, (resources.train, self._held_out()))
        self.problem_digests = {"train": train, "held_out": held_out}
        self.before: Evaluation | None = None
        self.evaluated: tuple[int, Evaluation] | None = None  # the last time, after how many updates
        self.best: tuple[float, str] | None = None  # held-out score, checkpoint's name
        self.saved: tuple[Any, ...] | None = None  # the progress that the newest checkpoint holds
        self.seconds_before = 0.0  # of earlier parts of a resumed run
        self.began = time.perf_counter()
        require_login(settings.tracker)
        if settings.prometheus_port is not None:
            endpoint = Endpoint(settings.prometheus_port)
            self.trackers.add(endpoint)
            console.log(f"metrics at {endpoint.url}")

    def _engine(self) -> EngineBase:
        settings, resources = self.settings, self.resources
        return engine_of(
            settings,
            self.plain_model,
            resources.tokenizer,
            resources.eos_token_ids,
            dtype=str(dtype_of(settings)).removeprefix("torch."),
            seed=settings.seed,
            beside_learner=True,
        )

    def _streamed_learner(self) -> Accumulate | StreamedLearner | None:
        if not self.settings.stream:
            return None
        if self.settings.stream_sms is None:
            return self.learner.accumulate
        return SharedGpuLearner(self.learner, some_sms(self.settings.stream_sms, self.resources.model.device))

    def _checked(self, engine: EngineBase) -> CheckedWeights | None:
        """An engine with its own copy of the weights gets them now, and is checked at every weight update."""
        if self.settings.engine == "embedded":
            return None
        checked = checked_engine(engine, self.settings, self.resources.train, self.learner.logprobs_of)
        checked.update_weights(self.learner.weights(), 0)
        return checked

    def show(self) -> None:
        """From now on the console shows the run. Its folder must be there: before that its name may change."""
        self.batched.sinks.append(self.console.begin(self.metrics, str(self.folder.path), self.updates_in_all))

    def _training_rewards(self) -> RewardSource:
        source = self.rewards.source()
        return shuffled(source, self.reward_pool) if self.settings.shuffle_rewards else source

    def _rejection_watch(self) -> RejectionWatch:
        return RejectionWatch(
            self.controller.schedule.rollouts_needed,
            max_fraction=self.settings.max_rejected_fraction,
            log=self.console.log,
        )

    def resume(self, saved: checkpoint.Checkpoint) -> None:
        """Go back to a checkpoint: later events stay in the log behind a mark, and no metric counts them."""
        state, log = saved.controller, self.console.log
        if (reason := why_other_problems(saved, self.resources.train, self._held_out())) is not None:
            fix = "Restore the data of the run, or start a new one."
            raise ConfigurationError("resume", str(self.folder.path), reason, fix)
        mark = CheckpointMark.of(state)
        recovered = self.folder.recover_events(mark, self.controller.first_event(), log)
        self.learner.load_state_dict(saved.learner)
        self.engine.update_weights(self._weights(), state["version"])
        for event in consistent(recovered.events):
            for sink in self.log.sinks:
                sink(event)
        write = self._write_events()
        write.roll_back(recovered)
        self.folder.drop_lines_after("metrics.jsonl", state["updates"], log)
        self.folder.drop_lines_after("rollouts.jsonl", state["updates"], log)
        for line in filter(is_metrics_line, self.folder.lines("metrics.jsonl")):
            self.console.line(line, old=True)
        self.controller.restore(state, last_time=recovered.last_time)
        self.before = Evaluation(tuple(saved.notes["before_ids"]), tuple(map(tuple, saved.notes["before"])))
        self.best = tuple(saved.notes["best"]) if saved.notes["best"] else None
        self.seconds_before = saved.notes["seconds"]
        self.reward_pool.recent = saved.notes.get("recent_rewards", [])  # older versions did not save them
        self.saved = self._progress()
        checkpoint.restore_random(saved.random)

    def run(self) -> dict[str, Any]:
        """Train to the end, or to an interrupt; returns the summary, whose `interrupted` is True after an interrupt."""
        self.log.sinks.append(self.rejections)  # only now: a resumed run first replays its old events
        if self.before is None:
            self._write_events()
            self.before = self._evaluate(0)
            self.learner.set_initial_rewards(self.before.rewards)
            self._save(0)
        with interruptible(self.controller) as signals:
            for batch in self.controller:
                self._update(batch)
            done = self.controller.updates
            try:
                signals.interrupt_at_once()
                return self._finish(done)
            except Interrupted:
                self._save(done)
                return {"interrupted": True, "updates": done, "folder": str(self.folder.path)}

    def _update(self, batch: Batch) -> None:
        settings, done = self.settings, batch.update + 1
        stats = self._step(batch)
        self.controller.publish(self._weights())
        evaluates = settings.eval_every > 0 and done % settings.eval_every == 0
        self._record(batch, stats | self._weight_update(is_due=evaluates or self.controller.harvest_is_used_up))
        self.skipped_steps.check(done, stats)
        if evaluates:
            self._evaluate(done)
        if settings.checkpoint_every and done % settings.checkpoint_every == 0:
            self._save(done)

    def _weight_update(self, *, is_due: bool) -> dict[str, float]:
        """Metrics of this update's weight update; none if a later update of the same harvest makes it."""
        if is_due:
            self.controller.update_engine()
        if self.controller.engine_is_behind or self.checked is None:
            return {}
        return {
            "weight_update_seconds": self.checked.weight_update_seconds,
            "weight_difference": self.checked.last_difference,
        }

    def _step(self, batch: Batch) -> dict[str, float]:
        def step() -> dict[str, float]:
            return self.learner.step(batch.rollouts, batch.version, batch.place_in_cohort)

        if self.settings.overlap:
            return self.controller.carry_on_during(step)
        self.engine.sleep()
        return step()

    def _weights(self) -> Any:
        return None if self.engine_shares_model else self.learner.weights()

    def _finish(self, done: int) -> dict[str, Any]:
        if not done:
            raise NothingLearned(
                f"no update was made: {self.metrics.run_metrics().rejected} rollouts were rejected, "
                f"{self.rejections.most_frequent()}. `sortedrl report {self.folder.path}` lists all reasons"
            )
        self.folder.require_in_place()
        if self.evaluated is not None and self.evaluated[0] == done:
            after = self.evaluated[1]
        else:
            self.folder.drop_evaluation(done)  # a run that is resumed after its last update has only its mean
            after = self._evaluate(done)
        self._save(done)
        self._export()
        assert self.before is not None
        difference = paired_difference(self.before.correct, after.correct)
        run_metrics = self.metrics.run_metrics()
        summary = {
            "interrupted": False,
            "folder": str(self.folder.path),
            "mode": self.settings.mode,
            "seed": self.settings.seed,
            "updates": done,
            "seconds": self._seconds(),
            "score_before": mean_at_k(self.before.correct)._asdict(),
            "score_after": mean_at_k(after.correct)._asdict(),
            "gain": difference._asdict(),
            "bottleneck": bottleneck(run_metrics.wall_parts),
            "metrics": asdict(run_metrics),
        }
        self.folder.write("summary.json", summary)
        self.console.log(bottleneck_line(run_metrics.wall_parts))
        return summary

    def _export(self) -> None:
        """The trained model in Hugging Face format. LoRA is merged, by way of the plain copy; the adapter is beside
        it."""
        if self.has_plain_copy:
            device = self.plain_model.device  # one weight at a time: merged ones may not fit beside the others
            copy_weights(self.plain_model, {name: weight.to(device) for name, weight in self.learner.weights()})

        def save_model(folder: Path) -> None:
            self.plain_model.save_pretrained(folder)
            self.resources.tokenizer.save_pretrained(folder)

        replace_folder(self.folder.path / "model", save_model)
        if self.settings.lora_rank:
            adapter = self.folder.path / "adapter"
            base = model_named(self.settings.model, self.settings.task)
            replace_folder(adapter, lambda folder: self.learner.save_adapter(folder, base))
            self.console.log(f"LoRA adapter in {adapter} (peft format), merged weights in {self.folder.path / 'model'}")

    # Output

    def _write_events(self) -> EventFile:
        stream = self.folder.stream("events.jsonl")
        write = EventFile(stream)
        self.batched.flush()  # what was read from the file is not written again
        self.batched.sinks += [write, kept_readable(stream)]
        return write

    def _seconds(self) -> float:
        return self.seconds_before + time.perf_counter() - self.began

    def _held_out(self) -> tuple[Prompt, ...]:
        return self.resources.held_out[: self.settings.eval_problems]

    def _evaluate(self, done: int) -> Evaluation:
        """Held-out score of the weights after `done` updates; the engine gets them first."""
        self.controller.update_engine()
        self.controller.mark_phase("evaluation")
        watch = self._rejection_watch()
        found = evaluate(
            self.engine,
            self._held_out(),
            self.evaluation_rewards.scorer,
            environments=self.evaluation_rewards.environments,
            samples=self.settings.eval_samples,
            limits=self.controller.schedule,
            sampling=self.sampling,
            seed=self.settings.eval_seed,
            on_progress=self.console.evaluating,
            watch=watch,
        )
        if notice := unscored_notice(watch):
            self.console.log(notice)
        self._record_evaluation(done, found)
        self.evaluated = (done, found)
        return found

    def _record_evaluation(self, done: int, found: Evaluation) -> None:
        score = mean_at_k(found.correct)
        line: dict[str, Any] = {"update": done, "seconds": self._seconds(), "held_out": score._asdict()}
        if self.settings.eval_samples > 1:
            line["pass_at_k"] = pass_at_k(found.correct, self.settings.eval_samples)._asdict()
        if found.parts:
            line["held_out_parts"] = dict(found.parts)
        self.folder.append("metrics.jsonl", line)
        self.trackers.line(line)
        self.console.line(line)
        has_turns = self.evaluation_rewards.environments is not None
        parts = "; " + ", ".join(f"{name} {value:.2f}" for name, value in found.parts.items()) if has_turns else ""
        self.console.log(
            f"held-out score after {_updates(done)}: {score.value:.3f} [{score.low:.3f}, {score.high:.3f}]"
            f" ({len(found.correct)} problems{parts})"
        )

    def _record(self, batch: Batch, stats: dict[str, float]) -> None:
        self.folder.require_in_place()
        self.batched.flush()
        run_metrics = self.metrics.snapshot()
        done = batch.update + 1
        rewards = [rollout.reward or 0.0 for rollout in batch]
        line = {
            "update": done,
            "updates_in_all": self.updates_in_all,
            "seconds": self._seconds(),
            "version": batch.version,
            "rollouts": len(batch),
            "tokens": batch.tokens,
            "reward": fmean(rewards),
            "correct": fmean(float((rollout.detail or {}).get("correct", False)) for rollout in batch),
            "length": batch.tokens / len(batch),
            **{name: getattr(run_metrics, name) for name in ("bubble", "idle", "goodput", "waste")},
            "run_staleness_mean": run_metrics.staleness_mean,
            "rejected": run_metrics.rejected,
            "reward_parts": mean_parts((rollout.detail or {}).get("parts", {}) for rollout in batch),
            "scoring_backlog": self.training_rewards.scorer.pending,
            **({"rejected_most": run_metrics.rejected_most} if run_metrics.rejected else {}),
            **stats,
        }
        self.folder.append("metrics.jsonl", line)
        for rollout in sampled(batch, self.settings.save_rollouts):
            self.folder.append("rollouts.jsonl", line_of(rollout, done, self.resources.tokenizer))
        self.trackers.line(line)
        self.console.line(line)

    @cached_property
    def updates_in_all(self) -> int:
        controller, settings = self.controller, self.settings
        possible = updates_in_all(controller.strategy, controller.schedule, len(self.resources.train), settings.epochs)
        return possible if settings.updates is None else min(possible, settings.updates)

    def _save(self, done: int) -> None:
        """Write a checkpoint, unless the newest one holds the same state."""
        self.controller.mark_phase("checkpoint")
        self._note_best(done)
        self.batched.flush()
        self.folder.flush()
        if self.saved == self._progress():
            return
        assert self.before is not None
        notes = {
            "before": self.before.correct,
            "before_ids": self.before.problem_ids,
            "problems": self.problem_digests,
            "recent_rewards": self.reward_pool.recent,
            "best": self.best,
            "seconds": self._seconds(),
            "settings": as_json(self.settings),  # config.json may be damaged
        }
        checkpoint.save(self.folder.checkpoints, done, self.learner.state_dict(), self.controller.state(), notes)
        self.saved = self._progress()
        best = self.folder.checkpoints / self.best[1] if self.best else None
        checkpoint.remove_old(self.folder.checkpoints, self.settings.keep_checkpoints, also_keep=best)

    def _progress(self) -> tuple[Any, ...]:
        """The state that decides whether a new checkpoint would differ from the last one."""
        c = self.controller
        return c.updates, c.version, c.harvests, self.best

    def _note_best(self, done: int) -> None:
        """The best checkpoint. An evaluation between two checkpoints does not count: its weights are not saved."""
        if self.evaluated is not None and self.evaluated[0] == done:
            score = mean_at_k(self.evaluated[1].correct).value
            if self.best is None or score > self.best[0]:
                self.best = (score, f"update-{done:06d}")


def _updates(count: int) -> str:
    return f"{count} update{'' if count == 1 else 's'}"


def train(settings: TrainSettings, log: Log, console: RunConsole | None = None) -> dict[str, Any]:
    """`console` shows the run; without one, there is one log line per update."""
    torch.manual_seed(settings.seed)
    folder = RunFolder.unused(settings) if settings.resume is None else RunFolder(settings.resume)
    with closing(folder):
        try:
            return _train_in(folder, settings, log, console or PlainConsole(log))
        except torch.OutOfMemoryError as error:
            raise out_of_memory_at_start(error, settings) from error


def _train_in(folder: RunFolder, settings: TrainSettings, log: Log, console: RunConsole) -> dict[str, Any]:
    resumed: checkpoint.Checkpoint | None = None
    if settings.resume is not None:
        folder.open_to_resume(settings, log)
        for place in (folder.path, folder.checkpoints):
            checkpoint.clean_up(place)
        resumed = checkpoint.load_newest_intact(folder.checkpoints, log)
    resources = read_resources(settings, log)
    set_threads(settings, resources.model)
    with ExitStack() as to_close:
        run = TrainingRun(settings, folder, resources, console, to_close)
        if resumed is None:
            folder.create(settings, log)
        run.show()
        log(f"run folder {folder.path}")
        log(f"{len(resources.train)} problems, {_updates(run.updates_in_all)}, mode {settings.mode}")
        if notice := learning_rate_notice(settings, resources.model.num_parameters()):
            log(notice)
        if resumed is not None:
            run.resume(resumed)
            log(f"resumed after {_updates(resumed.controller['updates'])}, from {resumed.path}")
        for name in settings.tracker:
            run.trackers.add(open_tracker(name, folder.path, as_json(settings)))
        try:
            with console, closing(to_close), folder.removal_explained():  # closing may log: the console ends last
                return run.run()
        except torch.OutOfMemoryError as error:
            raise out_of_memory(error, settings, folder.path) from error
        except (EngineDied, WeightsDiffer, TooManyRejected) as error:
            raise type(error)(f"{error}. From the last checkpoint: sortedrl train --resume {folder.path}") from error
