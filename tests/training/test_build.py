"""What a run makes of its settings and its model, and when it stops: models that could not be saved, copies, learning
rates that do not fit the model, optimizer steps that are skipped."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

import toy
from sortedrl.training.build import MOST_IN_A_ROW, NotFinite, SkippedSteps, copy_on, learning_rate_notice
from sortedrl.training.resources import make_savable, read_model
from sortedrl.training.settings import ModelSettings, TrainSettings

pytestmark = pytest.mark.usefixtures("one_thread")


def test_sampling_settings_beside_greedy_decoding_do_not_keep_the_model_from_being_saved(tmp_path: Path) -> None:
    folder = toy.make_model(tmp_path / "model")
    generation = '{"do_sample": false, "temperature": 0.6, "top_p": 0.9, "bos_token_id": 1, "eos_token_id": 2}'
    (folder / "generation_config.json").write_text(generation)
    with pytest.raises(ValueError, match="GenerationConfig is invalid"):
        AutoModelForCausalLM.from_pretrained(folder).save_pretrained(tmp_path / "plain")
    _, model = read_model(str(folder), ModelSettings())
    model.save_pretrained(tmp_path / "trained")
    saved = GenerationConfig.from_pretrained(tmp_path / "trained")
    assert (saved.do_sample, saved.temperature, saved.top_p, saved.eos_token_id) == (True, 0.6, 0.9, 2)


def test_of_settings_that_stay_invalid_only_the_token_ids_are_saved(tmp_path: Path) -> None:
    _, model = read_model(str(toy.make_model(tmp_path / "model")), ModelSettings())
    model.generation_config = GenerationConfig(eos_token_id=[2, 3])
    model.generation_config.max_new_tokens = -1
    with pytest.raises(ValueError, match="max_new_tokens"):
        model.save_pretrained(tmp_path / "plain")
    make_savable(model)
    model.save_pretrained(tmp_path / "trained")
    saved = GenerationConfig.from_pretrained(tmp_path / "trained")
    assert saved.eos_token_id == [2, 3] and saved.max_new_tokens is None


def test_a_copy_on_a_device_shares_nothing_and_keeps_tied_weights(tmp_path: Path) -> None:
    _, model = read_model(str(toy.make_model(tmp_path / "model")), ModelSettings())
    model.tie_weights()
    plain = copy_on(torch.device("cpu"), model)
    assert plain.device == model.device == torch.device("cpu")
    for (name, own), (_, copied) in zip(model.state_dict().items(), plain.state_dict().items(), strict=True):
        assert torch.equal(own, copied) and own.data_ptr() != copied.data_ptr(), name
    names = [len({tensor.data_ptr() for tensor in one.state_dict().values()}) for one in (model, plain)]
    assert names[0] == names[1]


def test_a_large_model_with_the_default_learning_rate_is_noted() -> None:
    notice = learning_rate_notice(TrainSettings(), 7_615_616_512)
    assert notice is not None and "learning_rate = 0.0003" in notice and "7,616 million" in notice
    assert learning_rate_notice(TrainSettings(), 341_280) is None
    for settings in (TrainSettings(learning_rate=1e-6), TrainSettings(lora_rank=16)):
        assert learning_rate_notice(settings, 7_615_616_512) is None


def test_one_line_per_row_of_skipped_updates_and_a_step_between_starts_a_new_count() -> None:
    lines: list[str] = []
    watch = SkippedSteps(1, 1e-3, lines.append)
    updates = iter(range(1, 1000))
    for _ in range(3):
        for _ in range(MOST_IN_A_ROW - 1):
            watch.check(next(updates), {"skipped_steps": 1.0})
        watch.check(next(updates), {})  # no rollout was trained on
        watch.check(next(updates), {"skipped_steps": 0.0})
    assert len(lines) == 3 and lines[0].startswith("update 1: 1 of 1 optimizer steps skipped")
    with pytest.raises(NotFinite, match=f"last {MOST_IN_A_ROW} updates"):
        for _ in range(MOST_IN_A_ROW):
            watch.check(next(updates), {"skipped_steps": 1.0})


def test_an_update_of_which_some_steps_were_made_does_not_count() -> None:
    lines: list[str] = []
    watch = SkippedSteps(4, 1e-3, lines.append)
    for update in range(100):
        watch.check(update, {"skipped_steps": 3.0})
    assert lines == ["update 0: 3 of 4 optimizer steps skipped, because the gradient is not finite"]
