"""The book as one Markdown file, and `llms.txt`, which lists its pages.

Links between pages lead to places in the file. Sphinx's directives become plain
Markdown, and figures their captions; the pages on the package's API are left out.
"""

import html
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from nbformat import NotebookNode

from cdopt_tutorial.publish.chapter import tagged

# Useless on paper, too; the bibliography is empty until Sphinx fills it.
ON_SCREEN_ONLY = ("book/api", "book/tests", "book/contributing")
_LEFT_OUT = (*ON_SCREEN_ONLY, "book/bibliography")
_OPENED = re.compile(r"^ *(`{3,}|:{3,})\{([\w:-]+)\} *(.*)$")
_LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")
_PAGE = re.compile(r"^(?:\.\./|/)*(?:(book|notebooks)/)?([\w-]+)(\.\w+)?$")
_ROLE = re.compile(r"\{(cite:p|py:\w+|term|download)\}`~?([^`]+)`")
_LABEL = re.compile(r"^\(([\w-]+)\)=$", re.MULTILINE)
# What the content of a directive begins with.
_TITLES = {"exercise": "**Exercise.**", "solution-start": "**Solution.**"}
_WITHOUT_CONTENT = {"raw", "button-ref", "literalinclude", "include", "bibliography"}


def write(folder: Path, pages: Mapping[str, NotebookNode | str]) -> None:
    """Write `book.md` and `llms.txt` into a folder.

    `pages` are in order, by names such as "book/setup": chapters with their outputs,
    other pages as text, both with the figures that they quote.
    """
    texts = {
        name: page if isinstance(page, str) else "\n\n".join(map(_cell, page.cells))
        for name, page in pages.items()
        if not name.startswith(_LEFT_OUT)
    }
    titles = {n: t.strip().partition("\n")[0].lstrip("# ") for n, t in texts.items()}
    labels = {label: label for text in texts.values() for label in _LABEL.findall(text)}
    whole = [
        f'<a id="{_anchor(name)}"></a>\n\n{_plain(text, name, labels | titles)}\n'
        for name, text in texts.items()
    ]
    (folder / "book.md").write_text("\n".join(whole), "utf-8")
    title, *summary = next(iter(texts.values())).strip().split("\n\n")[:2]
    index = [title, f"> {''.join(summary)}".replace("\n", " "), "## The whole"]
    index += ["- [All pages as one file of Markdown](book.md)", "## Pages"]
    index += ["\n".join(f"- [{titles[name]}]({name}.html)" for name in titles)]
    (folder / "llms.txt").write_text("\n\n".join(index) + "\n", "utf-8")


def _cell(cell: NotebookNode) -> str:
    """A cell as Markdown: fenced code, then what it printed, and captions."""
    if cell.cell_type == "markdown" or tagged(cell, "remove-cell"):
        return cell.source if cell.cell_type == "markdown" else ""
    parts = [f"```python\n{cell.source}\n```"]
    for output in cell.get("outputs", ()):
        text = output.get("text") or output.get("data", {}).get("text/html", "")
        if output.output_type == "stream":
            parts.append(f"```text\n{text.rstrip()}\n```")
        elif caption := re.search("<figcaption>(.*?)</figcaption>", text, re.DOTALL):
            parts.append(f"*Figure: {html.unescape(caption[1])}*")
    return "\n\n".join(parts)


def _anchor(place: str) -> str:
    return place.replace("/", "-")


def _plain(text: str, page: str, places: dict[str, str]) -> str:
    """A page's text without what only Sphinx understands."""
    text = _ROLE.sub(lambda role: _role(*role.groups()), text)
    text = _LABEL.sub(r'<a id="\1"></a>', text)
    text = _LINK.sub(lambda link: _link(*link.groups(), page, places), text)
    return "\n".join(_without_directives(text.splitlines()))


def _role(kind: str, text: str) -> str:
    if kind == "cite:p":
        return f"[{text}]"
    return f"`{text}`" if kind.startswith("py") else text.partition(" <")[0]


def _link(text: str, target: str, page: str, places: dict[str, str]) -> str:
    """A link to a page leads to its place here; one to a page left out is its text."""
    if re.match(r"\w+:", target):
        return f"[{text}]({target})"
    path, _, label = target.partition("#")
    found = _PAGE.match(path)
    name = found and f"{found[1] or page.partition('/')[0]}/{found[2]}"
    for place in (label, name):
        if place in places:
            return f"[{text or places[place]}](#{_anchor(place)})"
    return text or label or path


def _without_directives(lines: list[str]) -> Iterator[str]:
    """The lines without the fences of directives, and some without their content."""
    fences: list[tuple[str, bool]] = []  # those open, and whether their content is left
    for line in lines:
        hidden = bool(fences) and fences[-1][1]
        if opened := _OPENED.match(line):
            fence, kind, title = opened.groups()
            fences.append((fence, hidden or kind in _WITHOUT_CONTENT))
            if title := f"**{title}**" if kind == "admonition" else _TITLES.get(kind):
                yield f"{title}\n"
        elif fences and line.strip() == fences[-1][0]:
            fences.pop()
        elif not hidden and not (fences and re.match(r" *:[\w-]+:", line)):
            yield line
