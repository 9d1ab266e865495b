"""How far may two runs of turns.py be apart that differ in small delays only?

    python benchmarks/turns_spread.py benchmarks/measured/h200-turns-calibrated-2          two minutes, no vLLM

It simulates the workload of a measurement from its profile, `--runs` times per mode. In each run all times of the
engine are off by one factor from 0.99 to 1.01, and each latency of a tool by one of its own. Lengths stay the same. It
prints the goodput over 2 and over 8 counted updates, after the first, which is not counted.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from turns import MODES, SHAPES, Mode, measurement, predicted, summary, workload_of

from sortedrl.core.rollout import Prompt
from sortedrl.core.seeds import derive_seed
from sortedrl.engines.episodes import Episode
from sortedrl.studies import profile_file
from sortedrl.studies.workload import Workload

COUNTED_UPDATES = (2, 8)


def about_one(*place: int) -> float:
    """From 0.99 to 1.01."""
    return 1 + 0.01 * (2 * (derive_seed(*place) % 1001) / 1000 - 1)


def varied(known: profile_file.Profile, run: int) -> profile_file.Profile:
    """All times of the engine off by the same factor."""
    factor = about_one(run)
    cells = [
        replace(
            cell,
            step_seconds=cell.step_seconds * factor,
            prefill_seconds_per_token=cell.prefill_seconds_per_token * factor,
        )
        for cell in known.cells
    ]
    return replace(
        known,
        cells=tuple(cells),
        prefill_seconds_per_token=known.prefill_seconds_per_token * factor,
        prefill_step_seconds=known.prefill_step_seconds * factor,
    )


def varied_latencies(workload: Workload, run: int) -> Workload:
    """Each latency off by a factor of its own."""
    episodes = workload.episodes
    assert episodes is not None

    def episode(prompt: Prompt, seed: int) -> Episode:
        drawn = episodes(prompt, seed)
        return drawn._replace(seconds=tuple(s * about_one(run, seed, turn) for turn, s in enumerate(drawn.seconds)))

    return replace(workload, episodes=episode)


def spread(folder: Path, modes: Sequence[str], runs: int, counted_updates: Sequence[int] = COUNTED_UPDATES) -> None:
    known, _, options = measurement(folder)
    shape = SHAPES[options.shape]
    for name in modes:
        for counted in counted_updates:
            mode = replace(Mode.parsed(name, 0), updates=counted + 1)
            goodputs = []
            for run in range(1, runs + 1):
                workload = varied_latencies(workload_of(shape, mode, options), run)
                marks = predicted(shape, mode, varied(known, run), known.kv_tokens, options, workload)
                goodputs.append(summary(marks)["goodput"])
            mean = statistics.mean(goodputs)
            print(f"{mode.name}: {counted} counted updates, {mean:,.0f} tok/s, standard deviation "
                  f"{statistics.stdev(goodputs) / mean:.1%}, from {min(goodputs) / mean - 1:+.1%} "
                  f"to {max(goodputs) / mean - 1:+.1%} in {runs} runs", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measurement", type=Path, metavar="OUT", help="of turns.py with --calibrate")
    parser.add_argument("--modes", nargs="+", default=MODES, metavar="MODE")
    parser.add_argument("--runs", type=int, default=16, help="at least 2")
    options = parser.parse_args()
    spread(options.measurement, options.modes, options.runs)


if __name__ == "__main__":
    main()
