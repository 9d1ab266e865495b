r"""Limits on the cost of an answer, checked before a computer algebra system sees it.

A short text can take astronomically long to evaluate: `9^{9^{9}}`, `99999999!`, 900 parentheses. These rules read the
text without evaluating anything, so that such answers cost no time. What they miss is stopped by the time limit of the
worker process (math.py). A complex reference raises the limits: an answer may be twice as complex as its reference.
"""

from __future__ import annotations

import re
from typing import NamedTuple

MAX_CHARACTERS = 500
BEYOND = 10**9  # represents everything above the limits
_NUMBER = re.compile(r"\d+", re.ASCII)
_TOKEN = re.compile(r"\\[a-zA-Z]+|\d+|[^\s{}()]", re.ASCII)
_EXPONENT = re.compile(r"\^\s*(?:[{(]([^{}()]*)|(\d))", re.ASCII)
_POWER_OF_A_SUM = re.compile(r"\([^()]*[a-zA-Z][^()]*\)\s*\^\s*\{?\s*(\d+)", re.ASCII)
_FACTORIAL = re.compile(r"(\d+)\s*!|\\binom\s*\{([^{}]*)\}", re.ASCII)
_HEAVY = re.compile(
    r"(?<!_)(?<!_\{)\\(?:sum|prod|i*nt|oint|lim|limsup|liminf|max|min|sup|inf|gcd|lcm|[bp]?mod|det|nabla|partial"
    r"|choose|(?:sin|cos|tan|cot)h)(?![a-zA-Z])|\\(?:zeta|Gamma)\s*\("
)
_ROOT = re.compile(r"\\(?:sqrt|frac|binom)(?![a-zA-Z])")
_TRANSCENDENTAL = re.compile(r"\\(?:log|ln|exp|(?:arc)?(?:sin|cos|tan|cot|sec|csc))(?![a-zA-Z])")
_TOWER = re.compile(
    r"\*\*|(?:[-+]\s*){4}"  # other notations, and signs that take the parser long
    r"|\^\s*[^\s{(]\s*\^|\^\s*[-+]"  # 9^9^9
    r"|\^\s*[{(][^{}()]*(?:\d\s*\^\s*(?!\s*\{?-?[a-zA-Z])|\^\s*[{(][^{}()]*\^|!|\\binom)"  # 9^{9^{9}}, e^{e^{e^9}}
    r"|\([^()]*[!^][^()]*\)\s*!|!\s*!|\\binom\s*\{[^{}]*(?:\\binom|\^|!)"  # (9!)!
)


class Cost(NamedTuple):
    """What makes an answer expensive to evaluate."""

    tokens: int  # numbers, letters, commands and signs
    depth: int  # of brackets of all kinds
    digits: int  # of the longest number
    exponent: int  # the largest number in one; BEYOND for powers of powers and the like
    symbolic_exponent: int  # of a bracket with letters: it may be expanded
    factorial: int  # the largest number in a factorial or binomial coefficient
    powers: int  # how many
    roots: int  # how many roots, fractions and binomial coefficients
    transcendental: int  # how many logarithms and trigonometric functions
    heavy_functions: int  # sums, integrals, limits ...: work that the response should have done


LIMITS = Cost(
    tokens=120,
    depth=5,
    digits=40,
    exponent=5_000,
    symbolic_exponent=20,
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
    without_commands = re.sub(r"\\[a-zA-Z]+", "", text)
    return Cost(
        tokens=len(_TOKEN.findall(text)),
        depth=_depth(text),
        digits=max(map(len, _NUMBER.findall(text)), default=0),
        exponent=BEYOND if _TOWER.search(text) else _largest(_EXPONENT, text),
        symbolic_exponent=_largest(_POWER_OF_A_SUM, without_commands),
        factorial=_largest(_FACTORIAL, text),
        powers=text.count("^"),
        roots=len(_ROOT.findall(text)),
        transcendental=len(_TRANSCENDENTAL.findall(text)),
        heavy_functions=len(_HEAVY.findall(text)),
    )


def _depth(text: str) -> int:
    depth = deepest = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    return deepest


def _largest(pattern: re.Pattern[str], text: str) -> int:
    """The largest number in the groups of the pattern's matches."""
    groups = (group for match in pattern.finditer(text) for group in match.groups() if group)
    numbers = (number for group in groups for number in _NUMBER.findall(group))
    return max((int(number) if len(number) < 10 else BEYOND for number in numbers), default=0)
