"""What users pass and what their code returns: a dataset, a reward that can be trained on, an error in one line."""

import math
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any

from sortedrl.core.rollout import Prompt
from sortedrl.core.wording import kind_of

MAX_REWARD = 1e6  # absolute value: sums of larger squares could overflow float32
MAX_REASON_CHARACTERS = 300


def as_reward(value: Any, name: str = "the reward") -> float:
    """A number of any kind, or the one element of a tensor or an array, as a float that can be trained on.

    Anything else is a TypeError or a ValueError that names the type."""
    if type(value) is float and abs(value) <= MAX_REWARD:  # the common case, and isinstance(..., Real) is slow
        return value
    number = value
    if not isinstance(value, Real) and callable(getattr(value, "item", None)):
        try:
            number = value.item()
        except (ValueError, RuntimeError, TypeError):
            raise TypeError(f"{name} is {shown(value)} with several elements, not one number") from None
    if not isinstance(number, Real):
        raise TypeError(f"{name} is {shown(value)}, not a number{_hint(value)}")
    try:
        plain = float(number)
    except OverflowError:
        plain = math.inf
    if not math.isfinite(plain):
        raise ValueError(f"{name} is {plain} of type {type(value).__name__}, not a finite number")
    if abs(plain) > MAX_REWARD:
        raise ValueError(f"{name} is {plain:g} of type {type(value).__name__}, its size must be at most {MAX_REWARD:g}")
    return plain


def reason_of(error: BaseException) -> str:
    """An exception in one short line, even if its message raises an error."""
    name = type(error).__name__
    try:
        text = str(error)
    except BaseException as failure:
        return f"{name} (its message cannot be shown: {type(failure).__name__})"
    return one_line(f"{name}: {text}" if text else name)


def shown(value: Any) -> str:
    """A value for an error message: its type, and the value if that is short and safe to print."""
    kind = type(value).__name__
    if type(value) in (str, int, float, bool):
        part = value[:60] if isinstance(value, str) else value
        return f"{one_line(repr(part), 60)} of type {kind}"
    return "None" if value is None else f"a value of type {kind}"


def one_line(text: str, most: int = MAX_REASON_CHARACTERS) -> str:
    """Text for a log or a terminal: no line breaks, control characters or lone surrogates, limited in length."""
    words = " ".join(text[: 4 * most].split())
    plain = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in words)
    return plain if len(plain) <= most else f"{plain[: most - 3]}..."


def _hint(value: Any) -> str:
    kind = type(value).__name__
    if kind in ("coroutine", "async_generator"):
        return "; an async function is not awaited, make it a plain one"
    return "; use return, not yield" if kind == "generator" else ""


def check_dataset(dataset: Any) -> None:
    """Refuse what is no sequence of prompts. Raises TypeError or ValueError."""
    if isinstance(dataset, Mapping):  # such as a DatasetDict
        raise TypeError(f"the dataset is {kind_of(dataset)} with the keys {list(dataset)[:4]}: pass one value")
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise TypeError(f"the dataset is {kind_of(dataset)}: pass a sequence of Prompt, such as a list")
    if not len(dataset):
        raise ValueError("the dataset has no prompts: nothing to train on")
    if isinstance(dataset, list | tuple):  # any other one may tokenize a prompt when it is read
        for place, prompt in enumerate(dataset):
            _require_prompt(place, prompt)
        require_unique_ids("prompts", [prompt.id for prompt in dataset])


def _require_prompt(place: int, prompt: Any) -> None:
    if not isinstance(prompt, Prompt):
        raise TypeError(f"dataset[{place}] is {kind_of(prompt)}: make it a Prompt(id, token_ids, payload=answer)")
    if not isinstance(prompt.id, str):
        kind = type(prompt.id).__name__
        raise TypeError(f"dataset[{place}] has the id {prompt.id!r} of type {kind}: use text, as checkpoints are JSON")
    if isinstance(prompt.tokens, str | bytes):
        raise TypeError(f"dataset[{place}] has text in place of token ids: encode it with the tokenizer of the model")
    if not hasattr(prompt.tokens, "__len__"):
        raise TypeError(f"dataset[{place}] has {kind_of(prompt.tokens)} as its token ids: pass a list of them")
    if len(getattr(prompt.tokens, "shape", ())) > 1 or (len(prompt.tokens) and isinstance(prompt.tokens[0], list)):
        raise TypeError(f"dataset[{place}] has a batch in place of token ids: pass its row, as in input_ids[0]")


def require_unique_ids(what: str, ids: Iterable[str]) -> None:
    """Checkpoints and expected lengths refer to prompts by id. Raises ValueError."""
    seen: set[str] = set()
    for id in ids:
        if id in seen:
            raise ValueError(f"two {what} have the id {id!r}: ids must be unique")
        seen.add(id)
