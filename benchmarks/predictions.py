"""The H200 measurements of benchmarks/LOG.md, section 9, next to the simulator's predictions of the same runs.

    python benchmarks/predictions.py

Reads benchmarks/measured/h200-8b: the output of `sortedrl bench`, and the profile measured on the same day. Then
h200-vllm-server and h200-sglang: the same lengths through three engines, with today's preset and SGLang's own profile.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from sortedrl.studies import bench
from sortedrl.studies.bench import BenchSettings, bench_schedule, bench_workload
from sortedrl.studies.workload import limit

ALL = Path(__file__).parent / "measured"
MEASURED = ALL / "h200-8b"
SERVERS = {
    "h200-vllm-server": ("h200-8b",),
    "h200-vllm-server/beside-sglang": ("h200-8b",),
    **{
        folder: ("h200-8b", str(ALL / folder / "profile.json"))
        for folder in ("h200-sglang", "h200-sglang/third", "h200-sglang/stream-interval-8")
    },
}
FIRST_DAY = {
    "cold_baseline",
    "cold_lookahead",
    "cold_on_policy",
    "cold_planned_exactly",
    "four_cohorts",
    "little_memory",
    "wide",
}
TAKEN = ("median_length", "max_response_tokens", "prompt_tokens", "slots", "rollouts_per_update", "prompts_per_cohort")


def settings_of(path: Path, written: dict[str, Any], step_time: str = "") -> BenchSettings:
    """The settings of the run, with the profile measured on the same day."""
    saved = written["settings"]
    profile = MEASURED / ("profile.json" if path.stem in FIRST_DAY else "profile_second.json")
    return BenchSettings(
        engine="vllm",
        engine_options=saved["engine_options"],
        step_time=step_time or str(profile),
        seed=saved.get("seed", 0),
        kv_tokens=written["kv_tokens"],
        cohorts=saved["cohorts"],
        **{key: saved[key] for key in TAKEN},
    )


class Row(NamedTuple):
    run: str
    mode: str
    found: dict[str, Any]
    goodput_off: float  # relative error of the prediction
    kept_off: float
    bubble_off: float  # in percentage points


def rows(folder: Path = MEASURED, step_time: str = "") -> Iterator[Row]:
    for path in sorted(folder.glob("*.json")):
        written = json.loads(path.read_text(encoding="utf-8"))
        for mode, found in written.get("modes", {}).items():
            settings = settings_of(path, written, step_time)
            case = bench.case_of(mode_of(written, mode), bench_workload(settings), bench_schedule(settings))
            said = bench.predicted(case, found["updates"])
            off, kept_off = (said[key] / found[key] - 1 for key in ("goodput", "kept"))
            yield Row(path.stem, mode, found, off, kept_off, 100 * (said["bubble"] - found["bubble"]))


def mode_of(written: dict[str, Any], name: str) -> str:
    """With what is known of the lengths: the first files have it in their settings only."""
    return str(written["settings"]["modes"][0]) if len(written["modes"]) == 1 else name


def print_servers() -> None:
    for folder, step_times in SERVERS.items():
        names = "".join(f"{Path(name).stem:>16}" for name in step_times)
        print(f"\n{folder:46}{'kept tok/s':>12}{'bubble':>8}{names}  (prediction error)")
        for same in zip(*(rows(ALL / folder, step_time) for step_time in step_times), strict=True):
            found, errors = same[0].found, "".join(f"{row.kept_off:+16.1%}" for row in same)
            print(f"{same[0].run:46}{found['kept']:12,.0f}{found['bubble']:8.1%}{errors}")


def main() -> None:
    print(f"{'run':22}{'mode':38}{'tok/s':>8}{'limit':>7}{'bubble':>8}{'stale':>7}{'predicted tok/s, bubble':>26}")
    for run, mode, found, goodput_off, _, bubble_off in rows():
        share = f"{found['of_limit']:7.2f}" if found.get("of_limit") else " " * 7
        print(
            f"{run:22}{mode:38}{found['goodput']:8,.0f}{share}{found['bubble']:8.1%}"
            f"{found['staleness_mean']:7.2f}{goodput_off:+15.1%}, {bubble_off:+.1f} points"
        )
    four = MEASURED / "four_baseline.json"
    for profile in ("profile.json", "profile_second.json"):
        settings = settings_of(four, json.loads(four.read_text(encoding="utf-8")))
        settings = settings.model_copy(update={"step_time": str(MEASURED / profile)})
        most = limit(bench_workload(settings, 4), bench_schedule(settings))
        print(f"limit of four cohorts by {profile}: {most:,.0f} tok/s")
    print_servers()


if __name__ == "__main__":
    main()
