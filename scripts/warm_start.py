"""Creates the built-in model: a small Llama that reasons about small Knights & Knaves puzzles.

    python scripts/warm_start.py        # 4 to 6 minutes on 2 cores; writes src/sortedrl/models/knights-tiny

It is trained on solver-written responses, some of them flawed on purpose (worked_reasoning), to puzzles
that no task uses. Metrics on held-out puzzles at temperature 1 are written to recipe.json next to the model, together
with the recipe itself.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from worked_reasoning import Flaws, phrases, worked_response

from sortedrl.models import BUILT_IN_MODEL
from sortedrl.tasks.knights_and_knaves import (
    SMALL_CHARACTERS,
    KnightsAndKnaves,
    Puzzle,
    compact_text,
    warm_start_puzzle,
)
from sortedrl.tasks.task import Problem, Reward, Task

PAD, UNKNOWN, END, SYSTEM, USER, ASSISTANT = (
    "<pad>",
    "<unk>",
    "<|end|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
)
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
TOKEN_LIMIT = 320  # per response, in the evaluation
PASS_AT = 8  # samples per puzzle for PASS_PUZZLES puzzles, to see how much resampling can gain
PASS_PUZZLES = 60


FLAWS = Flaws(guess=0.5, overlook=0.08, give_up=0.03)


@dataclass(frozen=True)
class Recipe:
    seed: int = 0
    threads: int = 1  # more would change the order of sums, and thus the weights, for little speed
    puzzles: int = 16_000
    steps: int = 1300
    tokens_per_step: int = 2048  # including padding
    flaws: Flaws = FLAWS
    hidden_size: int = 96
    layers: int = 3
    head_size: int = 32
    feed_forward_size: int = 256
    muon_learning_rate: float = 0.02  # the matrices of the layers
    adam_learning_rate: float = 3e-3  # embeddings, norms and the head
    warmup_steps: int = 100


@dataclass(frozen=True)
class Example:
    """`mask` marks the tokens of the response to train on; empty: all."""

    prompt: list[int]
    response: list[int]
    mask: list[bool] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.prompt) + len(self.response)


def make_tokenizer(phrases: Sequence[str]) -> PreTrainedTokenizerFast:
    """One token per phrase in puzzles and reasoning; any other word is unknown."""
    special = [PAD, UNKNOWN, END, SYSTEM, USER, ASSISTANT]
    vocabulary = {token: number for number, token in enumerate([*special, *phrases])}
    words = sorted((phrase for phrase in phrases if phrase[0].isalpha()), key=len, reverse=True)
    pieces = rf"\b(?:{'|'.join(map(re.escape, words))})\b|</?\w+>|\w+|[^\w\s]"
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.add_special_tokens(special)
    tokenizer.pre_tokenizer = Split(Regex(pieces), behavior="removed", invert=True)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        pad_token=PAD,
        unk_token=UNKNOWN,
        eos_token=END,
        chat_template=CHAT_TEMPLATE,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )


def make_model(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    heads = recipe.hidden_size // recipe.head_size
    torch.manual_seed(recipe.seed)
    model = LlamaForCausalLM(  # type: ignore[no-untyped-call]
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=recipe.hidden_size,
            intermediate_size=recipe.feed_forward_size,
            num_hidden_layers=recipe.layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            head_dim=recipe.head_size,
            max_position_embeddings=1024,
            tie_word_embeddings=False,
            initializer_range=0.05,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=True, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return model


def prompt_tokens(question: str, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
    )
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def examples(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> Iterator[Example]:
    """Infinite: each time a puzzle comes up, it gets new reasoning with new flaws."""
    rng = random.Random(recipe.seed)
    puzzles = [warm_start_puzzle(rng.choice(SMALL_CHARACTERS), rng) for _ in range(recipe.puzzles)]
    prompts: dict[Puzzle, list[int]] = {}
    while True:
        puzzle = rng.choice(puzzles)
        if puzzle not in prompts:
            prompts[puzzle] = prompt_tokens(compact_text(puzzle), tokenizer)
        response = worked_response(puzzle, rng, recipe.flaws) + END
        yield Example(prompts[puzzle], tokenizer(response, add_special_tokens=False)["input_ids"])


def batches(recipe: Recipe, source: Iterator[Example]) -> Iterator[list[Example]]:
    """Examples of similar length are batched together, which saves padding; batches in random order."""
    rng = random.Random(recipe.seed + 1)
    while True:
        pool = sorted((next(source) for _ in range(512)), key=len)
        packed: list[list[Example]] = [[]]
        for example in pool:
            if len(example) * (len(packed[-1]) + 1) > recipe.tokens_per_step:
                packed.append([])
            packed[-1].append(example)
        rng.shuffle(packed)
        yield from packed


def padded(batch: Sequence[Example], pad: int) -> tuple[Tensor, Tensor]:
    """Tokens, and targets that are -100 where there is nothing to train on."""
    width = max(map(len, batch))
    tokens = torch.full((len(batch), width), pad)
    targets = torch.full((len(batch), width), -100)
    for row, example in enumerate(batch):
        tokens[row, : len(example)] = torch.tensor(example.prompt + example.response)
        response = torch.tensor(example.response)
        if example.mask:
            response = response.where(torch.tensor(example.mask), -100)
        targets[row, len(example.prompt) : len(example)] = response
    return tokens, targets


def train(
    model: LlamaForCausalLM,
    recipe: Recipe,
    source: Iterator[Example],
    pad: int,
    muon: Callable[..., torch.optim.Optimizer] = torch.optim.Muon,
) -> None:
    matrices = [parameter for parameter in model.model.layers.parameters() if parameter.ndim == 2]
    taken = {id(parameter) for parameter in matrices}
    others = [parameter for parameter in model.parameters() if id(parameter) not in taken]
    optimizers: list[torch.optim.Optimizer] = [
        muon(matrices, lr=recipe.muon_learning_rate, weight_decay=0.01),
        torch.optim.AdamW(others, lr=recipe.adam_learning_rate, betas=(0.9, 0.98), weight_decay=0.01),
    ]

    def fraction_of_peak(step: int) -> float:
        cosine = math.cos(step / recipe.steps * math.pi / 2)
        return min(1.0, (step + 1) / recipe.warmup_steps) * max(0.03, cosine)

    schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, fraction_of_peak) for optimizer in optimizers]
    model.train()
    begin = time.monotonic()
    for step, batch in zip(range(1, recipe.steps + 1), batches(recipe, source), strict=False):
        tokens, targets = padded(batch, pad)
        logits = model(input_ids=tokens, attention_mask=(tokens != pad).long()).logits
        # A constant divisor: every token has the same weight, in batches of short and of long responses.
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten(), reduction="sum")
        (loss / recipe.tokens_per_step).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        model.zero_grad()
        if step % 100 == 0:
            elapsed = time.monotonic() - begin
            left = elapsed / step * (recipe.steps - step)
            mean_loss = loss.item() / int((targets >= 0).sum())
            print(f"step {step} of {recipe.steps}: loss {mean_loss:.3f} per token, {left:.0f} s left", flush=True)


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder, save_jinja_files=False)
    (folder / "model.safetensors").chmod(0o644)
    # transformers 5 writes a name that version 4 does not support; both support this one.
    configuration = folder / "tokenizer_config.json"
    settings = json.loads(configuration.read_text(encoding="utf-8"))
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    configuration.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def vocabulary_number(tokenizer: PreTrainedTokenizerFast, token: str) -> int:
    return int(tokenizer.get_vocab()[token])


@dataclass(frozen=True)
class Sampled:
    """A response at temperature 1; `length` includes EOS."""

    problem: Problem
    reward: Reward
    length: int
    ended: bool


@torch.inference_mode()
def sample(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, problems: Sequence[Problem], task: Task
) -> list[Sampled]:
    model.eval()  # type: ignore[no-untyped-call]
    prompts = [prompt_tokens(problem.question, tokenizer) for problem in problems]
    inputs = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")
    rows = model.generate(**inputs, do_sample=True, top_k=0, max_new_tokens=TOKEN_LIMIT)  # type: ignore[misc]
    end = vocabulary_number(tokenizer, END)
    sampled = []
    for problem, row in zip(problems, rows[:, inputs["input_ids"].shape[1] :].tolist(), strict=True):
        length = row.index(end) + 1 if end in row else len(row)
        text = str(tokenizer.decode(row[:length], skip_special_tokens=True))
        sampled.append(Sampled(problem, task.score(problem, text), length, ended=end in row))
    return sampled


def measure(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int
) -> dict[str, float | dict[int, float]]:
    """Results of the model on held-out puzzles at temperature 1."""
    torch.manual_seed(seed)
    task = KnightsAndKnaves.small()
    problems = task.held_out()
    sampled = [one for part in batched(problems, 200) for one in sample(model, tokenizer, part, task)]
    again = sample(model, tokenizer, [*problems[:PASS_PUZZLES]] * PASS_AT, task)
    count = len(sampled)
    score = share(one.reward.correct for one in sampled)
    lengths = sorted(one.length for one in sampled)
    median, p95 = lengths[count // 2], lengths[int(0.95 * count)]
    return {
        "held_out_puzzles": count,
        "token_limit": TOKEN_LIMIT,
        "score": score,
        "score_half_width_95": round(1.96 * math.sqrt(score * (1 - score) / count), 3),
        "score_by_characters": {
            size: share(one.reward.correct for one in sampled if len(one.problem.answer) == size)
            for size in sorted(set(SMALL_CHARACTERS))
        },
        f"pass_at_{PASS_AT}_of_{PASS_PUZZLES}_puzzles": round(
            len({one.problem.id for one in again if one.reward.correct}) / PASS_PUZZLES, 3
        ),
        "format_right": share(one.reward.parts["format"] > 0 for one in sampled),
        "ended_by_itself": share(one.ended for one in sampled),
        "length_mean": round(sum(lengths) / count, 1),
        "length_median": median,
        "length_p95": p95,
        "length_p95_over_median": round(p95 / median, 2),
        "length_max": lengths[-1],
    }


def share(truths: Iterable[bool]) -> float:
    listed = list(truths)
    return round(sum(listed) / len(listed), 3)


def batched(problems: Sequence[Problem], size: int) -> Iterator[Sequence[Problem]]:
    return (problems[start : start + size] for start in range(0, len(problems), size))


def write_report(
    folder: Path, script: Path, recipe: Any, model: LlamaForCausalLM, training_seconds: int, measured: dict[str, Any]
) -> None:
    """recipe.json: how the model was made, and what it does."""
    report = {
        "made_by": f"scripts/{script.name}",
        "recipe": asdict(recipe),
        "parameters": model.num_parameters(),
        "training_seconds": training_seconds,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "measured_at_temperature_1": measured,
    }
    (folder / "recipe.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=2))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=BUILT_IN_MODEL, help="folder to write the model to")
    parser.add_argument("--seed", type=int, default=Recipe.seed)
    arguments = parser.parse_args()
    recipe = Recipe(seed=arguments.seed)
    torch.set_num_threads(recipe.threads)
    begin = time.monotonic()
    tokenizer = make_tokenizer(phrases())
    model = make_model(recipe, tokenizer)
    train(model, recipe, examples(recipe, tokenizer), vocabulary_number(tokenizer, PAD))
    training_seconds = round(time.monotonic() - begin)
    save(model, tokenizer, arguments.out)
    write_report(arguments.out, Path(__file__), recipe, model, training_seconds, measure(model, tokenizer, recipe.seed))


if __name__ == "__main__":
    main()
