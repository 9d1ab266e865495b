"""What an engine refuses at once, with the numbers: a request that could never run, however empty the engine is."""

from __future__ import annotations

from sortedrl.core.engine import Request


def refusal(request: Request, max_length: int) -> str | None:
    """Why the request does not fit an engine for contexts of `max_length` tokens; None if it does."""
    prompt, kept = len(request.prompt.tokens), request.prefix_length
    if prompt == 0:
        return "the prompt has no tokens, and the model needs at least 1 to continue from"
    if prompt + kept >= max_length:
        return (
            f"a prompt of {prompt} and a kept response of {kept} tokens leave no room for a token under "
            f"max_length = {max_length}: raise it to at least {prompt + kept + 1}"
        )
    if request.max_new_tokens < 1:
        return f"max_new_tokens = {request.max_new_tokens}: at least 1 token must be left to make"
    return None
