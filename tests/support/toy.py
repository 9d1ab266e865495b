"""A model of a few thousand random weights and a task that it can learn: end soon, and say `a` before."""

from __future__ import annotations

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
        num_hidden_layers=2,
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


class RaisesSometimes(SayA):
    def score(self, problem: Problem, response: str) -> Reward:
        if int(problem.id[-1]) % 3 == 0:
            raise RuntimeError("judge out of order")
        return super().score(problem, response)


class SlowAndRaisesSometimes(RaisesSometimes):
    """A reward that is far slower than the toy model, in training."""

    def score(self, problem: Problem, response: str) -> Reward:
        if problem.id.startswith("train"):
            time.sleep(0.15)
        return super().score(problem, response)


class RaisesAlways(SayA):
    def score(self, problem: Problem, response: str) -> Reward:
        raise RuntimeError("judge out of order")
