"""A model of a few thousand random weights and a task that it can learn: end soon, and say `a` before."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from sortedrl.tasks.task import Problem, Reward

WORDS = ["<unk>", "<s>", "</s>", "a", "b", "c", "d", *(f"q{i}" for i in range(40))]


def make_model(folder: Path, seed: int = 0, *, eos: bool = True) -> Path:
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokens = {"unk_token": "<unk>", "bos_token": "<s>"} | ({"eos_token": "</s>"} if eos else {})
    PreTrainedTokenizerFast(tokenizer_object=words, **tokens).save_pretrained(folder)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,  # decoding takes most of a run's time
        num_attention_heads=2,
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_id=2 if eos else None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


class SayA:
    """Reward: the share of `a` among the words."""

    name = "say-a"

    def __init__(self, problems: int = 64) -> None:
        self._problems = problems

    def train(self) -> Sequence[Problem]:
        return [Problem(f"train-{i}", f"q{i % 40} q{i // 40}", "a") for i in range(self._problems)]

    def held_out(self) -> Sequence[Problem]:
        return [Problem(f"held-out-{i}", f"q{i % 40} q9", "a") for i in range(40)]

    def score(self, problem: Problem, response: str) -> Reward:
        words = response.split()
        share = words.count(problem.answer) / len(words) if words else 0.0
        return Reward(share, correct=share > 0.5)


class Noisy(SayA):
    """Seeds Python's generator when it is made, as tasks that sample their problems do, and draws from it to score."""

    def __init__(self) -> None:
        super().__init__()
        random.seed(7)

    def score(self, problem: Problem, response: str) -> Reward:
        return Reward(random.random(), correct=False)


class HeldInEvaluation(SayA):
    """While the file that HOLD_EVALUATIONS names exists, an evaluation after the first one waits for a signal, and says
    so in a file beside it: a signal then comes between two updates, on a fast and on a slow machine."""

    def __init__(self) -> None:
        super().__init__()
        self._scored = 0

    def score(self, problem: Problem, response: str) -> Reward:
        self._scored += problem.id.startswith("held-out")
        hold = Path(os.environ["HOLD_EVALUATIONS"])
        if self._scored > len(self.held_out()) and hold.exists():
            _wait_for_signal(announce=hold.with_suffix(".held"))
            hold.unlink()
        return super().score(problem, response)


class HeldInTraining(SayA):
    """Its response number `at` in training waits until the file `hold` is gone: a test can act meanwhile, however slow
    it is. By then at most `at` responses are trained on, and at least `at` less a cohort."""

    def __init__(self, hold: str, at: int) -> None:
        super().__init__()
        self._hold = Path(hold)
        self._left = at

    def score(self, problem: Problem, response: str) -> Reward:
        self._left -= problem.id.startswith("train")
        while self._left <= 0 and self._hold.exists():
            time.sleep(0.01)
        return super().score(problem, response)


def held(hold: Path, at: int) -> list[str]:
    """Flags for a run with `HeldInTraining`; makes the file."""
    hold.touch()
    return ["--task", "toy:HeldInTraining", "--task-options", "hold", str(hold), "at", str(at)]


def _wait_for_signal(announce: Path) -> None:
    received, wakes = socket.socketpair()
    with received, wakes:
        wakes.setblocking(False)
        before = signal.set_wakeup_fd(wakes.fileno())
        try:
            announce.touch()
            received.recv(1)
        finally:
            signal.set_wakeup_fd(before)


class RowsInFile(SayA):
    """One problem per row of its file, `part question answer`: rows keep their ids when they are edited."""

    def __init__(self, data: Path) -> None:
        self._rows = [row.split() for row in Path(data).read_text().splitlines()]

    def train(self) -> Sequence[Problem]:
        return self._part("train")

    def held_out(self) -> Sequence[Problem]:
        return self._part("held-out")

    def _part(self, wanted: str) -> Sequence[Problem]:
        rows = [(question, answer) for part, question, answer in self._rows if part == wanted]
        return [Problem(f"{wanted}-{i}", *row) for i, row in enumerate(rows)]


class RaisesSometimes(SayA):
    def score(self, problem: Problem, response: str) -> Reward:
        if int(problem.id[-1]) % 3 == 0:
            raise RuntimeError("reward server is down")
        return super().score(problem, response)


class SlowAndRaisesSometimes(RaisesSometimes):
    """A reward that is far slower than the toy model, in training."""

    def score(self, problem: Problem, response: str) -> Reward:
        if problem.id.startswith("train"):
            time.sleep(0.15)
        return super().score(problem, response)


class RaisesAlways(SayA):
    def score(self, problem: Problem, response: str) -> Reward:
        raise RuntimeError("reward server is down")


class Talk(SayA):
    """Rollouts of `turns` turns. The environment answers after up to `seconds`, with a word that depends on what was
    said. Reward: the share of `a` among all words."""

    name = "talk"

    def __init__(self, problems: int = 64, turns: int = 3, seconds: float = 0.0, remembers: bool = True) -> None:
        super().__init__(problems)
        self._arguments = turns, seconds
        self._remembers = remembers

    def environment(self) -> Talker:
        return (RememberingTalker if self._remembers else Talker)(*self._arguments)


class Talker:
    def __init__(self, turns: int, seconds: float) -> None:
        self._turns = turns
        self._seconds = seconds
        self._said: list[list[str]] = []

    def reset(self, problem: Problem) -> str:
        self._problem = problem
        return problem.question

    async def step(self, response: str) -> str | Reward:
        if self._seconds:
            await asyncio.sleep(random.uniform(0.0, self._seconds))
        self._said.append(response.split())
        if len(self._said) == self._turns:
            return self._reward()
        return f"q{(len(self._said) + 7 * len(response)) % 40}"

    async def finish(self, reason: str) -> Reward:
        return self._reward()

    def _reward(self) -> Reward:
        return SayA().score(self._problem, " ".join(word for said in self._said for word in said))


class RememberingTalker(Talker):
    def state(self) -> list[list[str]]:
        return self._said

    def restore(self, state: list[list[str]]) -> None:
        self._said = state
