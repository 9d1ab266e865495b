"""A whole training run on a toy model: what it leaves behind, resume, interrupts, kills, and wrong input."""

import json
from pathlib import Path
from typing import Any

import pytest

import forked
import terminal
import toy
from config_file import config_file
from forked import Done
from sortedrl.core import events
from sortedrl.log.reading import read_events
from sortedrl.observe.metrics import Metrics
from toy_runs import flags, metrics_of, updates_of, without_times

SMALL = flags(terminal.SMALL)


def sortedrl(*words: str, check: bool = True) -> Done:
    done = forked.run(words)
    assert not check or done.returncode == 0, done.stderr + done.stdout
    return done


def trained(model: Path, out: Path, *words: str) -> dict[str, Any]:
    done = sortedrl("train", "--json", "--model", str(model), "--out", str(out), *SMALL, *words)
    summary: dict[str, Any] = json.loads(done.stdout)
    return summary


def test_a_run_leaves_everything_behind_and_its_figures_can_be_rebuilt(model: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    summary = trained(model, run, "--updates", "4", "--checkpoint-every", "2", "--eval-every", "2")
    assert summary["updates"] == 4
    for name in ("config.json", "events.jsonl", "metrics.jsonl", "rollouts.jsonl", "summary.json", "model/config.json"):
        assert (run / name).exists(), name
    run_metrics = Metrics().fold(read_events(run / "events.jsonl")).run_metrics()
    assert json.loads(json.dumps(run_metrics.staleness_mean)) == summary["metrics"]["staleness_mean"]
    assert 0 <= run_metrics.bubble <= run_metrics.idle <= 1
    assert [line["update"] for line in metrics_of(run, "reward")] == [1, 2, 3, 4]
    assert all(line["mismatch_max_abs"] < 1e-3 for line in metrics_of(run, "mismatch_max_abs"))
    again = json.loads(sortedrl("eval", "--json", "--model", str(run / "model"), *eval_flags()).stdout)
    assert again["mean_at_k"]["value"] == summary["score_after"]["value"]


def eval_flags() -> list[str]:
    wanted = ("--task", "--slots", "--max-response-tokens", "--max-prompt-tokens", "--eval-problems")
    return [word for flag in wanted for word in (flag, SMALL[SMALL.index(flag) + 1])]


@pytest.mark.parametrize(
    "mode", ["partial+elevator", "on-policy", "on-policy+planned", "baseline", "partial+lookahead"]
)
def test_modes_train(mode: str, model: Path, tmp_path: Path) -> None:
    trained(model, tmp_path / "run", "--mode", mode, "--updates", "3")
    updates = updates_of(tmp_path / "run")
    assert len(updates) == 3
    if not mode.startswith("partial"):
        assert all(version == update.version for update in updates for s in update.segments for version, _ in s)


def test_a_file_sets_how_the_learner_treats_truncated_responses(model: Path, tmp_path: Path) -> None:
    """Nearly every response of 2 tokens is cut, and only the others train."""
    rare = config_file(tmp_path, truncated_rollouts="masked")
    words = ["--model", str(model), "--out", str(tmp_path / "run"), *SMALL, *rare, "--max-response-tokens", "2"]
    assert "of update 1 were cut by --max-response-tokens 2" in sortedrl("train", *words, "--updates", "1").stdout
    (found,) = metrics_of(tmp_path / "run", "rollouts_trained")
    assert 0 < found["truncated_fraction"] <= 1
    assert found["rollouts_trained"] == found["rollouts"] * (1 - found["truncated_fraction"])


def test_a_run_whose_gradients_are_no_longer_finite_stops(model: Path, tmp_path: Path) -> None:
    """A learning rate of 1e30 breaks the weights in the first update; later steps are skipped."""
    words = ["--model", str(model), "--out", str(tmp_path / "run"), *SMALL, "--learning-rate", "1e30"]
    done = sortedrl("train", *words, "--updates", "20", check=False)
    assert done.returncode == 2
    output = done.stdout + done.stderr
    assert output.count("update 2: 1 of 1 optimizer steps skipped, because the gradient is not finite") == 1
    assert "the last 8 updates, up to 9, were not finite" in output and "lower learning_rate than 1e+30" in output
    assert "Traceback" not in output


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_resumed_run_continues_as_if_it_had_not_stopped(shuffle: bool, model: Path, tmp_path: Path) -> None:
    """Shuffled rewards are drawn from recent ones, which a resumed run must have."""
    whole, parts, shuffles = tmp_path / "whole", tmp_path / "parts", config_file(tmp_path, shuffle_rewards=shuffle)
    trained(model, whole, *shuffles, "--updates", "6")
    trained(model, parts, *shuffles, "--updates", "3")
    sortedrl("train", "--resume", str(parts), "--updates", "6")
    assert without_times(updates_of(whole)) == without_times(updates_of(parts))
    times = [event.at for event in read_events(parts / "events.jsonl")]
    assert times == sorted(times)


@pytest.mark.parametrize("eval_every", ["0", "2"])
def test_a_run_that_is_resumed_after_its_last_update_has_one_score_per_update(
    eval_every: str, model: Path, tmp_path: Path
) -> None:
    """As after a kill between the last checkpoint and the summary. The score is computed again."""
    run = tmp_path / "run"
    trained(model, run, "--updates", "2", "--eval-every", eval_every)
    before = metrics_of(run)
    (run / "summary.json").unlink()
    sortedrl("train", "--resume", str(run))
    after = metrics_of(run)
    assert [line["update"] for line in after] == [line["update"] for line in before] == [0, 1, 2, 2]
    assert after[:-1] == before[:-1] and after[-1]["held_out"] == before[-1]["held_out"]
    assert after[-1]["seconds"] > before[-1]["seconds"]


def test_resume_refuses_rows_that_were_edited_under_their_ids(model: Path, tmp_path: Path) -> None:
    run, data = tmp_path / "run", tmp_path / "rows.txt"
    rows = "".join([*(f"train q{i % 40} a\n" for i in range(64)), *(f"held-out q{i} a\n" for i in range(8))])
    data.write_text(rows)
    trained(model, run, "--updates", "1", "--task", "toy:RowsInFile", "--data", str(data))
    for old, new, which, first in (
        ("train q5 a", "train q5 b", "2 of 64 problems to train on", "train-5"),
        ("train q30 a", "train q6 a", "1 of 64 problems to train on", "train-30"),
        ("held-out q3 a", "held-out q3 b", "1 of 8 held-out problems", "held-out-3"),
    ):
        data.write_text(rows.replace(old, new))
        done = sortedrl("train", "--resume", str(run), "--updates", "2", check=False)
        assert done.returncode == 2, done.stderr
        assert f"{which} changed since the run started, the first is {first!r}" in done.stderr
        assert "Restore the data of the run" in done.stderr and "Traceback" not in done.stderr
    data.write_text(rows)
    sortedrl("train", "--resume", str(run), "--updates", "2")
    assert len(updates_of(run)) == 2


def test_a_reward_that_raises_is_counted_and_stops_nothing(model: Path, tmp_path: Path) -> None:
    words = ["--task", "toy:RaisesSometimes", "--reward-workers", "1", "--updates", "3"]
    summary = trained(model, tmp_path / "run", *words)
    assert summary["updates"] == 3
    assert summary["metrics"]["rejected"] > 0
    reasons = [e.reason for e in read_events(tmp_path / "run/events.jsonl") if isinstance(e, events.Rejected)]
    assert all("reward server is down" in reason for reason in reasons)


def test_a_run_without_one_update_is_an_error(model: Path, tmp_path: Path) -> None:
    """Here because there are fewer rollouts than would stop the run before."""
    words = ["--model", str(model), "--out", str(tmp_path / "run"), *SMALL, "--task", "toy:RaisesAlways"]
    few = ["--task-options", "problems", "3", "--rollouts-per-prompt", "2", "--eval-problems", "4"]
    done = sortedrl("train", *words, *few, *config_file(tmp_path, epochs=1), check=False)
    assert done.returncode == 2
    assert "no update was made. Rejected: 6 rollouts, 6 times: RuntimeError: reward server is down" in done.stderr


def test_the_best_of_the_saved_stays(model: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    rare = config_file(tmp_path, keep_checkpoints=1)
    trained(model, run, "--updates", "5", "--eval-every", "1", "--checkpoint-every", "2", *rare)
    kept = {path.name for path in (run / "checkpoints").iterdir()}
    evaluations = metrics_of(run, "held_out")
    scores = {f"update-{line['update']:06d}": line["held_out"]["value"] for line in evaluations}
    saved = ["update-000000", "update-000002", "update-000004", "update-000005"]
    assert kept == {max(saved, key=lambda name: scores[name]), "update-000005"}
    assert len(evaluations) == 6, "the last one is not repeated"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--rollouts-per-prompt 1 --prompts-per-cohort 16", "rollouts_per_prompt = 1"),
        ("--out /proc/run", "out = '/proc/run' (set by flag --out): the run folder cannot be made"),
        ("--max-response-tokens 5000", "Lower max_response_tokens or max_prompt_tokens"),
        ("--config greedy.toml", "temperature = 0"),
        ("--model no-eos", "its tokenizer has no EOS token"),
    ],
)
def test_bad_input_gives_one_clear_error_and_writes_nothing(
    words: str, expected: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "greedy.toml").write_text("temperature = 0\n")
    toy.make_model(tmp_path / "no-eos", eos=False)
    assert expected in refused("train", "--model", model, "--out", "run", *SMALL, *words.split())
    assert not (tmp_path / "run").exists()
