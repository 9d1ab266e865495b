"""What a run reads: the model, its tokenizer, and the task's problems as prompts. Every failure is a clear error.

A resumed run must have the problems that it started with: their number, ids, texts and answers.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from sortedrl.core.configuration import ConfigurationError
from sortedrl.core.import_path import fault_in_your_code
from sortedrl.core.rollout import Prompt
from sortedrl.core.wording import counted
from sortedrl.learner.checkpoint import Checkpoint
from sortedrl.models import model_named, unreadable_model
from sortedrl.observe.console import Log
from sortedrl.tasks.datasets import Distinct, digests, why_changed
from sortedrl.tasks.encode import Encoded, encode, environment_prompt
from sortedrl.tasks.environment import AnyTask, EnvironmentTask, ServedTask, reset_of
from sortedrl.tasks.environment import Prompt as EnvironmentPrompt
from sortedrl.tasks.registry import is_built_in, task_by_name
from sortedrl.tasks.task import Problem, checked_problems
from sortedrl.tasks.worker_process import WorkerError
from sortedrl.tasks.workers import WorkerPool
from sortedrl.training.build import device_of, dtype_of
from sortedrl.training.settings import ModelSettings, TrainSettings, cannot_be_sent, task_error

MAX_PROMPT_BYTES = 64 * 1024 * 1024
PARTS = ("training", "held-out")


@dataclass(frozen=True)
class Resources:
    """What a run reads: the model, its tokenizer, and the task's problems as prompts."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    task: AnyTask
    train: tuple[Prompt, ...]
    held_out: tuple[Prompt, ...]

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """All tokens that end a response: a model may have others than its tokenizer."""
        named = getattr(self.model.generation_config, "eos_token_id", None)
        ids = named if isinstance(named, list) else [named]
        return frozenset(int(token) for token in (*ids, self.tokenizer.eos_token_id) if token is not None)


def read_resources(settings: ModelSettings, log: Log) -> Resources:
    """For an evaluation there are no training prompts: some datasets have none, and they may be too long."""
    tokenizer, model = read_model(model_named(settings.model, settings.task), settings)
    try:
        task = task_by_name(settings.task, tools=settings.tools, **settings.resolved_task_options())
        trains = isinstance(settings, TrainSettings)
        found = (task.train() if trains else None, task.held_out())
        problems = (
            checked_problems(found[0], "its train()") if trains else (),
            checked_problems(found[1], "its held_out()"),
        )
        with _prompting(task, tokenizer, settings) as tokens_of:
            train, held_out = (
                encode(part, tokenizer, settings.max_prompt_tokens, tokens_of, f"{name} prompts")
                for part, name in zip(problems, PARTS, strict=True)
            )
    except ConfigurationError:
        raise
    except (ValueError, TypeError, OSError, ImportError) as error:
        raise task_error(settings, str(error)) from None
    except (Exception, SystemExit) as error:
        if is_built_in(settings.task):
            raise
        raise task_error(settings, fault_in_your_code(error)) from error
    _check_turns(settings, task)
    if overlap := _overlap(*problems, task):
        log(overlap)
    repeated = [
        part.notice(f"{name} problems") for part, name in zip(found, PARTS, strict=True) if isinstance(part, Distinct)
    ]
    for notice in (*repeated, train.rejection_notice(), held_out.rejection_notice()):
        if notice:
            log(notice)
    in_context = (_within_context(part, settings.longest_context(), log) for part in (train, held_out))
    return Resources(model, tokenizer, task, *in_context)


def _check_turns(settings: ModelSettings, task: AnyTask) -> None:
    if settings.max_turns is not None and not isinstance(task, EnvironmentTask | ServedTask):
        why = f"task {settings.task} has neither an environment nor tools, so every response has one turn"
        fix = "Leave it out, set --tools, or use a task with an environment (docs/environments.md)."
        raise ConfigurationError("max_turns", settings.max_turns, why, fix)


def _overlap(train: Sequence[Problem], held_out: Sequence[Problem], task: AnyTask) -> str | None:
    """A notice if problems are in both parts: a score on them is not held out.

    The data of an environment may depend on the id alone, so there only ids count.
    """
    has_environment = isinstance(task, EnvironmentTask | ServedTask)

    def marks(problem: Problem) -> set[str]:
        content = repr((problem.system, problem.question, problem.answer))
        return {problem.id} if has_environment else {problem.id, content}

    trained_on = {mark for problem in train for mark in marks(problem)}
    shared = [problem.id for problem in held_out if marks(problem) & trained_on]
    if not shared:
        return None
    return (
        f"{len(shared)} of {len(held_out)} held-out problems are also problems to train on, such as {shared[0]!r}: "
        "their score also rewards memorizing. Return other problems from held_out()"
    )


def _within_context(encoded: Encoded, context: int, log: Log) -> tuple[Prompt, ...]:
    """The prompts that leave room for a response."""
    prompts = encoded.prompts
    fitting = tuple(prompt for prompt in prompts if len(prompt.tokens) < context)
    if prompts and not fitting:
        shortest = min(len(prompt.tokens) for prompt in prompts)
        why = f"no prompt leaves room for a response: the shortest has {shortest} tokens"
        fix = "Set it to the longest prompt plus max_response_tokens, or leave it out."
        raise ConfigurationError("max_context_tokens", context, why, fix)
    if len(fitting) < len(prompts):
        left_out = len(prompts) - len(fitting)
        log(f"{left_out} of {len(prompts)} {encoded.kind} fill max_context_tokens = {context} and are left out")
    return fitting


@contextmanager
def _prompting(
    task: AnyTask, tokenizer: PreTrainedTokenizerBase, settings: ModelSettings
) -> Iterator[Callable[[Problem], Sequence[int]] | None]:
    """How the task makes prompts, if it does."""
    if isinstance(task, ServedTask):
        yield partial(task.prompt, tokenizer=tokenizer)
    elif isinstance(task, EnvironmentTask):
        tools = tuple(getattr(task.environment(), "tools", ()))
        with _resetting(task, settings) as reset:
            yield lambda problem: environment_prompt(reset(problem), problem, tokenizer, tools)
    else:
        yield None


@contextmanager
def _resetting(task: EnvironmentTask, settings: ModelSettings) -> Iterator[Callable[[Problem], EnvironmentPrompt]]:
    """`reset` of a new instance. Your own runs in a worker process: it may hang, or exit."""
    if is_built_in(settings.task) or settings.tools or not settings.reward_workers:
        yield lambda problem: task.environment().reset(problem)
        return
    limit_seconds = settings.score_limit_seconds
    try:
        pool = WorkerPool(
            partial(reset_of, task), workers=1, limit_seconds=limit_seconds, max_answer_bytes=MAX_PROMPT_BYTES
        )
    except ValueError as error:
        raise cannot_be_sent(settings, error) from None

    def reset(problem: Problem) -> EnvironmentPrompt:
        try:
            prompt, fault = pool(problem)
        except (WorkerError, TimeoutError) as error:
            fault = str(error)
        if fault:
            raise ValueError(f"reset of the problem {problem.id!r}: {fault}")
        return prompt  # type: ignore[no-any-return]

    with closing(pool):
        yield reset


def read_model(path: str, settings: ModelSettings) -> tuple[PreTrainedTokenizerBase, PreTrainedModel]:
    model = read_module(settings.model, path, settings)
    tokenizer = _read(settings.model, partial(AutoTokenizer.from_pretrained, path))
    if tokenizer.eos_token_id is None:
        why = "its tokenizer has no EOS token, so no response could end"
        raise ConfigurationError("model", settings.model, why, "Set eos_token in its tokenizer_config.json.")
    make_savable(model)
    return tokenizer, model


def read_module(name: str, path: str, settings: ModelSettings) -> PreTrainedModel:
    disable_progress_bar()
    read = partial(AutoModelForCausalLM.from_pretrained, path, dtype=dtype_of(settings))
    model: PreTrainedModel = _read(name, read).to(device_of(settings)).eval()
    return model


def _read(name: str, read: Callable[[], Any]) -> Any:
    try:
        return read()
    except Exception as error:  # transformers and safetensors raise many kinds for damaged files
        raise unreadable_model(name, error) from None


def make_savable(model: PreTrainedModel) -> None:
    """transformers reads generation settings that it refuses to write, such as a temperature without `do_sample`.

    The trained model could not be saved. The policy is sampled, so `do_sample` is turned on. If they are invalid still,
    only the token ids stay.
    """
    config = model.generation_config
    if config is None or _is_valid(config):
        return
    config.do_sample = True
    if not _is_valid(config):
        ids = ("bos_token_id", "eos_token_id", "pad_token_id")
        model.generation_config = GenerationConfig(**{name: getattr(config, name, None) for name in ids})


def _is_valid(config: GenerationConfig) -> bool:
    try:
        config.validate(strict=True)
    except ValueError:
        return False
    return True


def problem_digests(prompts: Sequence[Prompt]) -> str:
    """They cover the problem, not the tokens of its prompt: a chat template may write today's date into those."""
    return digests(prompt.payload for prompt in prompts)


def why_other_problems(saved: Checkpoint, train: Sequence[Prompt], held_out: Sequence[Prompt]) -> str | None:
    """How the problems differ from those of a checkpoint; None if they do not.

    With others, the rest of the data, the rewards of resumed rollouts and the gain over the first evaluation would not
    be those of the run.
    """
    before = saved.controller["prompts"]["size"]
    if len(train) != before:
        return f"the task has {counted(len(train), 'problem')} to train on, but had {before} when the run started"
    if [prompt.id for prompt in held_out] != saved.notes["before_ids"]:
        return "the task's held-out problems are not those of the run's first evaluation"
    parts = ("train", train, "problems to train on"), ("held_out", held_out, "held-out problems")
    reasons = (
        why_changed([prompt.id for prompt in prompts], problem_digests(prompts), saved.notes["problems"][part], what)
        for part, prompts, what in parts
    )
    return next(filter(None, reasons), None)
