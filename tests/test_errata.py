"""The errata name tests; each is shown on a page, and leads there."""

import re

SHOWN = re.compile(
    r"^\(([\w-]+)\)=\n```\{literalinclude\} \.\./(tests/\w+\.py)\n"
    r":pyobject: ([\w.]+)\n(?::dedent:\n)?:caption: (\S+)\n```$",
    re.M,
)


def test_every_test_that_the_errata_name_leads_to_its_text(project):
    """That the text is in its class is checked by the strict build."""
    errata = (project.root / "book/errata.md").read_text()
    page = (project.root / "book/tests.md").read_text()
    shown = {}
    for label, file, name, caption in SHOWN.findall(page):
        assert caption == f"{file}::{name.replace('.', '::')}"
        text = (project.root / file).read_text()
        assert f"def {name.rpartition('.')[2]}(" in text, caption
        shown[label] = caption
    assert len(shown) == page.count("literalinclude") > 40
    named = re.findall(r"\[`(\S+?)`\]\(#([\w-]+)\)", errata)
    assert {label for _, label in named} == set(shown)
    for name, label in named:
        assert shown[label].endswith(name)


def test_errata_name_no_test_without_leading_to_it(project):
    errata = (project.root / "book/errata.md").read_text()
    assert not re.findall(r"(?<!\[)`\S+::\S+`", errata)
