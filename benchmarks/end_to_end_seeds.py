"""How much the gain of end_to_end.py depends on the seed of the lengths: its predictions for many seeds, on a CPU.

    python benchmarks/end_to_end_seeds.py [--shape 8b] [--seeds 20] [--updates 9]        four minutes

Trained tokens per second over the baseline's, by seed: mean, standard deviation, extremes. The first update does not
count, as there.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from statistics import mean, stdev

from end_to_end_workload import GIB, HERE, SHAPES, Mode, kv_bytes_per_token, predicted, schedule_of, workload_of
from transformers import AutoConfig

from sortedrl.studies import profile_file

MODES = ("baseline", "partial", "partial+elevator", "partial+elevator:reuse")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=[name for name, shape in SHAPES.items() if shape.profile], default="8b")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--updates", type=int, default=9)
    options = parser.parse_args()
    shape = SHAPES[options.shape]
    assert shape.profile is not None and shape.learner_tokens_per_second is not None
    config = AutoConfig.from_pretrained(HERE / "shapes" / shape.folder)
    known = replace(
        profile_file.read(shape.profile),
        kv_tokens=int(shape.kv_gib * GIB / kv_bytes_per_token(config)),
        prefill_tokens_per_step=shape.prefill_tokens_per_step,
    )
    rates: dict[str, list[float]] = {}
    for mode in map(Mode.parsed, MODES):
        for seed in range(options.seeds):
            workload = workload_of(shape, mode, options.updates, seed)
            schedule = schedule_of(shape, mode, seed)
            said = predicted(workload, schedule, known, shape.learner_tokens_per_second, options.updates)
            rates.setdefault(mode.name, []).append(said["trained_tokens_per_second"])
    print(f"{'mode':26}{'tokens/s':>9}{'of base':>9}{'sd':>7}{'least':>7}{'most':>7}")
    for name, found in rates.items():
        gains = [rate / base for rate, base in zip(found, rates["baseline"], strict=True)]
        print(f"{name:26}{mean(found):9,.0f}{mean(gains):8.2f}x{stdev(gains):7.3f}{min(gains):7.2f}{max(gains):7.2f}")


if __name__ == "__main__":
    main()
