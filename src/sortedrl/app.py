"""Wires a run together: model, task, engine, scheduler, learner, and the run folder (run_folder.py)."""

from __future__ import annotations

import copy
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict
from functools import partial
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sortedrl.config import SERVERS, Compare, Evaluate, ModelSettings, Train, as_json
from sortedrl.core.controller import Batch, Controller
from sortedrl.core.engine import Engine, EngineDied, Failed, Finished, Request, Sampling, Tokens
from sortedrl.core.events import Batched, EventLog, JsonLines, RolledBack
from sortedrl.core.hashing import mixed
from sortedrl.core.prompts import Prompts
from sortedrl.core.rollout import Prompt, Rollout
from sortedrl.core.schedule import ConfigurationError
from sortedrl.core.scoring import Scored, Scorer
from sortedrl.core.strategy import updates_left
from sortedrl.cpu_threads import threads_here
from sortedrl.engine_choice import server_engine, vllm_engine
from sortedrl.engines.checked_weights import CheckedWeights, LogprobsOf, WeightsDiffer
from sortedrl.engines.embedded import EmbeddedEngine, copy_weights
from sortedrl.learner import checkpoint
from sortedrl.learner.learner import Learner
from sortedrl.learner.models import response_logprobs
from sortedrl.materials import Materials, Say, end_tokens, read_materials
from sortedrl.models import model_named
from sortedrl.observe.console import PlainConsole, RunConsole
from sortedrl.observe.metrics import Metrics
from sortedrl.observe.prometheus import Endpoint
from sortedrl.observe.trackers import Trackers, open_tracker, require_login
from sortedrl.observe.watch import kept_readable
from sortedrl.run_folder import RunFolder, refuse_changes
from sortedrl.tasks.evaluation import Evaluation, mean_at_k, paired_difference, pass_at_k
from sortedrl.tasks.scoring import BackgroundScorer, DirectScorer, judge
from sortedrl.tasks.task import Verdict

Judge = Callable[[Rollout], Verdict]
SHARE_OF_GPU_FOR_VLLM = 0.45  # where learner and engine share one: the learner needs the rest
PROBES = 4  # at least: prompts whose continuations show after each weight update whether engine and learner agree
PROBE_TOKENS = 16


# Evaluation


def evaluate(
    engine: Engine,
    prompts: Sequence[Prompt],
    score: Judge,
    *,
    samples: int,
    budget: int,
    sampling: Sampling,
    seed: int,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Evaluation:
    """Samples every problem, with the same noise at every call: two evaluations can be paired."""
    rollouts = {
        i * samples + j: Rollout(i * samples + j, prompt, j, 0, mixed(seed, i, j), 0)
        for i, prompt in enumerate(prompts)
        for j in range(samples)
    }
    engine.submit([Request(r.id, r.prompt, (), budget, r.seed, sampling) for r in rollouts.values()])
    correct = [[False] * samples for _ in prompts]
    rewards: list[float] = []
    left = len(rollouts)
    while left:
        for change in engine.poll():
            if isinstance(change, Tokens):
                rollouts[change.id].append(change.segment)
            elif isinstance(change, Finished | Failed):
                left -= 1
                on_progress(len(rollouts) - left, len(rollouts))
                verdict = _scored(score, rollouts[change.id]) if isinstance(change, Finished) else None
                if verdict is not None:
                    correct[change.id // samples][change.id % samples] = verdict.correct
                    rewards.append(verdict.reward)
    return Evaluation(tuple(prompt.id for prompt in prompts), tuple(map(tuple, correct)), tuple(rewards))


def _scored(score: Judge, rollout: Rollout) -> Verdict | None:
    try:
        return score(rollout)
    except Exception:  # a reward that raises on one response counts as wrong there
        return None


def engine_for(settings: ModelSettings, materials: Materials, model: PreTrainedModel, **vllm_defaults: Any) -> Engine:
    """The engine that the settings ask for. `model` is what the embedded one decodes with."""
    if settings.engine == "embedded":
        return embedded_engine(settings, model, materials.tokenizer)
    ends = end_tokens(materials.model, materials.tokenizer)
    if settings.engine != "vllm":
        return server_engine(settings, eos_token_ids=ends, tokenizer=materials.tokenizer)
    engine: Engine = vllm_engine(
        settings,
        model_named(settings.model),
        eos_token_ids=ends,
        max_length=settings.max_prompt_tokens + settings.max_response_tokens,
        tokenizer=materials.tokenizer,
        dtype=str(settings.torch_dtype()).removeprefix("torch."),
        **vllm_defaults,
    )
    return engine


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


def checked_engine(
    engine: Engine, settings: ModelSettings, prompts: Sequence[Prompt], logprobs_of: LogprobsOf
) -> CheckedWeights:
    """`engine` with the check of its weights. There is a probe for each server of a pool, which shares them evenly."""
    count = max(PROBES, len(settings.engine_urls))
    probes = [list(prompts[i % len(prompts)].tokens) for i in range(count)]
    tokens = min(PROBE_TOKENS, settings.max_response_tokens)
    return CheckedWeights(engine, logprobs_of, probes, tokens_per_probe=tokens)


# Training


class NothingLearnt(RuntimeError):
    """A run that came to its end without one update."""


class TrainingRun:
    def __init__(self, settings: Train, folder: RunFolder, materials: Materials, console: RunConsole) -> None:
        self.settings = settings
        self.folder = folder
        self.materials = materials
        self.console = console
        self.metrics = Metrics()
        self.sampling = Sampling(temperature=settings.temperature)
        self.judge = judge(materials.task, materials.tokenizer)
        embedded = settings.engine == "embedded"
        self.has_plain_copy = settings.lora_rank > 0 or (embedded and settings.gradient_checkpointing)
        self.engine_shares_model = embedded and not self.has_plain_copy
        self.plain_model = copy.deepcopy(materials.model) if self.has_plain_copy else materials.model
        self.learner = Learner(materials.model, settings.learner_settings())
        self.engine = self._engine()
        self.scorer = self._scorer()
        self.batched = Batched(self.metrics, console.begin(self.metrics, str(folder.path), self.total_updates()))
        self.log = EventLog(self.batched)
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
        self.evaluated: tuple[int, Evaluation] | None = None  # the last time, after how many updates
        self.best: tuple[float, str] | None = None  # held-out score, checkpoint's name
        self.seconds_before = 0.0  # of earlier parts of a resumed run
        self.began = time.perf_counter()
        self.trackers = Trackers(console.say)
        require_login(settings.tracker)
        if settings.prometheus_port is not None:
            endpoint = Endpoint(settings.prometheus_port)
            self.trackers.add(endpoint)
            console.say(f"metrics at {endpoint.url}")

    def _engine(self) -> Engine:
        """An engine outside of our own model is given the weights, and checked against the learner at every load."""
        settings, materials = self.settings, self.materials
        defaults = {"gpu_memory_utilization": SHARE_OF_GPU_FOR_VLLM, "seed": settings.seed}
        engine = engine_for(settings, materials, self.plain_model, **defaults)
        if settings.engine == "embedded":
            return engine
        checked = checked_engine(engine, settings, materials.train, self.learner.logprobs_of)
        checked.load(self.learner.weights(), 0)
        return checked

    def close(self) -> None:
        """End what the run has outside of its own process and memory."""
        self.batched.settle()
        self.folder.close()
        if isinstance(self.engine, CheckedWeights):
            self.engine.close()

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
        counted = events[: state["events"]]
        last_time = max((event.at for event in counted), default=0.0)
        for event in counted:
            for sink in self.log.sinks:
                sink(event)
        write = self._write_events()
        write(RolledBack(last_time, void))
        self.folder.drop_lines_after("metrics.jsonl", state["updates"])
        self.folder.drop_lines_after("rollouts.jsonl", state["updates"])
        for line in self.folder.lines("metrics.jsonl"):
            self.console.line(line, old=True)
        self.controller.restore(state, last_time=last_time)
        self.before = Evaluation(tuple(saved.notes["before_ids"]), tuple(map(tuple, saved.notes["before"])))
        self.best = tuple(saved.notes["best"]) if saved.notes["best"] else None
        self.seconds_before = saved.notes["seconds"]

    def run(self) -> dict[str, Any]:
        """Train to the end, or to an interrupt; returns the summary. `interrupted` in it says which."""
        if self.before is None:
            self._write_events()
            self.before = self._evaluate(0)
            self.learner.set_initial_rewards(self.before.rewards)
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
        stats = self._step(batch)
        self.controller.publish(self._weights())
        evaluates = settings.eval_every > 0 and done % settings.eval_every == 0
        self._record(batch, stats | self._weight_update(is_due=evaluates or self.controller.harvest_is_used_up))
        if evaluates:
            self._evaluate(done)
        if settings.checkpoint_every and done % settings.checkpoint_every == 0:
            self._save(done)

    def _weight_update(self, *, is_due: bool) -> dict[str, float]:
        """Metrics of this update's weight update; none if a later update of the same harvest makes it."""
        if is_due:
            self.controller.update_engine()
        if self.controller.engine_is_behind or not isinstance(self.engine, CheckedWeights):
            return {}
        return {"load_seconds": self.engine.load_seconds, "load_difference": self.engine.last_difference}

    def _step(self, batch: Batch) -> dict[str, float]:
        def step() -> dict[str, float]:
            place = batch.update % self.settings.updates_per_cohort()
            return self.learner.step(batch.rollouts, batch.version, place)

        if self.settings.overlap:
            return self.controller.carry_on_during(step)
        if isinstance(self.engine, CheckedWeights):
            self.engine.rest()
        return step()

    def _weights(self) -> Any:
        return None if self.engine_shares_model else self.learner.weights()

    def _finish(self, done: int) -> dict[str, Any]:
        if not done:
            raise NothingLearnt(
                f"no update was made: {self.metrics.figures().rejected} rollouts were rejected, "
                f"for reasons that `sortedrl report {self.folder.path}` lists"
            )
        after = self._evaluate(done) if self.evaluated is None or self.evaluated[0] != done else self.evaluated[1]
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
        """The trained model in Hugging Face format; LoRA is merged, by way of the plain copy."""
        if self.has_plain_copy:
            copy_weights(self.plain_model, dict(self.learner.weights()))
        self.plain_model.save_pretrained(self.folder.path / "model")
        self.materials.tokenizer.save_pretrained(self.folder.path / "model")

    # What is written down

    def _write_events(self) -> JsonLines:
        stream = self.folder.stream("events.jsonl")
        write = JsonLines(stream)
        self.batched.settle()  # what was read from the file is not written again
        self.batched.sinks += [write, kept_readable(stream)]
        return write

    def _seconds(self) -> float:
        return self.seconds_before + time.perf_counter() - self.began

    def _evaluate(self, done: int) -> Evaluation:
        """Held-out score of the weights after `done` updates, whatever the engine held until now."""
        self.controller.update_engine()
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
            on_progress=self.console.evaluating,
        )
        score = mean_at_k(found.correct)
        line: dict[str, Any] = {"update": done, "seconds": self._seconds(), "held_out": score._asdict()}
        if self.settings.eval_samples > 1:
            line["pass_at_k"] = pass_at_k(found.correct, self.settings.eval_samples)._asdict()
        self.folder.append("metrics.jsonl", line)
        self.trackers.line(line)
        self.console.line(line)
        self.console.say(
            f"held-out score after {done} updates: {score.value:.3f} [{score.low:.3f}, {score.high:.3f}]"
            f" ({len(held_out)} problems)"
        )
        self.evaluated = (done, found)
        return found

    def _record(self, batch: Batch, stats: dict[str, float]) -> None:
        self.batched.settle()
        figures = self.metrics.glance()
        done = batch.update + 1
        rewards = [rollout.reward or 0.0 for rollout in batch]
        line = {
            "update": done,
            "updates_in_all": self.total_updates(),
            "seconds": self._seconds(),
            "version": batch.version,
            "rollouts": len(batch),
            "tokens": batch.tokens,
            "reward": fmean(rewards),
            "correct": fmean(float((rollout.detail or {}).get("correct", False)) for rollout in batch),
            "length": batch.tokens / len(batch),
            **{name: getattr(figures, name) for name in ("bubble", "idle", "goodput", "waste")},
            "run_staleness_mean": figures.staleness_mean,
            "rejected": figures.rejected,
            **stats,
        }
        self.folder.append("metrics.jsonl", line)
        self._write_rollouts(batch, done)
        self.trackers.line(line)
        self.console.line(line)

    def _write_rollouts(self, batch: Batch, done: int) -> None:
        wanted = max(1, min(self.settings.save_rollouts, len(batch)))
        for place in range(wanted if self.settings.save_rollouts else 0):
            rollout = batch.rollouts[place * (len(batch) - 1) // max(1, wanted - 1)]
            response = str(self.materials.tokenizer.decode(rollout.tokens))
            self.folder.append(
                "rollouts.jsonl",
                {
                    "update": done,
                    "rollout": rollout.id,
                    "prompt": rollout.prompt.id,
                    "question": rollout.prompt.payload.question,
                    "response": response,
                    "reward": rollout.reward,
                    "detail": rollout.detail,
                    "truncated": rollout.truncated,
                    "segments": [[segment.version, len(segment)] for segment in rollout.segments],
                    "segment_ends": self._segment_ends(rollout, response),
                },
            )

    def _segment_ends(self, rollout: Rollout, response: str) -> list[int]:
        """Where each segment ends in the response, in characters."""
        inner = accumulate(map(len, rollout.segments[:-1]))
        return [*(len(self.materials.tokenizer.decode(rollout.tokens[:end])) for end in inner), len(response)]

    def total_updates(self) -> int:
        rollouts = len(self.materials.train) * self.settings.epochs * self.settings.rollouts_per_prompt
        possible = updates_left(rollouts, self.settings.rollouts_per_update)
        return possible if self.settings.updates is None else min(possible, self.settings.updates)

    def _save(self, done: int) -> None:
        self.controller.mark_phase("checkpoint")
        self._note_best(done)
        self.batched.settle()
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

    def _note_best(self, done: int) -> None:
        """Among those that are saved: what is evaluated between two checkpoints cannot be gone back to."""
        if self.evaluated is not None and self.evaluated[0] == done:
            score = mean_at_k(self.evaluated[1].correct).value
            if self.best is None or score > self.best[0]:
                self.best = (score, f"update-{done:06d}")


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


def set_threads(settings: ModelSettings, model: PreTrainedModel) -> None:
    """What is set; else, for a model on the CPU, what its size and the machine's load allow."""
    if settings.threads:
        torch.set_num_threads(settings.threads)
    elif settings.torch_device() == "cpu":
        torch.set_num_threads(threads_here(model.num_parameters()))


def train(settings: Train, say: Say, console: RunConsole | None = None) -> dict[str, Any]:
    """`console` shows the run; without one it says a line for each update."""
    torch.manual_seed(settings.seed)
    resumed: checkpoint.Checkpoint | None = None
    if settings.resume is not None:
        folder = RunFolder(settings.resume)
        refuse_changes(settings, folder)
        resumed = checkpoint.load(checkpoint.newest(folder.checkpoints))
    else:
        folder = RunFolder.unused(settings)
    materials = read_materials(settings, say)
    set_threads(settings, materials.model)
    run = TrainingRun(settings, folder, materials, console or PlainConsole(say))
    if resumed is None:
        folder.create(settings)
    say(f"run folder {folder.path}")
    say(f"{len(materials.train)} problems, {run.total_updates()} updates, mode {settings.mode}")
    if resumed is not None:
        run.resume(resumed)
        say(f"resumed after {resumed.controller['updates']} updates, from {resumed.path}")
    for name in settings.tracker:
        run.trackers.add(open_tracker(name, folder.path, as_json(settings)))
    try:
        with run.console, closing(run.trackers), closing(run):
            return run.run()
    except (EngineDied, WeightsDiffer) as error:
        raise type(error)(f"{error}. From the last checkpoint: sortedrl train --resume {folder.path}") from error


def compare(settings: Compare, say: Say, console: RunConsole | None = None) -> list[dict[str, Any]]:
    """One run for each mode and seed; modes alternate, so that a slow spell of the machine meets them all."""
    folder = settings.out or Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-compare"
    summaries = []
    for seed in settings.seeds:
        for mode in settings.modes:
            say(f"--- {mode}, seed {seed}")
            summaries.append(train(settings.of(mode, seed, folder / f"{mode}-seed{seed}"), say, console))
            if summaries[-1]["interrupted"]:
                raise KeyboardInterrupt
    return summaries


def evaluate_model(
    settings: Evaluate, say: Say, on_progress: Callable[[int, int], None] = lambda done, total: None
) -> dict[str, Any]:
    materials = read_materials(settings, say)
    set_threads(settings, materials.model)
    engine = engine_for(settings, materials, materials.model)
    held_out = materials.held_out[: settings.eval_problems]
    if settings.engine in SERVERS:  # whatever a server was started with or last given
        logprobs_of = partial(response_logprobs, materials.model)
        engine = checked_engine(engine, settings, held_out, logprobs_of)
        engine.load(materials.model.state_dict(), 0)
    began = time.perf_counter()
    found = evaluate(
        engine,
        held_out,
        judge(materials.task, materials.tokenizer),
        samples=settings.eval_samples,
        budget=settings.max_response_tokens,
        sampling=Sampling(temperature=settings.temperature),
        seed=settings.eval_seed,
        on_progress=on_progress,
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
