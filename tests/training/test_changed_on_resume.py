"""Settings that a resumed run may change: those with which it can continue where it could not before."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from sortedrl.cli.parse import parsed
from sortedrl.core.configuration import ConfigurationError
from sortedrl.engines.embedded.decoder import SlotDecoder
from sortedrl.learner.learner import Learner
from sortedrl.log.reading import read_events
from sortedrl.observe.metrics import Metrics
from sortedrl.observe.timeline import slot_counts
from sortedrl.settings.base import as_json
from sortedrl.training.build import OutOfMemory
from sortedrl.training.settings import TrainSettings, changed_on_resume, changes_refused, saved_settings
from sortedrl.training.trainer import train
from toy_runs import SMALL, SMALL_TRAINING, flags, metrics_of

pytestmark = pytest.mark.usefixtures("one_thread")


def run_out_of_memory(*_: Any, **__: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of ...")


@pytest.fixture
def small(model: Path) -> dict[str, Any]:
    return SMALL_TRAINING | {"model": str(model), "scoring": "at-once", "max_response_tokens": 8, "updates": 1}


def test_a_run_out_of_memory_can_be_resumed_with_smaller_micro_batches(
    small: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    with monkeypatch.context() as patched:
        patched.setattr(Learner, "step", run_out_of_memory)
        with pytest.raises(OutOfMemory) as stopped:
            train(TrainSettings(**small, out=run), print)
    message = str(stopped.value)
    assert "(CUDA out of memory. Tried to allocate 2.00 GiB)" in message
    assert "Lower tokens_per_micro_batch = 16384 or set gradient_checkpointing = true" in message
    assert f"sortedrl train --resume {run} --config FILE" in message
    memory = {"tokens_per_micro_batch": 32, "gradient_checkpointing": True, "recompute_above_tokens": 16}
    summary = train(TrainSettings(**small, **memory, out=run, resume=run), print)
    assert summary["updates"] == 1


def test_a_process_without_memory_says_how_to_continue(
    small: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_out_of_host_memory(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(Learner, "step", run_out_of_host_memory)
    run = tmp_path / "run"
    with pytest.raises(OutOfMemory, match=f"this process ran out of memory.*sortedrl train --resume {run}"):
        train(TrainSettings(**small, out=run), print)


def test_a_model_that_does_not_fit_is_one_line_and_leaves_no_folder(
    small: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The optimizer's state is made before the run: smaller micro-batches would not help."""
    monkeypatch.setattr(Learner, "__init__", run_out_of_memory)
    run = tmp_path / "run"
    with pytest.raises(OutOfMemory) as stopped:
        train(TrainSettings(**small, out=run), print)
    message = str(stopped.value)
    assert message.startswith("the model and its optimizer do not fit (CUDA out of memory. Tried to allocate 2.00 GiB)")
    assert "lora_rank" in message and "tokens_per_micro_batch" not in message
    assert not run.exists()


def test_a_run_of_an_older_version_may_have_settings_that_no_longer_exist_and_lack_new_ones(tmp_path: Path) -> None:
    saved = as_json(TrainSettings(updates=3)) | {"second_moment_limit": 0.04, "soft_penalty_tokens": None}
    del saved["overlap"]
    (tmp_path / "config.json").write_text(json.dumps(saved), encoding="utf-8")
    resumed = parsed(TrainSettings, ["--resume", str(tmp_path)], "sortedrl train")
    assert resumed.updates == 3 and resumed.resume == tmp_path
    assert changed_on_resume(resumed, saved_settings(tmp_path)) == ""
    assert not changes_refused(resumed, saved)


def test_a_resumed_run_draws_the_random_numbers_that_come_next(small: dict[str, Any], tmp_path: Path) -> None:
    """A reward in this process may draw them, and making its task may seed the generator."""
    small |= {"task": "toy:Noisy", "eval_every": 2, "checkpoint_every": 2}
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    train(TrainSettings(**small | {"updates": 4}, out=whole), print)
    train(TrainSettings(**small | {"updates": 2}, out=halves), print)
    train(TrainSettings(**small | {"updates": 4}, out=halves, resume=halves), print)
    first, second = ([line["reward"] for line in metrics_of(run, "reward")] for run in (whole, halves))
    assert len(first) == 4 and first == second


def test_a_run_whose_engine_is_out_of_memory_is_not_blamed_on_the_learner(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Any
) -> None:
    monkeypatch.setattr(SlotDecoder, "step", run_out_of_memory)
    words = ["--model", model, *flags(SMALL)]
    for error in (lines := [refused("eval", *words), refused("train", *words, "--out", tmp_path / "run")]):
        assert error.startswith("sortedrl: the embedded engine ran out of memory (CUDA out of memory. Tried to ")
    assert lines[1].endswith(f"sortedrl train --resume {tmp_path / 'run'}\n")


@pytest.mark.parametrize("mode", ["partial+elevator", "baseline"])
def test_a_run_may_be_resumed_with_other_slots(mode: str, small: dict[str, Any], tmp_path: Path, told: Any) -> None:
    """As on a machine with less memory, or more: metrics count each part of the run with its own slots."""
    run = tmp_path / "run"
    told("train", *flags(small | {"mode": mode, "updates": 2, "out": run}))
    resumed = told("train", "--resume", run, "--updates", "4", "--slots", "3")
    assert "changed settings: slots: 8 -> 3, updates: 2 -> 4\n" in resumed.out
    assert json.loads((run / "config.json").read_text())["slots"] == 3
    told("train", "--resume", run, "--updates", "6", "--slots", "5")
    log = list(read_events(run / "events.jsonl"))
    assert slot_counts(log) == (8, 3, 5)
    shown = json.loads((run / "summary.json").read_text())["metrics"]
    assert (shown["slots"], shown["updates"]) == (5, 6)
    assert Metrics().fold(log).run_metrics().bubble == pytest.approx(shown["bubble"])
    assert 0 <= shown["bubble"] <= shown["idle"] <= 1


def test_the_report_has_what_each_resume_changed(small: dict[str, Any], tmp_path: Path, told: Any) -> None:
    """Compared with the checkpoint that it went back to: changes after that one do not count, like all else then."""
    run, page = tmp_path / "run", tmp_path / "report.html"

    def changes() -> list[tuple[Any, ...]]:
        found = json.loads(told("report", run, "--out", page, "--json").out)["runs"][0]["changes_on_resume"]
        return [(one["updates"], one["setting"], one["old"], one["new"]) for one in found]

    told("train", *flags(small | {"updates": 2, "out": run}))
    assert changes() == []
    assert "changed on resume" not in page.read_text()
    told("train", "--resume", run, "--updates", "3", "--slots", "3", "--dtype", "float32")
    first = [(2, "slots", 8, 3), (2, "dtype", "auto", "float32"), (2, "updates", 2, 3)]
    assert sorted(changes()) == sorted(first)
    told("train", "--resume", run, "--updates", "4")
    assert sorted(changes()) == sorted([*first, (3, "updates", 3, 4)])
    text = page.read_text()
    assert "changed on resume" in text
    assert re.search(r'<th scope="row"[^>]*>dtype</th>\s*<td[^>]*>2</td>\s*<td[^>]*>auto</td>', text)
    shutil.rmtree(run / "checkpoints" / "update-000004")
    told("train", "--resume", run, "--dtype", "auto", "--slots", "8")
    again = [(3, "slots", 3, 8), (3, "dtype", "float32", "auto"), (3, "updates", 3, 4)]
    assert sorted(changes()) == sorted([*first, *again])


def test_a_run_may_be_resumed_with_another_engine(tmp_path: Path, told: Any, refused: Any) -> None:
    """URLs and options of the engine before do not count. What decides what is learned stays, and a dry run says so."""
    before: dict[str, Any] = {"engine": "vllm-server", "engine_urls": ("http://a:8000",), "mode": "partial"}
    before |= {"engine_options": {"reuse_kv_cache": "True"}, "stream": True, "rollouts_per_prompt": 4}
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text(json.dumps(as_json(TrainSettings(**before))))
    words = ["train", "--resume", str(run), "--dry-run", "--json"]
    (tmp_path / "learning.toml").write_text("learning_rate = 0.5\n")

    def resumed(*flags: str) -> dict[str, Any]:
        return json.loads(told(*words, *flags).out)["settings"]

    again = resumed("--engine", "embedded", "--no-stream", "--dtype", "bfloat16", "--slots", "8")
    assert (again["engine"], again["engine_urls"], again["engine_options"]) == ("embedded", [], {})
    assert resumed()["engine_urls"] == ["http://a:8000"]
    assert resumed("--engine", "sglang", "--engine-urls", "http://b:1")["engine_options"] == {}
    for changed, expected in (
        (["--seed", "3"], "seed = 3 (set by flag --seed): the run in"),
        (["--learning-rate", "1", "--mode", "april"], "(learning_rate: 0.0003 -> 1.0, mode: 'partial' -> 'april')"),
        (["--config", str(tmp_path / "learning.toml")], "with other settings (learning_rate: 0.0003 -> 0.5)"),
    ):
        assert expected in refused(*words, *changed)


def test_a_checkpoint_in_place_of_its_run_is_refused_with_the_run(tmp_path: Path, refused: Any) -> None:
    run = tmp_path / "run"
    place = run / "checkpoints" / "update-000002"
    place.mkdir(parents=True)
    (run / "config.json").write_text(json.dumps(as_json(TrainSettings())))
    for inside in (place, place.parent, run / "model"):
        error = refused("train", "--resume", inside)
        assert f"Name its run, {run}: it continues from its newest checkpoint" in error


def test_a_run_may_be_resumed_with_its_dtype_named_and_no_other(small: dict[str, Any], tmp_path: Path) -> None:
    """On another device, auto is another type."""
    run = tmp_path / "run"
    train(TrainSettings(**small, out=run), print)
    small["updates"] = 2
    with pytest.raises(ConfigurationError, match=r"saved with weights in float32\. Set dtype to float32"):
        train(TrainSettings(**small, resume=run, dtype="bfloat16"), print)
    assert json.loads((run / "config.json").read_text())["dtype"] == "auto"  # the run has not changed
    assert train(TrainSettings(**small, resume=run, dtype="float32", device="cpu"), print)["updates"] == 2


def test_a_resumed_run_refuses_another_folder_and_may_be_moved(
    small: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: Any, refused: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    train(TrainSettings(**small, out=Path("run")), print)
    error = refused("train", "--resume", "run", "--updates", "2", "--out", "elsewhere")
    assert "out = 'elsewhere' (set by flag --out): a resumed run continues in its own folder" in error
    (tmp_path / "run").rename(tmp_path / "moved")
    told("train", "--resume", "moved", "--updates", "2")
    told("train", "--resume", "moved", "--updates", "3", "--out", tmp_path / "moved")
    assert [path.name for path in tmp_path.iterdir()] == ["moved"]
