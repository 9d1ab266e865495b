"""Random schedules with random faults, each checked against the invariants (docs/design.md).

    python benchmarks/random_schedules.py --schedules 10000
    python benchmarks/random_schedules.py --schedules 10000 --turns  # rollouts of several turns
    python benchmarks/random_schedules.py --schedules 10000 --filter # dynamic sampling; both may be combined
    python benchmarks/random_schedules.py --reproduce 1234567        # one schedule again, with its settings

Each schedule has its own seed, derived from the printed one. Faults are engine deaths, interrupts, restores, lost
requests, preemptions, and late, lost and failed scores; the checks use only the event log and the batches.
"""

from __future__ import annotations

import argparse
import secrets
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from random_runs import Case, case_of, play
from schedule_rules import check_outcome
from sortedrl.core.seeds import derive_seed

SECONDS_BETWEEN_LINES = 20.0
MAX_FAILURES = 5  # maximum number printed


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--schedules", type=int, default=10_000)
    parser.add_argument("--seed", type=int, help="seed of all schedules; default: random")
    parser.add_argument("--reproduce", type=int, metavar="SEED", help="run the schedule with this seed again")
    parser.add_argument("--turns", action="store_true", help="rollouts of several turns, with environments that fail")
    parser.add_argument("--filter", action="store_true", help="groups that teach nothing are filtered")
    arguments = parser.parse_args()
    kind = {"with_turns": arguments.turns, "with_filter": arguments.filter}
    if arguments.reproduce is not None:
        case = case_of(arguments.reproduce, **kind)
        print(case)
        check_outcome(play(case))
        print("all rules hold")
        return 0
    seed = secrets.randbelow(2**32) if arguments.seed is None else arguments.seed
    print(f"seed {seed}, {arguments.schedules} schedules", flush=True)
    return Campaign(seed, arguments.schedules, kind).run()


class Campaign:
    """All schedules of one seed, and what happened in them."""

    def __init__(self, seed: int, schedules: int, kind: dict[str, bool]) -> None:
        self.seed = seed
        self.kind = kind  # arguments of case_of
        self.schedules = schedules
        self.modes: Counter[str] = Counter()
        self.kinds: Counter[str] = Counter()  # schedules that have this
        self.faults: Counter[str] = Counter()  # how often it happened
        self.hit: Counter[str] = Counter()  # schedules in which it happened
        self.totals: Counter[str] = Counter()
        self.failures = 0

    def run(self) -> int:
        began = printed = time.monotonic()
        for done in range(self.schedules):
            self._run_one(case_of(derive_seed(self.seed, done), **self.kind))
            if self.failures == MAX_FAILURES:
                break
            now = time.monotonic()
            if now - printed >= SECONDS_BETWEEN_LINES:
                printed = now
                left = (now - began) / (done + 1) * (self.schedules - done - 1)
                print(f"{done + 1} of {self.schedules}, {self.failures} failed, {left:.0f} s left", flush=True)
        self._summarize(time.monotonic() - began)
        return 1 if self.failures else 0

    def _run_one(self, case: Case) -> None:
        self.totals["schedules"] += 1
        self.modes[case.scenario.schedule.mode] += 1
        self.kinds.update(case.kinds)
        try:
            outcome = play(case)
            check_outcome(outcome)
        except Exception as error:  # any exception is a finding
            self.failures += 1
            print(f"FAILED in mode {case.scenario.schedule.mode}: {type(error).__name__}: {error}")
            flags = "".join(f" --{name.removeprefix('with_')}" for name, is_set in self.kind.items() if is_set)
            print(f"    python benchmarks/random_schedules.py{flags} --reproduce {case.seed}", flush=True)
            return
        self.faults.update(outcome.faults)
        self.hit.update(+Counter({kind: min(count, 1) for kind, count in outcome.faults.items()}))
        self.totals["events"] += len(outcome.raw)
        self.totals["updates"] += len(outcome.batches)
        self.totals["trained rollouts"] += sum(map(len, outcome.batches))

    def _summarize(self, seconds: float) -> None:
        counted = ", ".join(f"{count:,} {what}" for what, count in self.totals.items())
        print(f"\n{counted}; {self.failures} failed; {seconds:.0f} s")
        print("\nschedules by mode")
        for mode, count in sorted(self.modes.items()):
            print(f"  {mode:32}{count:8,}")
        print("\nschedules with")
        for kind, count in self.kinds.most_common():
            print(f"  {kind:36}{count:8,}")
        print("\nwhat happened                           times in schedules")
        for kind, count in self.faults.most_common():
            print(f"  {kind:36}{count:8,}{self.hit[kind]:8,}")


if __name__ == "__main__":
    sys.exit(main())
