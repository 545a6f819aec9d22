"""What a notebook or a script defines runs on workers; what is not the same does not.

Nothing of it can be imported, so it travels by value, and is then in every worker's
``__main__``.
"""

import os
import subprocess
import sys
import textwrap

import pytest
from books import KERNEL
from hosts import PATIENCE
from nbformat.v4 import new_code_cell, new_notebook

from cdopt_tutorial.publish import execute


def run_cells(*cells):
    """What each cell of a real notebook prints."""
    cells = [new_code_cell(textwrap.dedent(cell)) for cell in cells]
    notebook = new_notebook(cells=cells, metadata=KERNEL)
    execute._run_cells(notebook, lambda **_: None, {})
    return ["".join(o.get("text", "") for o in cell.outputs) for cell in notebook.cells]


DEFINITIONS = """
    import copy, enum
    from dataclasses import dataclass

    import torch
    import torch.distributed.rpc as rpc
    from cdopt_tutorial.run import Role, launch, report, serve
    from cdopt_tutorial.probes.attach import wrap

    class Kind(enum.Enum):
        PLAIN = 1

    @dataclass
    class Note:
        value: torch.Tensor
        kind: Kind = Kind.PLAIN

    class Book:
        def __init__(self, factor):
            self.factor, self.notes = factor, 0

        def add(self, note):
            self.notes += 1
            if not isinstance(note, Note):
                raise TypeError(type(note))
            return Note(self.factor * note.value + self.notes)

        def is_of(self, kind):
            return type(self) is kind and Kind(1) is Kind.PLAIN

    counted = 0

    def square(note):
        global counted
        counted += 1
        return Note(note.value ** 2)

    def how_often():
        return counted

    def ask(other, note):
        rref = rpc.remote(other, Book, args=(3,))
        later = rpc.rpc_async(other, square, kwargs={"note": note})
        first, second = rref.rpc_sync().add(note), rref.rpc_sync().add(note)
        report(second)
        same = rref.rpc_sync().is_of(Book) and isinstance(first, Note)
        return first, later.wait(), same, rpc.rpc_sync(other, how_often)

    roles = {
        "reader": Role(ask, ("owner", Note(torch.ones(2)))), "owner": Role(serve)
    }
"""

#: What is run after the definitions, and what it prints.
CELLS = {
    # The notebook counts nothing, and its class keeps its own methods.
    """
    reports = []
    method = Book.add
    found = launch(roles, on_report=lambda *record: reports.append(record))
    first, squared, same, often = found["reader"]
    print(first.value.tolist(), squared.value.tolist(), same, often, counted)
    print(type(first) is type(squared) is type(reports[0][1]) is Note, first.kind)
    print(reports[0][1].value.tolist(), Book.add is method, Book.__subclasses__())
    """: "[4.0, 4.0] [1.0, 1.0] True 1 0\nTrue Kind.PLAIN\n[5.0, 5.0] True []\n",
    # A class that no function names comes back as itself.
    """
    roles_ = {"a": Role(copy.copy, (Note(torch.ones(1)),)), "b": Role(serve)}
    print(type(launch(roles_)["a"]) is Note)
    """: "True\n",
    # The last definition is the one that runs.
    """
    class Book(Book):
        def add(self, note):
            return Note(-note.value)

    print(launch(roles)["reader"][0].value.tolist())
    """: "[-1.0, -1.0]\n",
    # What is attached reaches functions of a cell.
    """
    def attach():
        wrap(square, lambda function, note: Note(function(note).value + 10))

    print(launch(roles, attach=attach)["reader"][1].value.tolist())
    """: "[11.0, 11.0]\n",
    # What torch's extension defines is where torch is.
    """
    from torch.nn.functional import gelu

    print(launch({"a": Role(lambda: gelu(torch.zeros(1)).item())}))
    """: "{'a': 0.0}\n",
}  # fmt: skip


def test_what_a_notebook_defines_goes_to_the_workers():
    _, *printed = run_cells(DEFINITIONS, *CELLS)
    assert printed == [*CELLS.values()]


SCRIPT = """
from cdopt_tutorial.run import Role, launch, share
from running import preload_little

preload_little()
print("runs as", __name__)

class Sum(list):
    pass

found = launch({"a": Role(Sum, ([2, 3],)), "b": Role(int)})
print(type(found["a"]) is Sum, found)
print(share(lambda number: 2 * number, [(1,), (2,)]))
"""


@pytest.mark.usefixtures("scratch")
@pytest.mark.parametrize("how", ["-m script", "-m pdb -c continue script.py"])
def test_a_script_without_a_guard_runs_once_whatever_it_launches(how, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, *how.split()]
    pipes = {"capture_output": True, "text": True, "timeout": PATIENCE}
    done = subprocess.run(command, cwd=tmp_path, env=env, input="q\n", **pipes)
    assert (done.returncode, done.stderr) == (0, "")
    said = ["runs as __main__", "True {'a': [2, 3], 'b': 0}", "[2, 4]"]
    assert done.stdout.splitlines()[:3] == said
    assert done.stdout.count("runs") == 1
