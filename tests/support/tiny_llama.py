"""A small random Llama for tests of real servers and engines, and what they are checked against."""

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from sortedrl.core.engine import Engine, Request, Sampling
from sortedrl.core.rollout import Prompt
from sortedrl.engines.checked_weights import CheckedWeights
from sortedrl.testing.engine_contract import Ledger, resumed

ON_GPU = torch.cuda.is_available()


def logprobs_of(model: Any, temperature: float = 1.0) -> Any:
    def scored(context: Any, response: Any) -> list[float]:
        ids = torch.tensor([[*context, *response]], device=model.device)
        with torch.no_grad():
            logits = model(ids).logits[0, len(context) - 1 : -1].float()
        picked = torch.tensor(list(response), device=model.device)
        return torch.log_softmax(logits / temperature, -1).gather(1, picked[:, None])[:, 0].tolist()

    return scored


def tiny_model(folder: Path, *, tied: bool, seed: int = 0, vocab_size: int = 64) -> Any:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        head_dim=64 if ON_GPU else 32,  # SGLang has no kernel for 32
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=tied,
        initializer_range=0.3,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    return model.to("cuda" if ON_GPU else "cpu")


PROBES = [[5, 6, 7, 8] * 40, [9, 10, 11], [20] * 144]  # long enough to fill blocks of 128 cached tokens


def shake(model: Any, seed: int) -> None:
    torch.manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.2)


def parted_after_a_load(engine: Engine, learner: Any) -> float:
    """How far a response that is resumed under new weights is from the learner, in nats per token.

    The engine keeps stale KV: the check after the load must pass all the same, for its probes were made before it.
    """
    checked, ledger = CheckedWeights(engine, logprobs_of(learner), PROBES), Ledger(engine)
    checked.update_weights(dict(learner.named_parameters()), 1)
    first = Request(0, Prompt("long", PROBES[0]), (), 70, 0, Sampling(ignore_eos=True))
    ledger.submit([first])
    while len(ledger.tokens(0)) < 20:
        ledger.advance()
    ledger.abort([0])
    shake(learner, seed=11)
    checked.update_weights(dict(learner.named_parameters()), 2)
    # A server on a busy machine may be done before the abort arrives: its response is continued all the same.
    ledger.submit([resumed(first, ledger.segments[0])._replace(id=1, max_new_tokens=20)])
    ledger.run()
    assert len(ledger.tokens(1)) == 20
    expected = logprobs_of(learner)([*PROBES[0], *ledger.tokens(0)], ledger.tokens(1))
    return sum(abs(a - b) for a, b in zip(ledger.logprobs(1), expected, strict=True)) / len(expected)
