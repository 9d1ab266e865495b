"""Which drafts are accepted while a model is trained: by source and over the run.

    python benchmarks/draft_acceptance.py --model runs/smollm2-search --out OUT --seeds 0 1 2 [--updates 16]

Each seed is a training run of its own process on Knights & Knaves with `SuffixDrafter`, which drafts in every step,
however many requests run, so that acceptance is that of all responses. Few problems, so that epochs come round: 48
problems of 8 rollouts are 3 updates of 128. A line of OUT/seed-N.jsonl per update: drafted and accepted tokens by
source, tokens and requests in steps, since the update before. `table --out OUT` prints the means.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

SOURCES = ("itself", "running", "finished", "aborted")


def run_seed(args: argparse.Namespace, seed: int) -> None:
    from sortedrl.core.controller import Controller
    from sortedrl.engines import speculative
    from sortedrl.engines.suffix_drafter import SuffixDrafter
    from sortedrl.training import trainer
    from sortedrl.training.settings import TrainSettings

    started = time.monotonic()

    class BySource(speculative.LoggedDrafts):
        """Appends the counts of each update to the seed's file."""

        def __init__(self, engine: Any) -> None:
            super().__init__(engine)
            self.drafter: SuffixDrafter = engine.inner.drafter
            self.before: Counter[str] = Counter()

        def mark(self, controller: Controller) -> None:
            super().mark(controller)
            counts, sources = self.drafter.counts, self.drafter.by_source
            now = Counter(
                sources, drafted=counts.drafted, accepted=counts.accepted, sampled=sum(counts.tokens.values())
            )
            line = {"update": controller.updates, "seconds": time.monotonic() - started, **(now - self.before)}
            self.before = now
            with (args.out / f"seed-{seed}.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    trainer.LoggedDrafts = BySource  # type: ignore[misc]
    drafts = {"method": "custom_class", "num_speculative_tokens": 3}
    drafts["model"] = "sortedrl.engines.suffix_drafter.SuffixDrafter"
    settings = TrainSettings(
        mode="baseline",  # where drafts are left on
        task="knights_and_knaves",
        task_options={
            "characters": "[2, 3, 3]",
            "count": str(args.problems + 64),
            "held_out_fraction": str(64 / (args.problems + 64)),
            "wording": "compact",
        },
        model=args.model,
        engine="vllm",
        engine_options={
            "gpu_memory_utilization": "0.1",
            "kv_cache_memory_bytes": str(args.kv_bytes),
            "speculative_config": json.dumps(drafts),
        },
        learning_rate=4e-5,
        max_response_tokens=args.max_response_tokens,
        rollouts_per_update=args.rollouts_per_update,
        rollouts_per_prompt=8,
        tokens_per_micro_batch=6144,
        updates=args.updates,
        epochs=100,
        eval_every=0,
        eval_problems=16,
        slots=args.rollouts_per_update,
        checkpoint_every=0,
        save_rollouts=0,
        seed=seed,
        out=args.runs / f"seed-{seed}",
    )
    trainer.train(settings, print)


def table(out: Path) -> None:
    seeds = [
        [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        for file in sorted(out.glob("seed-*.jsonl"))
    ]
    print(f"{len(seeds)} seeds; tokens per step of a request, then accepted of drafted tokens by source (drafted)")
    updates = min(map(len, seeds))
    thirds = [range(k * updates // 3, (k + 1) * updates // 3) for k in range(3)]
    for name, places in [
        *zip(("first third", "second third", "last third"), thirds, strict=True),
        ("all", range(updates)),
    ]:
        if not places:
            continue
        sums = [sum((Counter(lines[place]) for place in places), Counter()) for lines in seeds]
        per_step = [s["sampled"] / (s["sampled"] - s["accepted"]) for s in sums]
        print(
            f"{name:14}", "  ".join(f"{value:.3f}" for value in per_step), *(_share(sums, source) for source in SOURCES)
        )


def _share(sums: list[Counter[str]], source: str) -> str:
    drafted, accepted = (sum(s[f"{source} {what}"] for s in sums) for what in ("drafted", "accepted"))
    return f"| {source} {accepted / drafted:.0%} ({drafted:,})" if drafted else f"| {source} none"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", nargs="?", choices=["table"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--runs", type=Path, default=Path("runs/draft-acceptance"))
    parser.add_argument("--model")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--updates", type=int, default=16)
    parser.add_argument("--problems", type=int, default=48)
    parser.add_argument("--rollouts-per-update", type=int, default=128)
    parser.add_argument("--max-response-tokens", type=int, default=512)
    parser.add_argument("--kv-bytes", type=int, default=4_000_000_000)
    parser.add_argument("--stagger", type=float, default=15.0, help="seconds between the starts of two seeds")
    args = parser.parse_args()
    if args.table:
        table(args.out)
        return
    args.out.mkdir(parents=True, exist_ok=True)
    spawn = multiprocessing.get_context("spawn")
    processes = []
    for seed in args.seeds:
        processes.append(spawn.Process(target=run_seed, args=(args, seed)))
        processes[-1].start()
        time.sleep(args.stagger)
    for process in processes:
        process.join()
    table(args.out)
    sys.exit(any(process.exitcode for process in processes))


if __name__ == "__main__":
    main()
