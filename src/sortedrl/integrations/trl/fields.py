"""How the fields of a GRPOConfig apply to the scheduler.

A field is kept (TRL handles it as usual), mapped (`schedule_for`), or refused by name if it differs from its default
(`REFUSED`). None is silently ignored.
"""

import dataclasses
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import trl
from packaging.version import Version
from torch import nn
from transformers import PreTrainedTokenizerBase
from trl.distributed import DistributedBackend
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from sortedrl.core.configuration import ConfigurationError, checked_float, checked_int, checked_slots
from sortedrl.core.group_filter import EQUAL_REWARDS
from sortedrl.core.parts import strategy_and_filter
from sortedrl.core.schedule import Schedule
from sortedrl.core.seeds import derive_seed
from sortedrl.core.wording import counted, kind_of
from sortedrl.engines.registry import SERVERS, check_available, check_name
from sortedrl.integrations.trl.engine import is_sharded

OLDEST_VERSION = "1.16.0"
VERIFIED_VERSIONS = ("1.16.0",)
UPDATES_PER_COHORT = 4
LOGGED_METRICS = (
    *("bubble", "idle", "goodput", "waste", "rejected", "filtered_fraction", "staleness_mean", "staleness_max"),
)

# The methods of GRPOTrainer that are overridden, with their parameters.
HOOKS: dict[str, tuple[str, ...]] = {
    "_prepare_inputs": ("generation_batch",),
    "_generate_and_score_completions": ("inputs",),
    "_generate_single_turn": ("prompt_ids", "images", "multimodal_fields", "num_generations"),
    "_calculate_rewards": ("inputs", "prompts", "completions", "completion_ids_list"),
    "_compute_loss": ("model", "inputs"),
    "_tool_call_loop": (
        *("prompts", "prompt_ids", "completion_ids", "completions", "logprobs", "images", "multimodal_fields"),
    ),
}

_WHOLE_DISTRIBUTION = "the loss uses log-probabilities of the full distribution, so its ratios would be biased"
_OWN_ENGINE = "the scheduler generates with its own engine"
_VLLM = "it sets up TRL's own vLLM, but the scheduler needs one that it can abort requests in"
_USE_ENGINE = "Leave it out and pass engine= to the trainer."

_FIELDS_OF_TRLS_VLLM = (
    *("vllm_mode", "vllm_model_impl", "vllm_structured_outputs_regex", "vllm_server_base_url", "vllm_server_host"),
    *("vllm_server_port", "vllm_server_timeout", "vllm_group_port"),
)
_FIELDS_OF_GENERATE = (
    *("use_transformers_paged", "use_transformers_continuous_batching", "transformers_continuous_batching_config"),
)

REFUSED: dict[str, tuple[str, str]] = {
    **dict.fromkeys(("top_p", "repetition_penalty"), (_WHOLE_DISTRIBUTION, "Leave it at 1.0.")),
    "top_k": (_WHOLE_DISTRIBUTION, "Leave it at 0."),
    "min_p": (_WHOLE_DISTRIBUTION, "Leave it out."),
    "generation_kwargs": (f"{_OWN_ENGINE}, which only supports temperature", "Leave it out."),
    "cache_implementation": (f"{_OWN_ENGINE}, which has its own KV cache", "Leave it out."),
    **dict.fromkeys(_FIELDS_OF_GENERATE, (_OWN_ENGINE, _USE_ENGINE)),
    "use_vllm": (_VLLM, "Pass engine='vllm' to the trainer instead."),
    **dict.fromkeys(_FIELDS_OF_TRLS_VLLM, (_VLLM, _USE_ENGINE)),
    "vllm_tensor_parallel_size": (
        "each rank schedules its own vLLM, and with tensor parallelism they would have to schedule alike",
        "Leave it at 1, or start a server with it and pass a function that returns its engine.",
    ),
    "neftune_noise_alpha": ("the engine samples without this noise, so the loss would be biased", "Leave it out."),
    "ds3_gather_for_generation": ("weights are gathered for the engine, tensor by tensor", "Leave it out."),
    "parallelism_config": ("models that are split within a layer were never run", "Use FSDP2 or ZeRO-3."),
}
# Settings of vLLM in this process.
ENGINE_FIELDS = ("vllm_gpu_memory_utilization", "vllm_max_model_length", "vllm_enable_sleep_mode")
OTHER_ENGINE = ("it sets up vLLM, but another engine generates", "Leave it out, or pass engine='vllm' to the trainer.")
# Settings of the off-policy correction: TRL reads them only if old and sampling policy are distinguished.
CORRECTION_FIELDS = tuple(f"vllm_importance_sampling_{name}" for name in ("cap", "mode", "clip_max", "clip_min"))
NOT_CORRECTED = (
    "it has no effect with off_policy_correction='ppo_clip'",
    "Leave it out, or pass off_policy_correction='decoupled' to the trainer.",
)

REFUSED_ARGUMENTS: dict[str, tuple[str, str]] = {
    "rollout_func": ("the scheduler decides what is generated and when", "Pass your own engine as engine=."),
    "quantization_config": ("the engine needs unquantized weights", "Load the model in bfloat16; LoRA is supported."),
}


def check_version(version: str = trl.__version__, trainer: type = GRPOTrainer) -> None:
    """Refuse a TRL version that is too old, or in which an overridden method is missing or has other parameters."""
    works = f"Verified with TRL {' and '.join(VERIFIED_VERSIONS)}: pip install 'trl=={VERIFIED_VERSIONS[-1]}'"
    if Version(version) < Version(OLDEST_VERSION):
        raise ConfigurationError("trl", version, f"older than {OLDEST_VERSION}, the first supported version", works)
    for name, parameters in HOOKS.items():
        method = getattr(trainer, name, None)
        known = () if method is None else tuple(inspect.signature(method).parameters)[1:]
        if known[: len(parameters)] != parameters:
            found = f"takes ({', '.join(known)}), not ({', '.join(parameters)})" if known else "does not exist"
            raise ConfigurationError("trl", version, f"GRPOTrainer.{name} {found}", works)


def check_arguments(given: Mapping[str, Any]) -> None:
    """Check the arguments of GRPOTrainer other than its config. `given` holds them by name."""
    for name, (why, fix) in REFUSED_ARGUMENTS.items():
        if given.get(name):
            raise ConfigurationError(name, given[name], why, fix)
    dataset, factory = given.get("train_dataset"), given.get("environment_factory")
    if dataset is None and factory is not None:
        return  # the environment has the data; TRL makes rows with empty prompts
    if dataset is None or not (hasattr(dataset, "column_names") and hasattr(dataset, "__len__")):
        why = "the scheduler loads prompts by their index in the dataset"
        fix = "Pass a datasets.Dataset: Dataset.from_list(rows), or a streaming dataset that is read into memory."
        raise ConfigurationError("train_dataset", type(dataset).__name__, why, fix)
    columns = set(dataset.column_names or ())
    names = {*map(str, factory)} if isinstance(factory, Mapping) else None
    needed = "prompt" if factory is None else "environment"
    if (factory is None or names is not None) and needed not in columns:
        why, fix = f"it has no column named {needed}", "Add it, or rename the column that holds it."
        raise ConfigurationError("train_dataset", sorted(columns), why, fix)
    for name in sorted(columns & {"image", "images"}):
        raise ConfigurationError("train_dataset", name, "images are not supported", "Use GRPOTrainer for them.")
    if (factory is not None or given.get("tools")) and "prompt" in columns and isinstance(dataset[0]["prompt"], str):
        fix = 'Use [{"role": "user", "content": ...}] instead of text.'
        raise ConfigurationError("train_dataset", "prompt", "tools need prompts that are lists of chat messages", fix)
    if names is not None and (unknown := sorted({*map(str, dataset["environment"])} - names)):
        why, fix = f"the dataset names environments that it has not: {unknown}", "Add them, or change the column."
        raise ConfigurationError("environment_factory", sorted(names), why, fix)


def check_parts(schedule: object, engine: object, slots: int | None, reuse_kv_cache: bool = False) -> None:
    """Check the arguments of SortedGRPOTrainer."""
    if not isinstance(schedule, str | Schedule):
        fix = 'Pass the name of a mode, or Schedule(mode="partial", max_staleness=4), or leave it out.'
        raise ConfigurationError("schedule", schedule, f"this is {kind_of(schedule)}", fix)
    if isinstance(engine, type) or not (isinstance(engine, str) or hasattr(engine, "poll") or callable(engine)):
        fix = "Pass embedded, vllm, an engine object or a function that makes one, or leave it out."
        raise ConfigurationError("engine", engine, f"this is {kind_of(engine)}", fix)
    if isinstance(engine, str):
        check_name(engine)
        if engine in SERVERS:
            fix = "Pass the engine itself, such as engine=VllmServerEngine(URL, slots=256, eos_token_ids=[...])."
            raise ConfigurationError("engine", engine, "the trainer needs the address of a server", fix)
    if reuse_kv_cache and engine != "vllm":
        fix = "Pass engine='vllm', or set it in the engine that you pass."
        raise ConfigurationError("reuse_kv_cache", True, "it is a setting of engine='vllm' alone", fix)
    own = getattr(engine, "slots", "slots of its own" if callable(engine) else slots)
    if slots is not None and checked_slots(slots) != own:
        reason = f"the engine that you pass has {own}"
        raise ConfigurationError("slots", slots, reason, "Leave it out.")
    if isinstance(engine, str):
        check_available(engine, urls=())  # before the model is loaded


def check_fields(args: GRPOConfig, *, off_policy_correction: str, engine: object) -> None:
    """Refuse, by name, fields that are set but would have no effect. All of them at once: a launch takes minutes."""
    defaults = {field.name: field.default for field in dataclasses.fields(args)}
    refused = REFUSED
    if engine != "vllm":
        refused = refused | dict.fromkeys(ENGINE_FIELDS, OTHER_ENGINE)
    if off_policy_correction == "ppo_clip":
        refused = refused | dict.fromkeys(CORRECTION_FIELDS, NOT_CORRECTED)
    are_set = [name for name in refused if name in defaults and getattr(args, name) != defaults[name]]
    if are_set:
        why, fix = refused[are_set[0]]
        others = f" Also refused: {', '.join(are_set[1:])}." if are_set[1:] else ""
        raise ConfigurationError(are_set[0], getattr(args, are_set[0]), why, fix + others)
    if off_policy_correction not in ("ppo_clip", "decoupled"):
        fix = "Use 'ppo_clip' or 'decoupled'."
        raise ConfigurationError("off_policy_correction", off_policy_correction, "no such correction", fix)
    for name, why, fix in _unfit(args, off_policy_correction):
        raise ConfigurationError(name, getattr(args, name), why, fix)


def _unfit(args: GRPOConfig, off_policy_correction: str) -> Iterator[tuple[str, str, str]]:
    """Fields whose values cannot work: their names, why, what to do. A batch of the scheduler must start and end with
    an optimizer step, and so must a checkpoint."""
    if off_policy_correction == "decoupled" and not args.vllm_importance_sampling_correction:
        fix = "Leave it at True, or pass off_policy_correction='ppo_clip' to the trainer."
        yield "vllm_importance_sampling_correction", "off_policy_correction='decoupled' requires it", fix
    if not args.temperature > 0:
        yield "temperature", "greedy responses to a prompt are all the same, so a group has no advantages", "Use 1.0."
    if args.max_completion_length is None:
        yield "max_completion_length", "a rollout needs a limit on its tokens", "Use 512."
    accumulated = args.gradient_accumulation_steps
    if _steps_per_generation(args) % accumulated:
        why = f"an update would end in the middle of an optimizer step of {accumulated} accumulated steps"
        yield "steps_per_generation", why, f"Use a multiple of gradient_accumulation_steps, such as {accumulated}."
    per_update = optimizer_steps_per_update(args)
    saves = str(getattr(args.save_strategy, "value", args.save_strategy)) == "steps"
    if saves and per_update > 1 and args.save_steps % per_update:  # below 1 it is a fraction of the run
        why = f"an update takes {per_update} optimizer steps, and a checkpoint in between could not be resumed from"
        yield "save_steps", why, f"Use a multiple of {per_update}."


def check_model(trainer: Any, engine: object) -> None:
    """Refuse models that the engine cannot follow. `trainer` is a GRPOTrainer."""
    if not isinstance(trainer.processing_class, PreTrainedTokenizerBase):
        why = "only text models are supported"
        fix = "Use GRPOTrainer for images."
        raise ConfigurationError("processing_class", type(trainer.processing_class).__name__, why, fix)
    backend = DistributedBackend(trainer.accelerator)
    if backend.fsdp_version == 1:
        raise ConfigurationError("fsdp_version", 1, "weights are gathered from FSDP2 or ZeRO-3", "Set it to 2.")
    if (backend.is_zero3 or backend.is_fsdp) and engine == "embedded":
        why = "it decodes with the trainer's module, whose weights are sharded: every step would need all ranks at once"
        fix = "Use engine='vllm', or a function that returns a server or a pool."
        raise ConfigurationError("engine", "embedded", why, fix)
    if getattr(trainer.model, "is_loaded_in_4bit", False) or getattr(trainer.model, "is_loaded_in_8bit", False):
        raise ConfigurationError("model", "quantized", "the engine needs unquantized weights", "Load it in bfloat16.")


def optimizer_steps_per_update(args: GRPOConfig) -> int:
    return int(_steps_per_generation(args) * args.num_iterations // args.gradient_accumulation_steps)


def _steps_per_generation(args: GRPOConfig) -> int:
    assert args.steps_per_generation is not None  # GRPOConfig fills it in
    return int(args.steps_per_generation)


def schedule_for(args: GRPOConfig, given: Schedule | str, rank: int, *, is_shared: bool = False) -> Schedule:
    """The schedule of one process: sizes from GRPOConfig, and the rest from `given`.

    A generation batch is an update; each process schedules its own part of it, or rank 0 all of it (`is_shared`).
    """
    rollouts = args.generation_batch_size // args.world_size
    if rollouts % args.num_generations:
        raise ConfigurationError(
            "per_device_train_batch_size", args.per_device_train_batch_size,
            f"each of {args.world_size} processes gets {rollouts} rollouts per update, which is not a whole number of "
            f"groups of {args.num_generations}",
            f"Make per_device_train_batch_size x steps_per_generation a multiple of {args.num_generations}.",
        )  # fmt: skip
    if is_shared:
        rank, rollouts = 0, rollouts * args.world_size
    owned: dict[str, Any] = {
        "rollouts_per_update": rollouts,
        "rollouts_per_prompt": args.num_generations,
        "whole_groups": True,
        "max_response_tokens": args.max_completion_length,
        "seed": derive_seed(args.seed, rank) if rank else args.seed,
    }
    given = Schedule(mode=given) if isinstance(given, str) else given
    if given.prompts_per_cohort == Schedule().prompts_per_cohort:  # not set
        owned["prompts_per_cohort"] = UPDATES_PER_COHORT * rollouts // args.num_generations
    schedule = _merged(given, owned)
    if schedule.overlap:
        raise ConfigurationError("overlap", True, "the engine is idle while the trainer steps", "Leave it out.")
    strategy_and_filter(schedule)
    return schedule


def check_rows(args: GRPOConfig, rows: int) -> None:
    """TRL's data loader counts the steps, and has none if the rows do not fill an update."""
    rollouts, group_size = args.generation_batch_size, args.num_generations
    if rows < rollouts // group_size:
        why = f"an update has {rollouts} rollouts, {group_size} for each of {rollouts // group_size} rows"
        raise ConfigurationError("train_dataset", counted(rows, "row"), why, "Add rows, or lower the batch size.")


def check_filter(trainer: Any, schedule: Schedule) -> None:
    """Refuse what `filter_groups` cannot work with. `trainer` is a GRPOTrainer."""
    if schedule.filter_groups is None:
        return
    if schedule.filter_groups == EQUAL_REWARDS and trainer.multi_objective_aggregation != "sum_then_normalize":
        why = f"{EQUAL_REWARDS} compares sums of rewards, and this aggregation compares function by function"
        fix = "Use sum_then_normalize, or a filter of your own that reads rollout.detail['rewards']."
        raise ConfigurationError("multi_objective_aggregation", trainer.multi_objective_aggregation, why, fix)
    for name, model in zip(trainer.reward_func_names, trainer.reward_funcs, strict=True):
        if isinstance(model, nn.Module) and is_sharded(model):
            raise ConfigurationError(
                "reward_funcs", name, "with filter_groups each rank scores its groups when they are complete, but this "
                "model is sharded, so that all ranks would have to run it at once",
                "Serve it, and call it from a reward function.",
            )  # fmt: skip


def with_tools(schedule: Schedule, threads: int, limit_seconds: float) -> Schedule:
    """TRL's limits: tool results count in `max_completion_length`."""
    checked_int("tool_threads", threads, 0)
    checked_float("tool_limit_seconds", limit_seconds, lambda x: x > 0, "of seconds above 0")
    return dataclasses.replace(
        schedule,
        count_observations=True,
        max_environment_seconds=max(schedule.max_environment_seconds, 2 * limit_seconds),
        score_wait_seconds=max(schedule.score_wait_seconds, 2 * limit_seconds),
    )


def _merged(given: Schedule, owned: dict[str, Any]) -> Schedule:
    names = {
        "rollouts_per_update": "per_device_train_batch_size x steps_per_generation",
        "rollouts_per_prompt": "num_generations",
        "max_response_tokens": "max_completion_length",
        "seed": "seed",
    }
    defaults = {field.name: field.default for field in dataclasses.fields(Schedule)}
    for key, name in names.items():
        value = getattr(given, key)
        if value not in (defaults[key], owned[key]):
            why = f"{name} of GRPOConfig sets it to {owned[key]}"
            raise ConfigurationError(key, value, why, f"Leave {key} out of the schedule.")
    return dataclasses.replace(given, **owned)
