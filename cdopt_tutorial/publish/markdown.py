"""The book as one file of Markdown, and `llms.txt`, which names what it holds.

Links between pages lead to places in the file. Directives of Sphinx become plain
Markdown, figures their captions; the pages of the package's interface are left out.
"""

import html
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jinja2
import nbformat
import yaml

from cdopt_tutorial.publish.pages import ABSENT

# Of no use on paper either; a list of works is made by Sphinx, and is none here.
ON_SCREEN_ONLY = ("book/api", "book/tests", "book/contributing")
_LEFT_OUT = (*ON_SCREEN_ONLY, "book/bibliography")
_OPENED = re.compile(r"^ *(`{3,}|:{3,})\{([\w:-]+)\} *(.*)$")
_LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")
_PAGE = re.compile(r"^(?:\.\./|/)*(?:(book|notebooks)/)?([\w-]+)(\.\w+)?$")
_EXPRESSION = re.compile(r"\{\{(.+?)\}\}")
_ROLE = re.compile(r"\{(glue:text|cite:p|py:\w+|term|download|ref|doc)\}`~?([^`]+)`")
_LABEL = re.compile(r"^\(([\w-]+)\)=$", re.MULTILINE)
_JINJA = jinja2.Environment(undefined=jinja2.StrictUndefined)
# What a directive's content begins with.
_TITLES = {"exercise": "**Exercise.**", "solution-start": "**Solution.**"}
_WITHOUT_CONTENT = {"raw", "button-ref", "literalinclude", "include", "bibliography"}


def write(
    folder: Path, root: Path, chapters: dict[str, nbformat.NotebookNode], quotes: dict
) -> None:
    """Write `book.md` and `llms.txt` into a folder: chapters as they ran, and pages.

    `chapters` are by name, such as "notebooks/01_reinforce", and `quotes` is what a
    page may quote, as the builder gets it.
    """
    pages = {name: "" for name in _in_order(root) if not name.startswith(_LEFT_OUT)}
    for name in pages:
        if name in chapters:
            pages[name] = "\n\n".join(map(_cell, chapters[name].cells))
        else:
            text = (root / f"{name}.md").read_text("utf-8")
            pages[name] = _EXPRESSION.sub(lambda each: _value(each[1], quotes), text)
    titles = {name: _title(text) for name, text in pages.items()}
    labels = {label: label for text in pages.values() for label in _LABEL.findall(text)}
    places = labels | titles
    whole = [
        f'<a id="{_anchor(name)}"></a>\n\n{_plain(text, name, places, quotes)}'
        for name, text in pages.items()
    ]
    (folder / "book.md").write_text("\n\n".join(whole) + "\n", "utf-8")
    title, *_ = titles.values()
    index = [f"# {title}\n", f"> {_summary(pages)}\n", "## The whole\n"]
    index += ["- [All pages as one file of Markdown](book.md)\n", "## Pages\n"]
    index += [f"- [{title}]({name}.html)" for name, title in titles.items()]
    (folder / "llms.txt").write_text("\n".join(index) + "\n", "utf-8")


def _in_order(root: Path) -> Iterator[str]:
    """The names of all pages, as the table of contents has them."""

    def below(entry: dict[str, Any]) -> Iterator[str]:
        yield entry["file"]
        for section in entry.get("sections", ()):
            yield from below(section)

    toc = yaml.safe_load((root / "_toc.yml").read_text("utf-8"))
    yield toc["root"]
    for part in toc.get("parts", [toc]):
        for entry in part.get("chapters", ()):
            yield from below(entry)


def _value(expression: str, quotes: dict) -> str:
    """What a page quotes, as Sphinx would put it there."""
    try:
        return str(_JINJA.compile_expression(expression.strip(), False)(**quotes))
    except (jinja2.UndefinedError, TypeError):  # of a chapter without a result
        return ABSENT


def _cell(cell: nbformat.NotebookNode) -> str:
    """A cell as Markdown: code is fenced, and what it printed and showed follows."""
    if cell.cell_type == "markdown" or "remove-cell" in cell.metadata.get("tags", ()):
        return cell.source if cell.cell_type == "markdown" else ""
    parts = [f"```python\n{cell.source}\n```"]
    for output in cell.get("outputs", ()):
        text = output.get("text") or output.get("data", {}).get("text/html", "")
        if output.output_type == "stream":
            parts.append(f"```text\n{text.rstrip()}\n```")
        elif caption := re.search("<figcaption>(.*?)</figcaption>", text, re.DOTALL):
            parts.append(f"*Figure: {html.unescape(caption[1])}*")
    return "\n\n".join(parts)


def _title(page: str) -> str:
    """A page's first line, which is its title."""
    return page.strip().partition("\n")[0].lstrip("# ")


def _summary(pages: dict[str, str]) -> str:
    """The front page's first paragraph, if it has one."""
    _, *paragraphs = next(iter(pages.values())).strip().split("\n\n")
    return "".join(paragraphs[:1]).replace("\n", " ")


def _anchor(place: str) -> str:
    return place.replace("/", "-")


def _plain(text: str, page: str, places: dict[str, str], quotes: dict) -> str:
    """Markdown without what only Sphinx understands."""
    text = _ROLE.sub(lambda role: _role(role, quotes["figures"]), text)
    text = _LABEL.sub(r'<a id="\1"></a>', text)
    text = _LINK.sub(lambda link: _link(link, page, places), text)
    return "\n".join(_without_directives(text.splitlines()))


def _role(role: re.Match, figures: dict[str, Any]) -> str:
    kind, text = role.groups()
    if kind == "glue:text":
        name, _, spec = text.partition(":")
        return format(figures[name], spec) if name in figures else ABSENT
    if kind == "cite:p":
        return f"[{text}]"
    return f"`{text}`" if kind.startswith("py") else text.partition(" <")[0]


def _link(link: re.Match, page: str, places: dict[str, str]) -> str:
    """A link to a page becomes one to its place; one to what is left out, its text."""
    text, target = link.groups()
    if re.match(r"\w+:", target):
        return link[0]
    path, _, label = target.partition("#")
    found = _PAGE.match(path)
    name = found and f"{found[1] or page.partition('/')[0]}/{found[2]}"
    for place in (label, name):
        if place in places:
            return f"[{text or places[place]}](#{_anchor(place)})"
    return text or label or path


def _without_directives(lines: list[str]) -> Iterator[str]:
    """The lines, with fences of directives taken away, or what is in them as well."""
    fences: list[tuple[str, bool]] = []  # that are open, and whether all in it is left
    for line in lines:
        hidden = bool(fences) and fences[-1][1]
        if opened := _OPENED.match(line):
            fence, kind, title = opened.groups()
            fences.append((fence, hidden or kind in _WITHOUT_CONTENT))
            if kind == "admonition":
                yield f"**{title}**\n"
            elif kind in _TITLES:
                yield f"{_TITLES[kind]}\n"
        elif fences and line.strip() == fences[-1][0]:
            fences.pop()
        elif not hidden and not (fences and re.match(r" *:[\w-]+:", line)):
            yield line
