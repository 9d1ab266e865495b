r"""Mathematics: the last \boxed{...} of a response is compared with the reference answer.

Text and plain numbers are compared here, at once; what is left goes to math-verify, in processes that
are killed when sympy does not come back in time (such an answer counts as wrong). What counts as equal:

- the same text, once LaTeX spacing, sizes, currency, degrees, units in \text{} and the like are taken away;
- numbers: exactly, if the reference is whole or both are fractions; else to 1 part in 100,000. A unit in
  words and a percent sign may be there or not;
- lists without regard to order, but with the same number of elements;
- everything else as math-verify decides (expressions, intervals, sets, matrices, equations).
"""

from __future__ import annotations

import logging
import os
import re
import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from importlib.util import find_spec
from typing import Any

from sortedrl.tasks.datasets import Columns, Source, read_problems, split_off, without
from sortedrl.tasks.task import Problem, Verdict
from sortedrl.tasks.workers import WorkerPool

INSTRUCTION = r"Think step by step, then give the final answer inside \boxed{}."
RELATIVE_TOLERANCE = Fraction(1, 100_000)
MAX_ANSWER_CHARACTERS = 2000  # longer ones are loops of a model, and only cost time
WORKER_MEMORY_BYTES = 4 * 2**30  # a tower of powers must not eat the machine before its time is up
USUAL_COLUMNS = Columns(("problem", "question"), ("answer", "final_answer", "solution"))


@dataclass(frozen=True, slots=True)
class Preset:
    """A known dataset: where the hub has it. Without `train` it is for evaluation only."""

    train: Source | None = None
    held_out: Source | None = None
    columns: Columns = USUAL_COLUMNS
    question_text: Callable[[str], str] = str.strip


def dapo_question(text: str) -> str:
    """The problem alone: the dataset wraps it into instructions for another answer format."""
    paragraphs = text.strip().split("\n\n")
    if paragraphs[0].startswith("Solve the following math problem"):
        paragraphs = paragraphs[1:]
    if paragraphs and paragraphs[-1].startswith("Remember to put your answer"):
        paragraphs = paragraphs[:-1]
    return "\n\n".join(paragraphs).strip()


PRESETS = {
    "": Preset(),
    "dapo": Preset(
        train=Source("BytedTsinghua-SIA/DAPO-Math-17k"),
        columns=Columns(("prompt.0.content",), ("reward_model.ground_truth",)),
        question_text=dapo_question,
    ),
    "gsm8k": Preset(Source("openai/gsm8k", "train", "main"), Source("openai/gsm8k", "test", "main")),
    "math500": Preset(held_out=Source("HuggingFaceH4/MATH-500", "test")),
    "minerva": Preset(held_out=Source("math-ai/minervamath", "test")),
    "olympiadbench": Preset(held_out=Source("Hothan/OlympiadBench", "train", "OE_TO_maths_en_COMP")),
    "aime24": Preset(held_out=Source("HuggingFaceH4/aime_2024", "train")),
    "amc23": Preset(held_out=Source("math-ai/amc23", "test")),
}


class Math:
    """Mathematical problems from files or the hub, by the columns of a preset or by column names of your own.

    `data` is trained on, `held_out_data` is evaluated on. What is not given is the preset's own on the hub;
    with `data` alone, or a preset that has nothing to evaluate on, `held_out_share` of the training problems
    is held out. A question that is held out is not in `train`, even if the files overlap.
    """

    def __init__(
        self,
        preset: str = "",
        *,
        data: str | os.PathLike[str] | None = None,
        held_out_data: str | os.PathLike[str] | None = None,
        question_column: str | None = None,
        answer_column: str | None = None,
        held_out_share: float = 0.1,
        seed: int = 0,
        limit_seconds: float = 5.0,
    ) -> None:
        if preset not in PRESETS:
            raise ValueError(f"no preset {preset!r} for math; there are {', '.join(filter(None, PRESETS))}")
        if find_spec("math_verify") is None:
            raise ValueError("math needs math-verify: pip install 'sortedrl[math]'")
        self.name = f"math:{preset}" if preset else "math"
        known = PRESETS[preset]
        self._train_source = Source(os.fspath(data)) if data else known.train
        self._held_out_source = Source(os.fspath(held_out_data)) if held_out_data else None if data else known.held_out
        if not self._train_source and not self._held_out_source:
            raise ValueError("math needs problems: name a preset (math:gsm8k) or give data=problems.jsonl")
        if data and not held_out_data and known.held_out and not known.train:
            raise ValueError(f"{self.name} is for evaluation only: give {os.fspath(data)} as held_out_data")
        self._columns = Columns(
            question=(question_column,) if question_column else known.columns.question,
            answer=(answer_column,) if answer_column else known.columns.answer,
        )
        self._question_text = known.question_text
        self._held_out_share = held_out_share
        self._seed = seed
        self._verify = WorkerPool(
            load_math_verify, workers=max((os.cpu_count() or 1) // 2, 1), limit_seconds=limit_seconds
        )

    def train(self) -> Sequence[Problem]:
        return self._problems[0]

    def held_out(self) -> Sequence[Problem]:
        return self._problems[1]

    def score(self, problem: Problem, response: str) -> Verdict:
        answer = last_boxed(response)
        if answer is None:
            return Verdict(0.0, False, {"boxed": 0.0})
        timed_out = False
        try:
            correct = self._equal(str(problem.answer), answer)
        except TimeoutError:
            correct, timed_out = False, True
        return Verdict(float(correct), correct, {"boxed": 1.0, "timed_out": float(timed_out)})

    def _equal(self, reference: str, answer: str) -> bool:
        if len(answer) > MAX_ANSWER_CHARACTERS:
            return reference == answer
        reference, answer = normalised(reference), normalised(answer)
        decided = compare_plainly(reference, answer)
        return bool(self._verify(reference, answer)) if decided is None else decided

    @cached_property
    def _problems(self) -> tuple[list[Problem], list[Problem]]:
        train = self._read(self._train_source) if self._train_source else []
        if self._held_out_source is None:
            return split_off(train, self._held_out_share, self._seed)
        held_out = self._read(self._held_out_source)
        return without(train, held_out), held_out

    def _read(self, source: Source) -> list[Problem]:
        name = f"{self.name}/{'train' if source is self._train_source else 'held-out'}"
        problems = read_problems(source, self._columns, name, INSTRUCTION, self._question_text)
        return [
            Problem(problem.id, problem.question, reference_answer(problem.answer), problem.system)
            for problem in problems
        ]


def reference_answer(value: Any) -> str:
    r"""The answer in a dataset's column: after `####`, in the last \boxed{}, or all; a list is joined."""
    if isinstance(value, list):
        return ", ".join(map(str, value))
    text = str(value)
    if "####" in text:
        return text.rsplit("####", 1)[1].strip()
    return (last_boxed(text) or text).strip()


def last_boxed(text: str) -> str | None:
    r"""The content of the last \boxed{...} that is closed; None if there is none. One pass, however long."""
    open_braces: list[re.Match[str]] = []
    last: re.Match[str] | None = None
    content = None
    for token in re.finditer(r"\\boxed\{|\\.|[{}]", text, re.DOTALL):
        if token.group() in ("{", r"\boxed{"):
            open_braces.append(token)
        elif token.group() == "}" and open_braces:
            opened = open_braces.pop()
            if opened.group() != "{" and (last is None or opened.start() > last.start()):
                last, content = opened, text[opened.end() : token.start()].strip()
    return content


_REWRITES = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"(?<=\d),\s*\\!\s*(?=\d)|(?<=\d)\{,\}(?=\d)", ","),  # the thousands of 11,\!111
        (r"(?<!\\)\\[!,;:> ]|\\q?quad(?![a-zA-Z])|~", " "),
        (r"\s+", " "),
        (r"\\(?:left|right|displaystyle)(?![a-zA-Z])", ""),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\\(leq|geq)slant(?![a-zA-Z])", r"\\\1"),
        # a unit at the end
        (r"(?<=[\w})\]])\s*\\(?:text|mbox|mathrm)\s*\{(?!\s*(?:and|or)\b)[^{}]*\}(?:\^\{?\d\}?)?\s*$", ""),
        (r"\\(?:text|mbox|mathrm|textbf|mathbf)\s*\{([^{}]*)\}", r"\1"),
        (r",?\s+(?:and|or)\s+", ","),
        (r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![a-zA-Z]))|°|\\degree(?![a-zA-Z])", ""),
        (r"\\?\$", ""),
        (r"\\%", "%"),
        (r"_\{(\w)\}", r"_\1"),
        (r"\bnp\.(?=[a-z])", r"\\"),  # functions in the notation of numpy
        # What the parser takes for Euler's number, the gamma function and the derivative of a constant.
        (r"(?<![a-zA-Z\\])[eE](?=_)", r"\\epsilon"),
        (r"\\gamma(?![a-zA-Z])", r"\\upsilon "),
        (r"\\frac\s*\{d\s*\\?([a-zA-Z]+)\}\s*\{d\s*([a-zA-Z])\}", r"d_{\1\2}"),
        (r"(?<=\d)\.(?!\d)", ""),  # 1. is 1
        (r"(?<![\w.}])(\d*\.?\d+)[eE]([+-]?\d+)(?!\w)", r"\1 \\times 10^{\2}"),
        (r"^\((\w)\)$", r"\1"),  # the letter of a choice
        (r"^\\\{(.*)\\\}$", r"\1"),  # a set is a list here
    )
)


def normalised(answer: str) -> str:
    """The answer without what changes its looks only: applied to reference and response alike."""
    for pattern, replacement in _REWRITES:
        answer = pattern.sub(replacement, answer)
    answer = answer.strip().rstrip(" .,;")
    thousands = re.match(r"[+-]?\d{1,3}(?:,\d{3})+(?![\d,])", answer)
    return thousands.group().replace(",", "") + answer[thousands.end() :] if thousands else answer


def compare_plainly(reference: str, answer: str) -> bool | None:
    """Whether two normalised answers are equal, where that shows without algebra; else None."""
    if reference.replace(" ", "") == answer.replace(" ", ""):
        return True
    if re.fullmatch(r"[A-Za-z ]{3,}", reference):
        return reference.casefold() == answer.casefold()
    if wanted := _numbers(reference):
        without_unit = re.sub(r"(?<=\d)\s*[a-zA-Z]{2}[a-zA-Z /]*(?:\^\{?-?\d\}?)?$", "", answer)
        if given := _numbers(without_unit):
            fractions = "." not in reference + answer
            return any(_close(a, b, exact=fractions or a.denominator == 1) for a in wanted for b in given)
    if in_base := re.fullmatch(r"(\w+)_(?:\d|\{\d+\})", reference):  # a response may leave the base out
        return answer == in_base.group(1)
    if r"\pm" not in reference + answer and _elements(reference) != _elements(answer):
        return False
    return None


def _numbers(text: str) -> list[Fraction]:
    """The value of a plain number (two where a percent sign may count or not); empty for anything else."""
    text, percent = text.removesuffix("%").strip(), text.endswith("%")
    text = re.sub(r"\s*\\(?:times|cdot)\s*10\^(?:\{\s*([+-]?\d{1,4})\s*\}|(\d))$", r"e\1\2", text)
    text = re.sub(r"^([+-]?)\\frac\s*(?:\{(\d+)\}|(\d))\s*(?:\{(\d+)\}|(\d))$", r"\1\2\3/\4\5", text)
    if not re.fullmatch(r"[+-]?(?:\d+/\d+|(?:\d+|\d*\.\d+)(?:e[+-]?\d{1,4})?)", text):
        return []
    try:
        value = Fraction(text)
    except (ValueError, ZeroDivisionError):
        return []
    return [value, value / 100] if percent else [value]


def _close(reference: Fraction, value: Fraction, exact: bool) -> bool:
    return reference == value or (not exact and abs(reference - value) <= RELATIVE_TOLERANCE * abs(reference))


def _elements(text: str) -> int:
    """How many elements a list has: commas outside of all brackets, and one."""
    depth, commas = 0, 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        commas += character in ",;" and depth == 0
    return commas + 1


def load_math_verify() -> Callable[[str, str], bool]:
    """Runs in a worker process: the comparison of two normalised answers by algebra."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limit is off
    resource.setrlimit(resource.RLIMIT_AS, (WORKER_MEMORY_BYTES, WORKER_MEMORY_BYTES))
    # Its removal of units takes the variables t, m and c for tonnes, metres and cents.
    latex = LatexExtractionConfig(
        normalization_config=NormalizationConfig(malformed_operators=True, nits=True, units=False)
    )

    def parsed(text: str) -> Any:
        """A sympy object, or the text where there is none."""
        found = parse(rf"\boxed{{{text}}}", [latex], parsing_timeout=None)
        return found[0] if found else text

    def equal(reference: str, answer: str) -> bool:
        try:
            wanted, given = parsed(reference), parsed(answer)
            if isinstance(wanted, str) or isinstance(given, str) or _meaningless(wanted):
                return False  # the texts were compared before
            as_numbers = _compare_numbers(wanted, given)
            return bool(verify(wanted, given, timeout_seconds=None)) if as_numbers is None else as_numbers
        except Exception:  # whatever sympy raises about an answer, the answer is no more than wrong
            return False

    if not equal("x + 1", "1 + x"):  # also loads the parser, which does not count toward the limit either
        raise RuntimeError("math-verify does not find x + 1 equal to 1 + x")
    return equal


def _meaningless(expression: Any) -> bool:
    """What the parser makes of an answer that it does not understand: it would equal other such answers."""
    import sympy

    trivial = isinstance(expression, sympy.Eq) and expression.lhs == expression.rhs
    return trivial or bool(expression.has(sympy.zoo, sympy.nan))


def _compare_numbers(reference: Any, answer: Any) -> bool | None:
    """Two constants by their values (math-verify takes all that is below 1e-15 for 0); None for others."""
    import sympy

    if not all(isinstance(one, sympy.Expr) and one.is_number for one in (reference, answer)):
        return None
    exact = reference.is_Integer or not (reference.has(sympy.Float) or answer.has(sympy.Float))
    size, difference = (abs(one.doit().evalf(25)) for one in (reference, reference - answer))
    if not (size.is_comparable and difference.is_comparable):
        return None
    return bool(difference <= (size or 1) * (1e-12 if exact else float(RELATIVE_TOLERANCE)))
