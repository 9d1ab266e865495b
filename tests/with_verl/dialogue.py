"""The built-in dialogue task and its model, as verl reads them."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas
from verl_config import MODEL

from sortedrl.tasks.knights_and_knaves import COMPACT_NAMES
from sortedrl.tasks.knights_dialogue import DialoguePuzzle, KnightsDialogue
from sortedrl.tasks.task import Problem

HERE = Path(__file__).resolve().parent
TOOL_AGENT = [
    "actor_rollout_ref.rollout.multi_turn.enable=True",
    f"actor_rollout_ref.rollout.multi_turn.tool_config_path={HERE / 'ask_tool.yaml'}",
    "actor_rollout_ref.rollout.multi_turn.format=ask",
    "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=4",
]


def dialogue_model(folder: Path) -> Path:
    """A copy whose template writes what a tool returns as what a user says: the model has seen no other role."""
    shutil.copytree(MODEL.parent / "knights-dialogue", folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    role = "('user' if message['role'] == 'tool' else message['role'])"
    settings["chat_template"] = settings["chat_template"].replace("message['role'] +", f"{role} +", 1)
    path.write_text(json.dumps(settings))
    return folder


def messages_and_tools(problem: Problem) -> tuple[list[dict[str, str]], dict[str, Any]]:
    puzzle: DialoguePuzzle = problem.answer
    statements = {COMPACT_NAMES[one]: puzzle.statement(one) for one in range(puzzle.puzzle.characters)}
    return [{"role": "user", "content": problem.question}], {"ask": {"create_kwargs": {"statements": statements}}}


def write_dialogue(folder: Path, count: int) -> None:
    task = KnightsDialogue(count=count)
    folder.mkdir(parents=True, exist_ok=True)
    parts: dict[str, Sequence[Problem]] = {"train": task.train(), "held_out": task.held_out()[:4]}
    for name, problems in parts.items():
        rows = [_row(index, problem) for index, problem in enumerate(problems)]
        pandas.DataFrame(rows).to_parquet(folder / f"{name}.parquet")


def _row(index: int, problem: Problem) -> dict[str, Any]:
    messages, tools_kwargs = messages_and_tools(problem)
    answer = dict(zip(COMPACT_NAMES, problem.answer.answer, strict=False))
    return {
        "data_source": "knights_and_knaves:dialogue",
        "prompt": messages,
        "reward_model": {"style": "rule", "ground_truth": json.dumps(answer)},
        "extra_info": {"index": index, "id": problem.id, "tools_kwargs": tools_kwargs, "need_tools_kwargs": True},
    }
