r"""Mathematics: the last \boxed{...} of a response is compared with the reference answer.

Text and plain numbers are compared here directly; other answers go to math-verify, in processes that are killed if
sympy does not finish in time (the answer then counts as wrong). Answers that would take too long count as wrong without
trying (math_limits.py). A policy exploits every leniency, so anything not known to be equal is wrong. Equal are:

- the same text, after removing LaTeX spacing, sizes, currency, degrees and the like;
- numbers: exactly, if the reference is an integer or both are fractions; otherwise to 1 part in 100,000. A unit
  (units.py), a percent sign and a label (`x =`) are optional. Any other word or letter makes the answer wrong;
- lists in any order, but with the same number of elements;
- everything else as math-verify decides (expressions, intervals, sets, matrices, equations).
"""

import logging
import os
import re
import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from importlib.util import find_spec
from typing import Any

from sortedrl.settings.install_hint import install_hint
from sortedrl.tasks.datasets import Columns, Distinct, Source, read_problems, split_off
from sortedrl.tasks.math_limits import MAX_CHARACTERS, is_affordable
from sortedrl.tasks.task import Problem, Reward, SplitTask
from sortedrl.tasks.units import quantity
from sortedrl.tasks.workers import WorkerPool

INSTRUCTION = r"Think step by step, then give the final answer inside \boxed{}."
RELATIVE_TOLERANCE = Fraction(1, 100_000)
WORKER_MEMORY_BYTES = 4 * 2**30  # a tower of powers must not exhaust memory before its time is up
USUAL_COLUMNS = Columns(("problem", "question"), ("answer", "final_answer", "solution"))


@dataclass(frozen=True, slots=True)
class Preset:
    """A known dataset: its location on the hub. Without `train`, it is for evaluation only."""

    train: Source | None = None
    held_out: Source | None = None
    columns: Columns = USUAL_COLUMNS
    question_text: Callable[[str], str] = str.strip


def dapo_question(text: str) -> str:
    """The problem without the dataset's instructions, which are for another answer format."""
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


class Math(SplitTask):
    """Mathematical problems from files or the hub, by the columns of a preset or your own column names.

    `data` is for training, `held_out_data` for evaluation. By default both come from the preset on the hub; with only
    `data`, or a preset without evaluation data, `held_out_fraction` of the training problems is held out. A held-out
    question is never in `train`, even if the files overlap.
    """

    def __init__(
        self,
        preset: str = "",
        *,
        data: str | os.PathLike[str] | None = None,
        held_out_data: str | os.PathLike[str] | None = None,
        question_column: str | None = None,
        answer_column: str | None = None,
        held_out_fraction: float = 0.1,
        seed: int = 0,
        limit_seconds: float = 5.0,
    ) -> None:
        if preset not in PRESETS:
            raise ValueError(f"no preset {preset!r} for math; use one of {', '.join(filter(None, PRESETS))}")
        if find_spec("math_verify") is None:
            raise ValueError(f"math needs math-verify: {install_hint('math')}")
        self.name = f"math:{preset}" if preset else "math"
        known = PRESETS[preset]
        self._train_source = Source(os.fspath(data)) if data else known.train
        self._held_out_source = Source(os.fspath(held_out_data)) if held_out_data else None if data else known.held_out
        if not self._train_source and not self._held_out_source:
            raise ValueError("math needs problems: choose a preset (math:gsm8k) or set data=problems.jsonl")
        if data and not held_out_data and known.held_out and not known.train:
            file = os.fspath(data)
            raise ValueError(
                f"{self.name} is for evaluation only: pass {file} as held_out_data "
                f"(--task-options held_out_data {file})"
            )
        self._columns = Columns(
            question=(question_column,) if question_column else known.columns.question,
            answer=(answer_column,) if answer_column else known.columns.answer,
        )
        self._question_text = known.question_text
        self._held_out_fraction = held_out_fraction
        self._seed = seed
        self._limit_seconds = limit_seconds

    @cached_property
    def _verify(self) -> WorkerPool:
        """No process starts before the first call."""
        workers = max((os.cpu_count() or 1) // 2, 1)
        return WorkerPool(load_math_verify, workers=workers, limit_seconds=self._limit_seconds)

    def score(self, problem: Problem, response: str) -> Reward:
        answer = last_boxed(response)
        if answer is None:
            return Reward(0.0, False, {"boxed": 0.0})
        timed_out = False
        try:
            correct = self._equal(str(problem.answer), answer)
        except TimeoutError:
            correct, timed_out = False, True
        return Reward(float(correct), correct, {"boxed": 1.0, "timed_out": float(timed_out)})

    def _equal(self, reference: str, answer: str) -> bool:
        if len(answer) > max(MAX_CHARACTERS, len(reference)):  # it may be a loop of a million characters
            return reference == answer
        decided = compare_plainly(reference, answer)
        if isinstance(decided, bool):
            return decided
        return is_affordable(*decided) and bool(self._verify(*decided))

    @cached_property
    def _problems(self) -> tuple[Distinct, Distinct]:
        train = self._read(self._train_source) if self._train_source else Distinct(())
        if self._held_out_source is None:
            return split_off(train, self._held_out_fraction, self._seed)
        held_out = self._read(self._held_out_source)
        return Distinct(train, held_out), held_out

    def _read(self, source: Source) -> Distinct:
        name = f"{self.name}/{'train' if source is self._train_source else 'held-out'}"
        return read_problems(source, self._columns, name, INSTRUCTION, self._question_text, reference_answer)


def reference_answer(value: Any) -> str:
    r"""The answer in a dataset's column: after `####`, in the last \boxed{}, or the whole text; lists are joined."""
    if isinstance(value, list):
        return ", ".join(map(str, value))
    text = str(value)
    if "####" in text:
        return text.rsplit("####", 1)[1].strip()
    return (last_boxed(text) or text).strip()


def last_boxed(text: str) -> str | None:
    r"""The content of the last closed \boxed{...}; None if there is none. A single pass over the text."""
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


_SPACING = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"(?<=\d),\s*\\!\s*(?=\d)|(?<=\d)\{,\}(?=\d)", ","),  # thousands separator, as in 11,\!111
        (r"(?<!\\)\\[!,;:> ]|\\q?quad(?![a-zA-Z])|~|(?<!\\)\$", " "),
        (r"\s+", " "),
        (r"\\(?:left|right|displaystyle)(?![a-zA-Z])", ""),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\\(leq|geq)slant(?![a-zA-Z])", r"\\\1"),
        (r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![a-zA-Z]))|°|\\degree(?![a-zA-Z])", ""),
        (r"\\%", "%"),
    )
)
_REWRITES = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\(?:text|mbox|mathrm|textbf|mathbf)\s*\{([^{}]*)\}", r"\1"),
        (r",?\s+(?:and|or)\s+", ","),
        (r"\\\$", " "),
        (r"_\{(\w)\}", r"_\1"),
        (r"\bnp\.(?=[a-z])", r"\\"),  # functions in numpy notation
        # The parser would read these as Euler's number, the gamma function and the derivative of a constant.
        (r"(?<![a-zA-Z\\])[eE](?=_)", r"\\epsilon"),
        (r"\\gamma(?![a-zA-Z])", r"\\upsilon "),
        (r"\\frac\s*\{d\s*\\?([a-zA-Z]+)\}\s*\{d\s*([a-zA-Z])\}", r"d_{\1\2}"),
        (r"(?<=\d)\.(?![\d.])", ""),  # 1. is 1
        (r"(?<![\w.}])(\d*\.?\d+)[eE]([+-]?\d+)(?!\w)", r"\1 \\times 10^{\2}"),
        (r"^\((\w)\)$", r"\1"),  # the letter of a choice
        (r"^\\\{(.*)\\\}$", r"\1"),  # a set counts as a list
    )
)
_UNICODE = str.maketrans({"−": "-", "×": r"\times ", "·": r"\cdot ", "π": r"\pi "})


def spaced(answer: str) -> str:
    """The answer without spacing, sizes and degree signs; text markup is kept."""
    answer = answer.translate(_UNICODE)
    for pattern, replacement in _SPACING:
        answer = pattern.sub(replacement, answer)
    return answer.strip()


def normalized(answer: str) -> str:
    """The answer without purely visual markup: applied to reference and response alike."""
    answer = spaced(answer)
    for pattern, replacement in _REWRITES:
        answer = pattern.sub(replacement, answer)
    answer = re.sub(r"(?<![.,;\s])\s*[.,;]\s*$", "", answer).strip()
    thousands = re.match(r"[+-]?\d{1,3}(?:(?:,\d{3})+|(?: \d{3})+)(?![\d,])", answer, re.ASCII)
    return re.sub("[, ]", "", thousands.group()) + answer[thousands.end() :] if thousands else answer


def compare_plainly(reference: str, answer: str) -> bool | tuple[str, str]:
    """Whether two answers are equal. If only algebra can compare them, both in normalized form."""
    if any(character.isnumeric() and not character.isascii() for character in answer):
        return False  # digits of other scripts and superscripts: parsers disagree about them
    if _without_spaces(normalized(reference)) == _without_spaces(normalized(answer)):
        return True
    wanted, given = quantity(spaced(reference)), quantity(spaced(answer))
    if wanted.unit and given.unit and wanted.unit != given.unit and not (wanted.percent or given.percent):
        return False
    label, wanted_text = split_label(normalized(wanted.number))
    given_label, given_text = split_label(normalized(given.number))
    if label and given_label and label != given_label:
        return f"{label}={wanted_text}", f"{given_label}={given_text}"
    if wanted_text == given_text and wanted.scale == given.scale and wanted.percent == given.percent:
        return True
    if re.fullmatch(r"[A-Z]|[A-Za-z ]{3,}", wanted_text):
        return wanted_text.casefold() == given_text.casefold()
    wanted_number, given_number = _number(wanted_text, wanted.scale), _number(given_text, given.scale)
    if wanted_number is not None and given_number is not None:
        fractions = "." not in wanted_text + given_text
        return any(
            _close(a, b, exact=fractions or a.denominator == 1)
            for a, b in _readings(wanted_number, wanted.percent, given_number, given.percent)
        )
    if given.scale != 1 or wanted.scale != 1:
        return False
    if wanted_number is not None:
        return (wanted_text, given_text) if _is_arithmetic(given_text) else False
    if in_base := re.fullmatch(r"(\w+)_(?:\d|\{\d+\})", wanted_text):  # a response may omit the base
        return given_text == in_base.group(1)
    if not _may_be_equal(wanted_text, given_text):
        return False
    return wanted_text + "%" * wanted.percent, given_text + "%" * given.percent


def split_label(text: str) -> tuple[str, str]:
    r"""The label and the value of an answer: `x = 5`, `f(x) = 2x`, `x \in [0, 1]`, `x = 2, x = 3`.

    The label is ignored. It must have a letter, so `4 = 5` is not the answer 5; and only one is allowed, so `x = 4 = 5`
    is not an answer.
    """
    parts = [_LABELED.fullmatch(part.strip()) for part in _split_list(text)]
    labels = {part and part.group(1).replace(" ", "") for part in parts}
    if len(labels) == 1 and None not in labels:
        return str(labels.pop()), ",".join(part.group(2) for part in parts if part)
    alone = _LABELED.fullmatch(text)
    return (alone.group(1).replace(" ", ""), alone.group(2)) if alone else ("", text)


_LABELED = re.compile(
    r"(?=[^=]*[a-zA-Z])([^=<>,]{1,40}?)\s*(?:=|\\in(?![a-zA-Z])|\\approx(?![a-zA-Z]))\s*([^=]+)", re.ASCII
)


def _without_spaces(text: str) -> str:
    """Except between digits: `5 6` is not 56."""
    return re.sub(r"(?<!\d) | (?!\d)", "", text)


_ARITHMETIC = re.compile(r"(?:[-+*/^(){}.\de\s]|\\(?:frac|sqrt|cdot|times|div|pi)(?![a-zA-Z])|\\sqrt\[\d\])+", re.ASCII)


def _is_arithmetic(text: str) -> bool:
    """Whether it can be a number: no variables, relations, lists, bases, bounds or functions."""
    return bool(_ARITHMETIC.fullmatch(text)) and ".." not in text and not re.search(r"\d \d", text)


_FUNCTIONS = "sin|cos|tan|cot|sec|csc|log|ln|exp|sqrt"
_WORDS = re.compile(rf"\\[a-zA-Z]+|(?<![a-zA-Z])(?:{_FUNCTIONS}|[pbv]?matrix|i|e)(?![a-z])")
_RELATION = re.compile(
    r"=|<|>|\\(?:leq?|geq?|neq?|approx|equiv|sim|cong|in|to|implies|[Rr]ightarrow|l?or|vee)(?![a-zA-Z])"
)


def _may_be_equal(reference: str, answer: str) -> bool:
    """False if algebra cannot help: variables, relations or list elements that the reference does not have."""
    letters = set(re.findall(r"[a-zA-Z]", _WORDS.sub("", answer)))
    if not letters <= set(re.findall(r"[a-zA-Z]", reference)):
        return False
    if len(_RELATION.findall(answer)) > len(_RELATION.findall(reference)) or _is_unbalanced(answer):
        return False
    if any(reference.count(mark) != answer.count(mark) for mark in (r"\begin", "&")):
        return False
    return r"\pm" in reference + answer or len(_split_list(reference)) == len(_split_list(answer))


def _is_unbalanced(text: str) -> bool:
    """Whether a brace, escaped or not, is unclosed: the parser's behavior is then arbitrary."""
    return text.count("{") != text.count("}") or text.count(r"\{") != text.count(r"\}")


def _number(text: str, scale: int) -> Fraction | None:
    """The value of a plain or mixed number; None for anything else."""
    text = re.sub(r"\s*\\(?:times|cdot)\s*10\^(?:\{\s*([+-]?\d{1,4})\s*\}|(\d))$", r"e\1\2", text, flags=re.ASCII)
    text = re.sub(r"^([+-]?)\\frac\s*(?:\{(\d+)\}|(\d))\s*(?:\{(\d+)\}|(\d))$", r"\1\2\3/\4\5", text, flags=re.ASCII)
    mixed = re.fullmatch(r"([+-]?)(\d+) (\d+)/(\d+)", text, re.ASCII)
    if mixed and int(mixed.group(3)) < int(mixed.group(4)):
        sign, whole, above, below = mixed.groups()
        text = f"{sign}{int(whole) * int(below) + int(above)}/{below}"
    if not re.fullmatch(r"[+-]?(?:\d+/\d+|(?:\d+|\d*\.\d+)(?:e[+-]?\d{1,4})?)", text, re.ASCII):
        return None
    try:
        return Fraction(text) * scale
    except (ValueError, ZeroDivisionError):
        return None


def _readings(
    reference: Fraction, reference_percent: bool, value: Fraction, percent: bool
) -> Iterator[tuple[Fraction, Fraction]]:
    """Pairs to compare. A percent sign on one side only is a factor, or a unit that the other side omitted."""
    if reference_percent == percent:
        yield reference, value
    elif reference_percent:
        yield from ((reference, value), (reference / 100, value))
    else:
        yield reference, value / 100
        if abs(reference) >= 1:  # smaller values are more likely probabilities, and 0.5% is not 0.5
            yield reference, value


def _close(reference: Fraction, value: Fraction, exact: bool) -> bool:
    return reference == value or (not exact and abs(reference - value) <= RELATIVE_TOLERANCE * abs(reference))


def _split_list(text: str) -> list[str]:
    """The elements of a list, separated by commas outside of all brackets."""
    depth, elements = 0, [""]
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if character in ",;" and depth == 0:
            elements.append("")
        else:
            elements[-1] += character
    return elements


def load_math_verify() -> Callable[[str, str], bool]:
    """Runs in a worker process: compares two normalized answers by algebra."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limit is off
    resource.setrlimit(resource.RLIMIT_AS, (WORKER_MEMORY_BYTES, WORKER_MEMORY_BYTES))
    # Its unit removal mistakes the variables t, m and c for tonnes, meters and cents.
    latex = LatexExtractionConfig(
        normalization_config=NormalizationConfig(malformed_operators=True, nits=True, units=False)
    )

    def parsed(text: str) -> Any:
        """A sympy object, or the text if it cannot be parsed."""
        found = parse(rf"\boxed{{{text}}}", [latex], parsing_timeout=None)
        return found[0] if found else text

    def equal(reference: str, answer: str) -> bool:
        try:
            wanted, given = parsed(reference), parsed(answer)
            if isinstance(wanted, str) or isinstance(given, str) or _meaningless(wanted):
                return False  # the texts were compared before
            as_numbers = _compare_numbers(wanted, given)
            return bool(verify(wanted, given, timeout_seconds=None)) if as_numbers is None else as_numbers
        except Exception:  # any error in sympy just means that the answer is wrong
            return False

    if not equal("x + 1", "1 + x"):  # also loads the parser outside of the time limit
        raise RuntimeError("math-verify does not find x + 1 equal to 1 + x")
    return equal


def _meaningless(expression: Any) -> bool:
    """The parser's result for an answer that it does not understand, which would equal other such answers."""
    import sympy

    trivial = isinstance(expression, sympy.Eq) and expression.lhs == expression.rhs
    return trivial or bool(expression.has(sympy.zoo, sympy.nan))


def _compare_numbers(reference: Any, answer: Any) -> bool | None:
    """Compares two constants by value (math-verify treats anything below 1e-15 as 0); None for other expressions."""
    import sympy

    if not all(isinstance(one, sympy.Expr) and one.is_number for one in (reference, answer)):
        return None
    if not (reference.is_finite and answer.is_finite):
        return bool(reference == answer)
    exact = reference.is_Integer or not (reference.has(sympy.Float) or answer.has(sympy.Float))
    size, difference = (abs(one.doit().evalf(25)) for one in (reference, reference - answer))
    if not (size.is_comparable and difference.is_comparable):
        return None
    return bool(difference <= (size or 1) * (1e-12 if exact else float(RELATIVE_TOLERANCE)))
