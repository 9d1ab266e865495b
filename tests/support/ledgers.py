"""What many tests of engines do first: submit requests, and wait."""

from collections.abc import Sequence

from sortedrl.core.engine import Engine, Request
from sortedrl.testing.engine_contract import Ledger


def completed(engine: Engine, requests: Sequence[Request]) -> Ledger:
    """All requests have ended."""
    ledger = Ledger(engine)
    ledger.submit(requests)
    ledger.run()
    return ledger


def partly_generated(engine: Engine, requests: Sequence[Request], tokens: int, of: int = 4) -> Ledger:
    """The first requests, so many, have so many tokens each."""
    ledger = Ledger(engine)
    ledger.submit(requests)
    while min(len(ledger.tokens(request.id)) for request in requests[:of]) < tokens:
        ledger.apply(engine.poll())
    return ledger
