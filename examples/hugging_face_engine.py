"""A complete engine over Hugging Face `generate`, in about 80 lines, for the scheduler of SortedRL.

It generates a few tokens for all running requests, reports them, refills free slots, and repeats. Every round prefills
the contexts again, so it is slow: read it to learn the protocol (docs/engine_authors.md). Run it:

    python examples/hugging_face_engine.py
"""

import time
from collections import deque

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sortedrl import Controller, Prompt, Prompts, Schedule
from sortedrl.core import EngineSpec, RequestFinished, RequestStarted, ScoreAtOnce, Segment, Tokens
from sortedrl.models import BUILT_IN_MODEL


class HuggingFaceEngine:
    def __init__(self, model, slots, eos_token_id, tokens_per_round=8):
        self.model, self.slots, self.eos = model.eval(), slots, eos_token_id
        self.tokens_per_round = tokens_per_round
        self.version = 0
        self.queue = deque()
        self.running = {}  # id -> (request, tokens that it has made since it was submitted)

    def now(self):
        return time.monotonic()

    def submit(self, requests):
        self.queue.extend(requests)

    def poll(self, until=None):
        changes = []
        while self.queue and len(self.running) < self.slots:
            request = self.queue.popleft()
            self.running[request.id] = (request, [])
            changes.append(RequestStarted(request.id, self.now()))
        if self.running:
            return changes + self._round()
        if until is not None:  # nothing to do: wait, as the protocol asks
            time.sleep(max(0.0, until - self.now()))
        return changes

    def abort(self, ids):
        """Tokens are delivered after every round, so there are never undelivered ones to return."""
        self.queue = deque(request for request in self.queue if request.id not in ids)
        for id in ids:
            self.running.pop(id, None)
        return []

    def update_weights(self, weights, version):
        if weights is not None:
            self.model.load_state_dict(dict(weights), strict=False)  # a tied output layer has no weights of its own
        self.version = version

    def _round(self):
        requests = [request for request, _ in self.running.values()]
        sampled = self._generate([self._context(*entry) for entry in self.running.values()], requests[0].sampling)
        at, changes = self.now(), []
        for request, (tokens, logprobs) in zip(requests, sampled, strict=True):
            made = self.running[request.id][1]
            tokens = tokens[: request.max_new_tokens - len(made)]
            made += tokens
            changes.append(Tokens(request.id, at, Segment(tokens, logprobs[: len(tokens)], self.version)))
            ended = tokens[-1] == self.eos and not request.sampling.ignore_eos
            if ended or len(made) == request.max_new_tokens:
                changes.append(RequestFinished(request.id, at, truncated=not ended))
                del self.running[request.id]
        return changes

    def _context(self, request, made):
        return [*request.prompt.tokens, *request.prefix_tokens, *made]

    @torch.no_grad()
    def _generate(self, contexts, sampling):
        """For each context its next tokens, up to and with EOS, and the log-probability of each."""
        eos = None if sampling.ignore_eos else self.eos
        longest = max(map(len, contexts))
        ids = torch.tensor([[self.eos] * (longest - len(context)) + context for context in contexts])
        mask = torch.tensor([[0] * (longest - len(context)) + [1] * len(context) for context in contexts])
        made = self.model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=self.tokens_per_round,
            do_sample=True,
            temperature=sampling.temperature,
            top_k=0,
            top_p=1.0,
            eos_token_id=eos,
            pad_token_id=self.eos,
            output_scores=True,  # after temperature: what the token was sampled from
            return_dict_in_generate=True,
        )
        new = made.sequences[:, longest:]
        scores = torch.stack(made.scores, dim=1).float().log_softmax(-1)
        logprobs = scores.gather(-1, new.unsqueeze(-1)).squeeze(-1)
        for tokens, values in zip(new.tolist(), logprobs.tolist(), strict=True):
            length = tokens.index(eos) + 1 if eos in tokens else len(tokens)
            yield tokens[:length], values[:length]


def engine(spec):
    """For `sortedrl train --engine hugging_face_engine:engine` and for the contract suite (docs/engine_authors.md)."""
    model = AutoModelForCausalLM.from_pretrained(spec.model)
    return HuggingFaceEngine(model, spec.slots, next(iter(spec.eos_token_ids), model.config.eos_token_id))


if __name__ == "__main__":
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(BUILT_IN_MODEL)
    prompts = Prompts([Prompt(f"p{i}", tokenizer(f"A says B lies {i}").input_ids) for i in range(32)])
    schedule = Schedule(mode="partial", rollouts_per_update=8, prompts_per_cohort=16, max_response_tokens=64)
    own = engine(EngineSpec(model=str(BUILT_IN_MODEL), slots=8, max_length=96))
    brevity = ScoreAtOnce(lambda rollout: 1.0 / len(rollout))
    controller = Controller(own, prompts, brevity, schedule)
    for batch in controller:
        lengths = [len(rollout) for rollout in batch]
        print(f"update {batch.update}: {len(batch)} rollouts, lengths {lengths[0]} to {lengths[-1]}")
        controller.publish(own.model.state_dict())  # a learner would have changed them
