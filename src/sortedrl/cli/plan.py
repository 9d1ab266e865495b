"""`sortedrl plan`: which schedule to use, and whether you need one at all."""

from dataclasses import asdict, replace
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from sortedrl.cli.output import ProgressBar, print_json, table_console
from sortedrl.cli.workload import accuracy_line, print_dry_run, print_notices, spread, workload_line
from sortedrl.core.schedule import Schedule
from sortedrl.core.strategies.registry import strategy_named
from sortedrl.studies import plan, tables
from sortedrl.studies.plan import Allowed, PlanSettings, plan_drafts
from sortedrl.studies.workload_settings import simulated_schedule, simulated_workload, step_time_of

SETTINGS = PlanSettings
VERL_BOUND = 4  # with overlap, verl's adapter requires one
MOST_ROWS = 8  # of a micro-batch; TRL's own default


def run(settings: PlanSettings) -> int:
    schedule = simulated_schedule(settings)
    workload = replace(simulated_workload(settings), expectation=settings.expectation, step_time=step_time_of(settings))
    if settings.dry_run:
        return print_dry_run(settings, schedule, workload.prompts)
    print_notices(settings)
    allowed = Allowed(settings.max_length_bias, settings.max_staleness_mean, settings.max_cohort_updates)
    with ProgressBar("planning", quiet=settings.json_output, when_piped=True) as progress:
        found = plan.plan(workload, schedule, allowed, settings.seeds, progress)
    drafts = None if settings.drafts == "none" else plan_drafts(settings, workload, (found.choice, found.baseline))
    if settings.json_output:
        return print_json(settings, asdict(found) | ({} if drafts is None else {"drafts": asdict(drafts)}))
    limit = found.baseline.goodput / found.baseline.of_limit
    head = f"{workload_line(settings)}\nlimit of this workload: {limit:,.0f} tokens/s"
    head += f"; expected lengths: {settings.expectation}"
    said: list[RenderableType] = [] if drafts is None else ["", Text(drafts.reason, "bold")]
    tried = (found.baseline, *found.options)
    error = spread(tried, {o.name: asdict(o) for o in tried}, len(settings.seeds), settings.cohorts)
    tables.show(table_console(), [head, *tables.plan_view(found), *said, "", error, accuracy_line(settings)])
    if found.needed:
        choice, separate = found.choice, settings.separate_learner
        lines = lines_to_paste(choice.schedule, choice.slots, settings.controllers, separate=separate)
        for line in (*limit_of_file(settings), *lines):
            print(line)
    return 0


def limit_of_file(settings: PlanSettings) -> list[str]:
    """That the file does not say where its responses were cut."""
    replayed = settings.replayed_lengths
    if settings.max_response_tokens is not None or replayed is None or replayed.run_limit:
        return []
    longest = f"the longest response in {settings.lengths} has {replayed.longest} tokens"
    return ["", f"{longest}: set the limit of your run below instead, or plan again with --max-response-tokens."]


# The schedule as lines to paste


def lines_to_paste(schedule: Schedule, slots: int, processes: int = 1, *, separate: bool = False) -> list[str]:
    """`processes`: controllers of the plan, each in a training process of TRL: the others have one. `separate`: the
    learner has GPUs of its own, and so do the servers."""
    chosen = {"mode": schedule.mode, "prompts_per_cohort": schedule.prompts_per_cohort}
    optional = ("oversubscribe", "max_staleness", "filter_groups")
    chosen |= {key: value for key in optional if (value := getattr(schedule, key)) is not None}
    if processes > 1:
        others = f"sortedrl train and verl have one controller, not {processes}: plan for them without --controllers."
        return [*_trl(schedule, chosen, slots, processes), "", others]
    lines = ["", "sortedrl train --config FILE, with these lines in FILE, beside your model, task and learning_rate:"]
    keys = ("rollouts_per_update", "rollouts_per_prompt", "max_response_tokens")
    sizes = {key: getattr(schedule, key) for key in keys}
    overlap = {"overlap": True} if schedule.overlap else {}
    lines += [f"    {key} = {_toml(value)}" for key, value in {**chosen, "slots": slots, **sizes, **overlap}.items()]
    separate = separate or schedule.overlap
    if separate:
        lines += ["", "TRL: engine and learner take turns there. Plan without --separate-learner and --overlap."]
    else:
        lines += _trl(schedule, chosen, slots)
    return lines + _verl(schedule, chosen, slots, separate)


def _toml(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value).lower()


def _trl(schedule: Schedule, chosen: dict[str, Any], slots: int, processes: int = 1) -> list[str]:
    if schedule.rollouts_per_prompt == 1:
        return ["", "TRL: its GRPO needs groups. Plan with --rollouts-per-prompt 8 --whole-groups."]
    if (prompts := schedule.prompts_per_cohort) is not None:
        chosen = chosen | {"prompts_per_cohort": -(-prompts // processes)}
    arguments = ", ".join(f"{key}={value!r}" for key, value in chosen.items())
    where = f"each of {processes} processes" if processes > 1 else "one process; for N of them add --controllers N"
    rows = -(-schedule.rollouts_needed // processes)
    per_device = next(size for size in range(MOST_ROWS, 0, -1) if rows % size == 0)
    return [
        "",
        f"TRL ({where}), with one optimizer step per update:",
        f"    GRPOConfig(num_generations={schedule.rollouts_per_prompt}, per_device_train_batch_size={per_device}, "
        f"gradient_accumulation_steps={rows // per_device}, max_completion_length={schedule.max_response_tokens}, ...)",
        f"    SortedGRPOTrainer(slots={slots // processes}, schedule=Schedule({arguments}), ...)",
    ]


def _verl(schedule: Schedule, chosen: dict[str, Any], slots: int, separate: bool) -> list[str]:
    head = "verl:"
    keys: dict[str, Any] = {"trainer.v1.trainer_mode": "sortedrl"}
    if separate:
        head = "verl (add actor_rollout_ref.rollout.nnodes and n_gpus_per_node: the GPUs of the servers):"
        keys |= {
            "actor_rollout_ref.hybrid_engine": False,
            "actor_rollout_ref.rollout.checkpoint_engine.backend": "nccl",
        }
    if schedule.overlap:
        chosen = {"max_staleness": VERL_BOUND} | chosen
    keys |= {"algorithm.filter_groups.enable": True} if "filter_groups" in chosen else {}
    ours = {key: value for key, value in {**chosen, "slots": slots}.items() if key != "filter_groups"}
    keys |= {f"+trainer.v1.sortedrl.{key}": value for key, value in ours.items()}
    keys |= {
        "data.train_batch_size": schedule.rollouts_needed // schedule.rollouts_per_prompt,
        "data.max_response_length": schedule.max_response_tokens,
        "actor_rollout_ref.rollout.n": schedule.rollouts_per_prompt,
        "actor_rollout_ref.actor.use_dynamic_bsz": True,
    }
    if not strategy_named(schedule.mode).on_policy:
        keys["algorithm.rollout_correction.rollout_is"] = "token"
    *others, last = (f"    {key}={value}" for key, value in keys.items())
    return ["", head, *(f"{line} \\" for line in others), last]
