"""Whole training jobs: verl's main program, its trainer, FSDP 2, TransferQueue, reward workers and Ray, on this CPU.

Each job is a process of its own, as a user starts it. They take minutes, most of it imports in Ray's processes.
"""

import json
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pandas
import pytest
import verl_config
from cpu_backend import LOSES_WEIGHTS
from dialogue import HERE, TOOL_AGENT
from verl_config import JOB, MODEL

from sortedrl.core import events
from sortedrl.core.rollout import ENVIRONMENT
from sortedrl.log.reading import read_events, without_rolled_back
from sortedrl.observe.metrics import Metrics

pytestmark = pytest.mark.slow
PROMPTS, SIBLINGS, SLOTS = 4, 2, 4
TOOLS = [
    *TOOL_AGENT,
    "actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent",
    f"reward.custom_reward_function.path={HERE / 'dialogue_reward.py'}",
]
SEPARATE = [*verl_config.SEPARATE, "ray_kwargs.ray_init.num_gpus=3"]
TWO_MINI_BATCHES = f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS // 2}"


def command_of(
    setting: str, data: Path, out: Path, *more: str, steps: int = 4, model: Path = MODEL, prompts: int = PROMPTS
) -> list[str]:
    return [
        sys.executable, str(JOB / "job.py"), setting, "--cpu", "--model", str(model), "--data", str(data),
        "--out", str(out), "--steps", str(steps), "--prompts", str(prompts), "--siblings", str(SIBLINGS),
        "--slots", str(SLOTS), "--prompt-tokens", "96", "--response-tokens", "160", "--workers", "1", *more,
    ]  # fmt: skip


def job(setting: str, data: Path, out: Path, *more: str, **sizes: Any) -> subprocess.CompletedProcess[str]:
    """verl chooses free ports seconds before it uses them: if another process takes one meanwhile, it starts again."""
    command = command_of(setting, data, out, *more, **sizes)
    for _ in range(3):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if "EADDRINUSE" not in done.stdout + done.stderr:
            break
    return done


def run(setting: str, data: Path, out: Path, *more: str, **sizes: Any) -> dict[str, Any]:
    done = job(setting, data, out, *more, **sizes)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    result: dict[str, Any] = json.loads((out / "result.json").read_text())
    return result


def check_log(folder: Path, updates: int) -> list[events.Event]:
    """What must hold in every mode."""
    log = without_rolled_back(read_events(folder / "events.jsonl"))
    found = [event for event in log if isinstance(event, events.Updated)]
    assert [event.update for event in found] == [event.version for event in found] == list(range(updates))
    trained = Counter(rollout for event in found for rollout in event.rollouts)
    assert set(trained.values()) == {1}, "every rollout is trained on once"
    for event in found:
        assert list(event.lengths) == sorted(event.lengths)
        sets = Counter(rollout // SIBLINGS for rollout in event.rollouts)
        assert set(sets.values()) == {SIBLINGS}, "GRPO is given whole groups"
    metrics = Metrics()
    metrics.fold(log)
    run_metrics = metrics.run_metrics()
    assert 0 <= run_metrics.bubble <= run_metrics.idle <= 1
    assert run_metrics.updates == updates
    return log


def staleness(log: list[events.Event]) -> set[int]:
    return {
        event.version - version
        for event in log
        if isinstance(event, events.Updated)
        for segments in event.segments
        for version, _ in segments
        if version != ENVIRONMENT
    }


def test_on_policy_trains_on_tokens_of_the_learners_version_only(data: Path, tmp_path: Path) -> None:
    result = run("on-policy", data, tmp_path / "run")
    log = check_log(tmp_path / "run", updates=4)
    assert staleness(log) == {0}
    assert any(isinstance(event, events.Aborted) and event.dropped for event in log)
    regenerated = [event for event in log if isinstance(event, events.Submitted) and event.attempt]
    assert regenerated and all(event.prefix == 0 for event in regenerated)
    assert len(result["rollouts"]) == 4 and len(result["reward"]) == 4
    assert max(result["probability_difference_max"]) < 1e-5, "the servers sample from the learner's weights"
    assert sum(result["rollouts"]) == sum(len(e.rollouts) for e in log if isinstance(e, events.Updated))


def test_partial_resumes_and_a_killed_job_goes_on_from_its_checkpoint(data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run("partial", data, folder, "--save-every", "2", "--override", "trainer.test_freq=2", TWO_MINI_BATCHES, steps=4)
    before = check_log(folder, updates=4)
    assert max(staleness(before)) <= 4
    assert any(isinstance(event, events.Submitted) and event.prefix for event in before), "stopped rollouts are resumed"
    (folder / "latest_checkpointed_iteration.txt").write_text("2")  # as if the job was killed in its third step
    trained = {
        rollout
        for event in before
        if isinstance(event, events.Updated) and event.update < 2
        for rollout in event.rollouts
    }
    resume = ["--override", "trainer.resume_mode=auto", TWO_MINI_BATCHES]
    run("partial", data, folder, *resume, steps=4)
    after = check_log(folder, updates=4)
    again = [e for e in after if isinstance(e, events.Updated) and e.update >= 2]
    assert len(again) == 2 and not trained & {rollout for event in again for rollout in event.rollouts}
    assert max(staleness(after)) <= 4


def test_a_reward_that_always_fails_ends_the_job_with_its_error(data: Path, tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return extra_info['anwser']\n"
    )
    folder = tmp_path / "run"
    done = job("partial", data, folder, "--override", f"reward.custom_reward_function.path={tmp_path / 'reward.py'}")
    assert done.returncode != 0
    output = (done.stdout + done.stderr)[-6000:]
    assert "TooManyRejected: the first 8 rollouts were all rejected; 8 times: KeyError: 'anwser'" in output, output
    rejected = [e for e in read_events(folder / "events.jsonl") if isinstance(e, events.Rejected)]
    assert [event.reason for event in rejected] == ["no reward: KeyError: 'anwser'"] * 8


def first_step(out: Path) -> dict[str, float]:
    lines = (json.loads(line)["data"] for line in (out / "metrics.jsonl").read_text().splitlines())
    found: dict[str, float] = next(line for line in lines if line.get("training/global_step") == 1)
    return found


def responses_of_first_step(out: Path) -> list[tuple[str, str, float]]:
    rows = [json.loads(line) for line in (out / "rollouts" / "1.jsonl").read_text().splitlines()]
    return sorted((row["input"], row["output"], row["score"]) for row in rows)


def test_an_update_with_a_filter_is_that_of_the_kept_groups_without_it(data: Path, tmp_path: Path) -> None:
    """Rollouts, loss and gradient. Both runs start with the same weights, and sample the same responses to a prompt."""

    def settings(out: Path) -> list[str]:
        return ["--override", "trainer.v1.sortedrl.mode=baseline", "data.shuffle=False",
                f"trainer.rollout_data_dir={out / 'rollouts'}"]  # fmt: skip

    filtering, plain = tmp_path / "filtering", tmp_path / "plain"
    run("on-policy", data, filtering, *settings(filtering), "algorithm.filter_groups.enable=True", steps=2)
    log = list(read_events(filtering / "events.jsonl"))
    filtered = {rollout for event in log if isinstance(event, events.Filtered) for rollout in event.rollouts}
    updates = [event for event in log if isinstance(event, events.Updated)]
    assert filtered and not filtered & {rollout for event in updates for rollout in event.rollouts}
    assert all(len(event.rollouts) >= PROMPTS * SIBLINGS for event in updates), "updates are full"

    rows = pandas.read_parquet(data / "train.parquet")
    kept = sorted({rollout // SIBLINGS for rollout in updates[0].rollouts})
    assert kept != list(range(len(kept))), "the first update is not what it would be without the filter"
    (tmp_path / "kept").mkdir()
    pandas.concat([rows.iloc[kept], rows.drop(index=kept)]).to_parquet(tmp_path / "kept" / "train.parquet")
    shutil.copy(data / "held_out.parquet", tmp_path / "kept")
    run("on-policy", tmp_path / "kept", plain, *settings(plain), steps=2, prompts=len(kept))
    assert responses_of_first_step(filtering) == responses_of_first_step(plain)
    ours, reference = first_step(filtering), first_step(plain)
    for name in ("actor/pg_loss", "actor/grad_norm", "critic/advantages/max", "critic/score/mean"):
        assert ours[name] == pytest.approx(reference[name], rel=1e-4, abs=1e-7), name
    assert ours["actor/grad_norm"] > 0 < ours["sortedrl/filtered_fraction"]
    assert ours["sortedrl/reward_mean"] != pytest.approx(ours["critic/score/mean"])


@pytest.mark.parametrize(("layout", "steps"), [([], 3), (["--override", *SEPARATE], 8)], ids=["shared", "own GPUs"])
def test_weights_that_do_not_arrive_end_the_job(
    layout: list[str], steps: int, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same job ends well if they do."""
    fast = ["--learning-rate", "0.01", *layout]
    run("partial", data, tmp_path / "right", *fast, steps=3 + bool(layout))
    lines = [json.loads(line)["data"] for line in (tmp_path / "right" / "metrics.jsonl").read_text().splitlines()]
    differences = [line["sortedrl/logprob_difference"] for line in lines if "sortedrl/logprob_difference" in line]
    assert len(differences) > bool(layout) and max(differences) < 1e-4
    assert lines[-1].get("weights/sent") == (1.0 if layout else None), "verl's checkpoint engine logs metrics"
    monkeypatch.setenv(LOSES_WEIGHTS, "1")
    done = job("partial", data, tmp_path / "wrong", *fast, steps=steps)
    assert done.returncode != 0
    output = (done.stdout + done.stderr)[-6000:]
    assert "the servers do not sample from the weights that are trained" in output, output
    updates = [e for e in read_events(tmp_path / "wrong" / "events.jsonl") if isinstance(e, events.Updated)]
    assert layout or len(updates) in (2, 3), "the first update is of the first weights, which the servers read"


def check_turns(log: list[events.Event]) -> None:
    """Tools were called, the loops went on, and their turns were trained on."""
    observed = [event.rollout for event in log if isinstance(event, events.Observed)]
    trained = {rollout for event in log if isinstance(event, events.Updated) for rollout in event.rollouts}
    assert len(trained & set(observed)) > len(trained) // 4
    assert not any(isinstance(event, events.Rejected | events.EnvironmentFailed) for event in log)


def test_tools_on_policy(dialogue: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    result = run("on-policy", dialogue, folder, "--override", *TOOLS, steps=3, model=dialogue / "model")
    log = check_log(folder, updates=3)
    check_turns(log)
    assert staleness(log) == {0}
    assert max(result["probability_difference_max"]) < 1e-5, "tool tokens are context, and masked"


def test_tools_partial_and_after_a_kill(dialogue: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    model = dialogue / "model"
    run("partial", dialogue, folder, "--save-every", "2", "--override", *TOOLS, steps=4, model=model)
    before = check_log(folder, updates=4)
    check_turns(before)
    assert max(staleness(before)) <= 4
    (folder / "latest_checkpointed_iteration.txt").write_text("2")  # as if the job was killed in its third step
    run("partial", dialogue, folder, "--override", *TOOLS, "trainer.resume_mode=auto", steps=4, model=model)
    after = check_log(folder, updates=4)
    assert max(staleness(after)) <= 4
