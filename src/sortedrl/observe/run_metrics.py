"""The metrics of a run. Definitions are in docs/metrics.md; `Metrics` (metrics.py) computes them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Metrics that are cheap at any length of the run: for displays and for every line of metrics.jsonl."""

    wall_seconds: float
    bubble: float
    bubble_now: float  # of the current harvest so far
    idle: float
    goodput: float
    waste: float
    filtered_fraction: float  # of the trained and filtered rollouts
    rejected: int
    rejected_most: str  # the most frequent reason
    staleness_mean: float
    staleness_max: int
    tokens_per_step: float | None  # of a request; None: no drafts


@dataclass(frozen=True, slots=True)
class RunMetrics:
    """Times in seconds on the engine's clock, goodput and kept in tokens per second, fractions between 0 and 1."""

    mode: str
    slots: int  # at the end: a resumed run may have other slots than before
    seconds: float  # in which the engine can run: harvests only
    wall_seconds: float
    bubble: float
    bubble_parts: dict[str, float]
    bubble_per_harvest: tuple[float, ...]
    idle: float
    idle_parts: dict[str, float]
    wall_parts: dict[str, float]  # fractions of wall-clock time by what the run waited for (wall_clock.py)
    goodput: float
    kept: float
    waste: float
    generated_tokens: int
    trained_tokens: int
    filtered_tokens: int  # of complete groups that teach nothing (`filter_groups`)
    dropped_tokens: int
    cached_tokens: int
    prefill_tokens: int
    re_prefill_tokens: int  # submitted again; an engine with a prefix cache or `reuse_kv_cache` finds some of them
    preemptions: int
    drafted_tokens: int  # by speculative decoding
    accepted_tokens: int  # of the drafted ones
    tokens_per_step: float | None  # of a request, with the drafted ones; None: no drafts
    loaded: int
    trained: int
    rejected: int
    rejected_reasons: dict[str, int]
    filtered: int
    filtered_fraction: float
    filtered_reasons: dict[str, int]  # rollouts
    failures: int
    regenerated: int
    truncated: int
    updates: int
    harvests: int
    rollouts_per_update_mean: float
    updates_per_hour: float
    trained_rollouts_per_hour: float
    trained_tokens_per_hour: float
    staleness_mean: float
    staleness_max: int
    staleness_histogram: dict[int, int]  # trained tokens by staleness
    segments_histogram: dict[int, int]  # trained rollouts by number of segments
    sortedness: float | None  # None: unknown, each update is one unit
    mean_length: float
    uncut_mean_length: float | None  # None: unknown
    length_bias: float | None  # what the schedule favors, not what a filter does
    expectation_quality: float | None
    longest_wait_updates: int
    skipped: int  # prompts that `revisit_filtered` did not load
    skipped_fraction: float  # of the prompts that would have been loaded
    skipped_age_max: int  # epochs since the last visit
    mean_reward: float  # of trained and filtered rollouts
    streamed_fraction: float  # of the trained rollouts: their gradient was computed during the harvest
    streamed_seconds: float  # the learner's work during harvests
    turns_mean: float  # of trained rollouts
    environment_seconds: float  # of all rollouts in their environments, added up
    environment_tokens: int  # of trained rollouts; `trained_tokens` are the policy's
    environment_failures: int
