"""The contract of engines on an engine of yours: `python -m sortedrl.testing your.module:factory`.

The factory is that of `sortedrl train --engine`: it takes an EngineSpec and returns an engine. Exit codes: 0 all rules
kept, 1 some broken, 2 no factory.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from sortedrl.core.errors import UserError
from sortedrl.core.import_path import import_object
from sortedrl.core.wording import counted
from sortedrl.models import model_named
from sortedrl.settings.base import literal
from sortedrl.testing.engine_contract import EngineFactory, contract_spec, outcomes_of


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m sortedrl.testing", description="Check the contract of engines.")
    parser.add_argument("factory", metavar="MODULE:FACTORY", help="a function that takes an EngineSpec")
    parser.add_argument("--model", default="built-in", help="folder or hub name of a Hugging Face causal LM")
    parser.add_argument("--engine-urls", nargs="+", default=(), metavar="URL", help="servers, if the engine needs them")
    parser.add_argument("--engine-options", nargs="+", default=(), metavar="KEY VALUE", help="options of the engine")
    parser.add_argument("--deterministic", action="store_true", help="equal seeds and weights give equal tokens")
    given = parser.parse_args(words)
    try:
        factory = imported(given.factory)
        options = options_of(given.engine_options)
        spec = contract_spec(model=model_named(given.model), urls=tuple(given.engine_urls), options=options)
    except UserError as error:
        print(f"sortedrl.testing: {error}", file=sys.stderr)
        return 2
    broken = unchecked = 0
    for rule, why, skipped in outcomes_of(factory, spec=spec, deterministic=given.deterministic):
        broken, unchecked = broken + bool(why), unchecked + bool(skipped)
        print(
            f"BROKEN  {rule}: {why}" if why else f"skipped {rule}: {skipped}" if skipped else f"kept    {rule}",
            flush=True,
        )
    found = f"{counted(broken, 'rule')} broken" if broken else "all rules kept"
    print(f"{found}, {unchecked} not checked" if unchecked else found)
    return int(broken > 0)


def options_of(words: Sequence[str]) -> dict[str, Any]:
    if len(words) % 2:
        raise UserError(f"--engine-options {' '.join(words)}: a value is missing. Give pairs of KEY and VALUE")
    return dict(zip(words[::2], map(literal, words[1::2]), strict=True))


def imported(path: str) -> EngineFactory:
    try:
        found = import_object(path)
    except ValueError as error:
        raise UserError(f"no engine factory {path}: {error}") from None
    if not callable(found):
        raise UserError(f"{path} is not a function. Name one that takes an EngineSpec and returns an engine")
    factory: EngineFactory = found
    return factory


if __name__ == "__main__":
    sys.exit(main())
