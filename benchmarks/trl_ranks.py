"""Sharded weights under TRL on a GPU: do engine and trainer agree after each update, and how long does gathering take?

    python benchmarks/trl_ranks.py --out OUT                             FSDP2, then ZeRO-3 if DeepSpeed imports
    python benchmarks/trl_ranks.py --out OUT --shape tiny --processes 2  without a GPU: FSDP2 needs the tests' launcher

Each run is `torchrun --nproc-per-node PROCESSES` with vLLM in process on every rank: five updates of a model of the
given shape with random weights. One line per update goes to OUT/trl_ranks.jsonl at once. The limit for `mismatch` is
0.05 nats per token in bfloat16. No run starts, and none continues, after BUDGET seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
MISMATCH = 0.05
UPDATES = 5
FSDP2 = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
}
ZERO3 = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}


def rank(options: argparse.Namespace) -> None:
    """One rank of a run."""
    import torch
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig

    from sortedrl.integrations.trl import SortedGRPOTrainer
    from sortedrl.models import BUILT_IN_MODEL

    class Reporter(TrainerCallback):  # type: ignore[misc]
        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **named: Any) -> None:
            if "sortedrl/mismatch" not in logs or not state.is_world_process_zero:
                return
            names = ("mismatch", "weight_update_seconds", "goodput")
            line = {name: logs[f"sortedrl/{name}"] for name in names} | {"step_seconds": logs["step_time"]}
            about = {"sharding": options.rank, "shape": options.shape, "processes": args.world_size}
            with (options.out / "trl_ranks.jsonl").open("a") as file:
                file.write(json.dumps(about | {"update": state.global_step} | line) + "\n")
            print(about | line, flush=True)

    prompts = [f"Puzzle {i}: Ann says that Bob is a knight." for i in range(256)]
    on_gpu = torch.cuda.is_available()
    trainer = SortedGRPOTrainer(
        AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16 if on_gpu else torch.float32),
        lambda completion_ids, **columns: [float(len(ids)) for ids in completion_ids],
        GRPOConfig(
            str(options.out / options.rank), max_steps=UPDATES, per_device_train_batch_size=8, num_generations=8,
            gradient_accumulation_steps=8 if on_gpu else 1, max_completion_length=512 if on_gpu else 16,
            learning_rate=1e-5, logging_steps=1, save_strategy="no", report_to="none", bf16=on_gpu, use_cpu=not on_gpu,
            vllm_max_model_length=640, vllm_enable_sleep_mode=on_gpu,
        ),
        Dataset(InMemoryTable.from_pydict({"prompt": prompts}), fingerprint="puzzles"),
        processing_class=AutoTokenizer.from_pretrained(BUILT_IN_MODEL),
        callbacks=[Reporter()],
        engine="vllm",
    )  # fmt: skip
    trainer.train()


def saved_model(shape: str, folder: str) -> None:
    """In another process: this one stays without a CUDA context."""
    code = (
        "import sys, torch\n"
        "from transformers import AutoConfig, AutoModelForCausalLM\n"
        "torch.manual_seed(0)\n"
        "torch.set_default_device('cuda' if torch.cuda.is_available() else 'cpu')  # on the CPU, 1.5B takes a minute\n"
        "config = AutoConfig.from_pretrained(sys.argv[1])\n"
        "AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(sys.argv[2])\n"
    )
    subprocess.run([sys.executable, "-c", code, str(HERE / "shapes" / shape), folder], check=True)


def has_succeeded(launch: list[str], variables: dict[str, str], seconds: float) -> bool:
    run = subprocess.Popen(launch, env=os.environ | variables)
    try:
        return run.wait(seconds) == 0
    except subprocess.TimeoutExpired:
        print(f"ended after {seconds:.0f} s: the budget is used up")
        return False
    finally:
        run.terminate()  # torchrun ends its ranks
        run.wait()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shape", default="qwen2.5-1.5b")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--budget", type=float, default=540.0)
    parser.add_argument("--launcher", nargs="*", default=[], help="a script that runs this one, before its arguments")
    parser.add_argument("--shardings", nargs="+", choices=("fsdp2", "zero3"), default=["fsdp2", "zero3"])
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.rank:
        rank(options)
        return 0
    ends = time.monotonic() + options.budget
    shardings = {"fsdp2": FSDP2} if "fsdp2" in options.shardings else {}
    if find_spec("deepspeed") is None:
        print("ZeRO-3 is left out: DeepSpeed is not installed")
    elif "zero3" in options.shardings:
        shardings["zero3"] = ZERO3
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        saved_model(options.shape, folder)
        for sharding, variables in shardings.items():
            launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            launch += [f"--nproc-per-node={options.processes}", *options.launcher, __file__]
            launch += ["--out", str(options.out), "--shape", options.shape, "--rank", sharding, "--model", folder]
            if time.monotonic() < ends:
                failed |= not has_succeeded(launch, variables, ends - time.monotonic())
            else:
                print(f"{sharding} is left out: the budget is used up")
    report = options.out / "trl_ranks.jsonl"
    lines = [json.loads(line) for line in report.read_text().splitlines()] if report.exists() else []
    return int(failed or not lines or any(line["mismatch"] >= MISMATCH for line in lines))


if __name__ == "__main__":
    sys.exit(main())
