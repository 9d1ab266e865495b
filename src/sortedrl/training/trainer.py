"""Wires a run together: model, task, engine, scheduler, learner, signals, and the run folder (training/run_dir.py)."""

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict
from functools import cached_property
from typing import Any

import torch

from sortedrl.core.configuration import ConfigurationError
from sortedrl.core.controller import Batch, Controller
from sortedrl.core.engine import EngineBase, EngineDied, Sampling
from sortedrl.core.errors import UserError
from sortedrl.core.events import SettingsChanged
from sortedrl.core.group_filter import FilterFailed, TooManyFiltered
from sortedrl.core.loading import updates_in_all
from sortedrl.core.prompts import Prompts
from sortedrl.core.rejections import RejectionWatch, TooManyRejected
from sortedrl.core.rollout import Prompt
from sortedrl.core.strategies.registry import strategy_named
from sortedrl.core.streaming import Accumulate, StreamedLearner
from sortedrl.core.wording import counted
from sortedrl.engines.checked_weights import CheckedWeights, WeightsDiffer
from sortedrl.engines.speculative import LoggedDrafts, why_no_drafts
from sortedrl.learner import checkpoint
from sortedrl.learner.learner import Learner
from sortedrl.learner.shared_gpu import SharedGpuLearner, some_sms
from sortedrl.observe.console import Log, PlainConsole
from sortedrl.observe.trackers import Endpoint, open_tracker, require_login
from sortedrl.observe.wall_clock import bottleneck, bottleneck_line
from sortedrl.settings.base import as_json
from sortedrl.settings.slots import too_many_slots
from sortedrl.tasks.evaluation import Evaluation, mean_at_k, paired_difference
from sortedrl.training.build import (
    OutOfMemory,
    PlainModel,
    SkippedSteps,
    learner_settings_of,
    learning_rate_notice,
    out_of_memory,
    out_of_memory_at_start,
    set_threads,
)
from sortedrl.training.engine import checked_engine, engine_of, require_own_device
from sortedrl.training.evaluate import evaluate, unscored_notice
from sortedrl.training.resources import Resources, problem_digests, read_resources, why_other_problems
from sortedrl.training.rewards import Rewards, RewardShuffler
from sortedrl.training.run_dir import RunFolder
from sortedrl.training.run_record import RunRecord
from sortedrl.training.settings import TrainSettings, changes_of, changes_refused, listed, schedule_of


class NothingLearned(UserError, RuntimeError):
    """A run that ended without a single update."""


class TrainingRun:
    """What it opens is closed by `to_close`, so that also a run that cannot start leaves no worker and no server."""

    def __init__(
        self,
        settings: TrainSettings,
        folder: RunFolder,
        resources: Resources,
        console: PlainConsole,
        to_close: ExitStack,
    ) -> None:
        self.settings = settings
        self.folder = folder
        self.resources = resources
        self.console = console
        self.record = RunRecord(folder, console, resources.tokenizer, rollouts_per_update=settings.save_rollouts)
        to_close.callback(self.record.trackers.close)
        # First of what takes time: its workers start meanwhile.
        self.rewards = to_close.enter_context(Rewards(settings, resources, settings.scoring))
        self.plain_model = PlainModel(settings, resources.model)
        self.learner = Learner(resources.model, learner_settings_of(settings))
        engine = to_close.enter_context(closing(self._engine()))
        require_own_device(engine, settings)
        self.checked = self._checked(engine)
        self.engine: EngineBase = self.checked or engine
        self.rewards.require_ready()
        self.reward_shuffler = RewardShuffler(settings.seed)  # for `shuffle_rewards`
        self.training_rewards = self.rewards.source()
        self.evaluation_rewards = self.rewards.source()
        to_close.callback(self.record.flush)
        self.prompts = Prompts(resources.train, epochs=settings.epochs, seed=settings.seed)
        self.controller = Controller(
            self.engine,
            self.prompts,
            self.training_rewards.scorer,
            schedule_of(settings),
            sampling=Sampling(temperature=settings.temperature),
            log=self.record.log,
            environments=self.training_rewards.environments,
            max_updates=settings.updates,
            stream_to=self._streamed_learner(),
        )
        self.drafts = LoggedDrafts(self.engine)
        self.rejections = self._rejection_watch()
        self.has_noted_cut = False
        self.skipped_steps = SkippedSteps(settings.steps_per_update, settings.learning_rate, console.log)
        prompts = {"train": resources.train, "held_out": self._held_out()}
        self.problem_digests = {part: problem_digests(prompts[part]) for part in prompts}
        self.before: Evaluation | None = None
        self.evaluated: tuple[int, Evaluation] | None = None  # the last time, after how many updates
        self.best: tuple[float, str] | None = None  # held-out score, checkpoint's name
        self.saved: tuple[Any, ...] | None = None  # the progress that the newest checkpoint holds
        require_login(settings.tracker)
        if settings.prometheus_port is not None:
            endpoint = Endpoint(settings.prometheus_port)
            self.record.trackers.add(endpoint)
            console.log(f"metrics at {endpoint.url}")

    def _engine(self) -> EngineBase:
        settings, resources = self.settings, self.resources
        why = why_no_drafts(settings.resolved_engine_options(), strategy_named(settings.mode))
        if why is not None and settings.engine == "vllm":
            self.console.log(why)
            drafts = {"speculative_config", "draft_up_to"}
            options = {key: text for key, text in settings.engine_options.items() if key not in drafts}
            settings = settings.model_copy(update={"engine_options": options})
        return engine_of(settings, resources, self.plain_model.module, seed=settings.seed, beside_learner=True)

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

    def _rejection_watch(self) -> RejectionWatch:
        return RejectionWatch(
            self.controller.schedule.rollouts_needed,
            max_fraction=self.settings.max_rejected_fraction,
            log=self.console.log,
        )

    def resume(self, saved: checkpoint.Checkpoint) -> None:
        """Go back to a checkpoint. What may refuse it comes before the log is recovered."""
        state, notes = saved.controller, saved.notes
        if (reason := why_other_problems(saved, self.resources.train, self._held_out())) is not None:
            fix = "Restore the data of the run, or start a new one."
            raise ConfigurationError("resume", str(self.folder.path), reason, fix)
        self.learner.load_state_dict(saved.learner)
        self.engine.update_weights(self._weights(), state["version"])
        self.record.record(self.controller, state)
        self.record.roll_back(state["updates"], notes["seconds"])
        # Since this checkpoint. Those of config.json are too new: the log of what came after it does not count.
        changes = changes_of(self.settings, notes["settings"])
        if changes := {key: change for key, change in changes.items() if key not in ("out", "resume", "slots")}:
            self.controller.mark(SettingsChanged, changes)
        self.before = Evaluation(tuple(notes["before_ids"]), tuple(map(tuple, notes["before"])))
        self.best = tuple(notes["best"]) if notes["best"] else None
        self.reward_shuffler.recent = notes["recent_rewards"]
        self.saved = self._progress()
        checkpoint.restore_random(saved.random)

    def run(self) -> dict[str, Any]:
        """Train to the end, or to an interrupt; returns the summary, whose `interrupted` is True after an interrupt."""
        self.record.log.sinks.append(self.rejections)  # only now: a resumed run first replays its old events
        if self.before is None:
            self.record.record(self.controller)
            self.before = self._evaluate(0)
            self.learner.set_initial_rewards(self.before.rewards)
            self._save(0)
        with interruptible(self.controller) as interrupt_at_once:
            for batch in self.controller:
                self._update(batch)
            done = self.controller.updates
            self._note_end_of_data(done)
            try:
                interrupt_at_once()
                return self._finish(done)
            except Interrupted:
                self._save(done)
                return {"interrupted": True, "updates": done, "folder": str(self.folder.path)}

    def _note_end_of_data(self, done: int) -> None:
        """Fewer updates than wanted: the epochs are too few, rollouts were rejected, or updates were larger."""
        settings = self.settings
        expected = self.updates_in_all if settings.updates is None else settings.updates
        if 0 < done < expected and not (self.prompts.remaining or self.controller.live):
            data = f"{counted(settings.epochs, 'epoch')} of {counted(len(self.resources.train), 'problem')}"
            fix = f"For more, set epochs to more than {settings.epochs} in a --config file"
            self.console.log(f"the data ended after {counted(done, 'update')}: {data}. {fix}")

    def _update(self, batch: Batch) -> None:
        settings, done = self.settings, batch.update + 1
        if settings.shuffle_rewards:
            self.reward_shuffler.shuffle(batch)
        self.drafts.mark(self.controller)
        stats = self._step(batch)
        self.controller.publish(self._weights())
        evaluates = settings.eval_every > 0 and done % settings.eval_every == 0
        stats |= self._weight_update(is_due=evaluates or self.controller.harvest_is_used_up)
        self.record.update(batch, stats, scoring_backlog=self.training_rewards.scorer.pending)
        self._note_cut_responses(batch)
        self.skipped_steps.check(done, stats)
        if evaluates:
            self._evaluate(done)
        if settings.checkpoint_every and done % settings.checkpoint_every == 0:
            self._save(done)

    def _note_cut_responses(self, batch: Batch) -> None:
        cut, count = sum(rollout.truncated for rollout in batch.rollouts), len(batch.rollouts)
        if 2 * cut > count and not self.has_noted_cut:
            self.has_noted_cut = True
            limit = f"--max-response-tokens {self.settings.max_response_tokens} or another limit"
            self.console.log(f"{cut} of the {count} responses of update {batch.update + 1} were cut by {limit}")

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
        if self.settings.overlap:
            return self.controller.carry_on_during(lambda: self.learner.step(batch))
        self.engine.sleep_until_update()
        return self.learner.step(batch)

    def _weights(self) -> Any:
        return self.plain_model.weights_for_engine(self.learner)

    def _finish(self, done: int) -> dict[str, Any]:
        if not done:
            raise NothingLearned(
                f"no update was made. Rejected: {counted(self.record.metrics.run_metrics().rejected, 'rollout')}, "
                f"{self.rejections.most_frequent()}. `sortedrl report {self.folder.path}` lists all reasons"
            )
        self.folder.require_in_place()
        if self.evaluated is not None and self.evaluated[0] == done:
            after = self.evaluated[1]
        else:
            self.record.drop_evaluation(done)  # a run that is resumed after its last update has only its mean
            after = self._evaluate(done)
        self._save(done)
        self.plain_model.export(self.learner, self.resources.tokenizer, self.folder.path, self.console.log)
        assert self.before is not None
        difference = paired_difference(self.before.correct, after.correct)
        run_metrics = self.record.metrics.run_metrics()
        summary = {
            "interrupted": False,
            "folder": str(self.folder.path),
            "mode": self.settings.mode,
            "seed": self.settings.seed,
            "updates": done,
            "seconds": self.record.seconds,
            "score_before": mean_at_k(self.before.correct)._asdict(),
            "score_after": mean_at_k(after.correct)._asdict(),
            "gain": difference._asdict(),
            "bottleneck": bottleneck(run_metrics.wall_parts),
            "metrics": asdict(run_metrics),
        }
        self.folder.write("summary.json", summary)
        self.console.log(bottleneck_line(run_metrics.wall_parts))
        return summary

    def _held_out(self) -> tuple[Prompt, ...]:
        return self.resources.held_out[: self.settings.eval_problems]

    def _evaluate(self, done: int) -> Evaluation:
        """Held-out score of the weights after `done` updates; the engine gets them first."""
        self.controller.update_engine()
        self.controller.mark_phase("evaluation")
        watch = self._rejection_watch()
        rewards, on_progress, version = self.evaluation_rewards, self.console.evaluating, self.controller.version
        found = evaluate(self.engine, self._held_out(), rewards, self.settings, watch, on_progress, version=version)
        if notice := unscored_notice(watch):
            self.console.log(notice)
        has_turns = rewards.environments is not None
        self.record.evaluation(done, found, samples=self.settings.eval_samples, has_turns=has_turns)
        self.evaluated = (done, found)
        return found

    @cached_property
    def updates_in_all(self) -> int:
        controller, settings = self.controller, self.settings
        possible = updates_in_all(controller.strategy, controller.schedule, len(self.resources.train), settings.epochs)
        return possible if settings.updates is None else min(possible, settings.updates)

    def _save(self, done: int) -> None:
        """Write a checkpoint, unless the newest one holds the same state."""
        self.controller.mark_phase("checkpoint")
        self._note_best(done)
        self.record.flush()
        self.folder.flush()
        if self.saved == self._progress():
            return
        assert self.before is not None
        notes = {
            "before": self.before.correct,
            "before_ids": self.before.problem_ids,
            "problems": self.problem_digests,
            "recent_rewards": self.reward_shuffler.recent,
            "best": self.best,
            "seconds": self.record.seconds,
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


def train(settings: TrainSettings, log: Log, console: PlainConsole | None = None) -> dict[str, Any]:
    """`console` shows the run; without one, there is one log line per update."""
    torch.manual_seed(settings.seed)
    folder = RunFolder.unused(settings) if settings.resume is None else RunFolder(settings.resume)
    with closing(folder):
        try:
            return _train_in(folder, settings, log, console or PlainConsole(log))
        except torch.OutOfMemoryError as error:
            raise out_of_memory_at_start(error, settings) from error


def _train_in(folder: RunFolder, settings: TrainSettings, log: Log, console: PlainConsole) -> dict[str, Any]:
    resumed: checkpoint.Checkpoint | None = None
    if settings.resume is not None:
        folder.open_to_resume(settings, log)
        for place in (folder.path, folder.checkpoints):
            checkpoint.clean_up(place)
        resumed = checkpoint.load_newest_intact(folder.checkpoints, log)
        if other := changes_refused(settings, resumed.notes["settings"]):
            raise checkpoint.unusable(resumed.path, f"it is that of another run ({listed(other)})")
    resources = read_resources(settings, log)
    set_threads(settings, resources.model)
    with ExitStack() as to_close:
        run = TrainingRun(settings, folder, resources, console, to_close)
        if resumed is None:
            folder.create(settings, log)
        run.record.show(run.updates_in_all)
        log(f"run folder {folder.path}")
        problems = counted(len(resources.train), "problem")
        log(f"{problems}, {counted(run.updates_in_all, 'update')}, mode {settings.mode}")
        if notice := learning_rate_notice(settings, resources.model.num_parameters()):
            log(notice)
        if notice := too_many_slots(settings.slots, run.controller.schedule.rollouts_needed):
            log(notice)
        if resumed is not None:
            with checkpoint.what_it_lacks(resumed.path):
                run.resume(resumed)
            folder.write("config.json", as_json(settings))  # only now: the engine started, and the state fits
            done = resumed.controller["updates"]
            log(f"resumed after {counted(done, 'update')}, from {resumed.path}")
            if settings.updates is not None and done >= settings.updates:
                log(f"no update is left to make: for more, set --updates to more than {done}")
        for name in settings.tracker:
            run.record.trackers.add(open_tracker(name, folder.path, as_json(settings)))
        from_checkpoint = f"From the last checkpoint: sortedrl train --resume {folder.path}"
        try:
            with console, closing(to_close), folder.removal_explained():  # closing may log: the console ends last
                return run.run()
        except torch.OutOfMemoryError as error:
            raise out_of_memory(error, settings, folder.path) from error
        except MemoryError as error:
            raise OutOfMemory(f"this process ran out of memory. {from_checkpoint}") from error
        except (EngineDied, WeightsDiffer, TooManyRejected, TooManyFiltered, FilterFailed) as error:
            raise type(error)(f"{error}. {from_checkpoint}") from error


class Interrupted(KeyboardInterrupt):
    """A signal asked the run to end; what it has learned is saved."""


@contextmanager
def interruptible(controller: Controller) -> Iterator[Callable[[], None]]:
    """SIGINT, SIGTERM and SIGHUP: the first one ends the run in order, the second at once.

    Call what it yields when the controller no longer listens: from then on, and if it was interrupted before, it is
    `Interrupted` that ends the run."""
    is_seen = is_at_once = False

    def receive(number: int, frame: Any) -> None:
        nonlocal is_seen
        if is_seen:
            raise KeyboardInterrupt
        is_seen = True
        controller.interrupt()
        if is_at_once:
            raise Interrupted

    def interrupt_at_once() -> None:
        nonlocal is_at_once
        is_at_once = True
        if is_seen:
            raise Interrupted

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup: the run is to outlive its terminal
        numbers.append(signal.SIGHUP)
    previous = {number: signal.signal(number, receive) for number in numbers}
    try:
        yield interrupt_at_once
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
