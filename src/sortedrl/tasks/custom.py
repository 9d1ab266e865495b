"""Your own reward function or task by import path, `your.module:name`.

A reward is a function `(problem, response) -> float | Reward` and comes with a file of prompts; a task is a class or an
object with `train`, `held_out` and `score`, or with `environment` instead of `score` (environment.py). A plain number
counts as correct if it is at least 1; return a Reward to override that.

An invalid reward function is refused here, before the run. Its errors on a response are handled by scoring.py.
"""

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeVar

from sortedrl.core.import_path import import_object
from sortedrl.core.wording import kind_of
from sortedrl.tasks.datasets import Columns, Distinct, Source, read_problems, split_off
from sortedrl.tasks.environment import AnyTask, require_environment
from sortedrl.tasks.task import Problem, Reward, SplitTask, checked_reward

T = TypeVar("T")
TASK_MEMBERS = ("train", "held_out")  # and score, or environment


class CustomReward(SplitTask):
    """Prompts from a file or the hub, scored by your function.

    The function receives the problem with its `question` and, as `answer`, the value of `answer_column`; if that is not
    set, of a column `answer`, or None if there is none.
    """

    def __init__(
        self,
        reward: str,
        *,
        data: str | os.PathLike[str],
        held_out_data: str | os.PathLike[str] | None = None,
        question_column: str = "question",
        answer_column: str | None = None,
        system: str = "",
        held_out_fraction: float = 0.1,
        seed: int = 0,
    ) -> None:
        self.name = reward
        _ = self._reward  # an invalid one is refused now
        self._data = Source(os.fspath(data))
        self._held_out_data = Source(os.fspath(held_out_data)) if held_out_data else None
        self._columns = Columns((question_column,), (answer_column or "answer",), answer_is_optional=not answer_column)
        self._system = system
        self._held_out_fraction = held_out_fraction
        self._seed = seed

    @cached_property
    def _reward(self) -> Callable[[Problem, str], Any]:
        """A worker process imports it by its path, so it may be a lambda."""
        return _two_argument_function(import_object(self.name), self.name)

    def score(self, problem: Problem, response: str) -> Reward:
        return checked_reward(self._reward(problem, response), f"the result of {self.name}")

    @cached_property
    def _problems(self) -> tuple[Distinct, Distinct]:
        train = read_problems(self._data, self._columns, f"{self.name}/train", self._system)
        if self._held_out_data is None:
            return split_off(train, self._held_out_fraction, self._seed)
        held_out = read_problems(self._held_out_data, self._columns, f"{self.name}/held-out", self._system)
        return Distinct(train, held_out), held_out


def custom_task(path: str, **options: Any) -> AnyTask:
    """The task at an import path: a task class called with `options`, a task object, or a reward function."""
    found = import_object(path, is_task)
    if inspect.isclass(found):
        return _require_task(make(found, path, options), path)
    if is_task(found):
        if options:
            raise ValueError(f"{path} is a task object, which takes no options: remove {', '.join(options)}")
        return _require_task(found, path)
    if not callable(found):
        raise ValueError(
            f"{path} is {kind_of(found)}: expected a reward function (problem, response) -> float, "
            f"or a task with {', '.join(TASK_MEMBERS)} and score or environment"
        )
    if "data" not in options:
        raise ValueError(
            f"the reward function {path} needs prompts: set --data FILE and --task-options question_column NAME"
        )
    return make(CustomReward, "a reward", options, path)


def make(task_class: Callable[..., T], name: str, options: Mapping[str, Any], *arguments: str) -> T:
    """Create the task; the error for an unknown option lists the valid ones."""
    signature = inspect.signature(task_class)
    try:
        signature.bind(*arguments, **options)
    except TypeError as error:
        known = ", ".join(list(signature.parameters)[len(arguments) :])
        raise ValueError(f"{name}: {error}; its options are {known or 'none'}") from error
    # A class of yours may take more than its defaults show.
    if str(getattr(task_class, "__module__", "")).startswith("sortedrl."):
        for option, value in options.items():
            if option in signature.parameters:  # not one of **options
                _require_kind(option, value, signature.parameters[option].default)
    return task_class(*arguments, **options)


def _require_kind(option: str, value: Any, default: Any) -> None:
    """Refuse an option of another kind than its default; anything goes for one without."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    match default:
        case bool():
            fits, kind = isinstance(value, bool), "True or False"
        case int():
            fits, kind = is_number and isinstance(value, int), "a whole number"
        case float():
            fits, kind = is_number, "a number"
        case str():
            fits, kind = isinstance(value, str), "text"
        case tuple():
            fits, kind = isinstance(value, Sequence) and not isinstance(value, str), f"a list, such as {[*default]}"
        case _:
            return
    if not fits:
        raise ValueError(f"{option} = {value!r}: it should be {kind}")


def is_task(value: Any) -> bool:
    return not inspect.ismodule(value) and all(hasattr(value, member) for member in TASK_MEMBERS)


def _require_task(task: Any, path: str) -> AnyTask:
    missing = [member for member in TASK_MEMBERS if not callable(getattr(task, member, None))]
    if not callable(getattr(task, "environment", None)) and not callable(getattr(task, "score", None)):
        missing.append("score (or environment)")
    if missing:
        raise ValueError(f"{path} is not a task: it has no {' and no '.join(missing)}; see sortedrl.tasks.task")
    if callable(getattr(task, "environment", None)):
        require_environment(task.environment(), path)
    else:
        _two_argument_function(task.score, f"{path}, its score")
    if not hasattr(task, "name"):
        task.name = path
    return task  # type: ignore[no-any-return]


def _two_argument_function(function: Any, path: str) -> Callable[[Problem, str], Any]:
    is_async = inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)
    if is_async or inspect.isgeneratorfunction(function):
        kind = "async" if is_async else "a generator"
        raise ValueError(f"the reward {path} is {kind}: make it a plain function that returns a number")
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):  # some C functions have no signature
        return function  # type: ignore[no-any-return]
    try:
        signature.bind("problem", "response")
    except TypeError as error:
        raise ValueError(
            f"the reward {path} is called with (problem, response), which its signature {signature} does not allow: "
            f"{error}"
        ) from error
    return function  # type: ignore[no-any-return]
