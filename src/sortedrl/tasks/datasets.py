"""Reads problems from JSONL files, Parquet files and hub datasets by column name.

A column name is a dotted path inside the row: `answer`, `reward_model.ground_truth`, `prompt.0.content` (a number is a
position in a list).
"""

from __future__ import annotations

import importlib.util
import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sortedrl.core.wording import kind_of
from sortedrl.models.hub import prepare_hub
from sortedrl.settings.install_hint import install_hint
from sortedrl.tasks.task import Problem

Row = Mapping[str, Any]


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
