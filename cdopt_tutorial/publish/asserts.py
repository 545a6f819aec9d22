"""Has a chapter's assert that fails say what it compared, by an extension of IPython.

`execute` loads it into each kernel; Python itself would say `AssertionError` alone.
"""

import ast

_LONGEST = 500  # characters of all values


class _Saying(ast.NodeTransformer):
    """Gives each assert a message of its own: its code, and the values it compares."""

    def visit_Assert(self, node: ast.Assert) -> list[ast.stmt]:
        tests = [node.test]
        if isinstance(node.test, ast.BoolOp) and isinstance(node.test.op, ast.And):
            tests = node.test.values
        return [
            ast.copy_location(ast.Assert(test, node.msg or _message(test)), node)
            for test in tests
        ]


def _message(test: ast.expr) -> ast.expr:
    values = ast.FormattedValue(
        _values(test),
        conversion=ord("s"),
        format_spec=ast.JoinedStr([ast.Constant(f".{_LONGEST}")]),
    )
    return ast.JoinedStr([ast.Constant(f"{ast.unparse(test)}: "), values])


def _values(test: ast.expr) -> ast.expr:
    """What a test compares, by its code; of a loop, for each that decides it."""
    match test:
        case ast.Call(ast.Name("all" | "any" as kind), [ast.GeneratorExp(each, loops)]):
            decides = ast.UnaryOp(ast.Not(), each) if kind == "all" else each
            *outer, inner = loops
            ifs = [*inner.ifs, decides]
            inner = ast.comprehension(inner.target, inner.iter, ifs, inner.is_async)
            return ast.ListComp(_values(each), [*outer, inner])
        case ast.Call(ast.Name("all" | "any"), [ast.Call(ast.Name("map"), [_, *of])]):
            pass
        case ast.UnaryOp(ast.Not(), inner):
            return _values(inner)
        case ast.Compare(left, _, others):
            of = [e for e in (left, *others) if not isinstance(e, ast.Constant)]
        case ast.Call(_, of):
            pass
        case _:
            of = [test]
    return ast.Dict([ast.Constant(ast.unparse(each)) for each in of], of)


def load_ipython_extension(shell) -> None:
    """Change the code of every cell before it runs; IPython calls this."""
    shell.ast_transformers.append(_Saying())
