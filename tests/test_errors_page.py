"""The errors page: `clumsy.ends` looks there for a line; here each row is of use."""

import re

from clumsy import PAGE, rows

# Files besides the package and the tests that have a line.
BESIDE = "Makefile", ".ci/preflight.py", "notebooks/01_reinforce.ipynb"


def test_every_line_on_the_page_is_in_the_code(project):
    files = [project.root / name for name in BESIDE]
    for folder in "cdopt_tutorial", "tests":
        files += (project.root / folder).rglob("*.py")
    text = "".join(file.read_text() for file in files).replace('\\"', '"')
    text = re.sub(r'"\s*f?"', "", text)  # literals that Python joins
    for row in rows():
        parts = sorted(re.split(r"\.\.\.|: |, ", row), key=len)
        assert any(part.strip() in text for part in parts[-2:]), row


def test_every_test_that_a_page_names_is_there(project):
    tests = "".join(file.read_text() for file in project.root.glob("tests/*.py"))
    for page in PAGE.parent.glob("*.md"):
        for name in re.findall(r"`(?:tests/\w+\.py::)?(test_\w+)`", page.read_text()):
            assert f"def {name}(" in tests, (page.name, name)
