"""What benchmarks/two_servers.sh measured, beside the simulator's prediction for the same number of engines.

python benchmarks/two_servers.py OUT                # OUT/profile.json of the pool, OUT/*.json of sortedrl bench
python benchmarks/two_servers.py OUT --engines 1    # a bench of one engine
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

from sortedrl.studies import bench, profile_file
from sortedrl.studies.bench import BenchSettings, bench_schedule, bench_workload
from sortedrl.studies.profile_file import Profile

TAKEN = ("median_length", "max_response_tokens", "prompt_tokens", "slots", "rollouts_per_update", "prompts_per_cohort")


def profile_of_one(pool: Profile, engines: int) -> Profile:
    """Of one engine in a pool that was measured as a whole: its share of the requests and tokens, the same seconds."""
    cells = [
        replace(
            cell,
            running=max(1, cell.running // engines),
            cached_tokens=cell.cached_tokens / engines,
            prefill_seconds_per_token=cell.prefill_seconds_per_token * engines,
        )
        for cell in pool.cells
    ]
    per_token = pool.prefill_seconds_per_token * engines
    return replace(pool, cells=tuple(cells), slots=pool.slots // engines, prefill_seconds_per_token=per_token)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--engines", type=int, default=2)
    arguments = parser.parse_args()
    profile = profile_of_one(profile_file.read(arguments.out / "profile.json"), arguments.engines)
    for path in sorted(arguments.out.glob("*.json")):
        written = json.loads(path.read_text(encoding="utf-8"))
        for mode, found in written.get("modes", {}).items():
            saved = written["settings"]
            settings = BenchSettings(
                cohorts=saved["cohorts"],
                seed=saved["seed"],
                **{key: saved[key] for key in TAKEN},
            )
            workload = replace(bench_workload(settings), engines=arguments.engines, step_time=profile.step_time())
            said = bench.predicted(bench.Case.parsed(mode), workload, bench_schedule(settings), found["updates"])
            off = said["goodput"] / found["goodput"] - 1
            print(f"{mode:24}{found['goodput']:10,.0f} tokens/s, bubble {found['bubble']:.1%}; predicted {off:+.1%}")


if __name__ == "__main__":
    main()
