"""Whether responses beside an EAGLE-3 head are the policy's own: their distribution and their log-probabilities.

    python benchmarks/draft_exactness.py [--responses 2500] [--eager] [--plain]

A small policy and a small head, both random. The policy prefers a few tokens, and the head drafts only those, so that
many drafts are accepted. Each sampled token is compared with the policy's distribution after the tokens before it,
computed apart from vLLM: its place in that distribution is uniform if and only if it was drawn from it. A chi-square
test over 20 places for all tokens and for each position; and one against a temperature of 0.9, which must fail.
On a GPU in bfloat16, with CUDA graphs; --plain shows what rounding alone does.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")

import torch
from synthetic_drafts import eagle3_head
from transformers import AutoConfig, AutoModelForCausalLM

from sortedrl.core.engine import Request, Sampling
from sortedrl.core.rollout import Prompt
from sortedrl.engines.vllm import VllmEngine
from sortedrl.testing.engine_contract import Ledger

SHAPE = Path(__file__).parent / "shapes" / "tiny"
PREFERRED, POSITIONS, PLACES = 2, 8, 20  # tokens, tokens per response, cells of the test
PROMPT = [13, 14, 15, 16]


def policy(device: str) -> Any:
    torch.manual_seed(3)
    config = AutoConfig.from_pretrained(SHAPE, initializer_range=0.3)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        model.lm_head.weight[:PREFERRED] *= 1.5
        model.lm_head.weight[PREFERRED:] *= 0.1
        for weight in model.parameters():
            weight.copy_(weight.bfloat16())  # vLLM's
    return model.to(device)


def draft_preferred(worker: Any) -> str:
    """Every token of the head's own vocabulary stands for a preferred one. Returns where the head runs."""
    runner = worker.model_runner
    head = getattr(runner, "speculator", None) or runner.drafter
    with torch.inference_mode():
        offsets = head.model.draft_id_to_target_id
        drafts = torch.arange(len(offsets), device=offsets.device)
        offsets.copy_(drafts % PREFERRED - drafts)
    return type(runner).__module__


def distributions(model: Any, responses: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of all tokens, for each response and position."""
    prompts = torch.tensor(PROMPT, device=responses.device).expand(len(responses), -1)
    with torch.no_grad():
        logits = model(torch.cat([prompts, responses], dim=1)).logits[:, len(PROMPT) - 1 : -1].float()
    return torch.log_softmax(logits, -1)


def places(log_p: torch.Tensor, responses: torch.Tensor, temperature: float) -> torch.Tensor:
    """Of each token in its distribution, from 0 to 1; uniform within the token's own part."""
    p = torch.softmax(log_p.double() / temperature, -1)
    own = p.gather(-1, responses[..., None])[..., 0]
    before = p.cumsum(-1).gather(-1, responses[..., None])[..., 0] - own
    torch.manual_seed(5)
    return before + own * torch.rand_like(own)


def p_value(found: torch.Tensor) -> float:
    counts = torch.histc(found.flatten().float().cpu(), PLACES, 0, 1)
    even = counts.sum() / PLACES
    statistic = ((counts - even) ** 2 / even).sum()
    return float(torch.special.gammaincc(torch.tensor((PLACES - 1) / 2), statistic / 2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--responses", type=int, default=2500)
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--plain", action="store_true", help="without the head")
    options = parser.parse_args()
    began, on_gpu = time.perf_counter(), torch.cuda.is_available()
    model = policy("cuda" if on_gpu else "cpu")
    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        engine = VllmEngine(
            folder,
            slots=64,
            eos_token_ids=[2],
            max_length=256,
            load_format="dummy",
            dtype="bfloat16" if on_gpu else "float32",
            enforce_eager=options.eager or not on_gpu,
            kv_cache_memory_bytes=2**27,
            **({"gpu_memory_utilization": 0.05} if on_gpu else {}),
            **({} if options.plain else {"speculative_config": eagle3_head(SHAPE)}),
        )
        engine.update_weights(dict(model.named_parameters()), 1)
        runner = "no head" if options.plain else engine._core.collective_rpc(draft_preferred)[0]
        ledger, sampling = Ledger(engine), Sampling(ignore_eos=True)
        ids = range(options.responses)
        ledger.submit([Request(i, Prompt("p", PROMPT), (), POSITIONS, i, sampling) for i in ids])
        ledger.run()
    responses = torch.tensor([ledger.tokens(i) for i in ids], device=model.device)
    log_p = distributions(model, responses)
    reported = torch.tensor([ledger.logprobs(i) for i in ids], device=model.device)
    apart = (reported - log_p.gather(-1, responses[..., None])[..., 0]).abs()
    drawn = places(log_p, responses, 1.0)
    each = min(p_value(drawn[:, position]) for position in range(POSITIONS))
    accepted = engine.draft_counts.accepted if engine.draft_counts is not None else 0
    print(
        f"{runner}: {responses.numel():,} tokens, {accepted:,} of them drafted; p {p_value(drawn):.3f}, least of "
        f"{POSITIONS} positions, times {POSITIONS}: {min(1.0, POSITIONS * each):.3f}; at a temperature of 0.9: "
        f"{p_value(places(log_p, responses, 0.9)):.1e}; log-probabilities {apart.mean():.1e} nats apart, at most "
        f"{apart.max():.1e} ({time.perf_counter() - began:.0f} s)"
    )
    engine.close()


if __name__ == "__main__":
    main()
