"""The command line as a user meets it: what it prints, and one clear line with exit code 2 for every wrong input."""

import importlib
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

import forked
from config_file import config_file
from forked import Done
from sortedrl.cli.help_page import flag_of, help_page
from sortedrl.cli.main import COMMANDS
from sortedrl.core.strategies.registry import STRATEGIES
from sortedrl.settings.base import Settings
from sortedrl.studies.simulate import FILTER_ROUNDS, SimulateSettings
from sortedrl.training.settings import TrainSettings

SIZES = ["--cohorts", "2", "--slots", "8", "--rollouts-per-update", "8", "--prompts-per-cohort", "32"]
SMALL = [*SIZES, "--step-time", "memory-bound"]


def sortedrl(*words: str, cwd: Path | None = None) -> Done:
    return forked.run(words, cwd=cwd, environment=os.environ | {"COLUMNS": "160"})


def test_all_modes_have_the_asynchronous_one_where_it_can_run() -> None:
    done = sortedrl("simulate", "--all", "--dry-run")
    assert done.returncode == 0, done.stderr
    alone, both = (
        SimulateSettings(all_modes=True, max_staleness=4, overlap=overlap).modes_and_expectations()[0]
        for overlap in (False, True)
    )
    assert set(both) == STRATEGIES.keys() - set(FILTER_ROUNDS) and set(both) - set(alone) == {"async-pool"}


def test_simulate_prints_every_mode_and_the_figures_of_each() -> None:
    done = sortedrl("simulate", "--all", "--json", *SMALL)
    assert done.returncode == 0, done.stderr
    modes = json.loads(done.stdout)["modes"]
    assert modes.keys() >= {"partial+elevator (warm)", "partial+elevator (oracle)"}
    details = sortedrl("simulate", "--modes", "baseline", "--details", *SMALL).stdout
    assert all(word in details for word in ("length bias", "drain", "of limit", "rollouts by segments"))
    needs_more = {"async-pool", *FILTER_ROUNDS}  # --overlap and --max-staleness; --filtered
    assert modes.keys() >= STRATEGIES.keys() - needs_more
    for run_metrics in modes.values():
        assert 0 <= run_metrics["bubble"] <= run_metrics["idle"] + 1e-9 <= 1 + 1e-9
        assert run_metrics["bubble"] == pytest.approx(sum(run_metrics["bubble_parts"].values()))
        assert run_metrics["trained"] + run_metrics["rejected"] == run_metrics["loaded"]
        names = "goodput kept of_limit waste staleness_mean staleness_max sortedness"
        assert set(names.split()) <= run_metrics.keys()
    assert modes["partial+elevator"]["goodput"] > modes["baseline"]["goodput"]


def test_own_lengths_are_replayed(tmp_path: Path) -> None:
    lengths = tmp_path / "lengths.jsonl"
    lengths.write_text("".join(json.dumps({"prompt": f"p{i % 40}", "length": 50 + i}) + "\n" for i in range(80)))
    done = sortedrl("simulate", "--json", "--modes", "baseline", "--lengths", str(lengths), *SMALL)
    assert done.returncode == 0, done.stderr
    assert 50 <= json.loads(done.stdout)["modes"]["baseline"]["mean_length"] <= 130


def test_own_measured_step_times_are_fitted(tmp_path: Path) -> None:
    points = tmp_path / "points.csv"
    rows = [(r, c, 0.005 + 3e-5 * r + 2.5e-8 * c) for r in (1, 32, 128) for c in (0, 10_000, 300_000)]
    points.write_text("running,cached_tokens,seconds\n" + "".join(f"{r},{c},{t}\n" for r, c, t in rows))
    fitted = sortedrl("simulate", "--json", "--modes", "baseline", "--step-time", str(points), *SMALL)
    words = "simulate --json --modes baseline --step-time h200-8b --prefill-seconds-per-token 0"
    preset = sortedrl(*words.split(), *SMALL)
    goodput = [json.loads(done.stdout)["modes"]["baseline"]["goodput"] for done in (fitted, preset)]
    assert goodput[0] == pytest.approx(goodput[1], rel=1e-6)


def test_plan_names_a_choice_and_says_when_it_is_not_needed() -> None:
    wide = json.loads(sortedrl("plan", "--json", *SIZES).stdout)
    assert wide["needed"] is True
    assert wide["choice"]["of_limit"] > wide["baseline"]["of_limit"]
    assert wide["staleness_frontier"] and wide["bias_frontier"]
    equal_lengths = ["--length-sd-between", "0", "--length-sd-within", "0"]
    flat = sortedrl("plan", *SIZES, *equal_lengths)
    assert "You do not need this" in flat.stdout and "tandard error" in flat.stdout


@pytest.mark.slow
def test_plan_states_what_kv_reuse_would_add() -> None:
    def found(*flags: str) -> dict[str, Any]:
        costly = ["--step-time", "h200-8b", "--prefill-seconds-per-token", "2e-4", "--expectation", "oracle"]
        return dict(json.loads(sortedrl("plan", "--json", *SMALL, *costly, *flags).stdout))

    plain, keeping = found(), found("--reuse-kv-cache")
    assert plain["with_kv_cache_reuse"]["of_limit"] > plain["choice"]["of_limit"] + 0.05
    assert "reuse_kv_cache" in plain["reason"] and "reuse_kv_cache" not in keeping["reason"]
    assert "reuse_kv_cache" not in found("--max-staleness-mean", "0")["reason"], "what is told of must be allowed"


def test_simulate_honours_the_settings_of_the_schedule() -> None:
    def run_metrics(*flags: str) -> dict[str, Any]:
        modes = ["--modes", "partial+elevator", "baseline", "--learner-seconds-per-update", "2000"]
        done = sortedrl("simulate", "--json", *SMALL, *modes, *flags)
        return dict(json.loads(done.stdout)["modes"])

    plain, bounded = run_metrics(), run_metrics("--max-staleness", "1")
    assert plain["partial+elevator"]["staleness_max"] > 1 == bounded["partial+elevator"]["staleness_max"]
    overlapping = run_metrics("--overlap")
    assert overlapping["partial+elevator"]["wall_seconds"] < 0.9 * plain["partial+elevator"]["wall_seconds"]
    assert overlapping["baseline"]["wall_seconds"] == plain["baseline"]["wall_seconds"]


def test_simulate_knows_the_memory_that_a_profile_found(tmp_path: Path) -> None:
    cell = {"prefill_seconds_per_token": 1e-5, "cached_tokens": 100.0}
    cells = [{**cell, "running": r, "context": c, "step_seconds": 0.01} for r in (1, 8) for c in (32, 64)]
    for number, entry in enumerate(cells):
        entry["cached_tokens"] = 50.0 * (number + 1)
    fields = {"engine": "", "model": "", "slots": 16, "cells": cells, "machine": "", "weight_update_seconds": None}
    fields |= {"prefill_seconds_per_token": 1e-5, "prefill_tokens_per_step": None}
    preempted = []
    for kv_tokens in (None, 9000):
        path = tmp_path / f"{kv_tokens}.json"
        path.write_text(json.dumps({**fields, "kv_tokens": kv_tokens}))
        done = sortedrl("simulate", "--json", *SMALL, "--modes", "baseline", "--step-time", str(path))
        preempted.append(json.loads(done.stdout)["modes"]["baseline"]["preemptions"] > 0)
    assert preempted == [False, True]


def test_options_in_a_file_may_be_numbers_switches_and_lists() -> None:
    options: dict[str, Any] = {"limit": 20, "fraction": 0.5, "strict": True, "sizes": [1, 2], "name": "x"}
    settings = TrainSettings(task_options=options, engine_options=options)
    assert settings.resolved_task_options() == settings.resolved_engine_options() == options
    assert settings.task_options["limit"] == "20", "as from a flag"


def test_a_file_sets_what_flags_do_not(tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text('slots = 8\nrollouts_per_update = 8\nmodes = ["baseline"]\nprompts_per_cohort = 32\n')
    done = sortedrl("simulate", "--dry-run", "--json", "--config", str(config), "--slots", "4")
    assert done.returncode == 0, done.stderr
    resolved = json.loads(done.stdout)
    assert resolved["settings"]["slots"] == 4
    assert resolved["settings"]["rollouts_per_update"] == 8
    assert resolved["derived"]["updates_per_cohort"] == 4


@pytest.mark.parametrize("command", ["simulate", "plan", "bench", "train"])
def test_a_dry_run_counts_updates_of_whole_groups(command: str) -> None:
    """64 x 8 rollouts make six updates of 90, but five of twelve groups or more: four of 96, and the rest."""
    groups = ["--algorithm", "grpo"] if command == "train" else ["--whole-groups"]
    sizes = "--prompts-per-cohort 64 --rollouts-per-prompt 8 --rollouts-per-update 90 --slots 192"
    done = sortedrl(command, "--dry-run", "--json", *sizes.split(), *groups)
    derived = json.loads(done.stdout)["derived"]
    assert derived["updates_per_cohort"] == 5
    assert derived["update_size_over_slots"] == 0.5


@pytest.mark.parametrize("command", ["simulate", "plan", "bench", "train"])
def test_a_cohort_is_four_updates_unless_it_is_set(command: str, tmp_path: Path) -> None:
    """Of whole prompts, also if the file sets one part of it and a flag the other."""

    def cohort(*words: str) -> int:
        done = sortedrl(command, "--dry-run", "--json", *config_file(tmp_path, rollouts_per_update=100), *words)
        return int(json.loads(done.stdout)["settings"]["prompts_per_cohort"])

    assert cohort("--rollouts-per-prompt", "2") == 200
    assert cohort("--rollouts-per-prompt", "8") == 4 * 13
    assert cohort("--rollouts-per-prompt", "8", "--prompts-per-cohort", "64") == 64


@pytest.mark.parametrize("command", ["simulate", "plan", "train", "eval"])
def test_a_dry_run_prints_settings_and_runs_nothing(command: str, tmp_path: Path) -> None:
    done = sortedrl(command, "--dry-run", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout).keys() == {"settings", "derived"}
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_every_flag_once_with_its_meaning(command: str) -> None:
    kind: type[Settings] = importlib.import_module(f"sortedrl.cli.{command}").SETTINGS
    page = help_page(kind, "sortedrl x")
    heads = [line.split()[0] for line in page.splitlines() if line.startswith("  ") and line[2] != " "]
    shown = kind.model_fields.keys() - kind.file_only
    names = [key.upper() if key in kind.positional else f"--{flag_of(key)}" for key in shown]
    assert sorted(heads) == sorted(names)
    assert all(field.description for field in kind.model_fields.values())
    assert max(map(len, page.splitlines())) <= 120
    if "slots" in shown:
        assert "(vLLM max_num_seqs, SGLang max_running_requests)" in " ".join(page.split())


def test_train_has_at_most_40_flags_and_keeps_the_common_ones() -> None:
    flags = TrainSettings.model_fields.keys() - TrainSettings.file_only
    assert len(flags) <= 40
    assert {
        *("threads", "eval_problems", "checkpoint_every", "data", "task", "resume", "out", "seed", "json_output"),
        *("scoring", "reward_workers"),
    } <= flags
    done = sortedrl("train", "--help")
    assert done.returncode == 0 and "set them in a toml file" in done.stdout.lower()
    first = re.findall(r"^  --(\S+)", done.stdout, re.MULTILINE)[:5]
    assert first == ["mode", "updates", "out", "resume", "seed"], "the common ones"
    assert done.stdout.index("\nschedule\n") < done.stdout.index("\nlearner\n") < done.stdout.index("\noutput\n")


@pytest.mark.parametrize("none", ["none", "None"])
def test_a_number_may_be_none_where_it_is_optional(none: str, tmp_path: Path) -> None:
    words = [["--updates", none], config_file(tmp_path, updates=none, max_staleness=none)]
    for given in words:
        done = sortedrl("train", "--dry-run", "--json", *given)
        assert done.returncode == 0 and json.loads(done.stdout)["settings"]["updates"] is None, done.stderr
    assert "--slots none: expected INT" in sortedrl("train", "--slots", "none", "--dry-run").stderr


def test_a_file_sets_what_has_no_flag(tmp_path: Path) -> None:
    done = sortedrl("train", "--dry-run", "--json", *config_file(tmp_path, clip_low=0.1))
    assert json.loads(done.stdout)["settings"]["clip_low"] == 0.1
    done = sortedrl("train", *config_file(tmp_path, aggregation="mean"))
    assert "aggregation = 'mean'" in done.stderr and "Its meaning: what the sum over tokens is divided" in done.stderr


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("", ["stream_sms = 96", "stream = true and --engine vllm"]),
        ("--stream", ["--engine vllm, which"]),
        ("--stream --engine vllm-server --engine-urls http://x", ["--engine vllm, which"]),
        ("--stream --engine my:engine", ["--engine vllm, which"]),
        ("--stream --engine vllm", ["device is cpu"]),
        ("--stream --engine vllm --engine-options enable_sleep_mode True", ["an engine that never sleeps"]),
        ("--stream --engine vllm --mode partial+elevator", ["a mode with a cohort gate", "(partial+elevator keeps"]),
        ("--stream --engine vllm --mode april", ["(april keeps all slots busy)"]),
    ],
)
def test_a_shared_gpu_is_refused_where_it_cannot_be_shared(tmp_path: Path, flags: str, words: list[str]) -> None:
    device = "auto" if "sleep" in flags or "mode" in flags else "cpu"
    done = sortedrl("train", "--dry-run", *flags.split(), *config_file(tmp_path, stream_sms=96, device=device))
    assert done.returncode == 2 and all(word in done.stderr for word in words), done.stderr


def test_streaming_with_the_batch_s_own_mean_is_refused(tmp_path: Path) -> None:
    file = config_file(tmp_path, advantage_baseline="batch")
    done = sortedrl(*STREAMED.split(), "--algorithm", "reinforce++", *file)
    assert done.returncode == 2 and "an advantage depends on the other rollouts" in done.stderr


STREAMED = "train --stream --engine vllm-server --engine-urls http://127.0.0.1:1"
BAD_INPUT: dict[str, tuple[str | list[str], list[str]]] = {
    "a folder that is not UTF-8": (["train", "--out", "runs/\udcff"], ["'runs/\\udcff' is not UTF-8"]),
    "a file that is not UTF-8": (["simulate", "--lengths=\udcff.csv"], ["is not UTF-8: use a name that is"]),
    "deeply nested options": (["train", "--engine-options", "a", "[" * 100_000], ["engine_options"]),
    "a cohort smaller than an update": ("simulate --prompts-per-cohort 64", ["prompts_per_cohort = 64", "128"]),
    "more slots than any engine has": (["simulate", "--slots", "9" * 20], ["slots = 9999", "it should be at most"]),
    "a prompt beyond any context": (["simulate", "--prompt-tokens", "9" * 20], ["it should be at most 10000000"]),
    "a cohort beyond any dataset": (["train", "--prompts-per-cohort", "9" * 20], ["it should be at most 10000000"]),
    "more cohorts than one can wait for": (["plan", "--cohorts", "9" * 20], ["it should be at most 10000000"]),
    "a number out of range": ("simulate --slots -3", ["slots = -3", "--slots", "it should be at least 1"]),
    "streaming beside vLLM": ("train --stream --engine vllm", ["share the device", "or set stream_sms"]),
    "an unknown mode": ("simulate --modes partial+elevater", ["Did you mean partial+elevator?"]),
    "an unknown flag": ("simulate --slotz 3", ["no such flag: --slotz. Did you mean --slots?"]),
    "a flag like no other": ("train --xyzzy", ["no such flag: --xyzzy. See sortedrl train --help."]),
    "a flag of vLLM": ("simulate --max-num-seqs 64", ["no such flag: --max-num-seqs.", "use --slots"]),
    "a flag of TRL": ("train --num-generations=4", ["use --rollouts-per-prompt"]),
    "a flag of TRL for a rare setting": ("train --num-train-epochs 2", ["set epochs in a TOML file"]),
    "a flag of TRL for the loss": ("train --loss-type dapo", ["set aggregation in a TOML file"]),
    "a folder without a run": ("simulate --lengths .", ["lengths = '.'", "it has no events.jsonl"]),
    "a trace without a run": ("trace", ["there is no run"]),
    "a word too many": ("train stray", ["no such argument: stray."]),
    "text for a number": ("train --slots abc", ["--slots abc: expected INT."]),
    "text for a number or nothing": ("train --updates abc", ["--updates abc: expected INT."]),
    "a flag without its value": ("train --slots", ["--slots needs a value: INT."]),
    "an unknown choice": ("train --engine vlm", ["Did you mean vllm?", "your.module:factory"]),
    "a key without its value": ("train --engine-options a", ["expected KEY VALUE pairs"]),
    "streaming in one process": (
        "train --stream",
        ["stream = True", "engine embedded runs in this process", "--engine vllm-server"],
    ),
    "streaming several batches per harvest": (
        f"{STREAMED} --mode cohort-at-once",
        ["mode cohort-at-once decides at the end of a harvest"],
    ),
    "a rare setting as a flag": ("train --clip-low 0.1", ["set clip_low in a TOML file with --config"]),
    "an unknown command": ("simulte", ["Did you mean simulate?"]),
    "an unknown step time": ("simulate --step-time memory-bond", ["step_time", "memory-bound"]),
    "no lengths file": ("simulate --lengths /nowhere.jsonl", ["lengths", "No such file"]),
    "memory below one response": ("simulate --kv-tokens 100", ["kv_tokens = 100", "8321"]),
    "oversubscribe below 1": ("simulate --oversubscribe 0.5", ["oversubscribe = 0.5"]),
    "a time of an environment that is never asked": (
        "plan --environment-seconds 9",
        ["environment_seconds = 9.0 (set by flag --environment-seconds)", "one turn", "Set --turns"],
    ),
    "tokens of an environment that is never asked": ("simulate --observation-tokens 9", ["observation_tokens = 9"]),
    "an option of the engine": ("train --reuse-kv-cache", ["--engine-options reuse_kv_cache True"]),
    "no folder for report": ("report /nowhere", ["(set by an argument)"]),
    "a learner of its own without time": ("simulate --separate-learner", ["Set --learner-seconds"]),
    "a cap that plan searches itself": ("plan --oversubscribe 2", ["no such flag", "plan tries"]),
    "staleness of 0": ("simulate --max-staleness 0", ["max_staleness = 0", "For 0 use mode = on-policy+planned."]),
    "a cap without end": ("bench --modes partial*inf", ["oversubscribe = inf"]),
    "a seed beyond PyTorch's": (["train", "--seed", str(2**64)], [f"seed = {2**64} (set by flag --seed)", "less than"]),
    "a seed twice": ("simulate --seeds 0 1 0", ["seeds = (0, 1, 0)", "one is named twice"]),
    "a mode of a bench twice": ("bench --modes partial partial", ["modes = 'partial'", "there twice"]),
    "a folder for the file of a bench": ("bench --out .", ["out = '.'", "Use bench.json."]),
    "a folder for the file of a profile": ("profile --out .", ["out = '.'", "Use profile.json."]),
    "a place for a profile that is not writable": ("profile --out /sys/p.json", ["out = '/sys'"]),
    "several seeds of a bench": ("bench --seeds 0 1", ["no such flag: --seeds.", "use --seed"]),
    "a bench without a prompt": ("bench --prompt-tokens 0", ["prompt_tokens = 0"]),
    "options of the embedded engine": ("bench --engine-options a 1", ["engine_options", "embedded"]),
    "a server of the embedded engine": ("train --engine-urls http://x", ["engine_urls", "vllm-server"]),
    "a server without its address": ("train --engine vllm-server", ["engine_urls", "http://127.0.0.1:8000"]),
    "a list without values": ("simulate --modes", ["modes = ()", "it needs at least one value"]),
    "a profile that does not fit": ("profile --max-context-tokens 128", ["max_context_tokens = 128"]),
    "returns to an engine without a prefix cache": (
        "profile --observation-tokens 16",
        ["observation_tokens = 16", "no prefix cache"],
    ),
    "observations that do not fit": (
        "profile --engine vllm --observation-tokens 400",
        ["observation_tokens = 400", "room for 128"],
    ),
    "no study": ("compare", ["study", "sortedrl compare STUDY.toml"]),
    "a study that is not there": ("compare nowhere.toml", ["nowhere.toml", "No such file"]),
    "results that are not there": ("compare --from nowhere", ["nowhere", "study.toml"]),
    "modes of compare": ("compare --modes baseline", ["no such flag: --modes"]),
    "a wrong option of the task": (
        "train --task-options count abc",
        ["task = 'knights_and_knaves:small'", "count = 'abc': it should be a whole number. See docs"],
    ),
    "a number in place of a list": (
        "train --task knights_and_knaves --task-options characters 3",
        ["characters = 3: it should be a list, such as [3, 4, 5, 6, 7]"],
    ),
    "a fraction that is text": ("train --task-options held_out_fraction nan", ["it should be a number"]),
    "too few puzzles": ("train --task-options count 0", ["Use a count of at least", "16. See docs"]),
    "all modes and some": ("simulate --all --modes partial", ["modes", "--all has every mode"]),
    "a data file that is not there": (
        "train --task math:gsm8k --data nofile.jsonl",
        ["data = 'nofile.jsonl' (set by flag --data)", "no such file"],
    ),
    "data of a task without": ("train --data nofile", ["data = 'nofile' (set by flag --data)"]),
    "a model folder without a model": ("bench --model /", ["this folder has no config.json"]),
    "no filter": (
        "train --dry-run --filter-groups equal",
        ["filter_groups = 'equal'", "no such filter", "equal_rewards"],
    ),
    "a filter with nothing to compare": (
        "train --dry-run --filter-groups equal_rewards --rollouts-per-prompt 1 --algorithm reinforce++",
        ["it compares the rollouts of a group", "rollouts_per_prompt to 2"],
    ),
    "a filter that is missing": ("train --dry-run --filter-groups no_such:f", ["no module 'no_such'"]),
    "a filter in a mode that cannot": (
        "train --dry-run --filter-groups equal_rewards --mode tail-batching",
        ["mode tail-batching", "elevator"],
    ),
    "a filter by rewards without any": (
        "simulate --filtered file --rollouts-per-prompt 8 --whole-groups",
        ["there is no --lengths"],
    ),
    "an unknown mode of a bench": ("bench --modes aprill", ["Did you mean april?"]),
    "a learner of a bench": ("bench --learner-seconds-per-update 3", ["a bench has no learner"]),
    "stale KV of a bench": ("bench --reuse-kv-cache", ["--engine-options reuse_kv_cache True"]),
    "stale KV, or not": ("bench --engine vllm --engine-options reuse_kv_cache no", ["it is either True or False"]),
    "too many accepted drafts": ("simulate --drafts tail --draft-acceptance 4.5", ["at most draft_tokens + 1 = 4"]),
    "accepted drafts without any": ("simulate --draft-acceptance 2", ["nothing is drafted"]),
    "no profile with drafts": ("simulate --drafts tail --draft-step-time missing.json", ["missing.json"]),
    "observations beyond the KV cache": (
        "simulate --turns 5 --observation-tokens 128 --kv-tokens 8400",
        ["128 + 8192 + 512 tokens"],
    ),
    "no config file": ("simulate --config /nowhere.toml", ["config", "No such file"]),
}


@pytest.fixture
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("command", ["simulate", "plan", "bench"])
@pytest.mark.parametrize("flag", ["--median-length", "--length-sd-between", "--length-sd-within"])
def test_a_flag_for_drawn_lengths_is_not_ignored_beside_a_file_of_lengths(
    command: str, flag: str, in_an_empty_folder: Path, told: Any, refused: Any
) -> None:
    (in_an_empty_folder / "mine.jsonl").write_text("100\n200\n")
    error = refused(command, "--lengths", "mine.jsonl", flag, "1.5", "--dry-run")
    assert f"(set by flag {flag}): no length is drawn: all are those of mine" in error
    told(command, "--lengths", "mine.jsonl", "--dry-run")


@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_flags_give_one_clear_error(name: str, in_an_empty_folder: Path, told: Any) -> None:
    words, expected = BAD_INPUT[name]
    assert_refused(told(*(words.split() if isinstance(words, str) else words), code=2), expected)
    assert not list(in_an_empty_folder.iterdir()), "something was written"


BAD_FILES = {
    "unknown key": ("run.toml", "slotz = 3\n", ["slotz = 3", "Did you mean slots?"]),
    "a key of TRL": ("run.toml", "num_generations = 4\n", ["num_generations = 4", "Use rollouts_per_prompt."]),
    "a table": ("run.toml", "[schedule]\nslots = 3\n", ["no such table", "top level"]),
    "broken TOML": ("run.toml", "slots = 3\nmodes = [\n", ["not TOML", "line"]),
    "wrong type": ("run.toml", 'slots = "many"\n', ["slots = 'many'", "run.toml"]),
    "empty lengths": ("lengths.jsonl", "\n", ["no lengths in this file"]),
    "negative length": ("lengths.jsonl", "12\n-4\n", ["line 2", "-4"]),
    "zero length": ("lengths.jsonl", '{"length": 0}\n', ["line 1"]),
    "length without sense": ("lengths.jsonl", "12\n1e308\n", ["lengths.jsonl, line 2", "1e+308", "10,000,000"]),
    "length too long": ("lengths.jsonl", '{"lengths": [5, 10000001]}\n', ["line 1", "10000001"]),
    "infinite length": ("lengths.jsonl", "Infinity\n", ["line 1", "inf"]),
    "length that is no number": ("lengths.jsonl", "5\nNaN\n", ["line 2", "nan"]),
    "length that is a truth value": ("lengths.jsonl", "5\ntrue\n", ["line 2", "True"]),
    "length of thousands of digits": ("lengths.jsonl", "5\n" + "9" * 5000 + "\n", ["lengths.jsonl, line 2"]),
    "length is text": ("lengths.jsonl", '{"length": 5}\n{"length": "x"}\n', ["line 2"]),
    "broken JSONL": ("lengths.jsonl", '{"length": 5}\n{"length": \n', ["line 2", "not JSON"]),
    "no length in it": ("lengths.jsonl", '{"len": 5}\n', ["line 1", "length"]),
    "points without a column": ("points.csv", "running,seconds\n1,2\n", ["cached_tokens"]),
    "points in a file without columns": ("points.csv", "", ["no column", "columns: none"]),
    "infinite points": ("points.csv", "running,cached_tokens,seconds\n1,0,inf\n", ["line 2", "not a valid"]),
    "broken points": ("points.csv", "running,cached_tokens,seconds\n1,0,0.1\n2,x,0.1\n", ["line 3"]),
    "too few points": ("points.csv", "running,cached_tokens,seconds\n1,0,0.1\n", ["at least 3"]),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_files_give_one_clear_error(name: str, in_an_empty_folder: Path, told: Any) -> None:
    file, content, expected = BAD_FILES[name]
    (in_an_empty_folder / file).write_text(content)
    flag = {"run.toml": "--config", "lengths.jsonl": "--lengths", "points.csv": "--step-time"}[file]
    assert_refused(told("simulate", flag, file, code=2), expected)
    assert len(list(in_an_empty_folder.iterdir())) == 1, "something was written"


def assert_refused(printed: Any, expected: list[str]) -> None:
    assert len(printed.err.splitlines()) == 1 and printed.out == "", printed
    assert all(text in printed.err for text in expected), printed.err
