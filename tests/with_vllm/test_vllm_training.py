"""A whole training run with vLLM as its engine: weights in place after every update, faults, and resume."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from sortedrl.cli import main
from sortedrl.engines.vllm import VllmEngine
from sortedrl.training import evaluate as evaluating
from sortedrl.training import trainer

pytest.importorskip("torch")
OPTIONS = ["--engine-options", "enforce_eager", "True", "gpu_memory_utilization", "0.1"]
SMALL = ["--engine", "vllm", *OPTIONS]
SMALL += ["--slots", "16", "--rollouts-per-update", "16", "--prompts-per-cohort", "8", "--rollouts-per-prompt", "4"]
SMALL += ["--max-response-tokens", "96", "--eval-problems", "8", "--dtype", "float32"]
REUSE = [*OPTIONS, "reuse_kv_cache", "True"]
EVALUATED = {"--engine", "--slots", "--max-response-tokens", "--eval-problems", "--dtype"}


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("mode", ["partial+elevator", "on-policy+planned"])
def test_engine_and_learner_stay_together(tmp_path: Path, mode: str) -> None:
    assert main(["train", *SMALL, "--mode", mode, "--updates", "3", "--out", str(tmp_path / "run")]) == 0
    updates = [line for line in lines(tmp_path / "run") if "weight_difference" in line]
    assert len(updates) == 3
    for update in updates:
        assert update["weight_difference"] < 1e-2 and 0 <= update["mismatch_kl"] < 1e-3
        assert update["weight_update_seconds"] > 0


def test_drafts_are_left_out_in_a_mode_that_they_slow_down(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drafts = ["draft_up_to", "4", "speculative_config", json.dumps({"method": "ngram", "num_speculative_tokens": 3})]
    words = ["train", *SMALL, *OPTIONS, *drafts, "--mode", "partial+elevator", "--updates", "1"]
    assert main([*words, "--out", str(tmp_path / "run")]) == 0, "vLLM would refuse draft_up_to of this drafter"
    assert "starts without speculative_config" in capsys.readouterr().out


@pytest.mark.parametrize("flags", [[], ["--lora-rank", "4"], REUSE], ids=["", "lora", "reuse"])
def test_rollouts_of_several_turns(tmp_path: Path, flags: list[str]) -> None:
    """A dialogue with environments in worker processes, which answer while vLLM decodes."""
    if "--lora-rank" in flags:
        pytest.importorskip("peft")
    dialogue = ["--task", "knights_and_knaves:dialogue", "--task-options", "count", "400", "--updates", "3"]
    words = ["train", *SMALL, *dialogue, "--scoring", "background", *flags, "--out", str(tmp_path / "run")]
    assert main(words) == 0
    updates = [line for line in lines(tmp_path / "run") if "weight_difference" in line]
    assert len(updates) == 3 and all(line["weight_difference"] < 1e-2 for line in updates)
    assert all(0 <= line["mismatch_kl"] < (1e-1 if flags == REUSE else 1e-3) for line in updates), "stale KV differs"
    run_metrics = json.loads((tmp_path / "run" / "summary.json").read_text())["metrics"]
    assert run_metrics["rejected"] == 0 and run_metrics["turns_mean"] > 1 and run_metrics["environment_tokens"] > 0


def test_an_engine_that_dies_ends_the_run_clearly_and_it_can_be_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    folder = tmp_path / "run"
    step, steps = VllmEngine._step, [0]

    def dies(engine: VllmEngine) -> None:
        steps[0] += 1
        if engine.version == 2 and steps[0] % 20 == 0:
            monkeypatch.setattr(engine._core, "get_output", _out_of_memory)
        step(engine)

    monkeypatch.setattr(VllmEngine, "_step", dies)
    command = ["train", *SMALL, "--updates", "4", "--checkpoint-every", "1"]
    assert main([*command, "--out", str(folder)]) == 2
    told = capsys.readouterr().err
    assert "vLLM stopped working: CUDA out of memory" in told and f"sortedrl train --resume {folder}" in told
    monkeypatch.undo()
    assert main(["train", "--resume", str(folder)]) == 0
    assert [line["update"] for line in lines(folder) if "reward" in line] == [1, 2, 3, 4]


def _out_of_memory() -> None:
    raise RuntimeError("CUDA out of memory")


def test_a_profile_times_the_load_of_weights_and_returns(tmp_path: Path) -> None:
    out = tmp_path / "profile.json"
    options = ["--engine-options", "enforce_eager", "True", "gpu_memory_utilization", "0.1", "load_format", "dummy"]
    options += ["dtype", "float32"]  # bfloat16 needs a newer CPU
    sizes = ["--slots", "4", "--max-context-tokens", "400", "--steps", "2", "--repeats", "1"]
    returns = ["--observation-tokens", "16"]
    assert main(["profile", "--engine", "vllm", *options, *sizes, *returns, "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["weight_update_seconds"] > 0.001 and found["kv_tokens"] > 1000
    assert found["prefill_step_tokens"] == 16 and 0 <= found["prefill_step_seconds"] < 1


def test_held_out_scores_are_those_of_the_exported_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seeded requests: the same weights and the same noise give the same answers, problem by problem."""
    found: list[Any] = []
    evaluate = evaluating.evaluate
    for module in (evaluating, trainer):
        monkeypatch.setattr(
            module, "evaluate", lambda *args, **options: found.append(evaluate(*args, **options)) or found[-1]
        )
    seeded = [*SMALL, "--eval-problems", "40"]
    place = seeded.index("--engine-options") + 1
    seeded[place:place] = ["seeded", "True"]
    command = ["train", *seeded, "--learning-rate", "1e-3", "--mode", "partial+elevator"]
    (tmp_path / "rare.toml").write_text("warmup_updates = 0\n")
    command += ["--config", str(tmp_path / "rare.toml")]
    assert main([*command, "--updates", "2", "--eval-every", "1", "--out", str(tmp_path / "run")]) == 0
    before, first, last = (one.correct for one in found)
    kept = [word for flag, word in pairwise(seeded) if flag in EVALUATED for word in (flag, word)]
    options = seeded[place - 1 : seeded.index("--slots")]
    assert main(["eval", "--model", str(tmp_path / "run" / "model"), *options, *kept]) == 0
    assert found[-1].correct == last
    assert len({before, first, last}) == 3, "the updates are too small to tell them apart"
