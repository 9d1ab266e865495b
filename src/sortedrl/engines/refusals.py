"""What engines refuse: requests that could never run, with the numbers in the reason, and calls at the wrong time."""

from __future__ import annotations

from collections.abc import Container, Sequence

from sortedrl.core.engine import Request
from sortedrl.core.wording import counted


def require_new(requests: Sequence[Request], inside: Container[int]) -> None:
    """Raise a ValueError if one of these requests is in the engine, or comes twice. `inside`: the ids in the engine."""
    seen: set[int] = set()
    for request in requests:
        if request.id in inside or request.id in seen:
            raise ValueError(f"request {request.id} is already in the engine: abort it first")
        seen.add(request.id)


def require_empty(inside: int, what: str) -> None:
    """Raise a RuntimeError if so many requests are in the engine: their KV would be lost, or of the old weights."""
    if inside:
        raise RuntimeError(f"{what} with {counted(inside, 'request')} in the engine: abort all first")


def refusal(request: Request, max_length: int, vocabulary: int) -> str | None:
    """Why the request cannot run within `max_length` tokens with this size of the vocabulary; None if it can."""
    prompt, kept = len(request.prompt.tokens), request.prefix_length
    if prompt == 0:
        return "the prompt is empty, but the model needs at least 1 token to continue from"
    if prompt + kept >= max_length:
        return (
            f"a prompt of {prompt} and a prefix of {kept} tokens leave no room for another token under "
            f"max_length = {max_length}: raise it to at least {prompt + kept + 1}"
        )
    if request.max_new_tokens < 1:
        return f"max_new_tokens = {request.max_new_tokens}: it must be at least 1"
    return unknown_token(request, vocabulary)


def unknown_token(request: Request, vocabulary: int) -> str | None:
    """The token id that the model does not have; None if it has all. One such id would end the engine or its server.

    Only the prompt and the environment's answers are checked: the rest was sampled by the engine itself.
    """
    answers = [("an answer of the environment", s.tokens) for s in request.prefix if s.is_environment]
    for what, tokens in (("the prompt", request.prompt.tokens), *answers):
        if len(tokens) and not (min(tokens) >= 0 and max(tokens) < vocabulary):
            bad = next(token for token in tokens if not 0 <= token < vocabulary)
            return f"{what} has token id {bad}, but the vocabulary size is {vocabulary}"
    return None
