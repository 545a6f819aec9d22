"""Parameters set from outside: where they go, and which there are."""

import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from cdopt_tutorial.publish.chapter import inject, read_value


def notebook(*sources: str, tagged: int = 1):
    cells = [new_markdown_cell("# A chapter"), *map(new_code_cell, sources)]
    cells[tagged].metadata["tags"] = ["parameters"]
    return new_notebook(cells=cells)


def test_parameters_are_the_names_of_the_tagged_cell():
    source = "epochs: int = 3  # many\nsizes = {\n    'a': dict(x=1),\n}\n"
    source += "%time print(epochs)\na = [i for i in range(3)]\n1 +"
    chapter = notebook("early = 1", source, "other = 1", tagged=2)
    for name in ("epochs", "sizes", "a"):
        inject(chapter, {name: 2})
    for name in ("early", "other", "dict", "x", "print", "i"):
        message = f"no parameter '{name}'; there are: epochs, sizes, a$"
        with pytest.raises(ValueError, match=message):
            inject(chapter, {name: 2})
    for tags, number in ([], 0), (["parameters"], 3):
        for cell in chapter.cells[1:]:
            cell.metadata["tags"] = tags
        with pytest.raises(ValueError, match=f"{number} cells are tagged"):
            inject(chapter, {"a": 2})


def test_values_stand_behind_the_others_of_the_cell_and_those_set_before():
    chapter = notebook("epochs = 3\nseeds = [1]\ndevice = 'cpu'", "epochs")
    values = {"seeds": (1, 2), "device": "cuda:1"}
    for some in {"device": "cuda:0"}, values:
        inject(chapter, some)
    names = {}
    exec(chapter.cells[1].source, names)
    assert names["epochs"] == 3 and chapter.metadata["injected"]
    assert {name: names[name] for name in values} == values


def test_a_value_is_a_literal_or_a_text():
    values = {"3": 3, "[1, 2]": [1, 2], "{'a': 1}": {"a": 1}, "cuda:1": "cuda:1"}
    assert {text: read_value(text) for text in values} == values
