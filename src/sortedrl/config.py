"""Configuration: a TOML file and flags, one typed model for each command.

Flags win over the file, the file over the defaults. Every error names the key, its value and where it was set.
"""

from __future__ import annotations

import difflib
import json
import math
import shlex
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, TypeVar

import pydantic
import tyro
from pydantic import BaseModel, ConfigDict, Field

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
Read = TypeVar("Read")


class _Refused(Exception):
    """Carries the first validation error past tyro, which would print it in its own words."""

    def __init__(self, error: pydantic.ValidationError) -> None:
        self.error = error


class Settings(BaseModel):
    """What all commands share."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @pydantic.model_validator(mode="wrap")
    @classmethod
    def _refuse(cls, values: Any, validate: pydantic.ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return validate(values)
        except pydantic.ValidationError as error:
            raise _Refused(error) from None

    config: Annotated[Path | None, Field(description="TOML file with any of these settings; flags win over it")] = None
    json_output: Annotated[
        bool, tyro.conf.arg(name="json"), Field(alias="json", description="print one JSON object instead of tables")
    ] = False
    dry_run: Annotated[
        bool, Field(description="print the resolved settings and what follows from them, run nothing")
    ] = False


class WorkloadSettings(Settings):
    """A simulated workload and the schedule to try on it."""

    default_response_limit: ClassVar[int] = 8192

    lengths: Annotated[
        Path | None, Field(description="JSONL of your own response lengths; without it a lognormal is drawn")
    ] = None
    median_length: Annotated[
        float, Field(gt=0, le=1e9, description="tokens; median of the drawn lengths, of which none is below 16")
    ] = 1273.7
    length_sd_between: Annotated[float, Field(ge=0, le=10, description="sd of log length between prompts")] = 0.8
    length_sd_within: Annotated[float, Field(ge=0, le=10, description="sd of log length within a prompt")] = 0.6
    prompt_tokens: Annotated[int, Field(ge=0)] = 128
    max_response_tokens: Annotated[
        int | None, Field(ge=1, description="default: the longest response in --lengths, else 8192")
    ] = None
    slots: Annotated[int, Field(ge=1, description="requests that the engine runs at once")] = 128
    rollouts_per_update: Annotated[int, Field(ge=1)] = 128
    prompts_per_cohort: Annotated[int, Field(ge=1)] = 512
    rollouts_per_prompt: Annotated[int, Field(ge=1)] = 1
    whole_groups: Annotated[bool, Field(description="update on whole groups, as GRPO and RLOO need")] = False
    oversubscribe: Annotated[
        float | None, Field(description="cap on what is started, as a multiple of the need; default: the mode's own")
    ] = None
    max_staleness: Annotated[int | None, Field(description="bound in versions, partial modes; kept by waiting")] = None
    overlap: Annotated[bool, Field(description="the engine goes on while the learner steps: partial modes")] = False
    keep_seed: Annotated[bool, Field(description="a regenerate draws the length of the attempt that was cut")] = False
    step_time: Annotated[
        str,
        Field(
            description=f"{', '.join(PRESETS)}, a file of sortedrl profile, or a CSV of running,cached_tokens,seconds"
        ),
    ] = "h200-8b"
    prefill_seconds_per_token: Annotated[float | None, Field(ge=0, description="default: the step time's own")] = None
    kv_tokens: Annotated[
        int | None, Field(ge=1, description="KV memory in tokens; beyond it requests are preempted")
    ] = None
    reuse_kv_cache: Annotated[
        bool, Field(description="resumes reuse the keys of what was kept, made under older weights: no prefill")
    ] = False
    weight_update_seconds: Annotated[
        float | None, Field(ge=0, description="to load weights into the engine; default: what the profile found, or 0")
    ] = None
    learner_seconds_per_update: Annotated[float, Field(ge=0)] = 0.0
    learner_seconds_per_token: Annotated[float, Field(ge=0)] = 0.0
    score_seconds: Annotated[float, Field(ge=0, description="from a rollout's end to its reward")] = 0.0
    seeds: Annotated[tuple[int, ...], Field(min_length=1)] = (0,)

    def schedule(self) -> Schedule:
        """All that was set; `with_mode` gives it to another mode, less what that one cannot honor."""
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
            raise ConfigurationError("lengths", str(self.lengths), _plain(error), _LENGTHS_FIX) from None

    def response_limit(self) -> int:
        """What is set, or the longest response in the file of lengths: none of those is cut unasked."""
        if self.max_response_tokens is not None:
            return self.max_response_tokens
        return self.default_response_limit if self.replayed_lengths is None else self.replayed_lengths.longest

    def lengths_cut(self) -> str | None:
        """What a limit below the longest response in the file of lengths does to it."""
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
        """What is set, or what the profile found."""
        profile = self._profile()
        return profile.kv_tokens if self.kv_tokens is None and profile is not None else self.kv_tokens

    def resolved_weight_update_seconds(self) -> float:
        """What is set, or what the profile found."""
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
                "step_time", self.step_time, _plain(error), f"{hint}Presets: {', '.join(PRESETS)}."
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
    """The modes that decide, side by side on one workload: what would I gain on my lengths?"""

    modes: Annotated[tuple[str, ...], Field(min_length=1)] = DECIDING_MODES
    all_modes: Annotated[
        bool, tyro.conf.arg(name="all"), Field(description="every mode, each with cold, warm and oracle lengths")
    ] = False
    details: Annotated[bool, Field(description="more tables: parts of the bubble, staleness, waiting, prefill")] = False
    expectations: Annotated[
        tuple[Expectation, ...], Field(min_length=1, description="qualities of expected length; the first names a mode")
    ] = ("cold", "warm")
    cohorts: Annotated[int, Field(ge=1, description="length of each simulated run, in cohorts")] = 6
    updates: Annotated[int | None, Field(ge=1, description="stop after this many updates")] = None

    def modes_and_expectations(self) -> tuple[tuple[str, ...], tuple[Expectation, ...]]:
        return (MODES, ("cold", "warm", "oracle")) if self.all_modes else (self.modes, self.expectations)

    def check(self) -> None:
        if self.all_modes and self.modes != DECIDING_MODES:
            raise ConfigurationError("modes", self.modes, "--all has every mode", "Leave out one of the two.")
        for mode in self.modes_and_expectations()[0]:
            strategy_named(mode).check(with_mode(self.schedule(), mode))
        self.check_context_fits()


class PlanSettings(WorkloadSettings):
    """Which mode, cohort size and oversubscription for this workload, and is it needed at all?"""

    expectation: Annotated[Expectation, Field(description="quality of expected length to plan with")] = "cold"
    cohorts: Annotated[int, Field(ge=1, description="length of each simulated run, in cohorts")] = 5
    max_cohort_updates: Annotated[int, Field(ge=1, description="largest cohort allowed; the paper found 8 harmful")] = 4
    max_length_bias: Annotated[float, Field(ge=0, description="largest share by which trained lengths may be off")] = (
        0.02
    )
    max_staleness_mean: Annotated[float | None, Field(ge=0, description="largest mean staleness of a token")] = None

    def check(self) -> None:
        if self.oversubscribe is not None:
            raise ConfigurationError(
                "oversubscribe", self.oversubscribe, "plan tries caps of its own", "Leave it out, or use simulate."
            )
        self.schedule()
        self.check_context_fits()

    def allowed(self) -> Allowed:
        return Allowed(self.max_length_bias, self.max_staleness_mean, self.max_cohort_updates)


SERVERS = ("vllm-server", "sglang")
SCORE_WAIT_SECONDS = Schedule().score_wait_seconds


# Of our engines: any text would count as yes.
_SWITCHES = {"reuse_kv_cache", "enable_sleep_mode", "seeded", "weights_readable_by_all"}


class EngineChoice(Settings):
    """Which engine makes the tokens."""

    engine: Annotated[
        Literal["embedded", "vllm", "vllm-server", "sglang"],
        Field(description="embedded and vllm: in this process; vllm-server and sglang: servers that run already"),
    ] = "embedded"
    engine_urls: Annotated[tuple[str, ...], Field(description="of running servers; several are used as one pool")] = ()
    engine_options: Annotated[
        dict[str, str], Field(description="for the engine, as KEY VALUE pairs, such as gpu_memory_utilization 0.5")
    ] = {}

    def resolved_engine_options(self) -> dict[str, Any]:
        return {key: _literal(value) for key, value in self.engine_options.items()}

    def check_engine(self) -> None:
        if self.engine_urls and self.engine not in SERVERS:
            raise ConfigurationError(
                "engine_urls", self.engine_urls, f"engine {self.engine} has no server", f"--engine {SERVERS[0]}"
            )
        if "api_key" in self.engine_options:
            raise ConfigurationError(
                "engine_options",
                "api_key (hidden)",
                "settings are written to the run folder, and command lines are seen by others",
                "Set the environment variable SORTEDRL_API_KEY.",
            )
        for key in sorted(_SWITCHES & self.engine_options.keys()):
            if not isinstance(self.resolved_engine_options()[key], bool):
                raise ConfigurationError(
                    "engine_options",
                    f"{key} {self.engine_options[key]}",
                    "it is a switch",
                    f"{key} True, or leave it out.",
                )
        if self.engine_options and self.engine == "embedded":
            raise ConfigurationError(
                "engine_options", self.engine_options, "the embedded engine has none", "Leave it out, or --engine vllm."
            )


class ModelSettings(EngineChoice):
    """A model, a task and how responses are sampled."""

    model: Annotated[str, Field(description="folder or hub name of a Hugging Face causal LM, or built-in")] = "built-in"
    task: Annotated[
        str, Field(description="knights_and_knaves[:small], math:PRESET, reasoning_gym:NAME, or your.module:name")
    ] = "knights_and_knaves:small"
    task_options: Annotated[dict[str, str], Field(description="options of the task, as KEY VALUE pairs")] = {}
    data: Annotated[Path | None, Field(description="the task's data file or folder, where it reads one")] = None
    max_prompt_tokens: Annotated[int, Field(ge=1, description="longer prompts are left out, with a count")] = 256
    max_response_tokens: Annotated[int, Field(ge=1)] = 320
    temperature: Annotated[float, Field(ge=0)] = 1.0
    slots: Annotated[int, Field(ge=1, description="requests that the engine decodes at once")] = 64
    eval_problems: Annotated[int, Field(ge=1, description="held-out problems of an evaluation")] = 500
    eval_samples: Annotated[int, Field(ge=1, description="samples of each, for mean@k and pass@k")] = 1
    eval_seed: int = 12345
    reward_workers: Annotated[
        int,
        Field(ge=0, le=1024, description="processes for a reward of your own; 0: in this process, which it can block"),
    ] = 2
    score_limit_seconds: Annotated[
        float, Field(gt=0, description="a reward of your own that takes longer has failed, and its process is killed")
    ] = 30.0
    device: Annotated[Literal["auto", "cpu", "cuda"], Field(description="auto: cuda where there is one")] = "auto"
    dtype: Annotated[Literal["auto", "float32", "bfloat16"], Field(description="auto: bfloat16 on cuda")] = "auto"
    threads: Annotated[int, Field(ge=0, le=1024, description="CPU threads for PyTorch; 0: by model size and load")] = 0

    def resolved_task_options(self) -> dict[str, Any]:
        options: dict[str, Any] = {key: _literal(value) for key, value in self.task_options.items()}
        return options | ({"data": self.data} if self.data is not None else {})

    def torch_device(self) -> str:
        import torch

        if self.device == "cuda" and not torch.cuda.is_available():
            raise ConfigurationError("device", "cuda", "PyTorch finds no such device here", "Leave it out: auto.")
        return self.device if self.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"

    def torch_dtype(self) -> Any:
        import torch

        if self.dtype == "auto":
            return torch.bfloat16 if self.torch_device() == "cuda" else torch.float32
        return getattr(torch, self.dtype)

    def check(self) -> None:
        """What else can be wrong shows when the model and the task are read."""
        self.check_engine()


class Evaluate(ModelSettings):
    """Held-out score of a model on a task: mean@k and pass@k with intervals."""


class Train(ModelSettings):
    """RL-train a model on one machine, with any schedule."""

    mode: Annotated[str, Field(description="the schedule; `sortedrl simulate` and `plan` compare them")] = (
        "partial+elevator"
    )
    rollouts_per_update: Annotated[int, Field(ge=1)] = 128
    prompts_per_cohort: Annotated[int, Field(ge=1)] = 64
    rollouts_per_prompt: Annotated[int, Field(ge=1)] = 8
    oversubscribe: float | None = None
    max_staleness: int | None = None
    overlap: Annotated[
        bool, Field(description="the engine goes on while the learner steps: partial modes, servers of their own GPUs")
    ] = False
    algorithm: Literal["reinforce++", "grpo", "rloo", "ppo"] = "grpo"
    advantage_baseline: Annotated[
        Literal["group", "previous_cohorts", "cohort_so_far", "batch"] | None,
        Field(description="what a reward is measured against; default: the algorithm's own"),
    ] = None
    off_policy_correction: Annotated[
        Literal["ppo_clip", "tis", "mask", "decoupled"] | None,
        Field(description="correction of stale tokens; default: decoupled, tis in on-policy modes"),
    ] = None
    learning_rate: Annotated[float, Field(gt=0)] = 3e-4
    warmup_updates: Annotated[int, Field(ge=0)] = 2
    clip_low: Annotated[
        float, Field(gt=0, lt=1, description="ppo_clip, mask, and decoupled with several steps; see docs/learner.md")
    ] = 0.2
    clip_high: Annotated[float, Field(gt=0)] = 0.28
    kl_coefficient: Annotated[float, Field(ge=0)] = 0.0
    entropy_coefficient: Annotated[float, Field(ge=0)] = 0.0
    steps_per_update: Annotated[int, Field(ge=1, description="optimizer steps per update")] = 1
    tokens_per_micro_batch: Annotated[int, Field(ge=1)] = 16_384
    gradient_checkpointing: bool = False
    lora_rank: Annotated[int, Field(ge=0, description="0: train all weights")] = 0
    updates: Annotated[int | None, Field(ge=1, description="stop after this many; default: all epochs")] = 60
    epochs: Annotated[int, Field(ge=1)] = 100
    eval_every: Annotated[int, Field(ge=0, description="updates between evaluations; 0: only first and last")] = 0
    checkpoint_every: Annotated[int, Field(ge=0, description="updates between checkpoints; 0: only first and last")] = (
        20
    )
    keep_checkpoints: Annotated[int, Field(ge=1, description="newest ones that stay; the best stays too")] = 2
    save_rollouts: Annotated[int, Field(ge=0, description="responses of each update to write down")] = 8
    scoring: Annotated[
        Literal["at-once", "background"] | None,
        Field(
            description="background: while the engine generates; at-once: waited for, for exact repeats; default: "
            "at-once for built-in tasks, background for your own"
        ),
    ] = None
    max_rejected_fraction: Annotated[
        float,
        Field(ge=0, le=1, description="stop when more of the last four updates' worth of rollouts were rejected"),
    ] = 0.5
    shuffle_rewards: Annotated[bool, Field(description="a control: nothing to learn, the score must not rise")] = False
    tracker: Annotated[
        tuple[Literal["tensorboard", "wandb", "trackio"], ...],
        Field(description="where the metrics of docs/metrics.md go too; metrics.jsonl is always written"),
    ] = ()
    prometheus_port: Annotated[
        int | None, Field(ge=0, le=65535, description="serve the metrics on this port of the loopback; 0: a free one")
    ] = None
    seed: int = 0
    out: Annotated[Path | None, Field(description="run folder; default: runs/TIME-MODE-SEED")] = None
    resume: Annotated[Path | None, Field(description="run folder to go on with")] = None

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
                warmup_updates=self.warmup_updates,
                steps_per_update=self.steps_per_update,
                tokens_per_micro_batch=self.tokens_per_micro_batch,
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
                "siblings are compared, and a prompt has no two of them",
                "Set it to 2 or more, or use --algorithm reinforce++ with its own baseline.",
            )
        if self.temperature == 0:
            raise ConfigurationError("temperature", 0, "greedy responses have nothing to learn from", "Use 1.0.")
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
                "where the learner is the slower part, what waits for it would grow older without end",
                "Set --max-staleness too, for example 4.",
            )


class Compare(Train):
    """Train once for each mode and seed, interleaved, on the same data order."""

    modes: Annotated[tuple[str, ...], Field(min_length=1)] = ("baseline", "on-policy+planned", "partial+elevator")
    seeds: Annotated[tuple[int, ...], Field(min_length=1)] = (0,)

    def of(self, mode: str, seed: int, out: Path) -> Train:
        plain = self.model_dump(exclude={"modes", "seeds", "json_output"})
        plain |= {"mode": mode, "seed": seed, "out": out}
        if not strategy_named(mode).keeps_tokens:
            plain |= {"max_staleness": None, "overlap": False}
        return Train.model_validate(plain)

    def check(self) -> None:
        for key in ("mode", "seed", "resume"):
            value = getattr(self, key)
            if value != type(self).model_fields[key].default:
                raise ConfigurationError(key, value, "compare has several runs", "Use --modes and --seeds.")
        for key in ("modes", "seeds"):
            if len(set(getattr(self, key))) < len(getattr(self, key)):
                raise ConfigurationError(key, getattr(self, key), "one is named twice", "Name each once.")
        for mode in self.modes:
            self.of(mode, 0, Path()).check()


class Bench(WorkloadSettings, EngineChoice):
    """The paper's throughput experiment on a real engine: schedules on equal, forced lengths.

    The sizes are what the built-in model can run; give those of your own model.
    """

    model: Annotated[
        str,
        Field(
            description="folder or hub name, or built-in; a config.json is enough for vllm with "
            "--engine-options load_format dummy"
        ),
    ] = "built-in"
    modes: Annotated[
        tuple[str, ...], Field(min_length=1, description="each mode[@cold|warm|oracle][*OVERSUBSCRIBE]")
    ] = ("baseline", "on-policy", "on-policy+planned", "partial", "partial+elevator")
    slots: Annotated[int, Field(ge=1, description="requests that the engine runs at once")] = 32
    rollouts_per_update: Annotated[int, Field(ge=1)] = 32
    prompts_per_cohort: Annotated[int, Field(ge=1)] = 128
    prompt_tokens: Annotated[int, Field(ge=0)] = 32
    default_response_limit: ClassVar[int] = 800
    max_response_tokens: Annotated[
        int | None, Field(ge=1, description="default: the longest response in --lengths, else 800")
    ] = None
    median_length: Annotated[
        float, Field(gt=0, le=1e9, description="tokens; median of the drawn lengths, of which none is below 16")
    ] = 100.0
    cohorts: Annotated[int, Field(ge=1)] = 1
    updates: Annotated[int | None, Field(ge=1, description="stop each mode after this many updates")] = None
    limit: Annotated[
        Literal["simulated", "measured", "none"],
        Field(description="simulated: by the step time; measured: every slot turns over three times on the engine"),
    ] = "none"
    step_time: Annotated[
        str, Field(description="profile (or preset) to predict each mode with; without it nothing is predicted")
    ] = ""
    out: Annotated[Path | None, Field(description="JSON file, written after every mode")] = None
    events: Annotated[Path | None, Field(description="folder for the event logs, one a mode")] = None

    def cases(self) -> list[Any]:
        from sortedrl.studies.bench import Case

        return [Case.parsed(text) for text in self.modes]

    def resolved_step_time(self) -> StepTime:
        return super().resolved_step_time() if self.step_time else PRESETS["memory-bound"]

    def resolved_weight_update_seconds(self) -> float:
        """No weights are loaded between the updates of a bench."""
        return 0.0

    def workload(self, cohorts: int) -> Workload:
        """What is predicted has the engine's own option."""
        keeps = bool(self.resolved_engine_options().get("reuse_kv_cache"))
        return replace(super().workload(cohorts), reuse_kv_cache=keeps)

    def check(self) -> None:
        for case in self.cases():
            strategy_named(case.mode).check(case.schedule(self.schedule()))
        self.check_engine()
        self.check_context_fits()
        if self.reuse_kv_cache:
            raise ConfigurationError(
                "reuse_kv_cache", True, "it is an option of the engine here", "--engine-options reuse_kv_cache True"
            )
        for name in (
            "weight_update_seconds",
            "learner_seconds_per_update",
            "learner_seconds_per_token",
            "score_seconds",
        ):
            if getattr(self, name):
                reason = "a bench has no learner, no rewards and no new weights"
                raise ConfigurationError(name, getattr(self, name), reason, "Leave it out, or use simulate.")
        if len(self.seeds) > 1:
            raise ConfigurationError("seeds", self.seeds, "a bench is one run of each mode", "Name one seed.")
        if self.prompt_tokens < 1:
            raise ConfigurationError("prompt_tokens", self.prompt_tokens, "an engine needs a token to begin", "Use 1.")
        if self.limit == "simulated" and not self.step_time:
            raise ConfigurationError("limit", "simulated", "there is no step time to simulate with", "--step-time FILE")


class ProfileSettings(EngineChoice):
    """Measure an engine's step time, prefill, KV capacity and weight load; `simulate --step-time FILE` uses all."""

    model: Annotated[
        str, Field(description="as in bench; for a server the folder that it serves, loaded again to time the load")
    ] = "built-in"
    slots: Annotated[int, Field(ge=3, description="requests that the engine runs at once")] = 64
    max_context_tokens: Annotated[int, Field(ge=64, description="longest prompt and response together")] = 1024
    steps: Annotated[int, Field(ge=1, description="decode steps of a measurement")] = 48
    repeats: Annotated[int, Field(ge=1, description="the median counts")] = 3
    out: Annotated[Path, Field(description="file to write")] = Path("profile.json")

    def check(self) -> None:
        from sortedrl.studies.profile import cells_for

        self.check_engine()
        cells = cells_for(self.slots, self.max_context_tokens, math.inf, self.steps)
        if len({running for running, _ in cells}) < 2 or len({context for _, context in cells}) < 2:
            raise ConfigurationError(
                "max_context_tokens",
                self.max_context_tokens,
                f"measurements of {self.steps} steps at two contexts and two numbers of requests do not fit in it",
                "Set it higher, or --steps or --slots lower.",
            )


class Watch(Settings):
    """Follow a run from another terminal, or see how one ended."""

    run: Annotated[tyro.conf.Positional[Path | None], Field(description="run folder; default: the newest in runs/")] = (
        None
    )
    stopped_after_seconds: Annotated[
        float, Field(gt=0, description="a run that wrote nothing for so long is taken for dead")
    ] = 600.0

    def check(self) -> None:
        """Whether there is a run shows when its folder is read."""


class Trace(Settings):
    """A run as Chrome-trace JSON: one track for each slot. Open it at ui.perfetto.dev."""

    run: Annotated[tyro.conf.Positional[Path], Field(description="run folder, or an event log")]
    out: Annotated[Path | None, Field(description="file to write; default: trace.json beside the event log")] = None

    def check(self) -> None:
        """Whether there is a run shows when its log is read."""


class Doctor(Settings):
    """What is installed, what is missing, and whether it works here."""

    def check(self) -> None:
        """Nothing can be wrong."""


class Report(Settings):
    """One self-contained HTML page about one run or several."""

    runs: Annotated[
        tyro.conf.Positional[tuple[Path, ...]],
        Field(description="run folders, folders of runs, or event logs; default: the newest in runs/"),
    ] = ()
    out: Annotated[
        Path | None, Field(description="the page; default: report.html in the run's folder, here for several runs")
    ] = None

    def check(self) -> None:
        if self.out is not None and self.out.is_dir():
            raise ConfigurationError("out", str(self.out), "a folder, not a file", f"Use {self.out / 'report.html'}.")
        if self.out is not None and self.out.suffix not in (".html", ".htm"):
            raise ConfigurationError("out", str(self.out), "the page is HTML", f"Use {self.out.with_suffix('.html')}.")


# Settings that a resumed run may change: they extend it or say where things are.
EXTENDING_KEYS = frozenset(
    {"updates", "epochs", "eval_every", "checkpoint_every", "keep_checkpoints", "save_rollouts", "threads"}
    | {"resume", "out", "score_limit_seconds", "reward_workers", "max_rejected_fraction", "tracker", "prometheus_port"}
)

S = TypeVar("S", bound=Settings)
_LENGTHS_FIX = 'Write one number a line, or objects such as {"prompt": "id", "length": 812}.'


def _fitted(path: Path) -> StepTime:
    if path.suffix == ".json":
        from sortedrl.studies import profile

        return profile.read(path).step_time()
    return fit(read_points(path), source=f"fit to {path}")


def origins(kind: type[Settings], args: Sequence[str]) -> dict[str, str]:
    """For each key that is set: by which file or flag."""
    path = _config_path(args)
    try:
        found = {} if path is None else dict.fromkeys(_read_toml(path), str(path))
    except ConfigurationError:
        found = {}
    return found | {key: f"flag --{_flag(key)}" for key in kind.model_fields if _is_given(key, args)}


def parsed(kind: type[S], args: Sequence[str], program: str) -> S:
    """The settings. Exits with 2 on flags that tyro refuses; raises ConfigurationError for all else.

    A run that is resumed begins with the settings that it was started with; a file is read over them.
    """
    path = _config_path(args)
    run = _value_of("--resume", args)
    try:
        values = {} if run is None else {**saved_settings(Path(run))[0], "resume": run}
        if path is not None:
            named = _read_toml(path)
            _refuse_unknown(kind, named, path)
            values |= {**named, "config": path}
        given: dict[str, Any] = {"default": kind.model_validate(values)} if values else {}
        settings: S = tyro.cli(kind, args=list(args), prog=program, **given)
        return settings
    except _Refused as refused:
        raise _first_error(refused.error) from None


def train_command(saved: dict[str, Any]) -> str | None:
    """The command that starts a training run with these settings, or None where they are not such a run's.

    It has every setting that is not the default, and always mode and seed.
    """
    try:
        settings = as_json(Train.model_validate(saved))
    except _Refused:
        return None
    usual = as_json(Train())
    words = ["sortedrl", "train"]
    for key, value in settings.items():
        if key in ("out", "resume") or (value == usual[key] and key not in ("mode", "seed")):
            continue
        if isinstance(value, bool):
            words.append(f"--{'' if value else 'no-'}{_flag(key)}")
        elif isinstance(value, dict):
            words += [f"--{_flag(key)}", *(str(word) for pair in value.items() for word in pair)]
        else:
            words += [f"--{_flag(key)}", *(map(str, value) if isinstance(value, list) else [str(value)])]
    return shlex.join(words)


def located(error: ConfigurationError, origin: dict[str, str]) -> str:
    """The error as a user reads it: key, value, where it was set, why, and a fix."""
    where = origin.get(error.key)
    return f"{error.key} = {error.value!r}{f' (set by {where})' if where else ''}: {error.why}. {error.fix}"


def _config_path(args: Sequence[str]) -> Path | None:
    value = _value_of("--config", args)
    return None if value is None else Path(value)


def _value_of(flag: str, args: Sequence[str]) -> str | None:
    for place, word in enumerate(args):
        if word == flag and place + 1 < len(args):
            return args[place + 1]
        if word.startswith(f"{flag}="):
            return word.removeprefix(f"{flag}=")
    return None


def saved_settings(folder: Path) -> tuple[dict[str, Any], str | None]:
    """The settings of a run, and a notice where they are not from config.json: each checkpoint holds them, too."""
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
            return settings, f"{path} cannot be read ({_plain(damage)}): settings taken from {state.parent.name}"
    raise ConfigurationError(
        "resume", str(folder), f"no run can be read there ({path.name}: {_plain(damage)})",
        "Name a run folder, as in runs/NAME.",
    )  # fmt: skip


def _read_object(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ValueError("not a JSON object")
    return found


def _literal(text: str) -> Any:
    """A value as JSON or as Python writes it; else the text itself."""
    try:
        return json.loads({"True": "true", "False": "false", "None": "null"}.get(text, text))
    except ValueError:
        return text


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError("config", str(path), _plain(error), "Name a TOML file that exists.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError("config", str(path), f"not TOML: {error}", "Mend that line.") from None


def _refuse_unknown(kind: type[Settings], values: dict[str, Any], path: Path) -> None:
    known = [name for name in kind.model_fields if name != "json_output"]
    for key, value in values.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"Did you mean {near[0]}?" if near else f"Keys: {', '.join(known)}."
            raise ConfigurationError(key, value, "no such key", hint)


def _first_error(error: pydantic.ValidationError) -> ConfigurationError:
    first = error.errors()[0]
    key = str(first["loc"][0]) if first["loc"] else "configuration"
    why = first["msg"][:1].lower() + first["msg"][1:]
    return ConfigurationError(key, first.get("input"), why, f"See the help of {key.replace('_', '-')}.")


def _flag(key: str) -> str:
    return key.replace("_", "-")


def _is_given(key: str, args: Sequence[str]) -> bool:
    names = (f"--{_flag(key)}", f"--no-{_flag(key)}")
    return any(word.split("=")[0].replace("_", "-") in names for word in args)


def _plain(error: Exception) -> str:
    return f"{error.strerror}" if isinstance(error, OSError) and error.strerror else str(error)


def as_json(settings: Settings) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(settings.model_dump_json(exclude={"config", "json_output", "dry_run"}))
    return plain
