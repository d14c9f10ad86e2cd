"""The value of an expression of a stranger, exactly: Python parses it, nothing is evaluated."""

from __future__ import annotations

import ast
import operator
from fractions import Fraction

LONGEST = 400  # characters; a longer expression is not computed
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


def value(text: str) -> Fraction | None:
    """The value of numbers with + - * / and brackets, as Python writes numbers; None of anything
    else, and of a division by zero. The terms of a fraction have at most about as many digits as
    the text."""
    try:
        return _computed(ast.parse(text, mode="eval").body) if len(text) <= LONGEST else None
    except (SyntaxError, ValueError, KeyError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _computed(node: ast.AST) -> Fraction:
    if isinstance(node, ast.Constant) and not isinstance(node.value, str):
        return Fraction(str(node.value))
    if isinstance(node, ast.UnaryOp):
        return _OPERATORS[type(node.op)](_computed(node.operand))
    if isinstance(node, ast.BinOp):
        return _OPERATORS[type(node.op)](_computed(node.left), _computed(node.right))
    raise KeyError(type(node))
