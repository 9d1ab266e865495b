"""A calculator as a tool: arithmetic on numbers, with limits on the size of results."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable

MAX_CHARACTERS = 200
MAX_DIGITS = 50  # of a result
_BINARY: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: dict[type[ast.unaryop], Callable[[float], float]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression.

    Args:
        expression: Numbers with + - * / // % ** and parentheses, for example (3 + 4) * 12.
    """
    if len(expression) > MAX_CHARACTERS:
        raise ValueError(f"the expression has {len(expression)} characters; the maximum is {MAX_CHARACTERS}")
    try:
        parsed = ast.parse(expression.strip(), mode="eval")
    except SyntaxError:
        raise ValueError(f"{expression!r} is not an arithmetic expression") from None
    value = _value(parsed.body)
    return str(int(value)) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else str(value)


def _value(node: ast.expr) -> float:
    match node:
        case ast.Constant(int() | float() as number) if not isinstance(number, bool):
            return number
        case ast.UnaryOp(operation, operand) if type(operation) in _UNARY:
            return _UNARY[type(operation)](_value(operand))
        case ast.BinOp(left, operation, right) if type(operation) in _BINARY:
            return _applied(operation, _value(left), _value(right))
    raise ValueError(f"{ast.unparse(node)!r} is not arithmetic")


def _applied(operation: ast.operator, left: float, right: float) -> float:
    if isinstance(operation, ast.Pow) and (abs(right) > MAX_DIGITS or abs(left) > 10**MAX_DIGITS):
        raise ValueError("the power is too large")
    value = _BINARY[type(operation)](left, right)
    if isinstance(value, complex):
        raise ValueError("the result is not a real number")
    if abs(value) > 10**MAX_DIGITS:
        raise ValueError(f"the result has more than {MAX_DIGITS} digits")
    return value
