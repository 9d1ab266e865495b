"""Makes the start model of the studies on knights_and_knaves:mixed, and measures how length goes with failure.

    python benchmarks/studies/start_model.py         # 4 minutes on one core; writes models/knights-search
    python benchmarks/studies/start_model.py --measure built-in knights_and_knaves:small
    python benchmarks/studies/start_model.py --measure benchmarks/studies/models/knights-search knights_and_knaves:mixed

The built-in model guesses half of its answers, in ten tokens, and guesses fail: its short responses are its bad ones.
This model continues from it on worked solutions without guesses. Its typical error takes a claim that fits for a
contradiction. The search then passes the answer and goes on to the last case, so long responses fail more often. Larger
puzzles need longer searches and are solved less often. `--measure` prints Spearman's rank correlation of response
length and failure, over responses and over the means of prompts, at temperature 1.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from sortedrl.core.engine import Request, RequestFinished, Sampling, Tokens
from sortedrl.core.rollout import Rollout
from sortedrl.core.seeds import derive_seed
from sortedrl.engines.embedded.engine import EmbeddedEngine
from sortedrl.models import BUILT_IN_MODEL, model_named
from sortedrl.tasks.encode import encode
from sortedrl.tasks.knights_and_knaves import MIXED_CHARACTERS, compact_text, warm_start_puzzle
from sortedrl.tasks.registry import task_by_name

sys.path.append(str(Path(__file__).parents[2] / "scripts"))

from worked_reasoning import SEARCH_TOO_FAR, worked_response

MODEL = Path(__file__).parent / "models" / "knights-search"
STEPS, ROWS, LEARNING_RATE, POOL = 150, 16, 1e-3, 8
TOKEN_LIMIT, PROBLEMS, SAMPLES = 320, 600, 4


def examples(tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[list[int], list[int]]]:
    """Prompt and worked response, as tokens, of puzzles that no task uses."""
    rng = random.Random(0)
    end = tokenizer.eos_token
    while True:
        puzzle = warm_start_puzzle(rng.choice(MIXED_CHARACTERS), rng)
        messages = [{"role": "user", "content": compact_text(puzzle)}]
        prompt = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        response = worked_response(puzzle, rng, SEARCH_TOO_FAR) + str(end)
        yield tuple(tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, response))


def batches(tokenizer: PreTrainedTokenizerBase) -> Iterator[list[tuple[list[int], list[int]]]]:
    """Examples of similar length together, which saves padding; batches in random order."""
    source, rng = examples(tokenizer), random.Random(1)
    while True:
        pool = sorted((next(source) for _ in range(POOL * ROWS)), key=lambda example: sum(map(len, example)))
        packed = [pool[start : start + ROWS] for start in range(0, len(pool), ROWS)]
        rng.shuffle(packed)
        yield from packed


def padded(batch: Sequence[tuple[list[int], list[int]]], pad: int) -> tuple[Tensor, Tensor]:
    """Tokens, and targets that are -100 outside of responses."""
    width = max(len(prompt) + len(response) for prompt, response in batch)
    tokens = torch.full((len(batch), width), pad)
    targets = torch.full((len(batch), width), -100)
    for row, (prompt, response) in enumerate(batch):
        tokens[row, : len(prompt) + len(response)] = torch.tensor(prompt + response)
        targets[row, len(prompt) : len(prompt) + len(response)] = torch.tensor(response)
    return tokens, targets


def make() -> None:
    tokenizer = AutoTokenizer.from_pretrained(BUILT_IN_MODEL)
    model = AutoModelForCausalLM.from_pretrained(BUILT_IN_MODEL, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, STEPS)
    for step, batch in zip(range(1, STEPS + 1), batches(tokenizer), strict=False):
        tokens, targets = padded(batch, int(tokenizer.pad_token_id))
        logits = model(input_ids=tokens).logits
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            print(f"step {step} of {STEPS}: loss {loss.item():.3f} per token", flush=True)
    model.bfloat16().save_pretrained(MODEL)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(BUILT_IN_MODEL / name, MODEL / name)
    (MODEL / "model.safetensors").chmod(0o644)


def sampled(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, task_name: str) -> list[tuple[str, int, bool]]:
    """Problem, response length and failure of `SAMPLES` responses to `PROBLEMS` held-out problems."""
    task = task_by_name(task_name)
    prompts = encode(task.held_out()[:PROBLEMS], tokenizer, 256).prompts
    engine = EmbeddedEngine(
        model,
        slots=64,
        eos_token_ids={int(tokenizer.eos_token_id)},
        max_length=256 + TOKEN_LIMIT,
        tokenizer=tokenizer,
    )
    rollouts = {
        i * SAMPLES + j: Rollout(i * SAMPLES + j, prompt, j, 0, derive_seed(0, i, j), 0)
        for i, prompt in enumerate(prompts)
        for j in range(SAMPLES)
    }
    engine.submit([Request(r.id, r.prompt, (), TOKEN_LIMIT, r.seed, Sampling()) for r in rollouts.values()])
    finished = 0
    while finished < len(rollouts):
        for change in engine.poll():
            if isinstance(change, Tokens):
                rollouts[change.id].append(change.segment)
            finished += isinstance(change, RequestFinished)
    texts = {id: str(tokenizer.decode(r.tokens, skip_special_tokens=True)) for id, r in rollouts.items()}
    return [(r.prompt.id, len(r), not task.score(r.prompt.payload, texts[id]).correct) for id, r in rollouts.items()]


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's, with mean ranks for ties."""

    def ranks(values: Sequence[float]) -> Tensor:
        value_n = torch.tensor(values, dtype=torch.float64)
        sorted_n = value_n.sort().values
        return (torch.searchsorted(sorted_n, value_n) + torch.searchsorted(sorted_n, value_n, right=True)) / 2

    return torch.corrcoef(torch.stack([ranks(first), ranks(second)]))[0, 1].item()


def measure(name: str, task_name: str) -> dict[str, object]:
    path = model_named(name)
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).train(False)
    found = sorted(sampled(model, tokenizer, task_name))
    by_prompt = [list(members) for _, members in groupby(found, key=lambda one: one[0])]
    by_size = [list(members) for _, members in groupby(found, key=lambda one: one[0].split("ppl")[0])]
    lengths = sorted(length for _, length, _ in found)
    return {
        "model": name,
        "task": task_name,
        "responses": len(found),
        "score": 1 - fmean(failed for _, _, failed in found),
        "length_mean": fmean(lengths),
        "length_median": lengths[len(lengths) // 2],
        "length_p95": lengths[int(0.95 * len(lengths))],
        "truncated": fmean(length == TOKEN_LIMIT for length in lengths),
        "rank_correlation": rank_correlation([one[1] for one in found], [one[2] for one in found]),
        "rank_correlation_of_prompts": rank_correlation(
            [fmean(one[1] for one in members) for members in by_prompt],
            [fmean(one[2] for one in members) for members in by_prompt],
        ),
        "by_characters": {
            members[0][0].split("ppl")[0]: {
                "score": 1 - fmean(one[2] for one in members),
                "length_mean": fmean(one[1] for one in members),
            }
            for members in by_size
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", nargs=2, metavar=("MODEL", "TASK"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if args.measure is None:
        make()
    print(json.dumps(measure(*(args.measure or (str(MODEL), "knights_and_knaves:mixed"))), indent=2))


if __name__ == "__main__":
    main()
