"""Who may import whom, and what `import sortedrl` costs."""

import ast
import json
import subprocess
import sys
from collections.abc import Container, Iterator
from pathlib import Path

import pytest

import sortedrl

PACKAGE = Path(__file__).parent.parent / "src" / "sortedrl"
PARTS = {"engines", "learner", "tasks", "observe"}
BELOW_TRAINING = {"core", "log", "settings", "models"} | PARTS
MAY_IMPORT = {
    "core": set[str](),
    "log": {"core"},
    "testing": {"core", "settings", "models"},
    "settings": {"core"},
    "models": {"core"},
    **{part: {"core", "log", "settings"} for part in PARTS},
    **{part: {"core", "log", "settings", "models"} for part in ("learner", "tasks")},
    "integrations": {"core", "log", "settings", "engines", "tasks", "observe", "models"},
    "training": BELOW_TRAINING,
    "studies": BELOW_TRAINING | {"training"},
    "cli": BELOW_TRAINING | {"training", "studies"},
}  # core < log, settings, models < engines, learner, tasks, observe < training < studies < cli
FILES = sorted(PACKAGE.rglob("*.py"))


def imported_modules(file: Path) -> Iterator[str]:
    """Dotted names of all modules that the file imports, inside functions too."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            here = ["sortedrl", *file.relative_to(PACKAGE).parts]
            base = ".".join(here[: -node.level]) if node.level else ""
            module = ".".join(part for part in (base, node.module or "") if part)
            yield module
            if module == "sortedrl":  # `from sortedrl import models` names a module, too
                yield from (f"sortedrl.{alias.name}" for alias in node.names)


def rooms_of_ours(file: Path) -> set[str]:
    names = {module for module in imported_modules(file) if module.split(".")[0] == "sortedrl"}
    return {module.split(".")[1] for module in names if "." in module} - {"__version__"}


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_a_room_imports_only_what_lies_below_it(file: Path) -> None:
    parts = file.relative_to(PACKAGE).parts
    if len(parts) == 1:
        return
    assert rooms_of_ours(file) <= MAY_IMPORT[parts[0]] | {parts[0]}


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports in functions and for type hints count, too."""
    file_of = {module_named(file): file for file in FILES}
    below = {name: set(own_modules(file, file_of)) - {name} for name, file in file_of.items()}
    while leaves := [name for name, imported in below.items() if not imported & below.keys()]:
        for name in leaves:
            del below[name]
    assert not below, f"in a circle, or above one: {sorted(below)}"


def module_named(file: Path) -> str:
    return ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


def own_modules(file: Path, known: Container[str]) -> Iterator[str]:
    """`from package import module` names the module, and the package otherwise."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield from [name for name in (f"{node.module}.{alias.name}", str(node.module)) if name in known][:1]


def test_what_the_package_offers_is_there_and_typed() -> None:
    """The names of the documented loop, each imported when it is first used."""
    types = PACKAGE / "__init__.py"
    for name in sortedrl.__all__:
        assert getattr(sortedrl, name) is not None
        assert name == "__version__" or f"import {name} as {name}\n" in types.read_text(encoding="utf-8")
    with pytest.raises(AttributeError, match="no attribute 'Controler'"):
        sortedrl.Controler  # noqa: B018


@pytest.mark.parametrize(
    "file", sorted((PACKAGE / "core").rglob("*.py")), ids=lambda file: str(file.relative_to(PACKAGE))
)
def test_core_imports_the_standard_library_alone(file: Path) -> None:
    roots = {module.split(".")[0] for module in imported_modules(file)}
    assert roots <= {*sys.stdlib_module_names, "sortedrl"}


def fresh_import(module: str) -> tuple[float, list[str]]:
    """CPU seconds that an import takes in a fresh interpreter, and the modules that it loaded.

    CPU time, because the tests run beside each other and wall-clock would measure the neighbors.
    """
    code = (
        "import json, sys, time\n"
        "before = set(sys.modules)\n"
        "began = time.process_time()\n"
        f"import {module}\n"
        "seconds = time.process_time() - began\n"
        "print(json.dumps([seconds, sorted(set(sys.modules) - before)]))\n"
    )
    command, environment = [sys.executable, "-c", code], {"PYTHONPATH": str(PACKAGE.parent)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    seconds, modules = json.loads(done.stdout)
    return seconds, modules


@pytest.mark.parametrize("module", ["sortedrl", "sortedrl.core", "sortedrl.log"])
def test_importing_the_scheduler_is_quick_and_needs_nothing_but_python(module: str) -> None:
    runs, standard = [], []
    for _ in range(5):  # in turn: a busy machine slows both down
        runs.append(fresh_import(module))
        standard.append(fresh_import("asyncio, dataclasses, logging, statistics")[0])
    foreign = {name for _, modules in runs for name in modules if name.split(".")[0] not in sys.stdlib_module_names}
    assert {name.split(".")[0] for name in foreign} == {"sortedrl"}
    assert min(seconds for seconds, _ in runs) < 2 * min(standard)  # 1.1 to 1.3 times; 0.07 s on a quiet machine
