"""One row per update of a run: where its seconds went. The same fold over the log of measured and simulated runs.

`generate` is the harvest without `re_prefill`. That is an estimate from the tokens that were prefilled again and the
seconds per prefilled token, since vLLM mixes prefill and decode steps. `weights` includes the check after the update
and, if the engine sleeps, its wake-up; `learner` does not include the engine's going to sleep, which is `sleep`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sortedrl.core import events
from sortedrl.core.events import Event
from sortedrl.observe.metrics import BUBBLE_PARTS, Metrics

PARTS = ("generate", "re_prefill", "learner", "weights", "sleep", "other")


@dataclass(frozen=True)
class Row:
    """One update, from the last one's end to its own. `busy`: seconds that all slots were in use, if lined up."""

    seconds: float
    generate: float
    re_prefill: float
    learner: float
    weights: float
    other: float
    busy: float
    trained_tokens: int
    trained_rollouts: int
    staleness_sum: int
    re_prefill_tokens: int
    sleep: float = 0.0  # older files have it in `learner`


class UpdateRows:
    """A sink that makes one row per update.

    `reused` counts the tokens of resumed requests that were cached, `slept` the seconds that going to sleep took.
    """

    def __init__(
        self,
        prefill_seconds_per_token: float,
        reused: Callable[[], int] = lambda: 0,
        on_row: Callable[[Row], None] = lambda row: None,
        *,
        slept: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.rows: list[Row] = []
        self._metrics = Metrics()
        self._prefill_seconds = prefill_seconds_per_token
        self._reused = reused
        self._on_row = on_row
        self._slept = slept
        self._slept_before = slept()
        self._before: dict[str, float] = {}
        self._began = 0.0
        self._reused_before = reused()
        self._re_prefill = self._tokens = self._rollouts = self._staleness = 0

    def __call__(self, event: Event) -> None:
        self._metrics(event)
        if isinstance(event, events.RunBegan):
            self._began = event.at
        elif isinstance(event, events.Submitted) and (event.prefix or event.attempt):
            self._re_prefill += event.prompt_tokens + event.prefix
        elif isinstance(event, events.Updated):
            self._tokens, self._rollouts = sum(event.lengths), len(event.rollouts)
            self._staleness = sum((event.version - v) * n for parts in event.segments for v, n in parts)
        elif isinstance(event, events.Published):
            self._close(event.at)

    def _close(self, at: float) -> None:
        slots, now = self._metrics.slots, self._metrics.slot_seconds()
        passed = {part: (now[part] - self._before.get(part, 0.0)) / slots for part in now}
        reused = self._reused()
        re_prefill_tokens = max(0, self._re_prefill - (reused - self._reused_before))
        harvest = passed["busy"] + sum(passed[part] for part in BUBBLE_PARTS)
        re_prefill = min(harvest, re_prefill_tokens * self._prefill_seconds)
        slept = self._slept()
        sleep = slept - self._slept_before
        learner, weights = passed.get("learner", 0.0) - sleep, passed.get("weights", 0.0)
        seconds = at - self._began
        row = Row(
            seconds=seconds,
            generate=harvest - re_prefill,
            re_prefill=re_prefill,
            learner=learner,
            weights=weights,
            other=seconds - harvest - learner - weights - sleep,
            busy=passed["busy"],
            trained_tokens=self._tokens,
            trained_rollouts=self._rollouts,
            staleness_sum=self._staleness,
            re_prefill_tokens=re_prefill_tokens,
            sleep=sleep,
        )
        self._before, self._began, self._re_prefill, self._reused_before = now, at, 0, reused
        self._slept_before = slept
        self.rows.append(row)
        self._on_row(row)


def summary(rows: Sequence[Row]) -> dict[str, float]:
    """Of all updates after the first, or of the first if it is the only one."""
    counted = rows[1:] or rows
    total = {key: sum(getattr(row, key) for row in counted) for key in Row.__dataclass_fields__}
    harvest = total["generate"] + total["re_prefill"]
    return {
        "updates": len(counted),
        "updates_per_hour": 3600 * len(counted) / total["seconds"],
        "trained_tokens_per_second": total["trained_tokens"] / total["seconds"],
        "seconds_per_update": total["seconds"] / len(counted),
        **{part: total[part] / len(counted) for part in PARTS},
        "bubble": 1 - total["busy"] / harvest,
        "idle": 1 - total["busy"] / total["seconds"],
        "staleness_mean": total["staleness_sum"] / total["trained_tokens"],
    }
