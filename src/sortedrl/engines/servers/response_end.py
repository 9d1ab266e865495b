"""Where a response ends by our own rules: its EOS token, its stop strings, its `max_new_tokens`.

A server may send more, or end a stream without saying why.
"""

from __future__ import annotations

from sortedrl.engines.servers.dialect import Sent


def take(sent: Sent, tokens: list[int], eos: frozenset[int]) -> tuple[list[int], str | None]:
    """Store the tokens up to the end of the response; returns them, and the rule that ends it."""
    room = sent.room - len(sent.tokens)
    end = "length" if len(tokens) >= room else None
    tokens = tokens[:room]
    if not sent.request.sampling.ignore_eos and not eos.isdisjoint(tokens):
        count = next(place for place, token in enumerate(tokens, start=1) if token in eos)
        tokens, end = tokens[:count], "stop"
    if sent.stop_strings is None:
        sent.tokens += tokens
        return tokens, end
    for count, token in enumerate(tokens, start=1):
        sent.tokens.append(token)
        if sent.stop_strings.completed_by_last(sent.turn, sent.tokens):
            return tokens[:count], "stop"
    return tokens, end


def reached(sent: Sent, eos: frozenset[int]) -> str | None:
    """The end that the stored tokens have reached, if it is one that the server did not report."""
    if not sent.tokens:
        return None
    if sent.tokens[-1] in eos and not sent.request.sampling.ignore_eos:
        return "stop"
    return "length" if len(sent.tokens) >= sent.room else None
