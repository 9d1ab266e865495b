"""Use your own engine with the scheduler: implement five methods (the contract is in sortedrl/core/engine_protocol.py).

This one "generates" letters, one per slot and step, and ends a response with probability 1/20. Run it:

    python examples/bring_your_own_engine.py
    python -m sortedrl.testing examples.bring_your_own_engine:engine --deterministic      # it keeps all rules
"""

import math
import random
from collections import deque

from sortedrl import Controller, Prompt, Prompts, Schedule
from sortedrl.core import RequestFinished, RequestStarted, ScoreAtOnce, Segment, Tokens


class LetterEngine:
    def __init__(self, slots):
        self.slots = slots
        self.steps = 0
        self.version = 0
        self.queue = deque()
        self.running = {}  # id -> [request, tokens, log-probabilities]

    def now(self):
        return float(self.steps)

    def submit(self, requests):
        self.queue.extend(requests)

    def poll(self, until=None):
        changes = []
        while not any(isinstance(change, RequestFinished) for change in changes):
            while self.queue and len(self.running) < self.slots:  # refill free slots immediately
                request = self.queue.popleft()
                self.running[request.id] = [request, [], []]
                changes.append(RequestStarted(request.id, self.now()))
            if not self.running and until is not None:
                self.steps = max(self.steps, math.ceil(until))  # its clock counts steps: time passes without any
            if not self.running or (until is not None and self.now() >= until):
                break
            self.steps += 1
            for request, tokens, logprobs in list(self.running.values()):
                position = request.prefix_length + len(tokens)
                noise = random.Random(
                    f"{request.seed}/{position}"
                )  # depends only on seed and position, so a resume changes nothing
                tokens.append(noise.randrange(26))
                logprobs.append(-3.258)
                ended = noise.random() < 1 / 20 and not request.sampling.ignore_eos
                if ended or len(tokens) == request.max_new_tokens:
                    changes += [self._tokens(request.id), RequestFinished(request.id, self.now(), truncated=not ended)]
                    del self.running[request.id]
        return changes

    def abort(self, ids):
        self.queue = deque(request for request in self.queue if request.id not in ids)
        partials = [self._tokens(id) for id in ids if id in self.running and self.running[id][1]]
        for id in ids:
            self.running.pop(id, None)
        return partials

    def update_weights(self, weights, version):
        self.version = version

    def _tokens(self, id):
        _, tokens, logprobs = self.running[id]
        return Tokens(id, self.now(), Segment(tokens, logprobs, self.version))


def engine(spec):
    """The factory for `--engine` and for sortedrl.testing."""
    return LetterEngine(spec.slots)


if __name__ == "__main__":
    prompts = Prompts([Prompt(f"p{i}", [0, 1, 2]) for i in range(64)])
    schedule = Schedule(mode="partial", rollouts_per_update=16, prompts_per_cohort=64, max_response_tokens=200)
    vowels = ScoreAtOnce(lambda rollout: sum(token in (0, 4, 8, 14, 20) for token in rollout.tokens) / len(rollout))
    controller = Controller(LetterEngine(slots=16), prompts, vowels, schedule)
    for batch in controller:
        lengths = [len(rollout) for rollout in batch]
        print(f"update {batch.update}: {len(batch)} rollouts, lengths {lengths[0]} to {lengths[-1]}")
        controller.publish()
