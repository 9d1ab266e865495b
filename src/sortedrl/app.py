"""Wires a run together: model, task, engine, scheduler, learner, and the run folder (run_folder.py)."""

from __future__ import annotations

import copy
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sortedrl.config import Compare, Evaluate, ModelSettings, Train
from sortedrl.core.controller import Batch, Controller
from sortedrl.core.engine import Engine, Failed, Finished, Request, Sampling, Tokens
from sortedrl.core.events import EventLog, JsonLines, RolledBack
from sortedrl.core.hashing import mixed
from sortedrl.core.prompts import Prompts
from sortedrl.core.rollout import Prompt, Rollout
from sortedrl.core.schedule import ConfigurationError
from sortedrl.core.scoring import Scored, Scorer
from sortedrl.core.strategy import updates_left
from sortedrl.engines.embedded import EmbeddedEngine
from sortedrl.learner import checkpoint
from sortedrl.learner.learner import Learner
from sortedrl.materials import Materials, Say, end_tokens, read_materials
from sortedrl.observe.metrics import Figures, Metrics
from sortedrl.run_folder import RunFolder, refuse_changes
from sortedrl.tasks.evaluation import Evaluation, mean_at_k, paired_difference, pass_at_k
from sortedrl.tasks.scoring import BackgroundScorer, DirectScorer, judge
from sortedrl.tasks.task import Verdict

Judge = Callable[[Rollout], Verdict]


# Evaluation


def evaluate(
    engine: Engine, prompts: Sequence[Prompt], score: Judge, *, samples: int, budget: int, sampling: Sampling, seed: int
) -> Evaluation:
    """Samples every problem, with the same noise at every call: two evaluations can be paired."""
    rollouts = {
        i * samples + j: Rollout(i * samples + j, prompt, j, 0, mixed(seed, i, j), 0)
        for i, prompt in enumerate(prompts)
        for j in range(samples)
    }
    engine.submit([Request(r.id, r.prompt, (), budget, r.seed, sampling) for r in rollouts.values()])
    correct = [[False] * samples for _ in prompts]
    left = len(rollouts)
    while left:
        for change in engine.poll():
            if isinstance(change, Tokens):
                rollouts[change.id].append(change.segment)
            elif isinstance(change, Finished | Failed):
                left -= 1
                if isinstance(change, Finished):
                    correct[change.id // samples][change.id % samples] = _is_correct(score, rollouts[change.id])
    return Evaluation(tuple(prompt.id for prompt in prompts), tuple(map(tuple, correct)))


def _is_correct(score: Judge, rollout: Rollout) -> bool:
    try:
        return score(rollout).correct
    except Exception:  # a reward that raises on one response counts as wrong there
        return False


def embedded_engine(
    settings: ModelSettings, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> EmbeddedEngine:
    try:
        return EmbeddedEngine(
            model,
            slots=settings.slots,
            eos_token_ids=end_tokens(model, tokenizer),
            max_length=settings.max_prompt_tokens + settings.max_response_tokens,
            tokenizer=tokenizer,
        )
    except ValueError as error:
        raise ConfigurationError(
            "max_response_tokens", settings.max_response_tokens, str(error), "Lower it, or max_prompt_tokens."
        ) from None


# Training


class TrainingRun:
    def __init__(self, settings: Train, folder: RunFolder, materials: Materials, say: Say) -> None:
        self.settings = settings
        self.folder = folder
        self.materials = materials
        self.say = say
        self.metrics = Metrics()
        self.sampling = Sampling(temperature=settings.temperature)
        self.judge = judge(materials.task, materials.tokenizer)
        self.engine_shares_model = settings.lora_rank == 0 and not settings.gradient_checkpointing
        self.engine_model = materials.model if self.engine_shares_model else copy.deepcopy(materials.model)
        self.learner = Learner(materials.model, settings.learner_settings())
        self.engine = embedded_engine(settings, self.engine_model, materials.tokenizer)
        self.scorer = self._scorer()
        self.log = EventLog(self.metrics)
        self.controller = Controller(
            self.engine,
            Prompts(materials.train, epochs=settings.epochs, seed=settings.seed),
            self.scorer,
            settings.schedule(),
            sampling=self.sampling,
            log=self.log,
            max_updates=settings.updates,
        )
        self.before: Evaluation | None = None
        self.best: tuple[float, str] | None = None  # held-out score, checkpoint's name
        self.seconds_before = 0.0  # of earlier parts of a resumed run
        self.began = time.perf_counter()

    def _scorer(self) -> Scorer:
        score: Scorer = (
            DirectScorer(self.judge)
            if self.settings.scoring == "at-once"
            else BackgroundScorer(self.judge, limit_seconds=self.settings.score_limit_seconds)
        )
        return ShuffledRewards(score, self.settings.seed) if self.settings.shuffle_rewards else score

    def resume(self, saved: checkpoint.Checkpoint) -> None:
        """Go back to a checkpoint: later events stay in the log behind a mark, and no figure counts them."""
        events = self.folder.events()
        state = saved.controller
        self.learner.load_state_dict(saved.learner)
        self.engine.load(self._weights(), state["version"])
        void = len(events) - state["events"]
        last_time = max((event.at for event in events), default=0.0)
        self.metrics.fold(events[: state["events"]])
        self._write_events()
        self.log.sinks[-1](RolledBack(last_time, void))
        self.folder.drop_lines_after("metrics.jsonl", state["updates"])
        self.folder.drop_lines_after("rollouts.jsonl", state["updates"])
        self.controller.restore(state, last_time=last_time)
        self.before = Evaluation(tuple(saved.notes["before_ids"]), tuple(map(tuple, saved.notes["before"])))
        self.best = tuple(saved.notes["best"]) if saved.notes["best"] else None
        self.seconds_before = saved.notes["seconds"]

    def run(self) -> dict[str, Any]:
        """Train to the end, or to an interrupt; returns the summary. `interrupted` in it says which."""
        if self.before is None:
            self._write_events()
            self.before = self._evaluate(0)
            self._save(0)
        with _interruptible(self.controller) as was_interrupted:
            for batch in self.controller:
                self._update(batch)
            done = self.controller.situation.updates
            if was_interrupted():
                self._save(done)
                self.folder.close()
                return {"interrupted": True, "updates": done, "folder": str(self.folder.path)}
        return self._finish(done)

    def _update(self, batch: Batch) -> None:
        settings, done = self.settings, batch.update + 1
        stats = self.learner.step(batch.rollouts, batch.version, batch.update % settings.updates_per_cohort())
        self.controller.publish(self._weights())
        self._record(batch, stats)
        if settings.eval_every and done % settings.eval_every == 0:
            self._evaluate(done)
        if settings.checkpoint_every and done % settings.checkpoint_every == 0:
            self._save(done)

    def _weights(self) -> Any:
        return None if self.engine_shares_model else self.learner.weights()

    def _finish(self, done: int) -> dict[str, Any]:
        after = self._evaluate(done)
        self._save(done)
        self._export()
        assert self.before is not None
        difference = paired_difference(self.before.correct, after.correct)
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
            "figures": asdict(self.metrics.figures()),
        }
        self.folder.write("summary.json", summary)
        self.folder.close()
        return summary

    def _export(self) -> None:
        """The trained model in Hugging Face format; LoRA is merged, by way of the engine's plain copy."""
        self.engine.load(self._weights(), self.controller.situation.version)
        self.engine_model.save_pretrained(self.folder.path / "model")
        self.materials.tokenizer.save_pretrained(self.folder.path / "model")

    # What is written down

    def _write_events(self) -> None:
        self.log.sinks.append(JsonLines(self.folder.stream("events.jsonl")))

    def _seconds(self) -> float:
        return self.seconds_before + time.perf_counter() - self.began

    def _evaluate(self, done: int) -> Evaluation:
        self.controller.mark_phase("evaluation")
        held_out = self.materials.held_out[: self.settings.eval_problems]
        found = evaluate(
            self.engine,
            held_out,
            self.judge,
            samples=self.settings.eval_samples,
            budget=self.settings.max_response_tokens,
            sampling=self.sampling,
            seed=self.settings.eval_seed,
        )
        score = mean_at_k(found.correct)
        line: dict[str, Any] = {"update": done, "seconds": self._seconds(), "held_out": score._asdict()}
        if self.settings.eval_samples > 1:
            line["pass_at_k"] = pass_at_k(found.correct, self.settings.eval_samples)._asdict()
        self.folder.append("metrics.jsonl", line)
        self.say(
            f"held-out score after {done} updates: {score.value:.3f} [{score.low:.3f}, {score.high:.3f}]"
            f" ({len(held_out)} problems)"
        )
        if self.best is None or score.value > self.best[0]:
            self.best = (score.value, f"update-{done:06d}")
        return found

    def _record(self, batch: Batch, stats: dict[str, float]) -> None:
        figures = self.metrics.figures()
        done = batch.update + 1
        rewards = [rollout.reward or 0.0 for rollout in batch]
        line = {
            "update": done,
            "seconds": self._seconds(),
            "version": batch.version,
            "rollouts": len(batch),
            "tokens": batch.tokens,
            "reward": fmean(rewards),
            "correct": fmean(float((rollout.detail or {}).get("correct", False)) for rollout in batch),
            "length": batch.tokens / len(batch),
            **{name: getattr(figures, name) for name in ("bubble", "idle", "goodput", "waste")},
            "rejected": figures.rejected,
            **stats,
        }
        self.folder.append("metrics.jsonl", line)
        self._write_rollouts(batch, done)
        self.say(self._progress_line(line, figures))

    def _write_rollouts(self, batch: Batch, done: int) -> None:
        wanted = max(1, min(self.settings.save_rollouts, len(batch)))
        for place in range(wanted if self.settings.save_rollouts else 0):
            rollout = batch.rollouts[place * (len(batch) - 1) // max(1, wanted - 1)]
            self.folder.append(
                "rollouts.jsonl",
                {
                    "update": done,
                    "rollout": rollout.id,
                    "prompt": rollout.prompt.id,
                    "question": rollout.prompt.payload.question,
                    "response": self.materials.tokenizer.decode(rollout.tokens),
                    "reward": rollout.reward,
                    "detail": rollout.detail,
                    "truncated": rollout.truncated,
                    "segments": [[segment.version, len(segment)] for segment in rollout.segments],
                },
            )

    def _progress_line(self, line: dict[str, Any], figures: Figures) -> str:
        total = self.total_updates()
        done = line["update"]
        eta = (self._seconds() - self.seconds_before) / max(1, done) * (total - done)
        return (
            f"update {done}/{total}  reward {line['reward']:+.2f}  correct {line['correct']:.0%}  "
            f"length {line['length']:.0f}  bubble {figures.bubble:.1%}  goodput {figures.goodput:,.0f} tok/s  "
            f"waste {figures.waste:.0%}  staleness {figures.staleness_mean:.2f}  "
            f"mismatch {line.get('mismatch_kl', 0.0):.1e}  ETA {int(eta) // 60}:{int(eta) % 60:02d}"
        )

    def total_updates(self) -> int:
        rollouts = len(self.materials.train) * self.settings.epochs * self.settings.rollouts_per_prompt
        possible = updates_left(rollouts, self.settings.rollouts_per_update)
        return possible if self.settings.updates is None else min(possible, self.settings.updates)

    def _save(self, done: int) -> None:
        self.controller.mark_phase("checkpoint")
        self.folder.flush()
        assert self.before is not None
        notes = {
            "before": self.before.correct,
            "before_ids": self.before.problem_ids,
            "best": self.best,
            "seconds": self._seconds(),
        }
        checkpoint.save(self.folder.checkpoints, done, self.learner.state_dict(), self.controller.state(), notes)
        best = self.folder.checkpoints / self.best[1] if self.best else None
        checkpoint.remove_old(self.folder.checkpoints, self.settings.keep_checkpoints, also_keep=best)


class ShuffledRewards:
    """A control: every rollout is given the reward of another one, so that there is nothing to learn."""

    def __init__(self, scorer: Scorer, seed: int, pool: int = 256) -> None:
        self._scorer = scorer
        self._seed = seed
        self._pool = pool
        self._seen: list[float] = []

    @property
    def pending(self) -> int:
        return self._scorer.pending

    def submit(self, rollout: Rollout) -> None:
        self._scorer.submit(rollout)

    def collect(self) -> list[Scored]:
        return [self._shuffled(scored) for scored in self._scorer.collect()]

    def wait(self, timeout_seconds: float) -> None:
        self._scorer.wait(timeout_seconds)

    def _shuffled(self, scored: Scored) -> Scored:
        if scored.reward is None:
            return scored
        self._seen = [*self._seen[-self._pool :], scored.reward]
        other = mixed(self._seed, scored.rollout_id, scored.attempt) % len(self._seen)
        return scored._replace(reward=self._seen[other])


@contextmanager
def _interruptible(controller: Controller) -> Iterator[Callable[[], bool]]:
    """The first Ctrl-C ends the run in order, the second at once."""
    seen: list[int] = []

    def on_signal(number: int, frame: Any) -> None:
        if seen:
            raise KeyboardInterrupt
        seen.append(number)
        controller.interrupt()

    previous = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(seen)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


# The commands


def train(settings: Train, say: Say) -> dict[str, Any]:
    torch.manual_seed(settings.seed)
    if settings.threads:
        torch.set_num_threads(settings.threads)
    resumed: checkpoint.Checkpoint | None = None
    if settings.resume is not None:
        folder = RunFolder(settings.resume)
        refuse_changes(settings, folder)
        resumed = checkpoint.load(checkpoint.newest(folder.checkpoints))
    else:
        folder = RunFolder.unused(settings)
    materials = read_materials(settings, say)
    run = TrainingRun(settings, folder, materials, say)
    if resumed is None:
        folder.create(settings)
    say(f"run folder {folder.path}")
    say(f"{len(materials.train)} problems, {run.total_updates()} updates, mode {settings.mode}")
    if resumed is not None:
        run.resume(resumed)
        say(f"resumed after {resumed.controller['updates']} updates, from {resumed.path}")
    return run.run()


def compare(settings: Compare, say: Say) -> list[dict[str, Any]]:
    """One run for each mode and seed; modes alternate, so that a slow spell of the machine meets them all."""
    folder = settings.out or Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-compare"
    summaries = []
    for seed in settings.seeds:
        for mode in settings.modes:
            say(f"--- {mode}, seed {seed}")
            summaries.append(train(settings.of(mode, seed, folder / f"{mode}-seed{seed}"), say))
            if summaries[-1]["interrupted"]:
                raise KeyboardInterrupt
    return summaries


def evaluate_model(settings: Evaluate, say: Say) -> dict[str, Any]:
    if settings.threads:
        torch.set_num_threads(settings.threads)
    materials = read_materials(settings, say)
    engine = embedded_engine(settings, materials.model, materials.tokenizer)
    began = time.perf_counter()
    found = evaluate(
        engine,
        materials.held_out[: settings.eval_problems],
        judge(materials.task, materials.tokenizer),
        samples=settings.eval_samples,
        budget=settings.max_response_tokens,
        sampling=Sampling(temperature=settings.temperature),
        seed=settings.eval_seed,
    )
    return {
        "model": settings.model,
        "task": settings.task,
        "problems": len(found.problem_ids),
        "samples": settings.eval_samples,
        "mean_at_k": mean_at_k(found.correct)._asdict(),
        "pass_at_k": pass_at_k(found.correct, settings.eval_samples)._asdict(),
        "seconds": time.perf_counter() - began,
    }
