"""One verl training job, in one setting: verl's own two or SortedRL's.

    python job.py sync|colocate_async|on-policy|partial|planned|elevator --model DIR --data DIR --out DIR [--steps 12]

All settings share model, data, seed, learner and rollout servers; they differ only in `SETTINGS`. The job's folder gets
verl's metrics (metrics.jsonl), SortedRL's event log (events.jsonl) and result.json: seconds per trained rollout,
bubble and reward; `--summarize` computes it from the files of an interrupted job. `--cpu` needs tests/with_verl on the
path, which describes what it adds to verl.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

from occupancy import bubble, harvests_in, until_last_response, whole_lines
from table import by_step

from sortedrl.core.events import Updated
from sortedrl.log.reading import read_events, without_rolled_back
from sortedrl.observe.metrics import Metrics

HERE = Path(__file__).resolve().parent
SETTINGS = {
    "sync": ["trainer.v1.trainer_mode=sync"],
    "colocate_async": ["trainer.v1.trainer_mode=colocate_async", "algorithm.rollout_correction.rollout_is=token"],
    "on-policy": ["trainer.v1.trainer_mode=sortedrl", "+trainer.v1.sortedrl.mode=on-policy"],
    "partial": [
        "trainer.v1.trainer_mode=sortedrl",
        "+trainer.v1.sortedrl.mode=partial+elevator",
        "+trainer.v1.sortedrl.max_staleness=4",
        "algorithm.rollout_correction.rollout_is=token",
    ],
    "planned": ["trainer.v1.trainer_mode=sortedrl", "+trainer.v1.sortedrl.mode=on-policy+planned"],
    "elevator": [  # with the bound that colocate_async has by default
        "trainer.v1.trainer_mode=sortedrl",
        "+trainer.v1.sortedrl.mode=partial+elevator",
        "+trainer.v1.sortedrl.max_staleness=8",
        "algorithm.rollout_correction.rollout_is=token",
    ],
}


LIKE_BESIDE_PEERS = [
    "data.shuffle=False",
    "actor_rollout_ref.actor.optim.lr_warmup_steps=2",
    "actor_rollout_ref.actor.optim.weight_decay=0.0",
    "actor_rollout_ref.actor.clip_ratio_low=0.2",
    "actor_rollout_ref.actor.clip_ratio_high=0.28",
    "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm",
]


def overrides(asked: argparse.Namespace) -> list[str]:
    shared = [
        f"data.train_files={asked.data}/train.parquet",
        f"data.val_files={asked.data}/held_out.parquet",
        f"data.train_batch_size={asked.prompts}",
        f"data.max_prompt_length={asked.prompt_tokens}",
        f"data.max_response_length={asked.response_tokens}",
        "data.dataloader_num_workers=0",
        "+ray_kwargs.ray_init.include_dashboard=False",
        "data.seed=0",
        "algorithm.adv_estimator=grpo",
        f"actor_rollout_ref.model.path={asked.model}",
        f"actor_rollout_ref.model.use_remove_padding={asked.packed}",
        f"actor_rollout_ref.model.use_fused_kernels={asked.packed}",
        f"+actor_rollout_ref.model.override_config.attn_implementation={'packed' if asked.packed else 'sdpa'}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={asked.prompts}",
        "actor_rollout_ref.actor.use_dynamic_bsz=True",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=32768",
        "actor_rollout_ref.actor.strategy=fsdp2",
        f"actor_rollout_ref.actor.optim.lr={asked.learning_rate}",
        "actor_rollout_ref.actor.use_kl_loss=False",
        "actor_rollout_ref.actor.fsdp_config.use_torch_compile=False",
        f"actor_rollout_ref.rollout.n={asked.siblings}",
        f"actor_rollout_ref.rollout.max_num_seqs={asked.slots}",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "actor_rollout_ref.rollout.calculate_log_probs=True",
        f"actor_rollout_ref.rollout.agent.num_workers={asked.workers}",
        f"reward.num_workers={asked.workers}",
        f"reward.custom_reward_function.path={HERE / 'reward.py'}",
        "trainer.nnodes=1",
        "trainer.n_gpus_per_node=1",
        f"trainer.total_training_steps={asked.steps}",
        f"trainer.default_local_dir={asked.out}",
        "trainer.resume_mode=disable",
        f"trainer.save_freq={asked.save_every}",
        "trainer.test_freq=-1",
        "trainer.val_before_train=False",
        "trainer.logger=[console,file]",
        f"trainer.experiment_name={asked.setting}",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=2",
    ]
    learner = LIKE_BESIDE_PEERS if asked.like_beside_peers else []
    return [*shared, *(_cpu(asked) if asked.cpu else _gpu()), *SETTINGS[asked.setting], *learner, *asked.override]


def _gpu() -> list[str]:
    return [
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.4",
        "actor_rollout_ref.rollout.load_format=auto",
    ]


def _cpu(asked: argparse.Namespace) -> list[str]:
    return [
        "actor_rollout_ref.rollout.name=embedded",
        "trainer.device=cpu",
        "+actor_rollout_ref.actor.fsdp_config.mixed_precision={param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}",
        "ray_kwargs.ray_init.num_cpus=16",  # counts for Ray's placement, not of this machine
        "+ray_kwargs.ray_init.num_gpus=1",
    ]


def environment(asked: argparse.Namespace) -> dict[str, str]:
    added = {
        "VERL_FILE_LOGGER_PATH": str(asked.out / "metrics.jsonl"),
        "OCCUPANCY_FOLDER": str(asked.out / "occupancy"),
        "HYDRA_FULL_ERROR": "1",
        "HF_HUB_OFFLINE": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "TOKENIZERS_PARALLELISM": "false",
    }
    modules = ["occupancy", *(["packed"] if asked.packed else []), *asked.module]
    if asked.cpu:
        added |= {"VERL_PLATFORM": "cpu", "OMP_NUM_THREADS": "1"}
        modules.insert(0, "cpu_backend")
    added["VERL_USE_EXTERNAL_MODULES"] = ",".join(modules)
    path = [str(HERE), str(HERE.parents[1] / "tests" / "with_verl"), os.environ.get("PYTHONPATH", "")]
    added["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    return {**os.environ, **added}


def result(asked: argparse.Namespace) -> dict[str, Any]:
    """From verl's metrics and, in every setting, from the starts and ends of requests at the servers.

    Lists have one entry per step. Metrics of the whole job exclude the first step, which compiles and warms up.
    """
    lines = whole_lines([asked.out / "metrics.jsonl"])
    steps = [line["data"] for line in lines if "training/global_step" in line["data"]]
    if len(steps) < 2:
        sys.exit(f"{asked.out}: {len(steps)} steps were done, but a result needs two")
    occupancy = asked.out / "occupancy"
    harvests = harvests_in(occupancy)[: len(steps)]
    without_polling = until_last_response(occupancy, harvests)
    rollouts = [harvest["rollouts"] for harvest in harvests]
    trained = sum(rollouts[1:])
    found: dict[str, Any] = {
        "setting": asked.setting,
        "rollouts": rollouts,
        **by_step(steps),
        # the trainer's probability of each token against the server's: weights, tokens and their order are right
        "probability_difference_max": [line["training/rollout_probs_diff_max"] for line in steps],
        "probability_difference_mean": [line["training/rollout_probs_diff_mean"] for line in steps],
        "last_response_seconds": [harvest["end"] - harvest["begin"] for harvest in without_polling],
        "bubble_at_servers": bubble(occupancy, harvests[1:], asked.slots),
        "bubble_until_last_response": bubble(occupancy, without_polling[1:], asked.slots),
    }
    for name in ("step_seconds", "generation_seconds"):
        found[f"{name}_per_step"] = sum(found[name][1:]) / len(steps[1:])
        found[f"{name}_per_trained_rollout"] = sum(found[name][1:]) / trained
    rewarded = zip(rollouts[1:], found["reward"][1:], strict=True)
    found["reward_mean"] = sum(count * reward for count, reward in rewarded) / trained
    tokens = zip(rollouts[1:], found["response_length"][1:], strict=True)
    found["trained_tokens_per_second"] = sum(count * length for count, length in tokens) / sum(
        found["step_seconds"][1:]
    )
    if (asked.out / "events.jsonl").exists():
        metrics, until_update = Metrics(), [0]
        for event in without_rolled_back(read_events(asked.out / "events.jsonl")):
            metrics.fold([event])
            if isinstance(event, Updated):
                until_update.append(metrics.run_metrics().generated_tokens)
        found["generated_tokens"] = [after - before for before, after in pairwise(until_update)]
        found["bubble_parts_of_event_log"] = metrics.run_metrics().bubble_parts
    return found | {name: value for name, value in steps[-1].items() if name.startswith("sortedrl/")}


def command_line() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("setting", choices=SETTINGS)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--prompts", type=int, default=16, help="of one update")
    parser.add_argument("--siblings", type=int, default=8)
    parser.add_argument("--slots", type=int, default=128)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--response-tokens", type=int, default=1024)
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--save-every", type=int, default=-1)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument(
        "--packed", action="store_true", help="no padding, and verl's fused log-probabilities (packed.py)"
    )
    parser.add_argument("--module", nargs="*", default=[], help="more modules for verl's processes")
    parser.add_argument("--summarize", action="store_true", help="do not train, only write result.json")
    parser.add_argument(
        "--like-beside-peers",
        action="store_true",
        help="prompts as stored, and warm-up, clipping and loss of benchmarks/beside_peers.py",
    )
    parser.add_argument("--override", nargs="*", default=[], help="more settings of verl")
    return parser


def main() -> None:
    asked = command_line().parse_args()
    asked.out = asked.out.resolve()
    (asked.out / "occupancy").mkdir(parents=True, exist_ok=True)
    if not asked.summarize:
        for old in [asked.out / "metrics.jsonl", asked.out / "result.json", *asked.out.glob("occupancy/*")]:
            old.unlink(missing_ok=True)
        command = [sys.executable, "-m", "verl.trainer.main_ppo", *overrides(asked), f"hydra.run.dir={asked.out}/hydra"]
        done = subprocess.run(command, env=environment(asked), check=False)
        if done.returncode:
            sys.exit(done.returncode)
    found = result(asked)
    (asked.out / "result.json").write_text(json.dumps(found, indent=1))
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
