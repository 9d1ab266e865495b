"""The loop of README with our engine and learner: all that it needs comes from `sortedrl`."""

from pathlib import Path

import pytest

from small_models import model_of
from sortedrl import (
    Controller,
    EmbeddedEngine,
    Learner,
    LearnerSettings,
    Prompt,
    Prompts,
    Recorder,
    Schedule,
    ScoreAtOnce,
)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("shares_module", [True, False])
def test_the_loop_learns_with_our_engine_and_learner(shares_module: bool, tmp_path: Path) -> None:
    model = model_of("Qwen2")
    learner = Learner(model, LearnerSettings(algorithm="grpo", learning_rate=1e-3, warmup_updates=0))
    engine = EmbeddedEngine(model if shares_module else model_of("Qwen2", 1), slots=8, eos_token_ids=[2], max_length=32)
    engine.update_weights(learner.weights(), 0)
    prompts = Prompts([Prompt(str(i), [3, 4 + i]) for i in range(8)], epochs=2)
    groups = {"rollouts_per_prompt": 4, "whole_groups": True}
    schedule = Schedule(rollouts_per_update=16, prompts_per_cohort=8, max_response_tokens=12, max_staleness=4, **groups)
    controller = Controller(engine, prompts, ScoreAtOnce(lambda rollout: rollout.tokens.count(5)), schedule)
    Recorder(controller, tmp_path)
    mismatch = []
    for batch in controller:
        metrics = learner.step(batch)
        controller.publish(learner.weights())
        mismatch.append(metrics.get("mismatch_max_abs", 0.0))
    assert len(mismatch) == 4 and max(mismatch) < 1e-3
