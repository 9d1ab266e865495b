"""The paper's throughput experiment on a real engine: every schedule on the same forced lengths, next to the limit.

The engine computes every token of a real batch; there is no learner, and weights do not change. Aborted and resumed
rollouts are prefilled again, as they would be after an update.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from sortedrl.core.controller import Controller
from sortedrl.core.engine import Engine, Failed, Finished, Request
from sortedrl.core.events import EventLog, Sink
from sortedrl.core.prompts import Prompts
from sortedrl.core.rollout import Prompt
from sortedrl.core.schedule import ConfigurationError, Schedule
from sortedrl.core.seeds import derive_seed
from sortedrl.engines.forced_lengths import ForcedLengths
from sortedrl.engines.lengths import length_of_request
from sortedrl.observe.metrics import Metrics
from sortedrl.studies import workload as simulated
from sortedrl.studies.workload import EXPECTATIONS, UncutLengths, Workload, expectation_for, with_mode
from sortedrl.tasks.scoring import DirectScorer
from sortedrl.tasks.task import Reward

FIRST_WORD = 10  # lower token ids are often special tokens
WARM_UP_TOKENS = 48


@dataclass(frozen=True)
class Case:
    """One row: a mode, its expectation and its oversubscription cap, as `mode[@expectation][*oversubscribe]`."""

    name: str
    mode: str
    expectation: str
    oversubscribe: float | None

    @classmethod
    def parsed(cls, text: str) -> Case:
        rest, _, factor = text.partition("*")
        mode, _, expectation = rest.partition("@")
        try:
            oversubscribe = float(factor) if factor else None
        except ValueError:
            raise ConfigurationError(
                "modes", text, f"{factor!r} is not a number", "Use for example on-policy*1.15."
            ) from None
        if expectation and expectation not in EXPECTATIONS:
            raise ConfigurationError(
                "modes", text, f"no such expectation: {expectation}", f"Use one of {', '.join(EXPECTATIONS)}."
            )
        return cls(text, mode, expectation or "cold", oversubscribe)

    def schedule(self, schedule: Schedule) -> Schedule:
        cap = schedule.oversubscribe if self.oversubscribe is None else self.oversubscribe
        return replace(with_mode(schedule, self.mode), oversubscribe=cap)


def random_prompts(places: Iterable[int], tokens: int, vocabulary: int) -> list[Prompt]:
    """One prompt of `tokens` random tokens per place. All differ, so the prefix cache never hits."""
    words = vocabulary - FIRST_WORD
    return [
        Prompt(str(place), [FIRST_WORD + derive_seed(place, i) % words for i in range(tokens)], place)
        for place in places
    ]


def warm_up(engine: Engine, vocabulary: int, max_length: int) -> None:
    """Let the engine compile, capture and allocate before timing starts, within `max_length` tokens of context."""
    tokens = max(1, min(WARM_UP_TOKENS, max_length // 2))
    prompts = random_prompts(range(engine.slots), max(1, min(WARM_UP_TOKENS, max_length - tokens)), vocabulary)
    forced = ForcedLengths(engine, lambda request: tokens)
    forced.submit([Request(-1 - i, prompt, (), tokens, i) for i, prompt in enumerate(prompts)])
    left = engine.slots
    while left:
        for change in forced.poll():
            if isinstance(change, Failed):
                raise RuntimeError(f"the first request to the engine failed: {change.reason}")
            left -= isinstance(change, Finished)


def run(
    engine: Engine,
    workload: Workload,
    schedule: Schedule,
    vocabulary: int,
    *sinks: Sink,
    max_updates: int | None = None,
    on_update: Callable[[int], None] = lambda done: None,
) -> dict[str, Any]:
    """Run one mode on the engine from first to last update: its metrics, and the overhead of the scheduler."""
    engine.update_weights(None, 0)  # a run counts versions from 0
    prompts = random_prompts(range(workload.prompts), workload.prompt_tokens, vocabulary)  # before timing starts
    metrics, uncut = Metrics(), UncutLengths(workload, schedule)
    controller = Controller(
        ForcedLengths(engine, length_of_request(workload.lengths)),
        Prompts(prompts, epochs=1, seed=schedule.seed),
        DirectScorer(lambda rollout: Reward(0.0, correct=False)),
        schedule,
        expectation=expectation_for(workload, schedule),
        log=EventLog(metrics, *sinks),
        max_updates=max_updates,
    )
    inside_before, began = getattr(engine, "inside_seconds", None), time.perf_counter()
    for batch in controller:
        uncut.add(batch)
        controller.publish()
        on_update(batch.update + 1)
    seconds = time.perf_counter() - began
    found = asdict(metrics.run_metrics(uncut.mean()))
    if inside_before is not None:
        found["own_fraction"] = 1 - (engine.inside_seconds - inside_before) / seconds  # type: ignore[attr-defined]
    return found


def measured_limit(
    engine: Engine, workload: Workload, schedule: Schedule, vocabulary: int, turnovers: int = 2
) -> float:
    """Tokens per second with every slot full in steady state: `turnovers` requests per slot after the first."""
    forced = ForcedLengths(engine, length_of_request(workload.lengths))
    done = [0] * engine.slots
    inside: dict[int, tuple[int, int]] = {}  # request id -> slot, length
    ids = iter(range(1 << 40))

    def start(slot: int) -> None:
        id = next(ids)
        words = random_prompts([id], workload.prompt_tokens, vocabulary)[0]  # unique: each pays for its prefill
        prompt = replace(words, payload=id % workload.prompts)  # determines the length
        request = Request(id, prompt, (), schedule.max_response_tokens, derive_seed(derive_seed(schedule.seed, id), 0))
        length = min(workload.lengths(request.prompt, request.seed), request.max_new_tokens)
        inside[id] = (slot, length)
        forced.submit([request])

    def run_until(least: int) -> tuple[float, int]:
        made = 0
        while min(done) < least:
            for change in forced.poll():
                if isinstance(change, Failed):
                    raise RuntimeError(f"the engine refused a request: {change.reason}")
                if isinstance(change, Finished):
                    slot, length = inside.pop(change.id)
                    made += length
                    done[slot] += 1
                    start(slot)
        return engine.now(), made

    for slot in range(engine.slots):
        start(slot)
    began, _ = run_until(1)
    ended, made = run_until(1 + turnovers)
    forced.abort(list(inside))
    return made / (ended - began)


def predicted(case: Case, workload: Workload, schedule: Schedule, max_updates: int | None) -> dict[str, Any]:
    """The simulator's prediction for the same mode and lengths, with the step time of the workload."""
    return asdict(
        simulated.run(replace(workload, expectation=case.expectation), case.schedule(schedule), max_updates=max_updates)
    )


def bench(
    engine: Engine,
    cases: Sequence[Case],
    workload: Workload,
    schedule: Schedule,
    vocabulary: int,
    *,
    limit: float | None,
    predict: bool,
    max_updates: int | None,
    sinks: Callable[[Case], Sequence[Sink]] = lambda case: (),
    on_update: Callable[[Case, int], None] = lambda case, done: None,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each case's name and metrics as it completes."""
    for case in cases:
        found = run(
            engine,
            replace(workload, expectation=case.expectation),
            case.schedule(schedule),
            vocabulary,
            *sinks(case),
            max_updates=max_updates,
            on_update=lambda done, case=case: on_update(case, done),  # type: ignore[misc]
        )
        found["limit"] = limit
        found["of_limit"] = found["goodput"] / limit if limit else None
        found["kept_of_limit"] = found["kept"] / limit if limit else None
        if predict:
            found["predicted"] = predicted(case, workload, schedule, max_updates)
        yield case.name, found
