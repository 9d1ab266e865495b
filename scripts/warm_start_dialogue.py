"""Creates the second built-in model: a small Llama that asks and reasons in Knights & Knaves dialogues.

    python scripts/warm_start_dialogue.py     # about 2 minutes on 2 cores; writes src/sortedrl/models/knights-dialogue

It starts from the weights of the first one (scripts/warm_start.py), which can search through the cases, and is trained
in the same way, on dialogues that a solver wrote (worked_dialogue); the environment's tokens are masked.
Metrics on held-out puzzles at temperature 1 are written to recipe.json.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
from warm_start import (
    ASSISTANT,
    END,
    PAD,
    USER,
    Example,
    Recipe,
    make_model,
    make_tokenizer,
    prompt_tokens,
    save,
    share,
    train,
    vocabulary_number,
    write_report,
)
from worked_dialogue import DialogueFlaws, dialogue_phrases, worked_dialogue

from sortedrl.models import BUILT_IN_MODEL, DIALOGUE_MODEL
from sortedrl.tasks.knights_and_knaves import COMPACT_NAMES, WARM_START_SHARE
from sortedrl.tasks.knights_answers import reward_function
from sortedrl.tasks.knights_dialogue import (
    DIALOGUE_CHARACTERS,
    DialoguePuzzle,
    asked,
    random_dialogue,
)

TOKEN_LIMIT = 320  # per response, in the evaluation
MOST_TURNS = 4
MEASURED_PUZZLES = 600


@dataclass(frozen=True)
class DialogueRecipe(Recipe):
    puzzles: int = 4_000
    steps: int = 400
    muon_learning_rate: float = 0.01
    warmup_steps: int = 20
    flaws: DialogueFlaws = field(
        default_factory=lambda: DialogueFlaws(guess=0.4, overlook=0.06, give_up=0.03, answer_early=0.5, muted=0.1)
    )


def make_dialogue_model(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """The first built-in model, with random embeddings for the additional tokens: they come last."""
    model = make_model(recipe, tokenizer)
    first = load_file(BUILT_IN_MODEL / "model.safetensors")
    weights = model.state_dict()
    for name, weight in weights.items():
        weight[: len(first[name])] = first[name]
    model.load_state_dict(weights)
    return model


class Muon(torch.optim.Optimizer):
    """torch.optim.Muon in float32: on a CPU without bf16 instructions that is 50 times faster."""

    def __init__(self, matrices: Sequence[torch.nn.Parameter], lr: float, weight_decay: float) -> None:
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        del closure
        for group in self.param_groups:
            for matrix in group["params"]:
                momentum = self.state[matrix].setdefault("momentum", torch.zeros_like(matrix))
                momentum.lerp_(matrix.grad, 0.05)
                direction = orthogonalized(matrix.grad.lerp(momentum, 0.95))
                rows, columns = matrix.shape
                matrix.mul_(1 - group["lr"] * group["weight_decay"])
                matrix.sub_(direction, alpha=group["lr"] * max(1.0, rows / columns) ** 0.5)


def orthogonalized(matrix: Tensor) -> Tensor:
    """Five steps of Muon's Newton-Schulz iteration toward a matrix whose singular values are all 1."""
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    wide = wide / wide.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = wide @ wide.T
        wide = 3.4445 * wide + (-4.775 * gram + 2.0315 * gram @ gram) @ wide
    return wide if matrix.shape[0] <= matrix.shape[1] else wide.T


def examples(recipe: DialogueRecipe, tokenizer: PreTrainedTokenizerFast) -> Iterator[Example]:
    """Infinite: each time a puzzle comes up, it gets a new dialogue with new flaws."""
    rng = random.Random(recipe.seed)
    puzzles = [
        random_dialogue(rng.choice(DIALOGUE_CHARACTERS), rng, high=WARM_START_SHARE) for _ in range(recipe.puzzles)
    ]
    while True:
        puzzle = rng.choice(puzzles)
        response: list[int] = []
        mask: list[bool] = []
        for turn in worked_dialogue(puzzle, rng, recipe.flaws):
            said = tokenizer(turn.response + END, add_special_tokens=False)["input_ids"]
            observed = [] if turn.observation is None else observation_tokens(turn.observation, tokenizer)
            response += said + observed
            mask += [True] * len(said) + [False] * len(observed)
        yield Example(prompt_tokens(puzzle.text, tokenizer), response, mask)


def observation_tokens(text: str, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    return list(tokenizer(USER + text + ASSISTANT, add_special_tokens=False)["input_ids"])


@dataclass
class Dialogue:
    """One that the model holds: its tokens so far, and its result."""

    puzzle: DialoguePuzzle
    tokens: list[int]
    lengths: list[int] = field(default_factory=list)  # of its responses
    correct: bool | None = None
    format_right: bool = False


@torch.inference_mode()
def hold_dialogues(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, puzzles: Sequence[DialoguePuzzle]
) -> list[Dialogue]:
    model.eval()  # type: ignore[no-untyped-call]
    end = vocabulary_number(tokenizer, END)
    dialogues = [Dialogue(puzzle, prompt_tokens(puzzle.text, tokenizer)) for puzzle in puzzles]
    for _ in range(MOST_TURNS):
        active = [dialogue for dialogue in dialogues if dialogue.correct is None]
        if not active:
            break
        inputs = tokenizer.pad({"input_ids": [one.tokens for one in active]}, padding_side="left", return_tensors="pt")
        rows = model.generate(**inputs, do_sample=True, top_k=0, max_new_tokens=TOKEN_LIMIT)  # type: ignore[misc]
        for dialogue, row in zip(active, rows[:, inputs["input_ids"].shape[1] :].tolist(), strict=True):
            take_turn(dialogue, row[: row.index(end) + 1] if end in row else row, tokenizer)
    return dialogues


def take_turn(dialogue: Dialogue, response: list[int], tokenizer: PreTrainedTokenizerFast) -> None:
    text = str(tokenizer.decode(response, skip_special_tokens=True))
    puzzle = dialogue.puzzle
    dialogue.lengths.append(len(response))
    if (character := asked(text, puzzle.puzzle.characters)) is not None:
        dialogue.tokens += response + observation_tokens(puzzle.statement(character), tokenizer)
        return
    reward = reward_function(text, dict(zip(COMPACT_NAMES, puzzle.answer, strict=False)))
    dialogue.correct = reward.correct
    dialogue.format_right = reward.parts["format"] > 0


def measure(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int
) -> dict[str, float | dict[int, float]]:
    """Results of the model on puzzles that no warm start uses, at temperature 1."""
    torch.manual_seed(seed)
    rng = random.Random(seed + 1)
    puzzles = [
        random_dialogue(rng.choice(DIALOGUE_CHARACTERS), rng, low=WARM_START_SHARE) for _ in range(MEASURED_PUZZLES)
    ]
    held = [
        one for start in range(0, len(puzzles), 200) for one in hold_dialogues(model, tokenizer, puzzles[start:][:200])
    ]
    asking = [one for one in held if len(one.lengths) > 1]
    lengths = sorted(sum(one.lengths) for one in held)
    return {
        "puzzles": len(puzzles),
        "chance": round(fmean(1 / one.candidates for one in puzzles), 3),
        "score": share(bool(one.correct) for one in held),
        "score_by_silent": {
            silent: share(bool(one.correct) for one in held if len(one.puzzle.silent) == silent) for silent in (1, 2)
        },
        "asks": share(len(one.lengths) > 1 for one in held),
        "asks_all_silent": share(len(one.lengths) > len(one.puzzle.silent) for one in held),
        "score_if_asked": share(bool(one.correct) for one in asking),
        "format_right": share(one.format_right for one in held),
        "length_mean": round(fmean(lengths), 1),
        "length_median": lengths[len(lengths) // 2],
        "length_p95": lengths[int(0.95 * len(lengths))],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=DIALOGUE_MODEL, help="folder to write the model to")
    parser.add_argument("--seed", type=int, default=DialogueRecipe.seed)
    arguments = parser.parse_args()
    recipe = DialogueRecipe(seed=arguments.seed)
    torch.set_num_threads(recipe.threads)
    begin = time.monotonic()
    tokenizer = make_tokenizer(dialogue_phrases())
    model = make_dialogue_model(recipe, tokenizer)
    train(model, recipe, examples(recipe, tokenizer), vocabulary_number(tokenizer, PAD), Muon)
    training_seconds = round(time.monotonic() - begin)
    save(model, tokenizer, arguments.out)
    write_report(arguments.out, Path(__file__), recipe, model, training_seconds, measure(model, tokenizer, recipe.seed))


if __name__ == "__main__":
    main()
