"""SortedGRPOTrainer on several ranks: real processes over gloo, FSDP2 and ZeRO on the CPU."""

import ast
import importlib.util
import json
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

pytest.importorskip("trl")
pytest.importorskip("peft")

import torch
from transformers import AutoTokenizer

import torchrun
from server_process import serving
from sortedrl.core.configuration import ConfigurationError
from sortedrl.core.events import Filtered, Scored, Updated
from sortedrl.core.rollout import Prompt, Rollout, Segment
from sortedrl.integrations.trl.fields import check_model, check_parts
from sortedrl.integrations.trl.rows import rows_by_rank, rows_in_groups
from sortedrl.integrations.trl.run import read_state, write_state
from sortedrl.log.reading import read_events, without_rolled_back
from sortedrl.models import BUILT_IN_MODEL
from torchrun import SUPPORT

EXAMPLE = Path(__file__).parents[2] / "examples" / "trl_fsdp"
HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None
needs_deepspeed = pytest.mark.skipif(not HAS_DEEPSPEED, reason="DeepSpeed is not installed")
SHARDINGS = ["fsdp2", *(pytest.param(f"zero{stage}", marks=needs_deepspeed) for stage in (1, 2, 3))]


def variables(sharding: str) -> dict[str, str]:
    """What `accelerate launch` makes of the example's file."""
    if sharding == "none":
        return {}
    if sharding == "fsdp2":
        settings = yaml.safe_load((EXAMPLE / "fsdp2.yaml").read_text())
        chosen = {name.upper(): str(value) for name, value in settings["fsdp_config"].items()}
        return {"ACCELERATE_USE_FSDP": "true", **chosen}
    return {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": sharding.removeprefix("zero")}


def trained(folder: Path, sharding: str, processes: int = 2, **settings: Any) -> dict[str, Any]:
    """The history and weights of a run of three updates, each of 16 rollouts in all."""
    settings = {"folder": str(folder), "engine": "shared", "accumulation": 4 // processes} | settings
    scripts = [SUPPORT / "fsdp_on_cpu.py", str(SUPPORT / "trl_on_ranks.py"), json.dumps(settings)]
    torchrun.run(*scripts, processes=processes, variables=variables(sharding))
    told: dict[str, Any] = json.loads((folder / "told.json").read_text())
    log = without_rolled_back(read_events(folder / "events.jsonl"))
    told["rollouts"] = [(event.rollouts, event.lengths) for event in log if isinstance(event, Updated)]
    return told | {"weights": torch.load(folder / "weights.pt")}


def losses(told: dict[str, Any]) -> list[float]:
    return [entry["loss"] for entry in told["history"] if "loss" in entry]


def difference(a: dict[str, Any], b: dict[str, Any]) -> float:
    assert a["weights"].keys() == b["weights"].keys()
    return max(float((weight - b["weights"][name]).abs().max()) for name, weight in a["weights"].items())


@pytest.mark.slow
@pytest.mark.parametrize("way", ["fsdp2", pytest.param("zero3", marks=needs_deepspeed)])
def test_weights_gathered_from_shards_are_those_before_sharding(way: str) -> None:
    told = torchrun.run(SUPPORT / "sharded_weights.py", way)
    assert told.count(f"equal: {way}") == 2 * 3  # on both ranks: whole model, LoRA, DoRA


@pytest.mark.slow
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_sharded_ranks_train_as_one_process_does_and_resume(sharding: str, tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    one = trained(tmp_path / "one", "none", processes=1)
    two = trained(tmp_path, sharding, evaluate=True)
    assert two["sharded"] == (sharding in ("fsdp2", "zero3")) and not one["sharded"]
    assert two["rollouts"] == one["rollouts"] and len(one["rollouts"]) == 3
    assert losses(two) == pytest.approx(losses(one), abs=1e-4)
    assert difference(one, two) < 1e-4 < float(sum((w**2).sum() for w in two["weights"].values()))
    assert max(entry["sortedrl/mismatch"] for entry in two["history"] if "loss" in entry) < 1e-5
    assert [entry["step"] for entry in two["history"] if "eval_reward" in entry] == [2, 3]
    again = trained(tmp_path, sharding, resume=str(tmp_path / "checkpoint-2"))
    assert again["rollouts"] == two["rollouts"]
    assert difference(two, again) < 1e-6


@pytest.mark.slow
def test_rank_0_scores_and_filters_for_all_as_one_process_does(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    one = trained(tmp_path / "one", "none", processes=1, filter_groups="equal_rewards")
    two = trained(tmp_path, "fsdp2", filter_groups="equal_rewards")
    assert two["rollouts"] == one["rollouts"] and len(one["rollouts"]) == 3
    assert losses(two) == pytest.approx(losses(one), abs=1e-4)
    assert difference(one, two) < 1e-4
    assert filtered_in(tmp_path / "events.jsonl") > 0
    assert (tmp_path / "scored-0").read_text() == (tmp_path / "one" / "scored-0").read_text()
    assert not (tmp_path / "scored-1").exists()


@pytest.mark.slow
def test_each_rank_scores_and_filters_its_own_groups_and_a_resumed_run_is_the_same(tmp_path: Path) -> None:
    two = trained(tmp_path, "none", engine="own", filter_groups="equal_rewards")
    for rank, name in enumerate(("events.jsonl", "events-1.jsonl")):
        log = without_rolled_back(read_events(tmp_path / name))
        assert [len(event.rollouts) for event in log if isinstance(event, Updated)] == [8, 8, 8]
        assert filtered_in(tmp_path / name) > 0
        scored = sum(isinstance(event, Scored) for event in log)
        assert len((tmp_path / f"scored-{rank}").read_text().splitlines()) == scored
    again = trained(
        tmp_path, "none", engine="own", filter_groups="equal_rewards", resume=str(tmp_path / "checkpoint-2")
    )
    assert again["rollouts"] == two["rollouts"]
    assert difference(two, again) < 1e-6


def filtered_in(log: Path) -> int:
    return sum(isinstance(event, Filtered) for event in without_rolled_back(read_events(log)))


def example(folder: Path, sharding: str, *arguments: str) -> list[str]:
    """The losses and mismatches that two updates of the example print."""
    told = torchrun.run(
        SUPPORT / "fsdp_on_cpu.py", str(EXAMPLE / "train.py"), "--model", str(BUILT_IN_MODEL), "--steps", "2",
        "--tokens", "16", "--slots", "8", "--output", str(folder), *arguments, variables=variables(sharding),
    )  # fmt: skip
    return [line for line in told.splitlines() if "'loss'" in line]


def mismatches(lines: list[str]) -> list[float]:
    return [float(ast.literal_eval(line[line.index("{") :])["sortedrl/mismatch"]) for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_the_example_runs_with_an_engine_on_every_rank(sharding: str, tmp_path: Path) -> None:
    found = mismatches(example(tmp_path, sharding, "--engine", "own_engine:on_cpu"))
    assert len(found) == 2 and max(found) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("place", ["on every rank", "in a server"])
def test_the_example_runs_with_vllm(place: str, tmp_path: Path) -> None:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(BUILT_IN_MODEL)]
    command += ["--host", "127.0.0.1", "--port", "{port}", "--dtype", "float32", "--enforce-eager", "--tokens-only"]
    command += ["--max-model-len", "128", "--max-num-seqs", "8", "--logprobs-mode", "processed_logprobs"]
    with ExitStack() as stack:
        arguments = []
        if place == "in a server":
            server = stack.enter_context(serving(command, tmp_path / "server.log", VLLM_SERVER_DEV_MODE="1"))
            arguments = ["--servers", server.url]
        found = mismatches(example(tmp_path, "fsdp2", *arguments))
    assert len(found) == 2 and max(found) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "rank", "said"),
    [
        ("reward", 1, "KeyError: 'solution'"),
        ("engine", 0, "EngineDied: the server does not answer"),
        ("SIGKILL", 1, "Signal 9"),
    ],
)
def test_a_rank_that_fails_ends_all(fault: str, rank: int, said: str, tmp_path: Path) -> None:
    settings = {"folder": str(tmp_path), "engine": "own", "fault": fault, "on_rank": rank, "lora": True}
    scripts = [str(SUPPORT / "trl_on_ranks.py"), json.dumps(settings)]
    started = torchrun.start(SUPPORT / "fsdp_on_cpu.py", *scripts, variables=variables("fsdp2"))
    output, _ = started.communicate(timeout=120)
    ended = time.time()
    assert started.returncode != 0 and said in output, output[-4000:]
    assert ended - float((tmp_path / "failed-at").read_text()) < 20


def rollout(id: int, group: int, tokens: int) -> Rollout:
    made = Rollout(id, Prompt(str(group), (1, 2), group), id % 2, 0, 0, 0)
    made.append(Segment([5] * tokens, [0.0] * tokens, 0))
    return made


@pytest.mark.parametrize("groups", [1, 3, 4, 7])
def test_each_rank_gets_whole_groups_of_all_lengths(groups: int) -> None:
    rows = rows_in_groups([rollout(id, id // 2, 10 * (id // 2) + 1) for id in range(2 * groups)], 2)
    parts = rows_by_rank(rows, 3, 2, 4)
    assert len({len(part) for part in parts}) == 1 and len(parts[0]) % 4 == 0
    trained = [[row.rollout.id for row in part if row.trains] for part in parts]
    assert sorted(id for part in trained for id in part) == list(range(2 * groups))
    assert all(part[::2] == [id - 1 for id in part[1::2]] for part in trained)  # group members stay together
    if groups == 7:
        assert [part[::2] for part in trained] == [[0, 10, 12], [2, 8], [4, 6]]


def test_an_engine_that_decodes_with_the_trainer_s_module_is_refused_if_that_is_sharded() -> None:
    trainer = SimpleNamespace(
        processing_class=AutoTokenizer.from_pretrained(BUILT_IN_MODEL),
        model=None,
        accelerator=SimpleNamespace(
            state=SimpleNamespace(deepspeed_plugin=None, fsdp_plugin=SimpleNamespace(fsdp_version=2))
        ),
    )
    check_model(trainer, "vllm")
    with pytest.raises(ConfigurationError, match="whose weights are sharded"):
        check_model(trainer, "embedded")


def test_another_number_of_ranks_is_refused_on_all_of_them_for_the_same_reason(tmp_path: Path) -> None:
    for rank in range(2):
        write_state(tmp_path / f"sortedrl-{rank}.json", {"processes": 2, "rank": rank})
    assert read_state(tmp_path, 1, 2)["rank"] == 1
    for rank in range(4):
        with pytest.raises(ConfigurationError, match="it was saved by 2 processes, but there are 4"):
            read_state(tmp_path, rank, 4)


def test_a_function_makes_an_engine_with_slots_of_its_own() -> None:
    check_parts("partial", lambda: None, None)
    with pytest.raises(ConfigurationError, match="slots of its own"):
        check_parts("partial", lambda: None, 8)


def test_vllm_that_is_not_installed_is_refused_before_the_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match="vLLM is not installed: pip install"):
        check_parts("partial", "vllm", None)
