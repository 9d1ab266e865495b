r"""Limits on the cost of an answer, checked before a computer algebra system sees it.

A short text can take astronomically long to evaluate: `9^{9^{9}}`, `99999999!`, 900 parentheses. These rules read the
text without evaluating anything, so that such answers cost no time. What they miss is stopped by the time limit of the
worker process (math.py). A complex reference raises the limits: an answer may be twice as complex as its reference.
"""

import re
from collections.abc import Callable

MAX_CHARACTERS = 500
BEYOND = 10**9  # represents everything above the limits
_NUMBER = re.compile(r"\d+", re.ASCII)
_TOWER = re.compile(
    r"\*\*|(?:[-+]\s*){4}"  # other notations, and signs that take the parser long
    r"|\^\s*[^\s{(]\s*\^|\^\s*[-+]"  # 9^9^9
    r"|\^\s*[{(][^{}()]*(?:\d\s*\^\s*(?!\s*\{?-?[a-zA-Z])|\^\s*[{(][^{}()]*\^|!|\\binom)"  # 9^{9^{9}}, e^{e^{e^9}}
    r"|\([^()]*[!^][^()]*\)\s*!|!\s*!|\\binom\s*\{[^{}]*(?:\\binom|\^|!)"  # (9!)!
)
Cost = Callable[[str], int]


def is_affordable(reference: str, answer: str) -> bool:
    """Whether the answer is within the limits, or at most twice as complex as its reference. Both are normalized."""
    answer, reference = (text.replace(r"\exp", " e^") for text in (answer, reference))
    return all((found := cost(answer)) <= limit or found <= 2 * cost(reference) for cost, limit in _LIMITS)


def _count(pattern: str) -> Cost:
    compiled = re.compile(pattern, re.ASCII)
    return lambda text: len(compiled.findall(text))


def _largest(pattern: str) -> Cost:
    """The largest number in the groups of the pattern's matches."""
    compiled = re.compile(pattern, re.ASCII)

    def cost(text: str) -> int:
        groups = (group for match in compiled.finditer(text) for group in match.groups() if group)
        numbers = (number for group in groups for number in _NUMBER.findall(group))
        return max((int(number) if len(number) < 10 else BEYOND for number in numbers), default=0)

    return cost


def _depth(text: str) -> int:
    depth = deepest = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    return deepest


_exponent = _largest(r"\^\s*(?:[{(]([^{}()]*)|(\d))")
_exponent_of_a_sum = _largest(r"\([^()]*[a-zA-Z][^()]*\)\s*\^\s*\{?\s*(\d+)")
_LIMITS: tuple[tuple[Cost, int], ...] = (
    (_count(r"\\[a-zA-Z]+|\d+|[^\s{}()]"), 120),  # numbers, letters, commands and signs
    (_depth, 5),  # of brackets of all kinds
    (lambda text: max(map(len, _NUMBER.findall(text)), default=0), 40),  # digits of the longest number
    (lambda text: BEYOND if _TOWER.search(text) else _exponent(text), 5_000),
    (lambda text: _exponent_of_a_sum(re.sub(r"\\[a-zA-Z]+", "", text)), 20),  # with letters: it may be expanded
    (_largest(r"(\d+)\s*!|\\binom\s*\{([^{}]*)\}"), 1_000),  # factorials and binomial coefficients
    (_count(r"\^"), 12),
    (_count(r"\\(?:sqrt|frac|binom)(?![a-zA-Z])"), 8),
    (_count(r"\\(?:log|ln|exp|(?:arc)?(?:sin|cos|tan|cot|sec|csc))(?![a-zA-Z])"), 3),
    (  # sums, integrals, limits ...: work that the response should have done
        _count(
            r"(?<!_)(?<!_\{)\\(?:sum|prod|i*nt|oint|lim|limsup|liminf|max|min|sup|inf|gcd|lcm|[bp]?mod|det|nabla|partial"
            r"|choose|(?:sin|cos|tan|cot)h)(?![a-zA-Z])|\\(?:zeta|Gamma)\s*\("
        ),
        0,
    ),
)
