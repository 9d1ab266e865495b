"""The settings of each command, as one typed model per command. command_line.py reads them from flags and files."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, TypeVar

import pydantic
import tyro
from pydantic import BaseModel, ConfigDict, Field

from sortedrl.cli.old_names import refuse_old_engine_options
from sortedrl.core.schedule import ConfigurationError, Schedule
from sortedrl.core.strategies.registry import strategy_named
from sortedrl.engines.lengths import LengthOf, LognormalLengths, ReplayedLengths, read_lengths
from sortedrl.engines.step_time import PRESETS, StepTime, fit, read_points
from sortedrl.observe.trackers import require_packages
from sortedrl.studies.plan import Allowed
from sortedrl.studies.simulate import DECIDING_MODES, MODES
from sortedrl.studies.workload import Workload, with_mode

if TYPE_CHECKING:
    from sortedrl.studies.profile import Profile

Expectation = Literal["cold", "warm", "oracle"]
SLOTS = "requests that the engine decodes at once (vLLM max_num_seqs, SGLang max_running_requests)"
ROLLOUTS_PER_UPDATE = "rollouts that one update trains on"
PROMPTS_PER_COHORT = "prompts that are loaded together and trained on before the next ones are loaded"
ROLLOUTS_PER_PROMPT = "responses per prompt: the group of GRPO and RLOO"
OVERSUBSCRIBE = "cap on started rollouts, as a multiple of what the update needs; default: the mode's own"
MAX_STALENESS = "bound on staleness in versions, for partial modes; the scheduler waits to keep it"
Read = TypeVar("Read")


class InvalidSettings(Exception):
    """Carries a validation error past tyro, which would print it itself."""

    def __init__(self, error: pydantic.ValidationError) -> None:
        self.error = error


class Settings(BaseModel):
    """What all commands share."""

    file_only: ClassVar[frozenset[str]] = frozenset()  # rare settings: no flag, only a key of the TOML file
    positional: ClassVar[tuple[str, ...]] = ()
    not_for_this_command: ClassVar[frozenset[str]] = frozenset()  # inherited, but refused by `check`

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @pydantic.model_validator(mode="wrap")
    @classmethod
    def _refuse(cls, values: Any, validate: pydantic.ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return validate(values)
        except pydantic.ValidationError as error:
            raise InvalidSettings(error) from None

    def check(self) -> None:
        """Refuse settings that cannot work together."""

    config: Annotated[Path | None, Field(description="TOML file with settings; flags win over it")] = None
    json_output: Annotated[
        bool, tyro.conf.arg(name="json"), Field(alias="json", description="print one JSON object instead of tables")
    ] = False
    dry_run: Annotated[bool, Field(description="print the resolved settings and derived values, and run nothing")] = (
        False
    )


class WorkloadSettings(Settings):
    """A simulated workload and the schedule to try on it."""

    default_response_limit: ClassVar[int] = 8192

    lengths: Annotated[
        Path | None, Field(description="JSONL file of your own response lengths; default: drawn from a lognormal")
    ] = None
    median_length: Annotated[
        float, Field(gt=0, le=1e9, description="median of the drawn lengths in tokens; none is below 16")
    ] = 1273.7
    length_sd_between: Annotated[
        float, Field(ge=0, le=10, description="standard deviation of log length between prompts")
    ] = 0.8
    length_sd_within: Annotated[
        float, Field(ge=0, le=10, description="standard deviation of log length within a prompt")
    ] = 0.6
    prompt_tokens: Annotated[int, Field(ge=0, description="tokens per prompt")] = 128
    max_response_tokens: Annotated[
        int | None, Field(ge=1, description="cut responses here; default: the longest in --lengths, else 8192")
    ] = None
    slots: Annotated[int, Field(ge=1, description=SLOTS)] = 128
    rollouts_per_update: Annotated[int, Field(ge=1, description=ROLLOUTS_PER_UPDATE)] = 128
    prompts_per_cohort: Annotated[int, Field(ge=1, description=PROMPTS_PER_COHORT)] = 512
    rollouts_per_prompt: Annotated[int, Field(ge=1, description=ROLLOUTS_PER_PROMPT)] = 1
    whole_groups: Annotated[bool, Field(description="update on whole groups, as GRPO and RLOO need")] = False
    oversubscribe: Annotated[float | None, Field(description=OVERSUBSCRIBE)] = None
    max_staleness: Annotated[int | None, Field(description=MAX_STALENESS)] = None
    overlap: Annotated[
        bool, Field(description="the engine keeps generating while the learner steps; partial modes only")
    ] = False
    keep_seed: Annotated[
        bool, Field(description="a regenerated rollout draws the same length as the attempt that was aborted")
    ] = False
    step_time: Annotated[
        str,
        Field(
            description=f"{', '.join(PRESETS)}, a file from sortedrl profile, or a CSV of running,cached_tokens,seconds"
        ),
    ] = "h200-8b"
    prefill_seconds_per_token: Annotated[float | None, Field(ge=0, description="default: part of the step time")] = None
    kv_tokens: Annotated[
        int | None, Field(ge=1, description="KV cache capacity in tokens; requests beyond it are preempted")
    ] = None
    reuse_kv_cache: Annotated[
        bool, Field(description="keep the KV cache across weight updates (stale KV): resumed rollouts need no prefill")
    ] = False
    weight_update_seconds: Annotated[
        float | None, Field(ge=0, description="seconds per weight update; default: as measured by the profile, or 0")
    ] = None
    learner_seconds_per_update: Annotated[float, Field(ge=0, description="fixed part of a learner step")] = 0.0
    learner_seconds_per_token: Annotated[float, Field(ge=0, description="learner time per trained token")] = 0.0
    score_seconds: Annotated[float, Field(ge=0, description="seconds from the end of a rollout to its reward")] = 0.0
    seeds: Annotated[tuple[int, ...], Field(min_length=1, description="one simulated run per seed")] = (0,)

    def schedule(self) -> Schedule:
        """The schedule as set; `with_mode` adapts it to another mode and drops what that mode cannot honor."""
        return Schedule(
            mode="partial+elevator",
            rollouts_per_update=self.rollouts_per_update,
            prompts_per_cohort=self.prompts_per_cohort,
            rollouts_per_prompt=self.rollouts_per_prompt,
            whole_groups=self.whole_groups,
            oversubscribe=self.oversubscribe,
            max_staleness=self.max_staleness,
            overlap=self.overlap,
            max_response_tokens=self.response_limit(),
            keep_seed=self.keep_seed,
            score_wait_seconds=max(SCORE_WAIT_SECONDS, 2 * self.score_seconds),
            seed=self.seeds[0],
        )

    def workload(self, cohorts: int) -> Workload:
        return Workload(
            lengths=self.length_of(),
            step_time=self.resolved_step_time(),
            slots=self.slots,
            prompts=cohorts * self.prompts_per_cohort,
            prompt_tokens=self.prompt_tokens,
            kv_tokens=self.resolved_kv_tokens(),
            reuse_kv_cache=self.reuse_kv_cache,
            weight_update_seconds=self.resolved_weight_update_seconds(),
            learner_seconds_per_update=self.learner_seconds_per_update,
            learner_seconds_per_token=self.learner_seconds_per_token,
            score_seconds=self.score_seconds,
        )

    @cached_property
    def replayed_lengths(self) -> ReplayedLengths | None:
        if self.lengths is None:
            return None
        try:
            return read_lengths(self.lengths)
        except (OSError, ValueError) as error:
            raise ConfigurationError("lengths", str(self.lengths), plain_reason(error), _LENGTHS_FIX) from None

    def response_limit(self) -> int:
        """As set, or the longest response in the file of lengths, so that none of them is cut by default."""
        if self.max_response_tokens is not None:
            return self.max_response_tokens
        return self.default_response_limit if self.replayed_lengths is None else self.replayed_lengths.longest

    def lengths_cut(self) -> str | None:
        """A notice if the response limit cuts responses of the file of lengths."""
        if self.replayed_lengths is None or not (cut := self.replayed_lengths.longer_than(self.response_limit())):
            return None
        count = self.replayed_lengths.count
        return (
            f"max_response_tokens = {self.response_limit()} cuts {cut:,} of {count:,} responses ({cut / count:.1%}) in "
            f"{self.lengths}; the longest has {self.replayed_lengths.longest:,} tokens. Leave it out to cut none."
        )

    def length_of(self) -> LengthOf:
        if self.replayed_lengths is not None:
            return self.replayed_lengths
        return LognormalLengths(
            mu=math.log(self.median_length),
            between=self.length_sd_between,
            within=self.length_sd_within,
            limit=self.response_limit(),
        )

    def resolved_step_time(self) -> StepTime:
        found = PRESETS.get(self.step_time) or self._from_step_time_file(_fitted)
        if self.prefill_seconds_per_token is not None:
            found = found.scaled(per_prefill_token=self.prefill_seconds_per_token)
        return found

    def resolved_kv_tokens(self) -> int | None:
        """As set, or as measured by the profile."""
        profile = self._profile()
        return profile.kv_tokens if self.kv_tokens is None and profile is not None else self.kv_tokens

    def resolved_weight_update_seconds(self) -> float:
        """As set, or as measured by the profile."""
        profile = self._profile()
        found = (
            profile.weight_update_seconds
            if self.weight_update_seconds is None and profile is not None
            else self.weight_update_seconds
        )
        return found or 0.0

    def _profile(self) -> Profile | None:
        from sortedrl.studies import profile

        return self._from_step_time_file(profile.read) if self.step_time.endswith(".json") else None

    def _from_step_time_file(self, read: Callable[[Path], Read]) -> Read:
        try:
            return read(Path(self.step_time))
        except (OSError, ValueError) as error:
            near = difflib.get_close_matches(self.step_time, PRESETS, n=1)
            hint = f"Did you mean {near[0]}? " if near else ""
            raise ConfigurationError(
                "step_time", self.step_time, plain_reason(error), f"{hint}Presets: {', '.join(PRESETS)}."
            ) from None

    def check_context_fits(self) -> None:
        longest, kv_tokens = self.prompt_tokens + self.response_limit(), self.resolved_kv_tokens()
        if kv_tokens is not None and longest + 1 > kv_tokens:
            raise ConfigurationError(
                "kv_tokens",
                kv_tokens,
                f"one response at the limit needs {self.prompt_tokens} + {self.response_limit()} tokens",
                f"Set kv_tokens to {longest + 1} or more, or lower max_response_tokens.",
            )


class Simulate(WorkloadSettings):
    """Compare schedules on one simulated workload: what would I gain on my lengths?"""

    modes: Annotated[tuple[str, ...], Field(min_length=1, description="schedules to compare")] = DECIDING_MODES
    all_modes: Annotated[
        bool, tyro.conf.arg(name="all"), Field(description="every mode, each with cold, warm and oracle lengths")
    ] = False
    details: Annotated[bool, Field(description="more tables: parts of the bubble, staleness, waiting, prefill")] = False
    expectations: Annotated[
        tuple[Expectation, ...],
        Field(min_length=1, description="how well lengths are known in advance; the first one has the plain mode name"),
    ] = ("cold", "warm")
    cohorts: Annotated[int, Field(ge=1, description="length of each simulated run, in cohorts")] = 6
    updates: Annotated[int | None, Field(ge=1, description="stop after this many updates")] = None

    def modes_and_expectations(self) -> tuple[tuple[str, ...], tuple[Expectation, ...]]:
        return (MODES, ("cold", "warm", "oracle")) if self.all_modes else (self.modes, self.expectations)

    def check(self) -> None:
        if self.all_modes and self.modes != DECIDING_MODES:
            raise ConfigurationError("modes", self.modes, "--all has every mode", "Leave out --all or --modes.")
        for mode in self.modes_and_expectations()[0]:
            strategy_named(mode).check(with_mode(self.schedule(), mode))
        self.check_context_fits()


class PlanSettings(WorkloadSettings):
    """Recommend a mode, cohort size and oversubscription for a workload, or none if you do not need one."""

    expectation: Annotated[Expectation, Field(description="how well lengths are known in advance")] = "cold"
    cohorts: Annotated[int, Field(ge=1, description="length of each simulated run, in cohorts")] = 5
    max_cohort_updates: Annotated[
        int, Field(ge=1, description="largest cohort allowed, in updates; the paper found 8 harmful")
    ] = 4
    max_length_bias: Annotated[float, Field(ge=0, description="largest relative bias allowed in trained lengths")] = (
        0.02
    )
    max_staleness_mean: Annotated[float | None, Field(ge=0, description="largest mean staleness of a token")] = None

    def check(self) -> None:
        if self.oversubscribe is not None:
            raise ConfigurationError(
                "oversubscribe", self.oversubscribe, "plan tries its own caps", "Leave it out, or use simulate."
            )
        self.schedule()
        self.check_context_fits()

    def allowed(self) -> Allowed:
        return Allowed(self.max_length_bias, self.max_staleness_mean, self.max_cohort_updates)


SERVERS = ("vllm-server", "sglang")
SCORE_WAIT_SECONDS = Schedule().score_wait_seconds


# Options of our engines that are switches: any other text would count as true.
_SWITCHES = {"reuse_kv_cache", "enable_sleep_mode", "seeded", "weights_readable_by_all"}


class EngineChoice(Settings):
    """Which engine generates."""

    engine: Annotated[
        Literal["embedded", "vllm", "vllm-server", "sglang"],
        Field(description="embedded and vllm run in this process; vllm-server and sglang are running servers"),
    ] = "embedded"
    engine_urls: Annotated[tuple[str, ...], Field(description="URLs of running servers; several form one pool")] = ()
    engine_options: Annotated[
        dict[str, str], Field(description="options of the engine, such as gpu_memory_utilization 0.5")
    ] = {}

    def resolved_engine_options(self) -> dict[str, Any]:
        return {key: _literal(value) for key, value in self.engine_options.items()}

    def check_engine(self) -> None:
        refuse_old_engine_options(self.engine_options)
        if self.engine_urls and self.engine not in SERVERS:
            raise ConfigurationError(
                "engine_urls", self.engine_urls, f"engine {self.engine} has no server", f"--engine {SERVERS[0]}"
            )
        if "api_key" in self.engine_options:
            raise ConfigurationError(
                "engine_options",
                "api_key (hidden)",
                "settings are written to the run folder, and other users can see command lines",
                "Set the environment variable SORTEDRL_API_KEY.",
            )
        for key in sorted(_SWITCHES & self.engine_options.keys()):
            if not isinstance(self.resolved_engine_options()[key], bool):
                raise ConfigurationError(
                    "engine_options",
                    f"{key} {self.engine_options[key]}",
                    "it is either True or False",
                    f"Use {key} True, or leave it out.",
                )
        if self.engine_options and self.engine == "embedded":
            raise ConfigurationError(
                "engine_options", self.engine_options, "the embedded engine has none", "Leave it out, or --engine vllm."
            )


class ModelSettings(EngineChoice):
    """A model, a task, and how responses are sampled."""

    model: Annotated[str, Field(description="folder or hub name of a Hugging Face causal LM, or built-in")] = "built-in"
    task: Annotated[
        str, Field(description="knights_and_knaves[:small], math:PRESET, reasoning_gym:NAME, or your.module:name")
    ] = "knights_and_knaves:small"
    task_options: Annotated[dict[str, str], Field(description="options of the task")] = {}
    data: Annotated[Path | None, Field(description="data file or folder of the task, if it reads one")] = None
    max_prompt_tokens: Annotated[int, Field(ge=1, description="longer prompts are skipped and counted")] = 256
    max_response_tokens: Annotated[int, Field(ge=1, description="responses are cut here")] = 320
    temperature: Annotated[float, Field(ge=0, description="sampling temperature")] = 1.0
    slots: Annotated[int, Field(ge=1, description=SLOTS)] = 64
    eval_problems: Annotated[int, Field(ge=1, description="held-out problems per evaluation")] = 500
    eval_samples: Annotated[int, Field(ge=1, description="samples per problem, for mean@k and pass@k")] = 1
    eval_seed: Annotated[int, Field(description="sampling seed of evaluations")] = 12345
    reward_workers: Annotated[
        int,
        Field(
            ge=0,
            le=1024,
            description="processes for your own reward function; 0: in this process, where it can block the run",
        ),
    ] = 2
    score_limit_seconds: Annotated[
        float, Field(gt=0, description="time limit of your own reward function; its process is killed after that")
    ] = 30.0
    device: Annotated[Literal["auto", "cpu", "cuda"], Field(description="auto: cuda if there is one")] = "auto"
    dtype: Annotated[Literal["auto", "float32", "bfloat16"], Field(description="auto: bfloat16 on cuda")] = "auto"
    threads: Annotated[
        int, Field(ge=0, le=1024, description="CPU threads of PyTorch; 0: chosen by model size and load")
    ] = 0

    def resolved_task_options(self) -> dict[str, Any]:
        options: dict[str, Any] = {key: _literal(value) for key, value in self.task_options.items()}
        return options | ({"data": self.data} if self.data is not None else {})

    def torch_device(self) -> str:
        import torch

        if self.device == "cuda" and not torch.cuda.is_available():
            raise ConfigurationError("device", "cuda", "PyTorch finds no CUDA device", "Leave it out.")
        return self.device if self.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"

    def torch_dtype(self) -> Any:
        import torch

        if self.dtype == "auto":
            return torch.bfloat16 if self.torch_device() == "cuda" else torch.float32
        return getattr(torch, self.dtype)

    def check(self) -> None:
        """Reading the model and the task finds the other mistakes."""
        self.check_engine()


class Evaluate(ModelSettings):
    """Score a model on held-out problems of a task: mean@k and pass@k with confidence intervals."""


class Train(ModelSettings):
    """Train a model with RL on one machine, with any schedule."""

    file_only: ClassVar[frozenset[str]] = frozenset(
        {"clip_low", "clip_high", "kl_coefficient", "entropy_coefficient", "warmup_updates", "steps_per_update"}
        | {"tokens_per_micro_batch", "eval_samples", "eval_seed", "keep_checkpoints", "save_rollouts", "device"}
        | {"score_limit_seconds", "max_rejected_fraction", "shuffle_rewards", "oversubscribe"}
        | {"scale_learning_rate_by_ess", "gradient_cosine"}
    )

    mode: Annotated[str, Field(description="schedule; `sortedrl simulate` and `sortedrl plan` compare them")] = (
        "partial+elevator"
    )
    rollouts_per_update: Annotated[int, Field(ge=1, description=ROLLOUTS_PER_UPDATE)] = 128
    prompts_per_cohort: Annotated[int, Field(ge=1, description=PROMPTS_PER_COHORT)] = 64
    rollouts_per_prompt: Annotated[int, Field(ge=1, description=ROLLOUTS_PER_PROMPT)] = 8
    oversubscribe: Annotated[float | None, Field(description=OVERSUBSCRIBE)] = None
    max_staleness: Annotated[int | None, Field(description=MAX_STALENESS)] = None
    overlap: Annotated[
        bool,
        Field(
            description="the engine keeps generating while the learner steps; partial modes, and servers with GPUs "
            "of their own"
        ),
    ] = False
    algorithm: Annotated[
        Literal["reinforce++", "grpo", "rloo", "ppo"], Field(description="how advantages are computed")
    ] = "grpo"
    advantage_baseline: Annotated[
        Literal["group", "previous_cohorts", "cohort_so_far", "batch"] | None,
        Field(description="what is subtracted from a reward; default: the algorithm's own"),
    ] = None
    off_policy_correction: Annotated[
        Literal["ppo_clip", "tis", "mask", "decoupled", "m2po"] | None,
        Field(description="how stale tokens are corrected; default: decoupled, or tis in on-policy modes"),
    ] = None
    learning_rate: Annotated[float, Field(gt=0, description="learning rate after warm-up")] = 3e-4
    scale_learning_rate_by_ess: Annotated[
        bool, Field(description="multiply it by the root of the rollouts' effective sample fraction, as in VCPO")
    ] = False
    warmup_updates: Annotated[int, Field(ge=0, description="updates of linear learning rate warm-up")] = 2
    clip_low: Annotated[float, Field(gt=0, lt=1, description="lower clip range of the ratio; see docs/learner.md")] = (
        0.2
    )
    clip_high: Annotated[float, Field(gt=0, description="upper clip range of the ratio")] = 0.28
    kl_coefficient: Annotated[float, Field(ge=0, description="weight of the KL penalty")] = 0.0
    entropy_coefficient: Annotated[float, Field(ge=0, description="weight of the entropy bonus")] = 0.0
    steps_per_update: Annotated[int, Field(ge=1, description="optimizer steps per update")] = 1
    tokens_per_micro_batch: Annotated[int, Field(ge=1, description="tokens per forward and backward pass")] = 16_384
    gradient_cosine: Annotated[bool, Field(description="report the cosine of successive gradients")] = False
    gradient_checkpointing: Annotated[bool, Field(description="less GPU memory, slower updates")] = False
    lora_rank: Annotated[int, Field(ge=0, description="rank of LoRA adapters; 0: train all weights")] = 0
    updates: Annotated[int | None, Field(ge=1, description="stop after this many updates; None: train all epochs")] = 60
    epochs: Annotated[int, Field(ge=1, description="passes over the prompts")] = 100
    eval_every: Annotated[
        int, Field(ge=0, description="updates between evaluations; 0: only before and after training")
    ] = 0
    checkpoint_every: Annotated[
        int, Field(ge=0, description="updates between checkpoints; 0: only before and after training")
    ] = 20
    keep_checkpoints: Annotated[int, Field(ge=1, description="checkpoints to keep; the best one is kept too")] = 2
    save_rollouts: Annotated[int, Field(ge=0, description="responses per update to write to rollouts.jsonl")] = 8
    scoring: Annotated[
        Literal["at-once", "background"] | None,
        Field(
            description="background: while the engine generates; at-once: the run waits, so that it can be repeated "
            "exactly; default: at-once for built-in tasks, background for your own"
        ),
    ] = None
    max_rejected_fraction: Annotated[
        float,
        Field(ge=0, le=1, description="stop if more than this fraction of recent rollouts was rejected"),
    ] = 0.5
    shuffle_rewards: Annotated[
        bool, Field(description="control experiment: rewards are shuffled, so the score must not rise")
    ] = False
    tracker: Annotated[
        tuple[Literal["tensorboard", "wandb", "trackio"], ...],
        Field(description="also send metrics there; metrics.jsonl is always written"),
    ] = ()
    prometheus_port: Annotated[
        int | None,
        Field(ge=0, le=65535, description="serve metrics for Prometheus on this port of localhost; 0: any free port"),
    ] = None
    seed: Annotated[int, Field(description="seed of data order and sampling")] = 0
    out: Annotated[Path | None, Field(description="run folder; default: runs/TIME-MODE-SEED")] = None
    resume: Annotated[Path | None, Field(description="run folder of an interrupted run to continue")] = None

    def schedule(self) -> Schedule:
        return Schedule(
            mode=self.mode,
            rollouts_per_update=self.rollouts_per_update,
            prompts_per_cohort=self.prompts_per_cohort,
            rollouts_per_prompt=self.rollouts_per_prompt,
            whole_groups=self.wants_whole_groups(),
            oversubscribe=self.oversubscribe,
            max_staleness=self.max_staleness,
            overlap=self.overlap,
            max_response_tokens=self.max_response_tokens,
            score_wait_seconds=max(SCORE_WAIT_SECONDS, 2 * self.score_limit_seconds),
            seed=self.seed,
        )

    def wants_whole_groups(self) -> bool:
        return self.advantage_baseline == "group" or (
            self.advantage_baseline is None and self.algorithm in ("grpo", "rloo")
        )

    def updates_per_cohort(self) -> int:
        return max(1, self.prompts_per_cohort * self.rollouts_per_prompt // self.rollouts_per_update)

    def learner_settings(self) -> Any:
        from sortedrl.learner.settings import LearnerSettings, off_policy_correction_for

        try:
            return LearnerSettings(
                algorithm=self.algorithm,
                advantage_baseline=self.advantage_baseline,
                off_policy_correction=self.off_policy_correction or off_policy_correction_for(self.mode),
                normalizer_tokens=self.rollouts_per_update * self.max_response_tokens,
                clip_low=self.clip_low,
                clip_high=self.clip_high,
                kl_coefficient=self.kl_coefficient,
                entropy_coefficient=self.entropy_coefficient,
                temperature=self.temperature,
                learning_rate=self.learning_rate,
                scale_learning_rate_by_ess=self.scale_learning_rate_by_ess,
                warmup_updates=self.warmup_updates,
                steps_per_update=self.steps_per_update,
                tokens_per_micro_batch=self.tokens_per_micro_batch,
                gradient_cosine=self.gradient_cosine,
                gradient_checkpointing=self.gradient_checkpointing,
                bf16=self.torch_dtype().itemsize == 2,
                lora_rank=self.lora_rank,
            )
        except ValueError as error:
            raise ConfigurationError("algorithm", self.algorithm, str(error), "See docs/learner.md.") from None

    def check(self) -> None:
        super().check()
        schedule = self.schedule()
        strategy_named(self.mode).check(schedule)
        if self.overlap:
            self._check_overlap()
        if self.wants_whole_groups() and self.rollouts_per_prompt < 2:
            raise ConfigurationError(
                "rollouts_per_prompt",
                self.rollouts_per_prompt,
                "rewards are compared within a group, and a group of one has nothing to compare",
                "Set it to 2 or more, or use --algorithm reinforce++.",
            )
        if self.temperature == 0:
            raise ConfigurationError(
                "temperature", 0, "greedy responses of a group are all equal, so there is nothing to learn", "Use 1.0."
            )
        require_packages(self.tracker)

    def _check_overlap(self) -> None:
        if self.engine not in SERVERS:
            raise ConfigurationError(
                "overlap",
                self.overlap,
                f"engine {self.engine} runs in this process and would share the device with the learner",
                f"Use --engine {' or '.join(SERVERS)}, or leave it out.",
            )
        if self.max_staleness is None:
            raise ConfigurationError(
                "overlap",
                self.overlap,
                "if the learner is slower than the engine, finished rollouts would go stale without bound",
                "Set --max-staleness too, for example 4.",
            )


class Compare(Train):
    """Train once per mode and seed, interleaved, with the same data order."""

    not_for_this_command: ClassVar[frozenset[str]] = frozenset({"mode", "seed", "resume"})

    modes: Annotated[tuple[str, ...], Field(min_length=1, description="schedules to train with")] = (
        "baseline",
        "on-policy+planned",
        "partial+elevator",
    )
    seeds: Annotated[tuple[int, ...], Field(min_length=1, description="one run per mode and seed")] = (0,)

    def of(self, mode: str, seed: int, out: Path) -> Train:
        plain = self.model_dump(exclude={"modes", "seeds", "json_output"})
        plain |= {"mode": mode, "seed": seed, "out": out}
        if not strategy_named(mode).keeps_tokens:
            plain |= {"max_staleness": None, "overlap": False}
        return Train.model_validate(plain)

    def check(self) -> None:
        for key in sorted(self.not_for_this_command):
            value = getattr(self, key)
            if value != type(self).model_fields[key].default:
                raise ConfigurationError(key, value, "compare makes several runs", "Use --modes and --seeds.")
        for key in ("modes", "seeds"):
            if len(set(getattr(self, key))) < len(getattr(self, key)):
                raise ConfigurationError(key, getattr(self, key), "one is named twice", "Name each one once.")
        for mode in self.modes:
            self.of(mode, 0, Path()).check()


class Bench(WorkloadSettings, EngineChoice):
    """Measure the throughput of each schedule on a real engine, with the same forced lengths for all.

    The default sizes suit the built-in model. Set them for your own model.
    """

    model: Annotated[
        str,
        Field(
            description="folder or hub name, or built-in; a config.json is enough for vllm with "
            "--engine-options load_format dummy"
        ),
    ] = "built-in"
    modes: Annotated[
        tuple[str, ...],
        Field(min_length=1, description="schedules to run, each as mode[@cold|warm|oracle][*OVERSUBSCRIBE]"),
    ] = ("baseline", "on-policy", "on-policy+planned", "partial", "partial+elevator")
    slots: Annotated[int, Field(ge=1, description=SLOTS)] = 32
    rollouts_per_update: Annotated[int, Field(ge=1, description=ROLLOUTS_PER_UPDATE)] = 32
    prompts_per_cohort: Annotated[int, Field(ge=1, description=PROMPTS_PER_COHORT)] = 128
    prompt_tokens: Annotated[int, Field(ge=0, description="tokens per prompt")] = 32
    default_response_limit: ClassVar[int] = 800
    max_response_tokens: Annotated[
        int | None, Field(ge=1, description="cut responses here; default: the longest in --lengths, else 800")
    ] = None
    median_length: Annotated[
        float, Field(gt=0, le=1e9, description="median of the drawn lengths in tokens; none is below 16")
    ] = 100.0
    cohorts: Annotated[int, Field(ge=1, description="length of each run, in cohorts")] = 1
    updates: Annotated[int | None, Field(ge=1, description="stop each mode after this many updates")] = None
    limit: Annotated[
        Literal["simulated", "measured", "none"],
        Field(description="upper limit of throughput; simulated: from the step time; measured: on the engine"),
    ] = "none"
    step_time: Annotated[
        str, Field(description="profile or preset to predict each mode with; default: no prediction")
    ] = ""
    out: Annotated[Path | None, Field(description="JSON file, written after every mode")] = None
    events: Annotated[Path | None, Field(description="folder for event logs, one per mode")] = None

    def cases(self) -> list[Any]:
        from sortedrl.studies.bench import Case

        return [Case.parsed(text) for text in self.modes]

    def resolved_step_time(self) -> StepTime:
        return super().resolved_step_time() if self.step_time else PRESETS["memory-bound"]

    def resolved_weight_update_seconds(self) -> float:
        """A bench makes no weight updates."""
        return 0.0

    def workload(self, cohorts: int) -> Workload:
        """The prediction follows the option of the engine."""
        keeps = bool(self.resolved_engine_options().get("reuse_kv_cache"))
        return replace(super().workload(cohorts), reuse_kv_cache=keeps)

    def check(self) -> None:
        for case in self.cases():
            strategy_named(case.mode).check(case.schedule(self.schedule()))
        self.check_engine()
        self.check_context_fits()
        if self.reuse_kv_cache:
            raise ConfigurationError(
                "reuse_kv_cache",
                True,
                "in a bench it is an option of the engine",
                "Use --engine-options reuse_kv_cache True.",
            )
        for name in (
            "weight_update_seconds",
            "learner_seconds_per_update",
            "learner_seconds_per_token",
            "score_seconds",
        ):
            if getattr(self, name):
                reason = "a bench has no learner, no rewards and no weight updates"
                raise ConfigurationError(name, getattr(self, name), reason, "Leave it out, or use simulate.")
        if len(self.seeds) > 1:
            raise ConfigurationError("seeds", self.seeds, "a bench runs each mode once", "Name one seed.")
        if self.prompt_tokens < 1:
            raise ConfigurationError(
                "prompt_tokens", self.prompt_tokens, "an engine needs at least one prompt token", "Use 1."
            )
        if self.limit == "simulated" and not self.step_time:
            raise ConfigurationError(
                "limit", "simulated", "there is no step time to simulate with", "Set --step-time FILE."
            )


class ProfileSettings(EngineChoice):
    """Measure an engine's step time, prefill, KV cache capacity and weight update, for `simulate --step-time FILE`."""

    model: Annotated[
        str,
        Field(description="as in bench; for a server, the folder that it serves, whose weights are sent again"),
    ] = "built-in"
    slots: Annotated[int, Field(ge=3, description=SLOTS)] = 64
    max_context_tokens: Annotated[int, Field(ge=64, description="longest prompt and response in all")] = 1024
    steps: Annotated[int, Field(ge=1, description="decode steps per measurement")] = 48
    repeats: Annotated[int, Field(ge=1, description="repeats of each measurement; the median is used")] = 3
    out: Annotated[Path, Field(description="file to write")] = Path("profile.json")

    def check(self) -> None:
        from sortedrl.studies.profile import cells_for

        self.check_engine()
        cells = cells_for(self.slots, self.max_context_tokens, math.inf, self.steps)
        if len({running for running, _ in cells}) < 2 or len({context for _, context in cells}) < 2:
            raise ConfigurationError(
                "max_context_tokens",
                self.max_context_tokens,
                f"measurements of {self.steps} steps at two context lengths and two batch sizes do not fit in it",
                "Set it higher, or --steps or --slots lower.",
            )


# Settings that may change when a run is resumed: they only extend it or name a place.
EXTENDING_KEYS = frozenset(
    {"updates", "epochs", "eval_every", "checkpoint_every", "keep_checkpoints", "save_rollouts", "threads"}
    | {"resume", "out", "score_limit_seconds", "reward_workers", "max_rejected_fraction", "tracker", "prometheus_port"}
)

_LENGTHS_FIX = 'Write one number per line, or objects such as {"prompt": "id", "length": 812}.'


def _fitted(path: Path) -> StepTime:
    if path.suffix == ".json":
        from sortedrl.studies import profile

        return profile.read(path).step_time()
    return fit(read_points(path), source=f"fit to {path}")


def saved_settings(folder: Path) -> tuple[dict[str, Any], str | None]:
    """The settings of a run, and a notice if they come from a checkpoint because config.json is damaged."""
    path = folder / "config.json"
    try:
        return _read_object(path), None
    except (OSError, ValueError) as error:
        damage = error
    states = sorted(folder.glob("checkpoints/update-*/state.json"), key=lambda state: state.parent.name)
    for state in reversed(states):
        try:
            settings = _read_object(state)["notes"]["settings"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if isinstance(settings, dict):
            return settings, f"{path} cannot be read ({plain_reason(damage)}): settings taken from {state.parent.name}"
    raise ConfigurationError(
        "resume", str(folder), f"no run can be read there ({path.name}: {plain_reason(damage)})",
        "Name a run folder, as in runs/NAME.",
    )  # fmt: skip


def _read_object(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ValueError("not a JSON object")
    return found


def _literal(text: str) -> Any:
    """A value in JSON or Python notation; any other text stays text."""
    try:
        return json.loads({"True": "true", "False": "false", "None": "null"}.get(text, text))
    except ValueError:
        return text


def plain_reason(error: Exception) -> str:
    return f"{error.strerror}" if isinstance(error, OSError) and error.strerror else str(error)


def as_json(settings: Settings) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(settings.model_dump_json(exclude={"config", "json_output", "dry_run"}))
    return plain
