"""vLLM's speculative decoding: which settings are refused because responses would no longer be the policy's, or would
stop being fast without a word, and the base of drafters that run in this process.

A drafter proposes tokens, and the policy checks them all in one step. Rejection sampling keeps the policy's own
distribution, so a draft changes how many tokens a step yields, never which.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sortedrl.core.configuration import ConfigurationError
from sortedrl.core.engine import Engine, ForwardingEngine
from sortedrl.core.events import Drafted
from sortedrl.core.strategies.base import Strategy

if TYPE_CHECKING:
    import numpy as np

    from sortedrl.core.controller import Controller

EXACT = ("standard", "block")  # ways of vLLM to accept drafts
WITHOUT_WEIGHTS = ("ngram", "ngram_gpu", "suffix", "custom_class")


def inexact_drafts(config: Mapping[str, Any] | None, *, seeded: bool) -> tuple[str, str] | None:
    """Why responses would not be what they are without drafts, and the fix; None if they are."""
    if not config:
        return None
    accepts = config.get("rejection_sample_method") or EXACT[0]
    if accepts not in EXACT:
        why = f"{accepts} acceptance keeps drafted tokens that the policy did not sample"
        return why, "Use rejection_sample_method standard. With load_format dummy it is allowed, for measurements."
    if seeded:
        return "with drafts a request's seed does not decide its tokens: they depend on the drafts, too", (
            "Leave out seeded or speculative_config."
        )
    return None


def refused_drafts_of_server(vllm_config: Mapping[str, Any], *, seeded: bool) -> str | None:
    """Why a server with this configuration is refused because of its drafts; None if it is not."""
    config = vllm_config.get("speculative_config")
    found = inexact_drafts(config, seeded=seeded)
    if found is None and config and str((vllm_config.get("device_config") or {}).get("device")).startswith("cpu"):
        return "vLLM's CPU build does not apply the temperature to drafts"
    return found and found[0]


def check_speculative_config(options: Mapping[str, Any], *, seeded: bool, enable_sleep_mode: bool) -> None:
    """Of vLLM in this process."""
    config = options.get("speculative_config")
    if config is None:
        return
    if not isinstance(config, Mapping):
        why, fix = "it is a JSON object", 'Use for example {"method": "ngram", "num_speculative_tokens": 3}.'
        raise ConfigurationError("engine_options", f"speculative_config {config}", why, fix)
    found = None if options.get("load_format") == "dummy" else inexact_drafts(config, seeded=seeded)
    if found is None and enable_sleep_mode and config.get("method") not in WITHOUT_WEIGHTS:
        why = "a sleeping engine drops the weights of the draft model, which no weight update brings back"
        found = why, "Leave out enable_sleep_mode, or use a drafter without weights, such as method ngram."
    if found is not None:
        raise ConfigurationError("engine_options", f"speculative_config {dict(config)}", *found)


def require_exact_checks(device: Any) -> None:
    """After vLLM has started. Its CPU build (0.32.0) checks drafts at temperatures that it never wrote: there is no
    error, but tokens and log-probabilities are not the policy's."""
    import torch
    from vllm.v1.sample.rejection_sampler import expand_batch_to_tokens

    temperatures = torch.tensor([0.5, 2.0], device=device)
    found = expand_batch_to_tokens(temperatures, torch.tensor([1, 3], dtype=torch.int32, device=device), 3)
    if found.tolist() != [0.5, 2.0, 2.0]:
        why = f"this build of vLLM does not apply the temperature to drafts ({device}: expand_batch_to_tokens)"
        raise ConfigurationError("engine_options", "speculative_config", why, "Leave it out, or use a GPU.")


@dataclass
class DraftCounts:
    """What drafts have yielded so far. Drafters that are not ours do not tell how much they have drafted."""

    drafted: int = 0
    accepted: int = 0
    steps: dict[int, int] = field(default_factory=dict)  # by running requests
    tokens: dict[int, int] = field(default_factory=dict)  # that these steps sampled

    def add(self, sampled: Sequence[Sequence[int]]) -> None:
        """A step, with the tokens that it sampled for each running request: none during its prefill."""
        running, made = len(sampled), sum(map(len, sampled))
        self.steps[running] = self.steps.get(running, 0) + 1
        self.tokens[running] = self.tokens.get(running, 0) + made
        self.accepted += made - sum(1 for tokens in sampled if tokens)


class Drafter:
    """A drafter for `speculative_config`: {"method": "custom_class", "model": "module.Class", ...}.

    vLLM makes it. `VllmEngine.drafter` is this object, so `most_running` can be changed at any time: with more running
    requests nothing is drafted. 0: never.
    """

    def __init__(self, vllm_config: Any) -> None:
        self.tokens = int(vllm_config.speculative_config.num_speculative_tokens)
        self.most_running = int(vllm_config.scheduler_config.max_num_seqs)
        self.counts = DraftCounts()

    def load_model(self, *_: Any, **__: Any) -> None:
        """vLLM asks for it. There are no weights."""

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """After every step, a draft for each running request. A request without sampled tokens is in its prefill."""
        self.counts.add(sampled_token_ids)
        if len(sampled_token_ids) > self.most_running:
            return [[] for _ in sampled_token_ids]
        contexts = [token_ids_cpu[row, : num_tokens_no_spec[row]] for row in range(len(sampled_token_ids))]
        drafts = self.drafts(sampled_token_ids, contexts)
        self.counts.drafted += sum(map(len, drafts))
        return drafts

    def drafts(self, sampled: Sequence[Sequence[int]], contexts: Sequence[np.ndarray]) -> list[list[int]]:
        """What may follow each of the contexts, prompts included: at most `self.tokens` tokens."""
        raise NotImplementedError

    def expect(self, prompt: Sequence[int]) -> None:
        """The engine got a request with this prompt."""

    def learn(self, prompt: Sequence[int], response: Sequence[int], source: str) -> None:
        """The engine delivered this response, or a part of it."""


def own_drafter(drafter: Any, draft_up_to: int | None) -> Drafter | None:
    """The drafter of an engine, if it is one of ours; then it follows `draft_up_to`."""
    own = drafter if isinstance(drafter, Drafter) else None
    if draft_up_to is not None:
        if own is None:
            why = "only a drafter that is a subclass of sortedrl.engines.speculative.Drafter can be switched"
            fix = 'Leave it out, or set speculative_config with "method": "custom_class" (docs/drafts.md).'
            raise ConfigurationError("engine_options", f"draft_up_to {draft_up_to}", why, fix)
        own.most_running = draft_up_to
    return own


class LoggedDrafts:
    """Logs what the drafts of vLLM in this process have yielded."""

    def __init__(self, engine: Engine) -> None:
        while isinstance(engine, ForwardingEngine):
            engine = engine.inner
        self._counts: DraftCounts | None = getattr(engine, "draft_counts", None)
        self._before = (0, 0, 0)

    def mark(self, controller: Controller) -> None:
        """At an update."""
        if (counts := self._counts) is not None:
            now = counts.drafted, counts.accepted, sum(counts.tokens.values())
            controller.mark(Drafted, *(new - old for new, old in zip(now, self._before, strict=True)))
            self._before = now


def why_no_drafts(options: Mapping[str, Any], strategy: Strategy) -> str | None:
    """Why vLLM starts without its drafts: if the mode leaves few slots empty, they cost more than they save. A draft
    model keeps vLLM's faster steps; from about two tokens per step on it may pay there, too."""
    config = options.get("speculative_config")
    method = config.get("method") if isinstance(config, Mapping) else None
    if method not in WITHOUT_WEIGHTS or (strategy.gated and not strategy.works_ahead):
        return None
    slots = f"{strategy.name} keeps the slots full, where such drafts made it 0.72 to 0.78x as fast on an H200"
    return f"vLLM starts without speculative_config {method}: {slots} (docs/drafts.md)"


class RepeatLast(Drafter):
    """Drafts the last token again: for measurements of what drafts cost, accepted or not."""

    def drafts(self, sampled: Sequence[Sequence[int]], contexts: Sequence[np.ndarray]) -> list[list[int]]:
        return [self.tokens * [made[-1]] if made else [] for made in sampled]
