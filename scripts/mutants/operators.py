"""Mutation operators: on what orders or chooses (waits, events, groups), and on arithmetic.

Arithmetic is cosmic-ray's, its operators alone: its runner rewrites the files of the tree that it
runs in, and starts a Python for each mutant, whose import of torch takes longer than the tests.
(mutmut leaves out all functions with a decorator: each property, and all that is a
``contextmanager``.)
"""

import ast
import copy
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import Any


@dataclass(frozen=True)
class Edit:
    """The text that an operator puts between two offsets of the source, ``begin`` and ``end``."""

    kind: str
    begin: int
    end: int
    text: str


@dataclass(frozen=True)
class Mutant:
    """A file of the library as a fault leaves it.

    ``file``, ``function``, ``kind``, the lines ``before`` and ``after`` and the place among equals
    in that function name it: a line's number would change with edits elsewhere.
    """

    #: Part that it is counted under: ``order`` or ``arithmetic``.
    part: str
    file: str
    function: str
    kind: str
    before: str
    after: str
    place: int
    line: int
    source: str

    @property
    def name(self) -> tuple[str, str, str, str, str, int]:
        return self.file, self.function, self.kind, self.before, self.after, self.place

    def __str__(self) -> str:
        where = f"{self.file}:{self.line} {self.function}"
        return f"{where} ({self.kind})\n    - {self.before}\n    + {self.after}"


class Source:
    """A file's text, its syntax tree, and the function of each line."""

    def __init__(self, file: str, text: str) -> None:
        self.file = file
        self.text = text
        self.tree = ast.parse(text)
        #: Offsets of the lines' beginnings.
        self.starts = [0]
        for line in text.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self._lines = text.splitlines()

    def offset(self, line: int, column: int) -> int:
        """The offset of a place as ``ast`` counts: lines from 1, columns in bytes."""
        text = self._lines[line - 1].encode()[:column].decode() if column else ""
        return self.starts[line - 1] + len(text)

    def edit(self, kind: str, node: ast.expr | ast.stmt, text: str) -> Edit:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        begin = self.offset(node.lineno, node.col_offset)
        return Edit(kind, begin, self.offset(node.end_lineno, node.end_col_offset), text)

    @cached_property
    def functions(self) -> dict[int, str]:
        """The innermost function or class of each line; a class's lines include its methods'."""
        names: dict[int, str] = {}

        def visit(node: ast.AST, name: str) -> None:
            for child in ast.iter_child_nodes(node):
                inner = name
                if isinstance(child, ast.FunctionDef | ast.ClassDef):
                    inner = f"{name}.{child.name}" if name else child.name
                    lines = range(child.lineno, (child.end_lineno or child.lineno) + 1)
                    names.update(dict.fromkeys(lines, inner))
                visit(child, inner)

        visit(self.tree, "")
        return names

    @cached_property
    def ignored(self) -> list[tuple[int, int]]:
        """Offsets of code that tests need not cover: annotations, errors' messages, assertions."""
        nodes: list[ast.AST | None] = []
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef):
                nodes.append(node.returns)
            elif isinstance(node, ast.arg | ast.AnnAssign):
                nodes.append(node.annotation)
            elif isinstance(node, ast.Subscript) and ast.unparse(node.value) == "Literal":
                nodes.append(node)
            elif isinstance(node, ast.Raise):
                nodes.append(node.exc)
            elif isinstance(node, ast.Assert):
                nodes.append(node)
            elif isinstance(node, ast.ClassDef):
                nodes += node.decorator_list
            elif isinstance(node, ast.keyword) and node.arg == "strict":
                nodes.append(node.value)
        edits = [self.edit("", node, "") for node in nodes if isinstance(node, ast.expr | ast.stmt)]
        return [(edit.begin, edit.end) for edit in edits]

    def mutants(self, part: str, edits: Iterable[Edit]) -> list[Mutant]:
        """The mutants of a part that ``edits`` make, in the file's order, each once."""
        by_source: dict[str, Mutant] = {}
        places: Counter[tuple[str, ...]] = Counter()
        for edit in sorted(edits, key=lambda edit: (edit.begin, edit.end)):
            if any(begin <= edit.begin and edit.end <= end for begin, end in self.ignored):
                continue
            source = self.text[: edit.begin] + edit.text + self.text[edit.end :]
            if source in by_source or not _compiles(source):
                continue
            line = self.text.count("\n", 0, edit.begin)
            first, last = self.starts[line], self.text.find("\n", max(edit.begin, edit.end - 1))
            before = " ".join(self.text[first:last].split())
            after = " ".join(source[first : last + len(source) - len(self.text)].split())
            name = self.file, self.functions.get(line + 1, ""), edit.kind, before, after
            by_source[source] = Mutant(part, *name, places[name], line + 1, source)
            places[name] += 1
        return [*by_source.values()]


def _compiles(source: str) -> bool:
    try:
        compile(source, "", "exec")
    except SyntaxError:
        return False
    return True


#: Functions whose calls, as statements, are left out.
_CALLS = {
    *("wait_stream", "wait_event", "record_event", "synchronize", "settle", "invalidate"),
    *("written_for", "freed_for", "note_read", "note_write"),
}
#: Groups and streams that are chosen instead: of as many ranks, or as good a queue.
_GROUPS = {
    "inter": "reduce_inter",
    "intra": "reduce_intra",
    "reduce_inter": "inter",
    "reduce_intra": "intra",
    "control_inter": "inter",
    "control_intra": "intra",
}
_STREAMS = {
    "copies_out": "copies_in",
    "copies_in": "copies_out",
    "inter_node": "intra_node",
    "intra_node": "inter_node",
}
#: Counters that tell versions of the parameters apart.
_GENERATIONS = {"generation", "offered", "held", "passed_over"}
_VERDICTS = {"fresh", "readable"}

#: Functions that are easily taken for one another.
_SIBLINGS = {
    "floor": "ceil",
    "ceil": "floor",
    "min": "max",
    "max": "min",
    "any": "all",
    "all": "any",
}


def order(source: Source) -> Iterator[Edit]:
    """Edits that take out or exchange one thing that orders or chooses."""
    for node in ast.walk(source.tree):
        match node:
            case ast.Expr(value=ast.Call(func=function)) if _last(function) in _CALLS:
                yield source.edit(_last(function), node, "pass")
            case ast.Expr(value=ast.Call(func=ast.Name(id="wait_all"), args=[begun])):
                yield source.edit("wait", node, ast.unparse(begun))
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=begun, attr="wait"))):
                yield source.edit("wait", node, ast.unparse(begun))
            case ast.withitem(context_expr=ast.Call(func=ast.Attribute(attr="on")) as call):
                # Queued on whatever stream is the current one.
                yield source.edit("on", call, '__import__("contextlib").nullcontext()')
            case ast.Call(func=ast.Attribute(value=of, attr="record_event")):
                # An event of a stream that has nothing queued has happened.
                yield source.edit("record_event", of, f"type({ast.unparse(of)})()")
            case ast.Call(func=ast.Attribute(attr="events")):
                yield source.edit("events", node, "[]")
            case ast.Call(func=ast.Attribute(value=of, attr="current")) if _is(of, "streams"):
                yield source.edit("stream", node, f"{ast.unparse(of)}.copies_in")
            case ast.Attribute(value=of, attr=name, ctx=ast.Load()):
                for owner, siblings in (("topology", _GROUPS), ("streams", _STREAMS)):
                    if _is(of, owner) and name in siblings:
                        text = f"{ast.unparse(of)}.{siblings[name]}"
                        yield source.edit("group" if owner == "topology" else "stream", node, text)
                if name in _VERDICTS:
                    yield from _either(source, node)
            case ast.Assign(targets=[ast.Attribute(attr="written")]):
                yield source.edit("written", node, "pass")
            case ast.Assign(targets=[ast.Attribute(attr=name)]) if name in _GENERATIONS:
                yield source.edit("generation", node, "pass")
            case ast.AugAssign(target=ast.Attribute(attr=name)) if name in _GENERATIONS:
                yield source.edit("generation", node, "pass")
            case ast.Compare(left=left, comparators=[right]):
                if {_last(left), _last(right)} & _GENERATIONS:
                    yield from _either(source, node)


def omissions(source: Source) -> Iterator[Edit]:
    """Edits that leave out a statement or a condition, or take the sibling of a function."""
    for node in ast.walk(source.tree):
        match node:
            case ast.Expr(value=ast.Call()) | ast.Raise() | ast.AugAssign():
                yield source.edit("statement", node, "pass")
            case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]) | ast.Return(value=None):
                yield source.edit("statement", node, "pass")
            case ast.BoolOp(values=values):
                for left_out in values:
                    rest = ast.BoolOp(node.op, [each for each in values if each is not left_out])
                    text = ast.unparse(rest if len(rest.values) > 1 else rest.values[0])
                    yield source.edit("condition", node, f"({text})")
            case ast.Call(func=function) if _last(function) in _SIBLINGS:
                text = ast.unparse(function)
                name = _last(function)
                yield source.edit("sibling", function, text[: -len(name)] + _SIBLINGS[name])


def _either(source: Source, node: ast.expr) -> Iterator[Edit]:
    for text in ("True", "False"):
        yield source.edit("generation", node, text)


def _last(node: ast.expr) -> str:
    """``c`` of ``a.b.c``."""
    match node:
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
    return ""


def _is(node: ast.expr, name: str) -> bool:
    return _last(node).lstrip("_") == name


#: A replacement of each of Python's operators, out of all pairs that cosmic-ray has.
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

#: A negated comparison, which another operator has too.
_TWICE = re.compile(r"\bnot [^ ()]+ (is|==|!=|<|<=|>|>=) ")


def arithmetic(source: Source) -> Iterator[Edit]:
    """Edits by the operators above, each wherever it applies."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.operators.provider import OperatorProvider

    operators = {name: OperatorProvider()[name]() for name in _OPERATORS}
    for node in ast_nodes(get_ast(source.text)):
        for name, operator in operators.items():
            for index, _ in enumerate(operator.mutation_positions(node)):
                # Operators change the node that they get: a copy, which shares its ancestors.
                clone = copy.deepcopy(node, {id(node.parent): node.parent})
                text = operator.mutate(clone, index).get_code().lstrip()
                if name != "AddNot" or not _TWICE.search(text):
                    yield _narrowed(name, source, node, text)


def _narrowed(kind: str, source: Source, node: Any, text: str) -> Edit:
    """The edit that puts ``text`` in the place of ``node``, without what is the same in both."""
    line, column = node.start_pos
    begin, was = source.starts[line - 1] + column, node.get_code(include_prefix=False)
    same = _same(was, text)
    behind = _same(was[same:][::-1], text[same:][::-1])
    return Edit(kind, begin + same, begin + len(was) - behind, text[same : len(text) - behind])


def _same(old: str, new: str) -> int:
    """The length of the prefix that two texts share."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(old, new, strict=False)))
