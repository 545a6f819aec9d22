"""Source code that the chapters show in their prose is the package's."""

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from shown import blocks, complaints

from cdopt_tutorial.publish.project import this_project

# As wide as a cell of code. A function fits a page, and a block is shorter, better.
COLUMNS = 78
LINES = 30

ROOT = this_project().root
SHOWN = [
    pytest.param(path, code, id=f"{chapter.stem}-{number}")
    for chapter in this_project().chapters()
    for number, (path, code) in enumerate(blocks(nbformat.read(chapter, as_version=4)))
]

SOURCE = '''\
import math


@cached
class Agent(Base):
    """Learns."""

    #: how many
    size: int = 2

    def act(self, state, gamma=0.9):
        """Return an action, in a line that is rather long."""
        # The first of an episode has none.
        return self.policy(state)  # drawn

    def learn(self): ...


def helper(a):
    return [a for a in range(a)]  # fmt: skip
'''
AGENT = SOURCE[SOURCE.index("@") : SOURCE.index("def helper")]
PART = """\
@cached
class Agent(Base):
    def act(self, state, gamma=0.9):
        # The first of
        # an episode has none.
        return self.policy(
            state,
        )  # drawn

    ...
"""


@pytest.mark.parametrize("path, code", SHOWN)
def test_what_is_shown_is_the_package_s_short_and_narrow(path, code):
    assert complaints(code, (ROOT / path).read_text("utf-8")) == []
    assert len(code.splitlines()) <= LINES
    assert max(map(len, code.splitlines())) <= COLUMNS


def test_what_is_as_in_the_file_is_found_so_and_what_is_not_is_said():
    for block in (AGENT, PART, "def helper(a):\n    return [a for a in range(a)]"):
        assert complaints(block, SOURCE) == []
    for was, now, said in (
        ("return self", "return 2 * self", "Agent.act is not as in the file"),
        ("gamma=0.9", "gamma=0.8", "Agent.act is not as in the file"),
        ("def act", "def move", "Agent.move is not in the file"),
        ("(Base)", "", "Agent is not as in the file"),
        ("    ...\n", "", "Agent needs `...`"),
        ("@cached", "print(1)\n@cached", "print(1) is not in the file"),
        ("# The first", "# The last", "# The last of an episode has none."),
    ):
        assert complaints(PART.replace(was, now), SOURCE)[0].startswith(said), now
    (said,) = complaints(AGENT.replace("Learns.", "Errs."), SOURCE)
    assert said.endswith("is not as in the file")


def test_blocks_are_those_of_the_prose_that_name_a_file():
    block = "```python\n# cdopt_tutorial/a/b.py\nx = 1\n```"
    other = "```python\nx = 2\n```"
    cells = [new_markdown_cell(f"# A\n\n{block}\n\nb\n\n{other}\n\n{block}\n")]
    cells.append(new_code_cell(f'"{block}"'))
    assert (
        blocks(new_notebook(cells=cells)) == [("cdopt_tutorial/a/b.py", "x = 1\n")] * 2
    )
