"""The fraction of rollouts that abort and resume change with equal weights: embedded engine, random abort times.

Every request runs twice: uninterrupted, and aborted at random times and resumed in random order with another number of
slots. Weights are random; responses have lognormal lengths, set with max_new_tokens.

    python benchmarks/embedded_exactness.py --tokens 1000000
    python benchmarks/embedded_exactness.py --model qwen2-0.5b --device cuda --slots 256 --tokens 1000000
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from typing import Any

import torch
from embedded_speed import MODELS, make_workload

from sortedrl.core.engine import Request, RequestFinished, Tokens
from sortedrl.core.rollout import Segment
from sortedrl.engines.embedded.engine import EmbeddedEngine


def undisturbed(engine: EmbeddedEngine, requests: Sequence[Request]) -> dict[int, list[Segment]]:
    return _run(engine, requests, None)[0]


def _run(
    engine: EmbeddedEngine, requests: Sequence[Request], stops: random.Random | None
) -> tuple[dict[int, list[Segment]], int]:
    made: dict[int, list[Segment]] = {request.id: [] for request in requests}
    asked = {request.id: request for request in requests}
    open_ids = set(asked)
    resumed = 0
    engine.submit(requests)
    while open_ids:
        until = None if stops is None else engine.now() + stops.random() * 1.0
        changes = engine.poll(until)
        chosen = []
        if stops is not None and stops.random() < 0.1:
            chosen = [id for id in open_ids if stops.random() < 0.7]
            changes += engine.abort(chosen)
        for change in changes:
            if isinstance(change, Tokens):
                made[change.id].append(change.segment)
            elif isinstance(change, RequestFinished):
                open_ids.remove(change.id)
        again = [id for id in chosen if id in open_ids]
        if stops is not None:
            stops.shuffle(again)
        resumed += sum(bool(made[id]) for id in again)
        engine.submit([_rest(asked[id], made[id]) for id in again])
    return made, resumed


def _rest(request: Request, made: Sequence[Segment]) -> Request:
    left = request.max_new_tokens - sum(map(len, made))
    return Request(request.id, request.prompt, tuple(made), left, request.seed, request.sampling)


def joined(segments: Sequence[Segment]) -> tuple[list[int], list[float]]:
    return [t for s in segments for t in s.tokens], [p for s in segments for p in s.logprobs]


def main() -> None:
    parser = argparse.ArgumentParser(description="Fraction of rollouts that abort and resume change.")
    parser.add_argument("--model", choices=MODELS, default="tiny-llama")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--requests", type=int, default=256, help="per round")
    parser.add_argument("--mean-length", type=float, default=128)
    parser.add_argument("--sigma", type=float, default=1.0)
    parser.add_argument("--prompt-length", type=int, default=64)
    parser.add_argument("--max-length", type=int, default=1024)
    parser.add_argument("--weight-scale", type=float, default=1.0, help="above 1: sharper distributions")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    model: Any = MODELS[args.model]()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(args.weight_scale)
    model = model.to(args.device, torch.bfloat16 if args.device == "cuda" else torch.float32).eval()
    rng = random.Random(args.seed)
    tokens = rollouts = resumes = other_tokens = other_bits = 0
    began = time.perf_counter()
    while tokens < args.tokens:
        args.seed += 1
        requests = make_workload(args, model.config.vocab_size).requests
        whole = undisturbed(_engine(model, args.slots, args), requests)
        parts, resumed = _run(_engine(model, max(args.slots // 2 + rng.randrange(9), 1), args), requests, rng)
        resumes += resumed
        for request in requests:
            first, second = joined(whole[request.id]), joined(parts[request.id])
            tokens += len(first[0])
            rollouts += 1
            other_tokens += first[0] != second[0]
            other_bits += first[1] != second[1]
        print(
            f"{tokens} tokens, {rollouts} rollouts, {resumes} resumes, {time.perf_counter() - began:.0f} s: "
            f"{other_tokens} rollouts with different tokens, {other_bits} with different log-probabilities",
            flush=True,
        )


def _engine(model: Any, slots: int, args: argparse.Namespace) -> EmbeddedEngine:
    return EmbeddedEngine(model, slots=slots, eos_token_ids=(), max_length=args.max_length)


if __name__ == "__main__":
    main()
