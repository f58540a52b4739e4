"""One fault in one file, named so that edits elsewhere leave its name as it is."""

import ast
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Edit:
    """The text that an operator puts in place of that from ``begin`` to ``end``, both offsets."""

    kind: str
    begin: int
    end: int
    text: str


@dataclass(frozen=True)
class Mutant:
    """A file of the library as a fault leaves it.

    ``file``, ``function``, ``kind``, the lines ``before`` and ``after`` and the place among equals
    in that function name it: no number of a line, which others' edits move.
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
    """A file's text, its syntax tree, and which function each line belongs to."""

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
        found: dict[int, str] = {}

        def visit(node: ast.AST, name: str) -> None:
            for child in ast.iter_child_nodes(node):
                inner = name
                if isinstance(child, ast.FunctionDef | ast.ClassDef):
                    inner = f"{name}.{child.name}" if name else child.name
                    lines = range(child.lineno, (child.end_lineno or child.lineno) + 1)
                    found.update(dict.fromkeys(lines, inner))
                visit(child, inner)

        visit(self.tree, "")
        return found

    @cached_property
    def ignored(self) -> list[tuple[int, int]]:
        """Offsets of what no test is meant to see: annotations, what an error says, assertions."""
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
        found: dict[str, Mutant] = {}
        places: Counter[tuple[str, ...]] = Counter()
        for edit in sorted(edits, key=lambda edit: (edit.begin, edit.end)):
            if any(begin <= edit.begin and edit.end <= end for begin, end in self.ignored):
                continue
            source = self.text[: edit.begin] + edit.text + self.text[edit.end :]
            if source in found or not _compiles(source):
                continue
            line = self.text.count("\n", 0, edit.begin)
            first, last = self.starts[line], self.text.find("\n", max(edit.begin, edit.end - 1))
            before = " ".join(self.text[first:last].split())
            after = " ".join(source[first : last + len(source) - len(self.text)].split())
            name = self.file, self.functions.get(line + 1, ""), edit.kind, before, after
            found[source] = Mutant(part, *name, places[name], line + 1, source)
            places[name] += 1
        return [*found.values()]


def _compiles(source: str) -> bool:
    try:
        compile(source, "", "exec")
    except SyntaxError:
        return False
    return True
