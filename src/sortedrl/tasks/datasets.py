"""Reads problems from JSONL files, Parquet files and hub datasets by column name.

A column name is a dotted path inside the row: `answer`, `reward_model.ground_truth`, `prompt.0.content` (a number is a
position in a list).

A resumed run finds problems and rows that changed since it started by their digests.
"""

import hashlib
import importlib.util
import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from sortedrl.core.wording import kind_of
from sortedrl.models import prepare_hub
from sortedrl.settings.install_hint import install_hint
from sortedrl.tasks.task import Problem

Row = Mapping[str, Any]
DIGITS = 8  # of a digest: a checkpoint has those of all problems, so that an error can name the one that changed


@dataclass(frozen=True, slots=True)
class Source:
    """The location of rows: a `.jsonl` or `.parquet` file, a folder of them, or the name of a hub dataset."""

    location: str
    split: str = "train"
    subset: str | None = None


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns of question and answer: for each, the first of these names that the row has."""

    question: tuple[str, ...]
    answer: tuple[str, ...]
    answer_is_optional: bool = False  # None for a row without one


def read_rows(source: Source) -> Iterator[Row]:
    """Iterate over the rows, so that a file may be larger than memory."""
    path = Path(source.location).expanduser()
    if path.suffix in (".jsonl", ".json"):
        return _read_jsonl(_existing_file(path))
    if path.suffix == ".parquet":
        return _read_parquet(_existing_file(path))
    if path.is_file():
        raise ValueError(f"cannot read {path}: the suffix {path.suffix!r} is not supported, use .jsonl or .parquet")
    return _read_hub(source)


class Distinct(list[Problem]):
    """Problems without a question twice; `left_out` were, or are in another part."""

    def __init__(self, problems: Iterable[Problem], excluded: Iterable[Problem] = ()) -> None:
        first: dict[str, Problem] = {}
        questions, count = {problem.question for problem in excluded}, 0
        for problem in problems:
            count += 1
            if problem.question not in questions:
                first.setdefault(problem.question, problem)
        super().__init__(first.values())
        self.left_out = count - len(first) + getattr(problems, "left_out", 0)

    def notice(self, kind: str) -> str | None:
        if not self.left_out:
            return None
        return f"{self.left_out} of {self.left_out + len(self)} {kind} repeat a question and are left out"


def read_problems(
    source: Source,
    columns: Columns,
    name: str,
    system: str,
    question_text: Callable[[str], str] = str,
    answer_of: Callable[[Any], Any] = lambda value: value,
) -> Distinct:
    """One problem per distinct question, in row order."""
    problems = []
    for number, row in enumerate(read_rows(source)):
        question = _value_of(row, columns.question)
        if question is None:
            raise _missing(row, columns.question, "question", source)
        question = question_text(str(question))
        answer = _value_of(row, columns.answer)
        if answer is None and not columns.answer_is_optional:
            raise _missing(row, columns.answer, "answer", source)
        problems.append(Problem(f"{name}/{number}", question, answer_of(answer), system))
    if not problems:
        raise ValueError(f"{source.location} has no rows: nothing to train or evaluate on")
    return Distinct(problems)


def split_off(problems: Distinct, share: float, seed: int) -> tuple[Distinct, Distinct]:
    """Training and held-out problems: a fraction `share`, at least one, is held out at random by `seed`."""
    if not 0 < share < 1:
        raise ValueError(f"held_out_fraction is {share}: it must be between 0 and 1, for example 0.1")
    if len(problems) < 2:
        raise ValueError(f"cannot hold out a fraction of {len(problems)} problem: set held_out_data")
    count = min(max(round(share * len(problems)), 1), len(problems) - 1)
    chosen = set(random.Random(seed).sample(range(len(problems)), count))
    train = Distinct(problem for index, problem in enumerate(problems) if index not in chosen)
    train.left_out = problems.left_out
    return train, Distinct(problems[index] for index in sorted(chosen))


def _existing_file(path: Path) -> Path:
    if path.is_file():
        return path
    beside = sorted(other.name for other in path.parent.glob(f"*{path.suffix}"))
    raise ValueError(f"no such file: {path}" + (f"; {path.parent} has {', '.join(beside[:8])}" if beside else ""))


def _read_jsonl(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}, line {number} is not JSON: {error}; use one object per line") from error
            if not isinstance(row, dict):
                raise ValueError(f"{path}, line {number} is {kind_of(row)} instead of an object")
            yield row


def _read_parquet(path: Path) -> Iterator[Row]:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise ValueError(f"reading {path} needs pyarrow: {install_hint('data')}") from error
    for batch in parquet.ParquetFile(path).iter_batches():
        yield from batch.to_pylist()


def _read_hub(source: Source) -> Iterator[Row]:
    if importlib.util.find_spec("datasets") is None:
        raise ValueError(f"loading {source.location} needs datasets: {install_hint('data')}")
    is_reachable = prepare_hub()
    import datasets

    datasets.config.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE or not is_reachable
    try:
        rows = datasets.load_dataset(source.location, source.subset, split=source.split)
    except Exception as error:  # the library raises a dozen types, all of which mean that it was not loaded
        why = f"{type(error).__name__}: {str(error).splitlines()[0]}" if is_reachable else "it cannot be reached"
        raise ValueError(
            f"there is no such file, and split {source.split!r} of {source.location!r} could not be loaded from the "
            f"Hugging Face hub ({why}); name a .jsonl or .parquet file, or a dataset on the hub"
        ) from error
    return iter(rows)


def _value_of(row: Row, names: Sequence[str]) -> Any:
    """The value of the first of these columns that the row has; None if it has none."""
    return next((value for name in names if (value := _at(row, name)) is not None), None)


def _missing(row: Row, names: Sequence[str], what: str, source: Source) -> ValueError:
    return ValueError(
        f"{source.location} has no {what} column {' or '.join(map(repr, names))}; "
        f"its columns are {', '.join(map(repr, row))}: choose one with {what}_column"
    )


def _at(value: Any, path: str) -> Any:
    """The value at a dotted path; None if there is none."""
    for part in path.split("."):
        if isinstance(value, Mapping):
            value = value.get(part)
        elif isinstance(value, Sequence) and not isinstance(value, str) and part.isdigit():
            value = value[int(part)] if int(part) < len(value) else None
        else:
            return None
    return value


# Digests


def digests(problems: Iterable[Any]) -> str:
    """`DIGITS` hexadecimal digits per problem, equal in every process for equal content."""
    return "".join(map(_digest, problems))


def why_changed(names: Sequence[str], now: str, before: str, what: str) -> str | None:
    """How the problems with these names and digests differ from earlier ones; None if they do not."""
    old, new = _split(before), _split(now)
    if len(old) != len(new):
        return f"there are {len(new)} {what}, but there were {len(old)} when the run started"
    changed = [name for name, was, is_now in zip(names, old, new, strict=True) if was != is_now]
    if not changed:
        return None
    if sorted(old) == sorted(new):
        return f"the {what} are in another order than when the run started"
    return f"{len(changed)} of {len(new)} {what} changed since the run started, the first is {changed[0]!r}"


def _split(text: str) -> list[str]:
    return [text[place : place + DIGITS] for place in range(0, len(text), DIGITS)]


def _digest(problem: Any) -> str:
    try:
        content = _content(problem)
    except RecursionError:  # an answer that contains itself: only the texts count
        content = tuple(text for text in _values(problem) if isinstance(text, str))
    data = repr(content).encode("utf-8", "backslashreplace")
    return hashlib.blake2b(data, digest_size=DIGITS // 2).hexdigest()


def _values(problem: Any) -> list[Any]:
    return [getattr(problem, field.name) for field in fields(problem)] if is_dataclass(problem) else []


def _content(value: Any) -> Any:
    """The value, made of types whose text is the same in every process.

    The text of any other object may contain its address or the order of a set, so only its type counts.
    """
    if value is None or isinstance(value, str | bytes | bool | int | float):
        return value
    if isinstance(value, Enum):
        return type(value).__name__, value.name
    if isinstance(value, Mapping):
        return dict, sorted((repr(_content(key)), _content(inner)) for key, inner in value.items())
    if isinstance(value, list | tuple):
        return [_content(inner) for inner in value]
    if isinstance(value, set | frozenset):
        return set, sorted(repr(_content(inner)) for inner in value)
    if is_dataclass(value):
        return type(value).__name__, [_content(inner) for inner in _values(value)]
    if callable(as_list := getattr(value, "tolist", None)):  # numbers and arrays of numpy and torch
        return _content(as_list())
    return type(value).__name__
