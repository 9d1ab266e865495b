"""A taskset of verifiers as a task: `--task verifiers:NAME`."""

import random
import tomllib
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from renderers import Renderer
from verifiers.v1.configs.env import EnvConfig
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.serve.pool import env_config_data
from verifiers.v1.task import TaskData
from verifiers.v1.utils.loaders import load_taskset, resolve_env_config

from sortedrl.core.scoring import Scorer
from sortedrl.core.turns import Environments
from sortedrl.integrations.verifiers.environments import VerifiersEnvironments
from sortedrl.integrations.verifiers.renderer import renderer_of, renderer_settings
from sortedrl.integrations.verifiers.service import Service
from sortedrl.tasks.task import Problem
from sortedrl.tasks.worker_process import WorkerError


class VerifiersTask:
    """`options` are those of verifiers' `--env.` flags, for example `player.harness.id`; `renderer.` options are for
    its model client. `config` is a file with an `[env]` table, as for verifiers' `eval` command."""

    def __init__(
        self,
        taskset: str,
        *,
        problems: int = 256,
        held_out_problems: int = 32,
        config: str | None = None,
        **options: Any,
    ) -> None:
        self.name = f"verifiers:{taskset}"
        self._counts = (problems, held_out_problems)
        table = {} if config is None else tomllib.loads(Path(config).read_text(encoding="utf-8")).get("env", {})
        for key, value in {**options, "taskset.id": taskset}.items():
            _set(table, key.split("."), value)
        self._renderer_options: Mapping[str, Any] = table.pop("renderer", {})
        self._prompts: dict[str, Sequence[int]] = {}  # by problem
        self._service: Service | None = None  # that no run has taken over yet
        self._config = _checked(table)

    def train(self) -> Sequence[Problem]:
        return self._problems[: self._counts[0]]

    def held_out(self) -> Sequence[Problem]:
        return self._problems[self._counts[0] :]

    def prompt(self, problem: Problem, tokenizer: Any) -> Sequence[int]:
        """The task's messages, rendered; or, if the harness sends others, what an episode starts with.

        The first call starts the service and an episode. Raises ValueError."""
        if not self._prompts:
            self._prompts = self._read_prompts(tokenizer)
        return self._prompts[problem.id]

    def serve(self, tokenizer: Any, *, eos_token_ids: Collection[int], workers: int, limit_seconds: float) -> "Served":
        services = [self._service or self._new_service(tokenizer), self._new_service(tokenizer)]
        self._service = None  # it belongs to the run now
        for service in services:
            service.resize(workers, limit_seconds)
        return Served(services, eos_token_ids)

    def _read_prompts(self, tokenizer: Any) -> dict[str, Sequence[int]]:
        problems, renderer = self._problems, self._renderer(tokenizer)
        if tokenizer.eos_token_id not in renderer.get_stop_token_ids():
            raise ValueError(
                f"the renderer {type(renderer).__name__} ends a turn at the tokens {renderer.get_stop_token_ids()}, "
                f"the tokenizer of {tokenizer.name_or_path!r} at {tokenizer.eos_token_id}: set its eos_token"
            )
        rendered = [_rendered(problem, renderer) for problem in problems]
        service = self._new_service(tokenizer)
        try:
            if service.prompts_of([problems[0].answer]) != rendered[:1]:  # the harness adds to it
                rendered = service.prompts_of([problem.answer for problem in problems])
        except WorkerError as error:
            service.close()
            raise ValueError(str(error)) from None
        self._service = service
        return {problem.id: tokens for problem, tokens in zip(problems, rendered, strict=True)}

    def _new_service(self, tokenizer: Any) -> Service:
        path = tokenizer.name_or_path
        client = {"renderer": renderer_settings(path, self._renderer_options), "renderer_model_name": path}
        return Service(env_config_data(self._config), client)

    @cached_property
    def _problems(self) -> list[Problem]:
        wanted = sum(self._counts)
        before = random.getstate()  # tasksets may seed it
        try:
            tasks = list(islice(load_taskset(self._config.taskset).load(), wanted))
        finally:
            random.setstate(before)
        if len(tasks) < wanted:
            raise ValueError(
                f"{self.name} has {len(tasks)} tasks, but problems = {self._counts[0]} and held_out_problems = "
                f"{self._counts[1]} need {wanted}: set them with --task-options problems N held_out_problems N"
            )
        return [_problem(self.name, number, task.data) for number, task in enumerate(tasks)]

    def _renderer(self, tokenizer: Any) -> Renderer:
        path = tokenizer.name_or_path
        return renderer_of(path, renderer_settings(path, self._renderer_options))


class Served:
    """The `ServedEnvironments` of a run. Training and evaluation have processes of their own: an evaluation must not
    wait for the episodes of training."""

    def __init__(self, services: Sequence[Service], eos_token_ids: Collection[int]) -> None:
        self._services = services
        self._eos_token_ids = eos_token_ids
        self._next = iter(services)

    def wait_until_ready(self) -> None:
        self._services[0].wait_until_ready()

    def source(self) -> tuple[Scorer, Environments]:
        environments = VerifiersEnvironments(next(self._next), self._eos_token_ids)
        return environments.ends, environments

    def process_ids(self) -> list[int]:
        return [process for service in self._services for process in service.process_ids()]

    def close(self) -> None:
        for service in self._services:
            service.close()


def _rendered(problem: Problem, renderer: Renderer) -> list[int]:
    """The tokens of the task's own messages."""
    messages = [{"role": "system", "content": problem.system}] if problem.system else []
    prompt = problem.answer["prompt"]
    messages += [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt or []
    tokens: list[int] = renderer.render(messages, add_generation_prompt=True).token_ids
    return tokens


def _problem(name: str, number: int, data: TaskData) -> Problem:
    """With the task's data, as verifiers' servers take them, in place of an answer."""
    fields = data.model_dump(mode="json")
    if data.prompt is not None and not isinstance(data.prompt, str):
        fields["prompt"] = [message_to_wire(message) for message in data.prompt]
    shown = data.prompt if isinstance(data.prompt, str) else str(data.name or number)
    return Problem(f"{name}/{number}", shown, fields, data.system_prompt or "")


def _set(table: dict[str, Any], path: Sequence[str], value: Any) -> None:
    if value is None and path[-1] == "id":
        value = "null"  # a harness; on the command line it reads like JSON's null
    for name in path[:-1]:
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            raise ValueError(f"{'.'.join(path)}: {name} is a value, not a table")
    table[path[-1]] = value


def _checked(table: dict[str, Any]) -> EnvConfig:
    """Raises ValueError in one line."""
    try:
        return resolve_env_config(table)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"verifiers refuses {'.'.join(map(str, first['loc'])) or 'env'}: {first['msg']}") from None
