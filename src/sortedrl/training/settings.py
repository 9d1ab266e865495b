"""The settings of `sortedrl train` and `sortedrl eval`: a model, a task, sampling, and for training the run."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from sortedrl.core.configuration import ConfigurationError
from sortedrl.core.group_filter import EQUAL_REWARDS
from sortedrl.core.parts import strategy_and_filter
from sortedrl.core.schedule import Schedule
from sortedrl.core.strategies.registry import strategy_named
from sortedrl.core.streaming import check_can_stream
from sortedrl.engines.registry import ENGINES, SERVERS, check_available, factory_named
from sortedrl.engines.settings import EngineSettings, check_engine
from sortedrl.learner.settings import (
    AlgorithmSetting,
    LearnerFlags,
    LearningRate,
    WarmupUpdates,
    learner_settings_from,
    require_streamable,
)
from sortedrl.models import check_model_path
from sortedrl.observe.trackers import require_packages
from sortedrl.settings.base import OptionTexts, Settings, as_json, literal, plain_reason
from sortedrl.settings.schedule import (
    Oversubscribe,
    RolloutsPerPrompt,
    ScheduleSettings,
    schedule_from,
    score_wait_seconds,
)
from sortedrl.tasks.registry import check_name as check_task_name
from sortedrl.tasks.worker_process import MAX_LIMIT_SECONDS

# Settings that may change when a run is resumed: they extend it, name a place, or fit it to another machine. Those of
# the learner's memory, its compilation and streaming change the rounding of gradients, nothing else. Engines differ by
# rounding, too. `slots` changes the schedule, as its mode allows: with more of them, partial modes have staler tokens.
# `dtype` may be named instead of auto, which depends on the device; the learner refuses another one than that of its
# state.
MAY_CHANGE_ON_RESUME = frozenset(
    {"updates", "epochs", "eval_every", "checkpoint_every", "keep_checkpoints", "save_rollouts", "threads"}
    | {"resume", "out", "score_limit_seconds", "reward_workers", "max_rejected_fraction", "max_filtered_fraction"}
    | {"tracker", "prometheus_port"}
    | {"tokens_per_micro_batch", "gradient_checkpointing", "recompute_above_tokens", "compile_layers"}
    | {"stream", "stream_sms", "device", "dtype"}
    | {"engine", "engine_urls", "engine_options", "slots"}
)

IN_THIS_PROCESS = frozenset(ENGINES) - frozenset(SERVERS)


class ModelSettings(Settings, EngineSettings):
    """A model, a task, and how responses are sampled and scored."""

    help_group: ClassVar[str] = "model and task"

    model: str = "built-in"
    """folder or hub name of a Hugging Face causal LM, or built-in"""
    task: str = "knights_and_knaves:small"
    """knights_and_knaves[:VARIANT], math:PRESET, reasoning_gym:NAME, verifiers:TASKSET, or your.module:name"""
    task_options: OptionTexts = {}  # noqa: RUF012 (pydantic copies it)
    """options of the task"""
    tools: tuple[str, ...] = ()
    """functions that responses may call: your.module:function, or calculator"""
    data: Path | None = None
    """data file or folder of the task, if it reads one"""
    max_prompt_tokens: Annotated[int, Field(ge=1)] = 256
    """longer prompts are skipped and counted"""
    max_response_tokens: Annotated[int, Field(ge=1)] = 320
    """responses are cut here"""
    max_turns: Annotated[int | None, Field(ge=1)] = None
    """turns per response, if the task has an environment or tools; default: no limit"""
    max_context_tokens: Annotated[int | None, Field(ge=1)] = None
    """limit of prompt, turns and observations together; default: max_prompt_tokens plus max_response_tokens"""
    temperature: Annotated[float, Field(ge=0)] = 1.0
    """sampling temperature"""
    eval_problems: Annotated[int, Field(ge=1)] = 500
    """held-out problems per evaluation"""
    eval_samples: Annotated[int, Field(ge=1)] = 1
    """samples per problem, for mean@k and pass@k"""
    eval_seed: int = 12345
    """sampling seed of evaluations"""
    reward_workers: Annotated[int, Field(ge=0, le=1024)] = 2
    """processes for your own reward function or environment; 0: in this process, where it can block the run"""
    score_limit_seconds: Annotated[float, Field(gt=0, le=MAX_LIMIT_SECONDS)] = 30.0
    """time limit of your own reward function, or of one turn of your environment"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda if there is one"""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: bfloat16 on cuda"""
    threads: Annotated[int, Field(ge=0, le=1024)] = 0
    """CPU threads of PyTorch; 0: chosen by model size and load"""

    def longest_context(self) -> int:
        return self.max_context_tokens or self.max_prompt_tokens + self.max_response_tokens

    def resolved_task_options(self) -> dict[str, Any]:
        options: dict[str, Any] = {key: literal(value) for key, value in self.task_options.items()}
        return options | ({"data": self.data} if self.data is not None else {})

    def check(self) -> None:
        """Reading the model and the task finds the other mistakes."""
        super().check()
        check_engine(self)


class EvalSettings(ModelSettings):
    """Score a model on held-out problems of a task: mean@k and pass@k with confidence intervals."""


class TrainSettings(ModelSettings, ScheduleSettings, LearnerFlags):
    """Train a model with RL on one machine, with any schedule."""

    file_only: ClassVar[frozenset[str]] = frozenset(
        {"clip_low", "clip_high", "kl_coefficient", "entropy_coefficient", "warmup_updates", "steps_per_update"}
        | {"tokens_per_micro_batch", "eval_samples", "eval_seed", "keep_checkpoints", "save_rollouts", "device"}
        | {"score_limit_seconds", "max_rejected_fraction", "shuffle_rewards", "oversubscribe"}
        | {"scale_learning_rate_by_ess", "gradient_cosine", "recompute_above_tokens", "compile_layers"}
        | {"prometheus_port", "epochs", "temperature", "gradient_checkpointing", "stream_sms"}
        | {"ratio_level", "importance_cap", "aggregation", "max_filtered_fraction", "revisit_filtered"}
        | {"advantage_baseline"}
        | {"truncated_rollouts", "weight_decay", "max_grad_norm"}
        | {"critic_learning_rate", "gamma", "gae_lambda"}
    )
    why_absent: ClassVar[Mapping[str, str]] = {"reuse_kv_cache": "write --engine-options reuse_kv_cache True"}

    mode: str = "partial+elevator"
    """schedule; `sortedrl simulate` compares them; your.module:Class is your own"""
    updates: Annotated[int | None, Field(ge=1)] = 60
    """stop after this many updates; none: train all epochs"""
    out: Path | None = None
    """run folder; default: runs/TIME-MODE-SEED"""
    resume: Path | None = None
    """run folder of an interrupted run to continue"""
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] = 0
    """seed of data order and sampling"""
    stream: bool = False
    """the learner works on the coming update while the rest of it is generated; gains most when it has its own GPU"""
    stream_sms: Annotated[int | None, Field(ge=1)] = None
    """with stream and engine vllm on one GPU: while the engine drains, the learner uses this many of its SMs, such as
    96 of 132"""
    rollouts_per_prompt: RolloutsPerPrompt = 8
    oversubscribe: Oversubscribe = None
    filter_groups: str | None = None
    """dynamic sampling: which complete groups are trained on, equal_rewards or your.module:name; the scheduler refills
    what is filtered"""
    revisit_filtered: Annotated[float, Field(gt=0, le=1)] = 1.0
    """probability that a prompt whose last group was filtered is loaded in the next epoch"""
    max_filtered_fraction: Annotated[float, Field(ge=0, le=1)] = Schedule().max_filtered_fraction
    """stop if more than this fraction of recent rollouts was filtered"""
    epochs: Annotated[int, Field(ge=1)] = 100
    """passes over the prompts"""
    eval_every: Annotated[int, Field(ge=0)] = 0
    """updates between evaluations; 0: only before and after training"""
    checkpoint_every: Annotated[int, Field(ge=0)] = 20
    """updates between checkpoints; 0: only before and after training"""
    keep_checkpoints: Annotated[int, Field(ge=1)] = 2
    """checkpoints to keep; the best one is kept too"""
    save_rollouts: Annotated[int, Field(ge=0)] = 8
    """responses per update to write to rollouts.jsonl"""
    scoring: Literal["at-once", "background"] | None = None
    """background: while the engine generates; at-once: the run waits, so that it can be repeated exactly; default:
    at-once for built-in tasks, background for your own"""
    max_rejected_fraction: Annotated[float, Field(ge=0, le=1)] = 0.5
    """stop if more than this fraction of recent rollouts was rejected"""
    shuffle_rewards: bool = False
    """control experiment: rewards are shuffled, so the score must not rise"""
    tracker: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()
    """also send metrics there; metrics.jsonl is always written"""
    prometheus_port: Annotated[int | None, Field(ge=0, le=65535)] = None
    """serve metrics for Prometheus on this port of localhost; 0: any free port"""
    algorithm: AlgorithmSetting = "grpo"
    learning_rate: LearningRate = 3e-4
    warmup_updates: WarmupUpdates = 2

    def check(self) -> None:
        super().check()
        if self.resume is not None and self.out is not None and self.out.resolve() != self.resume.resolve():
            why = f"a resumed run continues in its own folder, {self.resume}"
            raise ConfigurationError("out", str(self.out), why, "Leave it out.")
        strategy_and_filter(schedule_of(self))
        learner_settings_from(self, self.mode)
        if self.overlap:
            _check_overlap(self)
        if self.stream:
            _check_streaming(self)
        _check_shared_gpu(self)
        if self.wants_whole_groups() and self.rollouts_per_prompt < 2:
            why = "rewards are compared within a group, and a group of one has nothing to compare"
            fix = "Set it to 2 or more, or use --algorithm reinforce++."
            raise ConfigurationError("rollouts_per_prompt", self.rollouts_per_prompt, why, fix)
        if self.temperature == 0:
            why = "greedy responses of a group are all equal, so there is nothing to learn"
            raise ConfigurationError("temperature", 0, why, "Use 1.0.")
        require_packages(self.tracker)


def check_what_must_exist(settings: ModelSettings, *, import_user_code: bool = False, asks_engine: bool = True) -> None:
    """Refuse a model, an engine or a built-in task that is not there, before PyTorch is imported, which takes seconds.

    `import_user_code`: also import an engine and a task of your own, without creating them. `asks_engine`: its package
    must be installed, and its servers must answer; a dry run may be made on another machine.
    """
    check_model_path(settings.model)
    if asks_engine:
        check_available(settings.engine, settings.engine_urls)
    if import_user_code and settings.engine not in ENGINES:
        factory_named(settings.engine)
    try:
        options = settings.resolved_task_options()
        check_task_name(settings.task, options, tools=settings.tools, import_user_code=import_user_code)
    except (ValueError, TypeError, OSError, ImportError) as error:
        raise task_error(settings, str(error)) from None


def task_error(settings: ModelSettings, reason: str) -> ConfigurationError:
    """Blames the data or the tools if the reason is about them, else the task."""
    about_data = settings.data is not None and (str(settings.data) in reason or "'data'" in reason)
    key, value = ("data", str(settings.data)) if about_data else ("task", settings.task)
    if reason.startswith("the tool "):
        key, value = "tools", ", ".join(settings.tools)
    return ConfigurationError(key, value, reason.removesuffix("."), "See docs/tasks.md.")


def cannot_be_sent(settings: ModelSettings, error: ValueError) -> ConfigurationError:
    """The task, to a worker process."""
    fix = "Or set --reward-workers 0: its reward then runs in this process, which it can block."
    return ConfigurationError("task", settings.task, f"the task {error}", fix)


def schedule_of(settings: TrainSettings) -> Schedule:
    whole_groups = settings.wants_whole_groups() or settings.filter_groups == EQUAL_REWARDS
    return schedule_from(settings, whole_groups=whole_groups, **limits_of(settings))


def limits_of(settings: ModelSettings) -> dict[str, Any]:
    """Those of a schedule, for training and for evaluation."""
    return {
        "max_response_tokens": settings.max_response_tokens,
        "max_turns": settings.max_turns,
        "max_context_tokens": settings.longest_context(),
        "max_prompt_tokens": None,  # longer prompts are skipped when the task is read
        "score_wait_seconds": score_wait_seconds(settings.score_limit_seconds),
        "max_environment_seconds": max(Schedule().max_environment_seconds, 4 * settings.score_limit_seconds),
    }


def _check_overlap(settings: TrainSettings) -> None:
    if settings.engine in IN_THIS_PROCESS:
        raise _shared_device(settings, "overlap")
    if settings.max_staleness is None:
        reason = "tokens that are sampled while the learner steps are stale: a bound must say how stale they may be"
        raise ConfigurationError("overlap", True, reason, "Set --max-staleness too, for example 4.")


def _shared_device(settings: TrainSettings, key: str, other_fix: str = "") -> ConfigurationError:
    reason = f"engine {settings.engine} runs in this process and would share the device with the learner"
    return ConfigurationError(key, True, reason, f"Use --engine {' or '.join(SERVERS)}{other_fix}, or leave it out.")


def _check_streaming(settings: TrainSettings) -> None:
    check_can_stream(strategy_named(settings.mode))
    if settings.shuffle_rewards:
        reason = "rewards are shuffled when an update is complete, and the learner would have used them before"
        raise ConfigurationError("stream", True, reason, "Leave out stream or shuffle_rewards.")
    if settings.engine in IN_THIS_PROCESS and settings.stream_sms is None:
        share = ", or set stream_sms in a TOML file (docs/trainer.md)" * (settings.engine == "vllm")
        raise _shared_device(settings, "stream", share)
    try:
        require_streamable(learner_settings_from(settings, settings.mode))
    except ValueError as error:
        raise ConfigurationError("stream", True, str(error), "See docs/trainer.md.") from None


def _check_shared_gpu(settings: TrainSettings) -> None:
    if settings.stream_sms is None:
        return
    strategy = strategy_named(settings.mode)
    needs = {
        "stream = true": settings.stream,
        "--engine vllm, which runs in this process beside a learner's model of its own": settings.engine == "vllm",
        "a GPU (device is cpu)": settings.device != "cpu",
        "an engine that never sleeps (leave enable_sleep_mode out)": not (
            settings.resolved_engine_options().get("enable_sleep_mode")
        ),
        f"a mode with a cohort gate, such as baseline or partial ({settings.mode} keeps all slots busy)": not (
            strategy.keeps_tokens and not strategy.gated and settings.oversubscribe is None
        ),
    }
    if missing := [need for need, is_met in needs.items() if not is_met]:
        reason = "on the engine's GPU the learner works only while the engine drains"
        fix = f"It needs {' and '.join(missing)}. Or leave it out."
        raise ConfigurationError("stream_sms", settings.stream_sms, reason, fix)


def saved_settings(folder: Path) -> dict[str, Any]:
    """The settings of a run. Those that no longer exist are left out: a run of an older version has them."""
    config = folder / "config.json"
    try:
        settings = json.loads(config.read_text(encoding="utf-8"))
        if not isinstance(settings, dict):
            raise ValueError("not a JSON object")
        if "model_type" in settings:
            raise ValueError("it is that of a model, not of a run")
        return {key: value for key, value in settings.items() if key in TrainSettings.model_fields}
    except (OSError, ValueError, RecursionError) as error:
        damage = plain_reason(error)
    around = next((run for run in folder.parents[:2] if (run / "checkpoints").is_dir()), None)
    fix = "Name a run folder, as in runs/NAME."
    if around is not None:
        fix = f"Name its run, {around}: it continues from its newest checkpoint (older ones: docs/reliability.md)."
    reason = f"no run can be read there ({config.name}: {damage})"
    raise ConfigurationError("resume", str(folder), reason, fix)


def changed_on_resume(settings: TrainSettings, saved: dict[str, Any]) -> str:
    """What a resumed run changes in its settings. Refuses a change of those that must stay."""
    if refused := changes_refused(settings, saved):
        key, free = next(iter(refused)), ", ".join(sorted(MAY_CHANGE_ON_RESUME - {"out", "resume"}))
        why = f"the run in {settings.resume} was started with other settings ({listed(refused)})"
        fix = f"Leave these flags out, or start a new run; only {free} may change."
        raise ConfigurationError(key, as_json(settings)[key], why, fix)
    changes = changes_of(settings, saved)
    return listed({key: change for key, change in changes.items() if key not in ("out", "resume")})


def changes_refused(settings: TrainSettings, saved: dict[str, Any]) -> dict[str, list[Any]]:
    changes = changes_of(settings, saved)
    return {key: change for key, change in changes.items() if key not in MAY_CHANGE_ON_RESUME}


def changes_of(settings: TrainSettings, saved: dict[str, Any]) -> dict[str, list[Any]]:
    """The old and the new value of each setting that differs."""
    defaults = as_json(type(settings)())  # for a run of an older version that has no such setting
    before = defaults | saved
    return {key: [before[key], value] for key, value in as_json(settings).items() if before[key] != value}


def listed(changes: dict[str, list[Any]]) -> str:
    return ", ".join(f"{key}: {old!r} -> {new!r}" for key, (old, new) in changes.items())
