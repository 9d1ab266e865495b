"""Requests that an engine refuses immediately because they could never run, with the numbers in the reason."""

from __future__ import annotations

from sortedrl.core.engine import Request


def refusal(request: Request, max_length: int) -> str | None:
    """Why the request does not fit into `max_length` tokens; None if it does."""
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
    return None
