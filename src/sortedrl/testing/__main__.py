"""The contract of engines on an engine of yours: `python -m sortedrl.testing your.module:factory`.

The factory takes the number of slots and returns an engine. Exit codes: 0 all rules kept, 1 some broken, 2 no factory.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

from sortedrl.core.errors import UserError
from sortedrl.testing.engine_contract import outcomes_of


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m sortedrl.testing", description="Check the contract of engines.")
    parser.add_argument("factory", metavar="MODULE:FACTORY", help="a function of the number of slots")
    parser.add_argument("--deterministic", action="store_true", help="equal seeds and weights give equal tokens")
    given = parser.parse_args(words)
    try:
        factory = imported(given.factory)
    except UserError as error:
        print(f"sortedrl.testing: {error}", file=sys.stderr)
        return 2
    broken = 0
    for rule, why in outcomes_of(factory, deterministic=given.deterministic):
        broken += bool(why)
        print(f"BROKEN  {rule}: {why}" if why else f"kept    {rule}", flush=True)
    print(f"{broken} rules broken" if broken else "all rules kept")
    return int(broken > 0)


def imported(path: str) -> Callable[[int], Any]:
    """`package.module:name`; modules in the current folder are found, too."""
    module_name, _, name = path.partition(":")
    sys.path.insert(0, "")
    try:
        found = getattr(importlib.import_module(module_name), name)
    except (ImportError, ValueError, AttributeError) as error:
        raise UserError(f"{path!r} is no factory: {error}. Name it as your.module:factory") from None
    if not callable(found):
        raise UserError(f"{path!r} is no factory: it cannot be called")
    factory: Callable[[int], Any] = found
    return factory


if __name__ == "__main__":
    sys.exit(main())
