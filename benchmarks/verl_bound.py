"""verl's bounds on staleness against ours, for servers with GPUs of their own. Simulated, on the same lengths.

    python benchmarks/verl_bound.py          # about 3 CPU-minutes

verl's `separate_async` keeps an update's worth of prompts in flight beyond the one that it waits for, trains on the
oldest finished groups, and by default drops finished groups whose prompt was submitted 8 or more steps ago
(`max_off_policy_strategy=drop`); with `wait` it does not sample while such a prompt is in flight. Modeled from the
source of 0.9.1, without its polling. Ours: `partial+elevator` with overlap, as `integrations.verl` sets it.

8B on H200s by our profile: four servers of 64 slots, the learner on four more GPUs, groups of 8, limit 16,384 tokens.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from sortedrl.core.engine import Change, Request, RequestFailed, RequestFinished, Tokens
from sortedrl.core.rollout import Segment
from sortedrl.core.schedule import Schedule
from sortedrl.core.seeds import derive_seed
from sortedrl.engines.lengths import LognormalLengths
from sortedrl.observe.run_metrics import RunMetrics
from sortedrl.studies import profile_file
from sortedrl.studies.workload import SimulatedPrompts, Workload, run, simulated_engine

PROFILE = Path(__file__).parent / "measured" / "h200-8b" / "profile.json"
THRESHOLD, GROUP, LIMIT, UPDATES, SEEDS = 8, 8, 16_384, 40, (0, 1, 2)
PROMPTS_PER_UPDATE = (32, 8)
WARMUP_BATCHES = (1, 4, 6)  # updates' worth of prompts in flight beyond the one that is waited for; verl's default is 1


class Row(NamedTuple):
    speed: float  # trained tokens per second
    dropped: float  # fraction of the generated tokens
    staleness: float  # mean, in versions
    oldest: int
    rollouts: float  # per update


@dataclass
class Result:
    trained_tokens: int = 0
    made_tokens: int = 0
    seconds: float = 0.0
    staleness: Counter[int] = field(default_factory=Counter)  # trained tokens by versions

    def row(self, rollouts: float) -> Row:
        mean = sum(age * tokens for age, tokens in self.staleness.items()) / self.trained_tokens
        speed, dropped = self.trained_tokens / self.seconds, 1 - self.trained_tokens / self.made_tokens
        return Row(speed, dropped, mean, max(self.staleness), rollouts)


class Verl:
    """Its separate_async trainer, on our simulated servers."""

    def __init__(self, workload: Workload, prompts_per_update: int, warmup: int, strategy: str, seed: int) -> None:
        self.workload, self.size, self.strategy, self.seed = workload, prompts_per_update, strategy, seed
        self.warmup = warmup
        self.engine = simulated_engine(workload)
        self.prompts = SimulatedPrompts(workload.prompts, workload.prompt_tokens)
        self.submitted: dict[int, int] = {}  # step by prompt
        self.open: dict[int, Request] = {}  # by rollout
        self.segments: dict[int, list[Segment]] = defaultdict(list)
        self.unfinished: Counter[int] = Counter()  # rollouts by prompt
        self.result = Result()
        self.step = 0

    def add(self, count: int) -> None:
        for _ in range(count):
            prompt = len(self.submitted)
            self.submitted[prompt], self.unfinished[prompt] = self.step, GROUP
            for id in range(prompt * GROUP, (prompt + 1) * GROUP):
                seed = derive_seed(derive_seed(self.seed, id), 0)
                self.open[id] = Request(id, self.prompts[prompt], (), LIMIT, seed)
                self.engine.submit([self.open[id]])

    def take(self, changes: Iterable[Change]) -> None:
        for change in changes:
            assert not isinstance(change, RequestFailed)
            if isinstance(change, Tokens):
                self.segments[change.id].append(change.segment)
                self.result.made_tokens += len(change.segment)
            elif isinstance(change, RequestFinished):
                del self.open[change.id]
                self.unfinished[change.id // GROUP] -= 1

    def age(self, prompt: int) -> int:
        return self.step - self.submitted[prompt] + 1

    def forget(self, prompt: int) -> list[Segment]:
        del self.unfinished[prompt]
        return [segment for id in range(prompt * GROUP, (prompt + 1) * GROUP) for segment in self.segments.pop(id)]

    def sample(self) -> list[int]:
        while True:
            finished = [prompt for prompt, count in self.unfinished.items() if count == 0]
            late = [prompt for prompt in finished if self.age(prompt) > THRESHOLD] if self.strategy == "drop" else []
            for prompt in late:
                self.forget(prompt)
            self.add(len(late))
            finished = [prompt for prompt in finished if prompt in self.unfinished]
            waits = self.strategy == "wait" and any(
                count and self.age(prompt) >= THRESHOLD for prompt, count in self.unfinished.items()
            )
            if len(finished) >= self.size and not waits:
                return sorted(finished, key=self.submitted.__getitem__)[: self.size]
            self.take(self.engine.poll())

    def sync(self) -> None:
        self.take(self.engine.abort(list(self.open)))
        self.engine.update_weights(None, self.step)
        for id in self.open:
            first, made = self.open[id], tuple(segment.copy() for segment in self.segments[id])
            left = LIMIT - sum(map(len, made))
            self.engine.submit([first._replace(prefix=made, max_new_tokens=left)])

    def run(self) -> Result:
        self.step = 1
        self.add(self.warmup * self.size)
        for self.step in range(1, UPDATES + 1):
            self.add(self.size)
            tokens = 0
            for prompt in self.sample():
                for segment in self.forget(prompt):
                    tokens += len(segment)
                    self.result.staleness[self.step - 1 - segment.version] += len(segment)
            self.result.trained_tokens += tokens
            until = self.engine.now() + self.workload.learner_seconds(tokens)
            while self.engine.now() < until:
                self.take(self.engine.poll(until))
            self.sync()
        self.result.seconds = self.engine.now()
        in_flight = sum(len(segment) for segments in self.segments.values() for segment in segments)
        self.result.made_tokens -= in_flight  # neither trained nor dropped yet
        return self.result


def ours(workload: Workload, prompts: int, bound: int | None, seed: int) -> Row:
    schedule = Schedule(
        mode="partial+elevator", rollouts_per_update=prompts * GROUP, rollouts_per_prompt=GROUP, whole_groups=True,
        prompts_per_cohort=4 * prompts, max_response_tokens=LIMIT, overlap=True, max_staleness=bound,
        oversubscribe=None if bound is None else bound + 1.0, seed=seed,
    )  # fmt: skip
    found: RunMetrics = run(workload, schedule, max_updates=UPDATES)
    speed = found.trained_tokens / found.wall_seconds
    return Row(speed, found.waste, found.staleness_mean, found.staleness_max, found.rollouts_per_update_mean)


def workload_of(prompts_per_update: int) -> Workload:
    profile = profile_file.read(PROFILE)
    return Workload(
        lengths=LognormalLengths(mu=7.824, limit=LIMIT), step_time=profile.step_time(), kv_tokens=profile.kv_tokens,
        slots=256, engines=4, prompts=8 * UPDATES * prompts_per_update, weight_update_seconds=16 / 25,
        learner_seconds_per_token=1.45e-4 / 4, separate_learner=True,
    )  # fmt: skip


def main() -> None:
    print("| bound | rollouts per update | trained tokens/s | tokens dropped | staleness, mean | max |")
    print("|---|---|---|---|---|---|")
    for prompts in PROMPTS_PER_UPDATE:
        workload = workload_of(prompts)
        rows = {
            f"verl, {how} at {THRESHOLD}, {warmup} ahead": [
                Verl(workload, prompts, warmup, how, seed).run().row(prompts * GROUP) for seed in SEEDS
            ]
            for warmup in WARMUP_BATCHES
            for how in ("drop", "wait")
        }
        for bound in (None, 8, 4):
            name = "ours, no bound" if bound is None else f"ours, max_staleness={bound}"
            rows[name] = [ours(workload, prompts, bound, seed) for seed in SEEDS]
        for name, found in rows.items():
            speed, dropped, staleness, _, rollouts = map(fmean, zip(*found, strict=True))
            oldest = max(row.oldest for row in found)
            cells = f"{rollouts:.0f} | {speed:,.0f} | {dropped:.0%} | {staleness:.1f} | {oldest}"
            print(f"| {name} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
