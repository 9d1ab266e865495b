r"""Limits on the cost of an answer, checked before a computer algebra system sees it.

A short text can take astronomically long to evaluate: `9^{9^{9}}`, `(9999!)!`, 900 parentheses. `measure` reads the
text once, without evaluating anything, and `is_affordable` compares it with limits. A complex reference raises the
limits: an answer may be twice as complex as its reference.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_OPEN, _CLOSE = "([{", ")]}"
_NUMBER = re.compile(r"\d+", re.ASCII)
_HEAVY = re.compile(
    r"(?<!_)(?<!_\{)\\(?:sum|prod|i*nt|oint|lim|limsup|liminf|max|min|sup|inf|gcd|lcm|[bp]?mod|det|nabla|partial"
    r"|(?:sin|cos|tan|cot)h)(?![a-zA-Z])|\\(?:zeta|Gamma)\s*\("
)
_ROOT = re.compile(r"\\(?:sqrt|frac|binom)(?![a-zA-Z])")
_TRANSCENDENTAL = re.compile(r"\\(?:log|ln|exp|(?:arc)?(?:sin|cos|tan|cot|sec|csc))(?![a-zA-Z])")
_TOKEN = re.compile(r"\\[a-zA-Z]+|\d+|[^\s{}()]", re.ASCII)
_MANY_SIGNS = re.compile(r"(?:[-+]\s*){4}")
MAX_CHARACTERS = 500
BEYOND = 10**9  # represents everything above the limits


class Cost(NamedTuple):
    """Upper bounds on the cost of evaluating an answer."""

    tokens: int  # numbers, letters, commands and signs
    depth: int  # of brackets of all kinds
    digits: int  # of the longest number
    degree: int  # largest power of a number, powers of powers multiplied
    symbolic_degree: int  # largest power of a bracket with letters: it may be expanded
    factorial: int  # largest argument of a factorial or binomial coefficient
    powers: int  # how many
    roots: int  # how many roots, fractions and binomial coefficients
    transcendental: int  # how many logarithms and trigonometric functions
    heavy_functions: (
        int  # sums, integrals, limits, greatest common divisors ...: work that the response should have done
    )


LIMITS = Cost(
    tokens=120,
    depth=5,
    digits=40,
    degree=5_000,
    symbolic_degree=20,
    factorial=1_000,
    powers=12,
    roots=8,
    transcendental=3,
    heavy_functions=0,
)


def is_short(answer: str, reference: str) -> bool:
    """Check this before anything else: a response may be a loop of a million characters."""
    return len(answer) <= max(MAX_CHARACTERS, len(reference))


def is_affordable(answer: str, reference: str) -> bool:
    """Whether the answer is within the limits, or at most twice as complex as its reference. Both are normalized."""
    needed = measure(answer)
    if all(map(int.__le__, needed, LIMITS)):
        return True
    return all(need <= max(limit, 2 * own) for need, limit, own in zip(needed, LIMITS, measure(reference), strict=True))


def measure(text: str) -> Cost:
    text = text.replace(r"\exp", " e^")
    depth, powers = _depth(text), text.count("^")
    if depth > 50 or powers > 100 or "**" in text or _MANY_SIGNS.search(text):  # the code below is slow for these
        return Cost(*(BEYOND for _ in Cost._fields))
    partners = _partners(text)
    degree, symbolic_degree = _degrees(text, partners)
    transcendental = len(_TRANSCENDENTAL.findall(text))
    return Cost(
        tokens=len(_TOKEN.findall(text)),
        depth=depth,
        digits=max(map(len, _NUMBER.findall(text)), default=0),
        degree=degree * (50 if transcendental else 1),  # the sine of a large number needs all its digits
        symbolic_degree=symbolic_degree,
        factorial=_factorial(text, partners),
        powers=powers,
        roots=len(_ROOT.findall(text)),
        transcendental=transcendental,
        heavy_functions=len(_HEAVY.findall(text)),
    )


def _depth(text: str) -> int:
    depth = deepest = 0
    for character in text:
        depth += (character in _OPEN) - (character in _CLOSE)
        deepest = max(deepest, depth)
    return deepest


def _partners(text: str) -> dict[int, int]:
    """The position of each bracket's counterpart; brackets of different kinds may close each other."""
    partners: dict[int, int] = {}
    opened: list[int] = []
    for place, character in enumerate(text):
        if character in _OPEN:
            opened.append(place)
        elif character in _CLOSE and opened:
            start = opened.pop()
            partners[start], partners[place] = place, start
    return partners


def _degrees(text: str, partners: dict[int, int]) -> tuple[int, int]:
    """The largest power of a number and of a bracket with letters."""
    degree_at: dict[int, int] = {}  # by position of each ^: the product of its own power and those of its base
    symbolic = 0
    for match in re.finditer(r"\^", text):  # inner bases come first
        place = match.start()
        first, last = _base(text, place, partners)
        inner = max((degree for at, degree in degree_at.items() if first <= at < last), default=1)
        if "!" in text[first:last]:
            inner = max(inner, _factorial(text[first:last], _partners(text[first:last])))
        exponent = _exponent(text, place, partners)
        degree_at[place] = min(max(exponent, 1) * max(inner, 1), BEYOND)
        if last - first > 1 and re.search(r"[a-zA-Z]", re.sub(r"\\[a-zA-Z]+", "", text[first:last])):
            symbolic = max(symbolic, degree_at[place])
    return max(degree_at.values(), default=0), symbolic


def _base(text: str, place: int, partners: dict[int, int]) -> tuple[int, int]:
    """Start and end of the base of the power at `place`: a bracket, or one character."""
    last = len(text[:place].rstrip())
    if not last:
        return 0, 0
    if text[last - 1] in _CLOSE:
        first = partners.get(last - 1, 0)
        return (last - 1, last) if text[:first].endswith("_") else (first, last)
    if text[last - 1].isalnum() and not re.search(r"\\r[a-z]+$", text[:last]):
        return last - 1, last
    return 0, last  # |...|, a floor, another power: everything before it


def _exponent(text: str, place: int, partners: dict[int, int]) -> int:
    """A bound on the exponent after `place`: the product of its numbers, or BEYOND if it has powers of numbers."""
    first, last = _group(text, place + 1, partners)
    content = text[first:last]
    if text[last:].lstrip().startswith("^") or content in ("-", "+"):  # 9^9^9, 9^-9^9
        return BEYOND
    if "!" in content or r"\binom" in content or content.count("^") > 1:
        return BEYOND
    if re.search(r"[\d)}\]]\s*\^", content) and not re.search(r"\^\s*(?:[a-zA-Z]|\{\s*-?[a-zA-Z]\s*\})", content):
        return BEYOND
    fraction = re.fullmatch(r"[{(]?\s*-?\s*(\d+)\s*/\s*\d+\s*[})]?", content, re.ASCII)
    return _product(fraction.group(1) if fraction else content)


def _group(text: str, place: int, partners: dict[int, int]) -> tuple[int, int]:
    """Start and end of the argument after `place`: a bracket, or one character."""
    first = place + len(text[place:]) - len(text[place:].lstrip())
    if first >= len(text):
        return len(text), len(text)
    return first, partners.get(first, first) + 1 if text[first] in _OPEN else first + 1


def _factorial(text: str, partners: dict[int, int]) -> int:
    """The largest argument of a factorial or binomial coefficient."""
    largest = 0
    for match in re.finditer(r"(\d*)\s*!", text, re.ASCII):
        last = len(text[: match.start()].rstrip())
        if match.group(1):
            largest = max(largest, _product(match.group(1)))
        elif last and text[last - 1] in _CLOSE:
            largest = max(largest, _argument(text[partners.get(last - 1, 0) : last]))
        elif not last or not text[last - 1].isalpha():  # including another factorial
            return BEYOND
    for match in re.finditer(r"\\binom", text):
        upper = _group(text, match.end(), partners)
        lower = _group(text, upper[1], partners)
        largest = max(largest, *(_argument(text[first:last]) for first, last in (upper, lower)))
    return BEYOND if r"\choose" in text else largest


def _argument(text: str) -> int:
    return BEYOND if "^" in text or "!" in text else _product(text)


def _product(text: str) -> int:
    """A bound on all integers in a text: no sum or product of them is larger."""
    product = 1
    for number in _NUMBER.findall(text):
        product *= max(int(number[:10]), 2) if len(number) < 10 else BEYOND
        if product >= BEYOND:
            return BEYOND
    return product
