"""Mutants of arithmetic, as cosmic-ray's operators make them.

Its operators alone: its runner rewrites the files of the tree that it runs in, and starts a Python
for each mutant, whose import of torch takes longer than the tests. (mutmut leaves out all functions
with a decorator: each property, and all that is a ``contextmanager``.)
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from itertools import takewhile
from typing import Any

from scripts.mutants.mutant import Edit, Source

#: For each of Python's operators, by what cosmic-ray replaces it here; it knows all pairs.
_BINARY = (
    *("Add_Sub", "Sub_Add", "Mul_FloorDiv", "Div_Mul", "FloorDiv_Mul", "Mod_FloorDiv", "Pow_Mul"),
    *("RShift_LShift", "LShift_RShift", "BitOr_BitAnd", "BitAnd_BitOr", "BitXor_BitAnd"),
)
_COMPARISONS = (
    *("Eq_NotEq", "NotEq_Eq", "Lt_LtE", "Lt_GtE", "LtE_Lt", "LtE_Gt", "Gt_GtE", "Gt_LtE"),
    *("GtE_Gt", "GtE_Lt", "Is_IsNot", "IsNot_Is"),
)
_OPERATORS = (
    *(f"ReplaceBinaryOperator_{pair}" for pair in _BINARY),
    *(f"ReplaceComparisonOperator_{pair}" for pair in _COMPARISONS),
    *("ReplaceUnaryOperator_Delete_USub", "AddNot"),
    *("ReplaceTrueWithFalse", "ReplaceFalseWithTrue", "ReplaceAndWithOr", "ReplaceOrWithAnd"),
    *("ReplaceBreakWithContinue", "ReplaceContinueWithBreak", "NumberReplacer"),
    "ZeroIterationForLoop",
)

#: A condition whose comparison is turned around by another operator.
_TWICE = re.compile(r"\bnot [^ ()]+ (is|==|!=|<|<=|>|>=) ")


def arithmetic(source: Source) -> Iterator[Edit]:
    """Edits by the operators above, each wherever it applies."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.operators.provider import OperatorProvider

    operators = {name: OperatorProvider()[name]() for name in _OPERATORS}
    for node in ast_nodes(get_ast(source.text)):
        for name, operator in operators.items():
            for index, _ in enumerate(operator.mutation_positions(node)):
                # Operators write to what they are given: a copy, of which all above it is shared.
                own = copy.deepcopy(node, {id(node.parent): node.parent})
                text = operator.mutate(own, index).get_code().lstrip()
                if name != "AddNot" or not _TWICE.search(text):
                    yield _narrowed(name, source, node, text)


def _narrowed(kind: str, source: Source, node: Any, text: str) -> Edit:
    """The edit that puts ``text`` in the place of ``node``, without what is the same in both."""
    line, column = node.start_pos
    begin, was = source.starts[line - 1] + column, node.get_code(include_prefix=False)
    same = _same(was, text)
    behind = _same(was[same:][::-1], text[same:][::-1])
    return Edit(kind, begin + same, begin + len(was) - behind, text[same : len(text) - behind])


def _same(one: str, other: str) -> int:
    """How many characters the two begin with alike."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
