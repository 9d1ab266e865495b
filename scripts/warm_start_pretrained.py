"""Warm-starts any Hugging Face causal LM on worked Knights & Knaves puzzles, so that RL has something to improve.

    python scripts/warm_start_pretrained.py --gguf smollm2.gguf --out smollm2-knights      # minutes on a GPU
    sortedrl train --model smollm2-knights --engine vllm

The puzzles are those of scripts/warm_start.py: no task uses them, and some of the reasoning is flawed on purpose. By
default half of the responses are short guesses. With `--errors searches` there are none: the search rejects cases that
fit and goes on, so long responses fail more often.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from worked_reasoning import SEARCH_TOO_FAR, Flaws, worked_response

from sortedrl.learner.models import TokenScorer
from sortedrl.tasks.encode import prompt_tokens
from sortedrl.tasks.knights_and_knaves import SMALL_CHARACTERS, compact_text, warm_start_puzzle
from sortedrl.tasks.task import Problem

Example = tuple[list[int], list[int]]  # prompt and response

NO_TARGET = -100
EXAMPLES_TO_SORT = 256
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
FLAWS = {"guesses": Flaws(guess=0.5, overlook=0.08, give_up=0.03), "searches": SEARCH_TOO_FAR}


def examples(
    tokenizer: PreTrainedTokenizerBase, seed: int, characters: Sequence[int], flaws: Flaws
) -> Iterator[Example]:
    """Infinite (prompt, response) pairs; each entry of `characters` is a size of puzzle, all equally frequent."""
    rng = random.Random(seed)
    while True:
        puzzle = warm_start_puzzle(rng.choice(characters), rng)
        prompt = prompt_tokens(Problem("", compact_text(puzzle), ()), tokenizer)
        response = tokenizer(worked_response(puzzle, rng, flaws), add_special_tokens=False)["input_ids"]
        yield prompt, [*response, tokenizer.eos_token_id]


def batches(source: Iterator[Example], tokens: int, rng: random.Random) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Infinite (tokens, targets) of about `tokens` each; targets are NO_TARGET outside of responses.

    Examples of similar length share a batch: in their order of arrival more than half of a batch would be padding.
    """
    while True:
        pool = sorted(islice(source, EXAMPLES_TO_SORT), key=lambda example: len(example[0]) + len(example[1]))
        found = []
        while pool:
            rows = max(1, tokens // (len(pool[-1][0]) + len(pool[-1][1])))
            found.append(padded(pool[-rows:]))
            del pool[-rows:]
        rng.shuffle(found)
        yield from found


def padded(rows: Sequence[Example]) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(len(prompt) + len(response) for prompt, response in rows)
    inputs, targets = torch.zeros(len(rows), width, dtype=torch.long), torch.full((len(rows), width), NO_TARGET)
    for row, (prompt, response) in enumerate(rows):
        end = len(prompt) + len(response)
        inputs[row, :end] = torch.tensor(prompt + response)
        targets[row, len(prompt) : end] = torch.tensor(response)
    return inputs, targets


class Loss:
    """Mean cross-entropy of the targets. No other position gets logits: with a large vocabulary they fill the GPU."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._scorer = TokenScorer(model, temperature=1.0)

    def __call__(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        rows, places = (targets != NO_TARGET).nonzero(as_tuple=True)
        return -self._scorer.at(inputs, rows, places)[0].mean()


def let_segments_grow() -> None:
    """Sets the allocator to segments that can grow: batches have many shapes, which fragments fixed ones.

    PyTorch reads the variable when it first uses CUDA. The names with CUDA and HIP are the older ones, which it still
    reads; the user's setting under any of the names stays.
    """
    if not any(name in os.environ for name in ALLOCATOR_VARIABLES):
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def plain(model: PreTrainedModel) -> PreTrainedModel:
    """The same weights without the quantization flag, which would prevent saving them."""
    if not hasattr(model.config, "quantization_config"):
        return model
    weights = model.state_dict()
    del model.config.quantization_config
    unquantized = type(model)(model.config)
    unquantized.load_state_dict(weights)
    return unquantized


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default=".", help="folder or hub name; with --gguf the folder of that file")
    parser.add_argument("--gguf", type=Path, help="weights in a GGUF file (needs the package gguf)")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--tokens-per-step", type=int, default=16_384)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--characters", type=int, nargs="+", default=list(SMALL_CHARACTERS), help="sizes of puzzles")
    parser.add_argument("--errors", choices=FLAWS, default="guesses")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    let_segments_grow()
    source, extra = arguments.model, {}
    if arguments.gguf:
        source, extra = str(arguments.gguf.parent), {"gguf_file": arguments.gguf.name}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(arguments.seed)
    tokenizer = AutoTokenizer.from_pretrained(source, **extra)
    model = plain(AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, **extra)).to(device)
    loss_of = Loss(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    source_of_examples = examples(tokenizer, arguments.seed, arguments.characters, FLAWS[arguments.errors])
    data = batches(source_of_examples, arguments.tokens_per_step, random.Random(arguments.seed))
    began = time.monotonic()
    for step in range(1, arguments.steps + 1):
        share = min(1.0, step / 20) * max(0.05, math.cos(step / arguments.steps * math.pi / 2))
        for group in optimizer.param_groups:
            group["lr"] = arguments.learning_rate * share
        inputs, targets = (tensor.to(device) for tensor in next(data))
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):  # emulated on most CPUs
            loss = loss_of(inputs, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            print(
                f"step {step} of {arguments.steps}: loss {loss.item():.4f}, {time.monotonic() - began:.0f} s",
                flush=True,
            )
    if device == "cuda":
        print(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB", flush=True)
    model.to(torch.bfloat16).save_pretrained(arguments.out)
    tokenizer.save_pretrained(arguments.out)
    recipe = {key: str(value) for key, value in vars(arguments).items()}
    (arguments.out / "recipe.json").write_text(json.dumps(recipe, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
