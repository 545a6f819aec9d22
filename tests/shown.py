"""Source code that chapters show in their prose, held against the package's.

A block of Python in a markdown cell, whose first line is a comment with the path of a
file of the package, shows definitions of that file: functions, classes, assignments.
Lines may break elsewhere. Docstrings may be left out, and members of a class, if `...`
stands among those that are shown.
"""

import ast
import io
import re
import tokenize
from dataclasses import dataclass, field

from nbformat import NotebookNode

BLOCK = re.compile(
    r"^```python\n# (cdopt_tutorial/[\w/]+\.py)\n(.*?)^```$", re.MULTILINE | re.DOTALL
)
DIRECTIVE = re.compile(r"# (fmt|noqa)\b")


def blocks(notebook: NotebookNode) -> list[tuple[str, str]]:
    """Return path and code of each block that a notebook shows."""
    prose = [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]
    return [found for source in prose for found in BLOCK.findall(source)]


def complaints(block: str, source: str) -> list[str]:
    """Return what a block says that its file does not, a line each."""
    shown, given = Module(block), Module(source)
    said = [f"{what!r} is no definition" for what in shown.rest]
    for name, definition in shown.definitions.items():
        if name not in given.definitions:
            said.append(f"{name} is not in the file")
        elif not definition.is_that(given.definitions[name]):
            said.append(f"{name} is not as in the file")
    for name in shown.members.keys() & given.members.keys():
        if (shown.members[name] < given.members[name]) != (name in shown.cut):
            said.append(f"{name} needs `...` for what is left out, and for that only")
    return said


@dataclass(frozen=True)
class Definition:
    """A function, an assignment, or a class without its members."""

    code: str  #: its syntax tree, without its docstring
    comments: list[str]  #: their words
    doc: str | None  #: its docstring, on one line

    def is_that(self, other: "Definition") -> bool:
        """Whether it is the other one, with the docstring or without."""
        same = self.code == other.code and self.comments == other.comments
        return same and self.doc in (None, other.doc)


@dataclass
class Module:
    """The definitions of a file or of a block; those within a function are part of it.

    A name has its class before it: `Agent.select_action`.
    """

    text: str
    definitions: dict[str, Definition] = field(default_factory=dict)
    members: dict[str, set[str]] = field(default_factory=dict)  #: of each class
    cut: set[str] = field(default_factory=set)  #: classes with `...` as a member
    rest: list[str] = field(default_factory=list)  #: what is no definition

    def __post_init__(self) -> None:
        reader = io.StringIO(self.text).readline
        self._comments, self._alone = {}, set()
        for token in tokenize.generate_tokens(reader):
            if token.type == tokenize.COMMENT and not DIRECTIVE.match(token.string):
                line, column = token.start
                self._comments[line] = token.string.lstrip("#: ")
                if not token.line[:column].strip():
                    self._alone.add(line)
        for statement in ast.parse(self.text).body:
            self._add(statement)
        self.rest += self._comments.values()

    def _add(self, node: ast.stmt, owner: str = "") -> None:
        name = f"{owner}.{_name(node)}".lstrip(".")
        if owner and ast.unparse(node) == "...":
            self.cut.add(owner)
        elif not _name(node):
            self.rest.append(ast.unparse(node))
        else:
            if owner:
                self.members[owner].add(name)
            first = min(n.lineno for n in (node, *getattr(node, "decorator_list", ())))
            doc = _take_docstring(node)
            if isinstance(node, ast.ClassDef):
                self.members[name] = set()
                for member in node.body:
                    self._add(member, name)
                node.body = []
            comments = self._take_comments(first, node.end_lineno)
            self.definitions[name] = Definition(ast.dump(node), comments, doc)

    def _take_comments(self, first: int, last: int) -> list[str]:
        """Return the words of the comments in these lines, and right above them."""
        while first - 1 in self._alone:
            first -= 1
        lines = [line for line in range(first, last + 1) if line in self._comments]
        return " ".join(self._comments.pop(line) for line in lines).split()


def _name(node: ast.stmt) -> str:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return node.name
        case ast.Assign(targets=[ast.Name(name)]) | ast.AnnAssign(ast.Name(name)):
            return name
    return ""


def _take_docstring(node: ast.stmt) -> str | None:
    """Take the docstring out of a function or a class."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        if (doc := ast.get_docstring(node)) is not None:
            del node.body[0]
            return " ".join(doc.split())
    return None
