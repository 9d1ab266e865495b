"""Tasks by name, as in flags and configuration files.

    knights_and_knaves[:VARIANT]     math:<preset>, math     reasoning_gym:<dataset>     verifiers:<taskset>
    your.module:name

Dependencies of a task are imported only when it is used.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from sortedrl.core.import_path import import_object
from sortedrl.settings.install_hint import install_hint
from sortedrl.tasks.custom import custom_task, is_task, make
from sortedrl.tasks.environment import AnyTask, EnvironmentTask, ServedTask

BUILT_IN = ("knights_and_knaves", "math", "reasoning_gym")


def task_by_name(name: str, *, tools: Sequence[str] = (), **options: Any) -> AnyTask:
    """Create a task with these options; the error for an unknown name or option lists the valid ones.

    `tools` are functions that its responses may call (tools.py), by import path.
    """
    task = _without_tools(name, options)
    if not tools:
        return task
    if isinstance(task, EnvironmentTask | ServedTask):
        raise ValueError(f"{name} has an environment of its own, which answers its responses: it takes no tools")
    from sortedrl.tasks.tools import WithTools

    return WithTools(task, tools)


def _without_tools(name: str, options: dict[str, Any]) -> AnyTask:
    kind, _, variant = name.partition(":")
    if kind == "knights_and_knaves":
        return make(_knights_and_knaves(variant), name, options)  # type: ignore[no-any-return]
    if kind == "math":
        from sortedrl.tasks.math import Math

        return make(Math, name, options, variant)
    if kind == "reasoning_gym":
        from sortedrl.tasks.reasoning_gym import ReasoningGym

        if not variant:
            raise ValueError("choose a dataset of reasoning-gym, for example reasoning_gym:leg_counting")
        return make(ReasoningGym, name, options, variant)
    if kind == "verifiers" and variant:
        if find_spec("verifiers") is None:
            raise ValueError(f"{name} needs verifiers: {install_hint('verifiers')}")
        served = import_object("sortedrl.integrations.verifiers.task:VerifiersTask")
        return make(served, name, options, variant)  # type: ignore[no-any-return]
    if variant:
        return custom_task(name, **options)
    raise ValueError(
        f"no task {name!r}; use knights_and_knaves, math:<preset>, reasoning_gym:<dataset>, verifiers:<taskset>, or "
        "your own as your.module:name"
    )


def _knights_and_knaves(variant: str) -> Any:
    from sortedrl.tasks.knights_and_knaves import KnightsAndKnaves
    from sortedrl.tasks.knights_dialogue import KnightsDialogue

    match variant:
        case "":
            return KnightsAndKnaves
        case "small":
            return KnightsAndKnaves.small
        case "mixed":
            return KnightsAndKnaves.mixed
        case "dialogue":
            return KnightsDialogue
    raise ValueError(f"knights_and_knaves has no variant {variant!r}; use small, mixed or dialogue, or leave it out")


def check_name(
    name: str, options: dict[str, Any], *, tools: Sequence[str] = (), import_user_code: bool = False
) -> None:
    """Refuse a name or an option that no task has, with a ValueError. `import_user_code`: also look up the tools and a
    task of your own, which is not created: that may take long."""
    kind, _, variant = name.partition(":")
    if is_built_in(name) or not variant:
        _without_tools(name, options)
    elif kind != "verifiers" and import_user_code:
        import_object(name, is_task)
    if tools and import_user_code:
        from sortedrl.tasks.tools import function_of

        for tool in tools:
            function_of(tool)


def is_built_in(name: str) -> bool:
    """Whether the reward is built in, so it is cheap and cannot hang. A custom reward may do anything."""
    return name.partition(":")[0] in BUILT_IN
