"""Your own parts by import path, `your.module:name`: a task, a reward function, an engine, a mode."""

import difflib
import importlib
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sortedrl.core.user_values import reason_of

_NOT_YOURS = tuple(str(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib"))
_NOT_YOURS += (str(Path(__file__).parents[1]), "<frozen ")


def fault_in_your_code(error: BaseException) -> str:
    """An error in one line, with the last line of your own code that led to it, if there is one."""
    frames = traceback.extract_tb(error.__traceback__)
    yours = [frame for frame in frames if not frame.filename.startswith(_NOT_YOURS)]
    return f"{reason_of(error)} ({yours[-1].filename}:{yours[-1].lineno})" if yours else reason_of(error)


def import_object(path: str, is_candidate: Callable[[Any], bool] = callable) -> Any:
    """The object at `package.module:name`. Modules in the working directory are found too.

    `is_candidate` selects what an error suggests, besides functions and classes that the module itself defines."""
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute:
        raise ValueError(f"{path!r} is not an import path: use your.module:name")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise ValueError(f"{module_name} needs the module {error.name!r}, which is not installed") from error
        why = f"it is neither installed nor in {os.getcwd()}; set PYTHONPATH to the folder that contains it"
        raise ValueError(f"no module {error.name!r} for {path!r}: {why}") from error
    except (Exception, SystemExit) as error:  # SystemExit: a script without `if __name__ == "__main__"`
        raise ValueError(f"the module {module_name!r} cannot be imported: {fault_in_your_code(error)}") from error
    if not hasattr(module, attribute):
        own = _own_names(module, is_candidate)
        near = difflib.get_close_matches(attribute, own, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"it defines {', '.join(own[:8]) or 'nothing to call'}"
        where = getattr(module, "__file__", None) or "without a file"
        raise ValueError(f"the module {module_name!r} ({where}) has no {attribute!r}; {hint}")
    return getattr(module, attribute)


def _own_names(module: Any, is_candidate: Callable[[Any], bool]) -> list[str]:
    """What the module itself defines; what it imports is left out."""
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (getattr(value, "__module__", None) == module.__name__ if callable(value) else is_candidate(value))
    ]
