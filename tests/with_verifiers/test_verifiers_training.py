"""`sortedrl train` on environments of verifiers: a taskset of the tests, and TextArena's Hangman as it is."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from chat_tokenizer import chat_tokenizer
from processes import descendants_of, wait_for_end, wait_until
from sortedrl.core import events
from sortedrl.core.rollout import ENVIRONMENT
from sortedrl.log.reading import read_events
from sortedrl.observe.metrics import Metrics
from toy_runs import metrics_of

HERE = Path(__file__).resolve().parent
PATIENCE_SECONDS = 600.0
SMALL_FLAGS = (
    "--rollouts-per-update 4 --prompts-per-cohort 2 --rollouts-per-prompt 2 --slots 4 --eval-problems 2 --threads 1 "
    "--max-response-tokens 60 --reward-workers 1"
)
WORD_GAME_FLAGS = (
    "--task verifiers:word-game --task-options player.harness.id in-process-chat player.runtime.type subprocess "
    "problems 4 held_out_problems 2 --max-prompt-tokens 200 --max-context-tokens 600"
)
HANGMAN_FLAGS = (
    "--task verifiers:textarena --task-options taskset.game Hangman-v0 player.harness.id null "
    "player.runtime.type subprocess problems 4 held_out_problems 2 --max-prompt-tokens 1300 --max-context-tokens 2500"
)
SMALL, WORD_GAME, HANGMAN = SMALL_FLAGS.split(), WORD_GAME_FLAGS.split(), HANGMAN_FLAGS.split()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights that end a turn after about ten tokens."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("model")
    tokenizer = chat_tokenizer()
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        head_dim=16,
        max_position_embeddings=4096,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=0,
        initializer_range=0.1,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():  # one feature is constant, and speaks for EOS
        model.model.embed_tokens.weight[:, 0] = 2.0
        model.lm_head.weight[tokenizer.eos_token_id, 0] = 1.0
    model.save_pretrained(folder)
    (folder / "slow_machine.toml").write_text("score_limit_seconds = 300.0\noversubscribe = 3.0\n")
    return folder


def command(model: Path, run: Path, *words: str, updates: int = 2) -> list[str]:
    places = ["--config", str(model / "slow_machine.toml"), "--model", str(model), "--out", str(run)]
    options = [*places, "--updates", str(updates), *SMALL, *words]
    return [sys.executable, "-m", "sortedrl", "train", *options]


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}


def trained(model: Path, run: Path, *words: str, updates: int = 2) -> list[Any]:
    done = subprocess.run(
        command(model, run, *words, updates=updates),
        env=environment(), capture_output=True, text=True, timeout=PATIENCE_SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return list(read_events(run / "events.jsonl"))


def kinds(log: list[Any]) -> list[list[bool]]:
    """For each trained rollout: which segments are the environment's."""
    updates = [event for event in log if isinstance(event, events.Updated)]
    return [[version == ENVIRONMENT for version, _ in segments] for one in updates for segments in one.segments]


@pytest.mark.parametrize("mode", ["partial+elevator", "on-policy"])
def test_a_run_trains_on_episodes_of_verifiers(model: Path, tmp_path: Path, mode: str) -> None:
    run = tmp_path / "run"
    log = trained(model, run, *WORD_GAME, "--mode", mode)
    assert Metrics().fold(log).run_metrics().rejected == 0
    assert max(map(sum, kinds(log))) == 2, "three turns, two observations between them"
    assert all(1 <= line["reward_parts"]["replies"] <= 3 for line in metrics_of(run, "reward"))
    assert all(0 <= line["held_out_parts"]["has_a"] <= 1 for line in metrics_of(run, "held_out"))


def test_textarenas_hangman_runs_unchanged(model: Path, tmp_path: Path) -> None:
    log = trained(model, tmp_path / "run", *HANGMAN, "--max-turns", "3", updates=1)
    metrics = Metrics().fold(log).run_metrics()
    assert metrics.rejected == 0 and metrics.turns_mean > 1 and metrics.environment_tokens > 0
    rollouts = [json.loads(line) for line in (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()]
    assert len(rollouts) == 4 and all(0 <= one["detail"]["parts"]["game_reward"] <= 1 for one in rollouts)


def test_a_killed_run_leaves_no_process_and_resumes(model: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = [*WORD_GAME, "--mode", "partial+elevator"]
    started = subprocess.Popen(command(model, run, *words, updates=200), env=environment(), stderr=subprocess.DEVNULL)
    wait_until(lambda: _has_updates(run, 2) or started.poll() is not None, PATIENCE_SECONDS)
    assert started.poll() is None
    children = descendants_of(started.pid)
    assert children
    started.send_signal(signal.SIGKILL)
    started.wait()
    wait_for_end(*children)
    resume = [sys.executable, "-m", "sortedrl", "train", "--resume", str(run), "--updates", "4"]
    done = subprocess.run(resume, env=environment(), capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert done.returncode == 0, done.stderr[-2000:]


def _has_updates(run: Path, count: int) -> bool:
    metrics = run / "metrics.jsonl"  # whose last line may be half written
    return metrics.exists() and sum('"reward"' in line for line in metrics.read_text().splitlines()) >= count
