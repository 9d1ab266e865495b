"""A TRL script with the scheduler: two lines, which are marked, differ from plain GRPOTrainer.

The built-in model learns to answer Knights & Knaves puzzles in the right format, on one CPU core, in half a
minute. Run it:

    pip install '.[trl]'
    python examples/trl_grpo.py
"""

import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from transformers import PrinterCallback
from trl import GRPOConfig

from sortedrl.integrations.trl import SortedGRPOTrainer  # instead of: from trl import GRPOTrainer
from sortedrl.log import read_events
from sortedrl.models import BUILT_IN_MODEL
from sortedrl.observe.metrics import Metrics
from sortedrl.tasks.knights_and_knaves import KnightsAndKnaves

task = KnightsAndKnaves.small()
problems = {problem.id: problem for problem in task.train()[:256]}


def right_answer(completions, problem_id, **columns):
    """An ordinary TRL reward function: takes completions and the dataset's columns, returns one number each."""
    return [
        task.score(problems[name], completion[0]["content"]).value
        for name, completion in zip(problem_id, completions, strict=True)
    ]


if __name__ == "__main__":
    torch.set_num_threads(1)  # several threads of so small a model wait for each other: leave this out for yours
    output = Path(tempfile.mkdtemp(prefix="trl_grpo-"))
    trainer = SortedGRPOTrainer(
        model=str(BUILT_IN_MODEL),
        reward_funcs=right_answer,
        train_dataset=Dataset.from_list(
            [
                {"prompt": [{"role": "user", "content": problem.question}], "problem_id": name}
                for name, problem in problems.items()
            ]
        ),
        args=GRPOConfig(
            output_dir=str(output),
            max_steps=6,
            per_device_train_batch_size=32,
            num_generations=8,
            max_completion_length=320,
            learning_rate=3e-4,
            logging_steps=1,
            bf16=False,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        ),
        schedule="partial+elevator",  # the second line: the schedule
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    for entry in trainer.state.log_history:
        if "reward" in entry:
            print(
                f"update {entry['step']}  reward {entry['reward']:+.2f}  bubble {entry['sortedrl/bubble']:.1%}  "
                f"length {entry['completions/mean_length']:.0f}  staleness {entry['sortedrl/staleness_mean']:.2f}"
            )
    totals = Metrics().fold(read_events(output / "events.jsonl")).run_metrics()
    print(f"{totals.trained} rollouts, goodput {totals.goodput:,.0f} tok/s, event log in {output / 'events.jsonl'}")
