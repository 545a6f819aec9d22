"""The page that says what `dissolve` takes: its code runs, in the order of the page."""

import re


def test_its_code_runs(project):
    page = (project.root / "book/layers.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.S | re.M)
    assert len(blocks) > 5
    exec(compile("\n".join(blocks), "book/layers.md", "exec"), {})
