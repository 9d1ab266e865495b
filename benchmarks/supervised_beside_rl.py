"""Supervised training compared with reinforcement learning: the same model, puzzles and time.

For each seed, `sortedrl train` runs with its defaults. Then the initial model is trained for the same time on flawless
solver-written reasoning about the same training puzzles: a teacher that RL does not have. Both are scored on the same
held-out puzzles, with the same noise, by the same function.

    python benchmarks/supervised_beside_rl.py --seeds 0 1 2 --json supervised.json    # 3 minutes per seed on two cores
    python benchmarks/supervised_beside_rl.py --seconds 75                            # only the supervised half
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from sortedrl.cli.parse import parsed
from sortedrl.core.rejections import RejectionWatch
from sortedrl.tasks.evaluation import Estimate, Evaluation, mean_at_k, paired_difference
from sortedrl.tasks.knights_and_knaves import COMPACT_NAMES, Claim, Connective, Is, Joined, Not, Puzzle, compact_text
from sortedrl.tasks.scoring import DirectScorer, reward_function
from sortedrl.training.engine import engine_of
from sortedrl.training.evaluate import EVALUATION_WORTH, evaluate
from sortedrl.training.resources import Resources, read_resources
from sortedrl.training.rewards import RewardSource
from sortedrl.training.settings import TrainSettings

sys.path.append(str(Path(__file__).parent.parent / "scripts"))
from warm_start import END, PAD, Example, padded, vocabulary_number
from worked_reasoning import NO_FLAWS, worked_response

TOKENS_PER_STEP = 2048  # including padding
WARMUP_SHARE = 0.05  # of the time
POOL = 512  # examples per sort by length
_FACT = re.compile(r"(\w+) is (not )?a (knight|knave)")
_JOINED = re.compile(rf"({_FACT.pattern}) ({'|'.join(map(re.escape, Connective))}) ({_FACT.pattern})")


def puzzle_of(question: str) -> Puzzle:
    """The puzzle that a question in compact wording asks about."""
    speeches = question.removesuffix(".").split(". ")
    puzzle = Puzzle(tuple(_claim(speech.split(" says ", 1)[1]) for speech in speeches))
    if compact_text(puzzle) != question:
        raise ValueError(f"not a puzzle in compact wording: {question}")
    return puzzle


def _claim(text: str) -> Claim:
    joined = _JOINED.fullmatch(text)
    if joined is None:
        return _fact(text)
    left, right = _fact(joined[1]), _fact(joined[6])
    assert isinstance(left, Is) and isinstance(right, Is)
    return Joined(Connective(joined[5]), left, right)


def _fact(text: str) -> Is | Not:
    found = _FACT.fullmatch(text)
    assert found is not None, text
    fact = Is(COMPACT_NAMES.index(found[1]), found[3] == "knight")
    return Not(fact) if found[2] else fact


def examples(resources: Resources) -> list[Example]:
    tokenizer: Any = resources.tokenizer
    rng = random.Random(0)  # unused without flaws

    def response(question: str) -> list[int]:
        text = worked_response(puzzle_of(question), rng, NO_FLAWS) + END
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    return [Example(list(prompt.tokens), response(prompt.payload.question)) for prompt in resources.train]


def batches(data: Sequence[Example], seed: int) -> Iterator[list[Example]]:
    """Infinite. Examples of similar length are batched together, batches in random order."""
    rng = random.Random(seed)
    while True:
        pool = sorted(rng.sample(data, min(POOL, len(data))), key=len)
        packed: list[list[Example]] = [[]]
        for example in pool:
            if packed[-1] and len(example) * (len(packed[-1]) + 1) > TOKENS_PER_STEP:
                packed.append([])
            packed[-1].append(example)
        rng.shuffle(packed)
        yield from packed


def train_supervised(resources: Resources, seconds: float, learning_rate: float, seed: int) -> tuple[int, int]:
    """Train for this many seconds, with a learning rate that decays to 0. Returns steps and trained tokens."""
    model: Any = resources.model
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0, fused=True)
    began = time.perf_counter()
    data = examples(resources)
    pad = vocabulary_number(resources.tokenizer, PAD)  # type: ignore[arg-type]
    model.train()
    steps = tokens_seen = 0
    for batch in batches(data, seed):
        passed = (time.perf_counter() - began) / seconds
        if passed >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * min(1.0, passed / WARMUP_SHARE) * math.cos(passed * math.pi / 2)
        tokens, targets = padded(batch, pad)
        logits = model(input_ids=tokens, attention_mask=(tokens != pad).long()).logits
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten(), reduction="sum")
        (loss / TOKENS_PER_STEP).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        tokens_seen += sum(len(example.response) for example in batch)
    model.eval()
    return steps, tokens_seen


def score(resources: Resources, settings: TrainSettings) -> Evaluation:
    """Scores like `sortedrl train`."""
    return evaluate(
        engine_of(settings, resources, resources.model),
        resources.held_out[: settings.eval_problems],
        RewardSource(DirectScorer(reward_function(resources.task, resources.tokenizer))),
        settings,
        RejectionWatch(EVALUATION_WORTH),
    )


def run_rl(flags: Sequence[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "sortedrl", "train", *flags, "--out", f"{folder}/run", "--json"]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    summary: dict[str, Any] = json.loads(done.stdout)
    return summary


def run_supervised(flags: Sequence[str], seconds: float, learning_rate: float) -> dict[str, Any]:
    settings = parsed(TrainSettings, flags, "supervised_beside_rl")
    torch.manual_seed(settings.seed)
    torch.set_num_threads(settings.threads)
    resources = read_resources(settings, print)
    before = score(resources, settings)
    steps, tokens = train_supervised(resources, seconds, learning_rate, settings.seed)
    after = score(resources, settings)
    return {
        "seconds": seconds,
        "steps": steps,
        "trained_tokens": tokens,
        "score_before": mean_at_k(before.correct)._asdict(),
        "score_after": mean_at_k(after.correct)._asdict(),
        "gain": paired_difference(before.correct, after.correct)._asdict(),
    }


def described(name: str, seed: int, result: dict[str, Any]) -> str:
    after, gain = Estimate(**result["score_after"]), Estimate(**result["gain"])
    return (
        f"seed {seed}  {name:<12} score {result['score_before']['value']:.3f} -> {after.value:.3f} "
        f"[{after.low:.3f}, {after.high:.3f}]  gain {gain.value:+.3f} [{gain.low:+.3f}, {gain.high:+.3f}]  "
        f"in {result['seconds']:.0f} s"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compare supervised training with RL: same model, puzzles and time.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="of the supervised side")
    parser.add_argument("--seconds", type=float, help="skip RL; train supervised for this long")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    args = parser.parse_args(arguments)
    results = []
    for seed in args.seeds:
        flags = ["--seed", str(seed), "--threads", str(args.threads)]
        rl = run_rl(flags) if args.seconds is None else None
        if rl is not None:
            print(described("RL", seed, rl), flush=True)
        supervised = run_supervised(flags, args.seconds or rl["seconds"], args.learning_rate)
        print(described("supervised", seed, supervised), flush=True)
        results.append({"seed": seed, "rl": rl, "supervised": supervised})
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
