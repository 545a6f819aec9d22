"""The errata name tests, and the tests are there."""

import ast
import re
from pathlib import Path

TRAPS = "tests/test_cdopt_traps.py"


def named(page: str) -> set[str]:
    """All tests that the page names, with their files."""
    whole = set(re.findall(r"`(tests/\w+\.py(?:::\w+)+)`", page))
    (section,) = re.findall(r"^## Traps of `cdopt.nn`$(.*?)^## ", page, re.M | re.S)
    return whole | {
        f"{TRAPS}::{short}" for short in re.findall(r"`(Test\w+::\w+)`", section)
    }


def is_there(root: Path, test: str) -> bool:
    """Whether a file has a test of this name."""
    file, *names = test.split("::")
    body = ast.parse((root / file).read_text()).body
    for name in names:
        found = [each for each in body if getattr(each, "name", None) == name]
        if not found:
            return False
        body = found[0].body
    return True


def test_every_test_that_the_errata_name_is_there(project):
    tests = named((project.root / "book/errata.md").read_text())
    assert len(tests) > 60
    assert not [test for test in sorted(tests) if not is_there(project.root, test)]
