"""The published book: three variables decide its addresses; by default it has none."""

import re
import shutil
from xml.etree import ElementTree

import pytest
import yaml
from books import run, run_plainly, smallest_book, write_contents
from clumsy import ends
from PIL import Image

from cdopt_tutorial.publish.project import Project
from cdopt_tutorial.publish.render import render
from cdopt_tutorial.publish.site import VERSION, Site, read_site

pytestmark = pytest.mark.xdist_group("site")

URL = "https://books.example/some/book/"
PUBLISHED = {
    "CDOPT_TUTORIAL_URL": URL,
    "CDOPT_TUTORIAL_REPOSITORY": "https://github.com/an-owner/a.name",
    "CDOPT_TUTORIAL_BRANCH": "next",
}


def publish(monkeypatch, **values: str) -> None:
    for name, value in (values or PUBLISHED).items():
        monkeypatch.setenv(name, value)


def test_one_site_has_one_spelling_and_none_by_default(monkeypatch):
    assert read_site() == Site(None, None, "main")
    publish(monkeypatch, **dict.fromkeys(PUBLISHED, ""))
    assert read_site() == Site()
    place = "github.com/an-owner/a.name"
    repositories = [f"{how}://{place}" for how in ("http", "https")]
    repositories += [f"https://{place}{end}" for end in ("/", ".git", ".git/")]
    for url in (URL, URL.rstrip("/"), URL + "/"):
        for each in repositories:
            publish(monkeypatch, CDOPT_TUTORIAL_URL=url, CDOPT_TUTORIAL_REPOSITORY=each)
            assert read_site() == Site(URL, f"https://{place}", "main")


def test_the_citation_has_title_and_version_of_the_book(project):
    read = [(project.root / f).read_text() for f in ("CITATION.cff", "_config.yml")]
    citation, config = map(yaml.safe_load, read)
    assert (citation["title"], citation["version"]) == (config["title"], VERSION)


BAD = {
    "URL": ["books.example", "ftp://books.example/", "https://"]
    + ["https://books.example/?page=1", "https://books.example/a b"]
    + ["https://bücher.example/", 'https://books.example/"onload="'],
    "REPOSITORY": ["an-owner/a.name", "https://github.com/an-owner"]
    + ["https://elsewhere.example/an-owner/a.name"]
    + ["https://github.com/an-owner/a.name/tree/main"],
    "BRANCH": ["a branch", "main?"],
}


@pytest.mark.parametrize("name", BAD)
def test_bad_value_is_named_in_one_line_before_a_chapter_runs(
    monkeypatch, capsys, name
):
    monkeypatch.setattr("cdopt_tutorial.publish.execute.execute", None)
    for value in BAD[name]:
        publish(monkeypatch, **{f"CDOPT_TUTORIAL_{name}": value})
        ends("build", f"CDOPT_TUTORIAL_{name} is {value!r}: ... is needed", 2, capsys)


@pytest.fixture(scope="module")
def pages(tmp_path_factory, project) -> Project:
    """The small book as it is published."""
    small = smallest_book(tmp_path_factory.mktemp("published") / "book")
    configure(small, project)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("cdopt_tutorial.publish.execute._run_cells", run_plainly)
        run(small)
        publish(monkeypatch)
        render(small)
    return small


def configure(small: Project, project: Project) -> None:
    """As the real book is."""
    config = real_config(project)
    sphinx, static = config["sphinx"]["config"], small.root / "book/_static"
    sphinx["html_static_path"] = ["book/_static"]
    write_contents(small, config)
    for folder in static, small.root / "book/_templates":
        folder.mkdir()
    for name in "../references.bib", "book.css", "guess.js", "turn.js":
        (static / name).touch()
    pictures = "book/_static/preview.png", "book/_static/favicon.svg"
    for name in *pictures, sphinx["redirect_html_template_file"]:
        shutil.copy(project.root / name, small.root / name)


def real_config(project: Project) -> dict:
    return yaml.safe_load((project.root / "_config.yml").read_text("utf-8"))


def page(book: Project, name: str) -> str:
    return (book.html / name).read_text("utf-8")


def opened(text: str) -> list[str]:
    """The addresses of other hosts in a page's attributes."""
    return re.findall(r'(?:href|src|content|action)="(https?:[^"]*)"', text)


def test_buttons_open_the_notebook_and_the_repository(pages):
    links = opened(page(pages, "notebooks/01_a.html"))
    place = "an-owner/a.name"
    for link in (
        f"https://colab.research.google.com/github/{place}/blob/next/notebooks/01_a.ipynb",
        f"https://mybinder.org/v2/gh/{place}/next?urlpath=lab/tree/notebooks/01_a.ipynb",
        f"https://github.com/{place}",
    ):
        assert link in links
    front = opened(page(pages, "book/index.html"))
    assert f"https://github.com/{place}" in front
    assert not any("colab" in link or "binder" in link for link in front)


def test_sitemap_has_the_pages_under_their_addresses(pages):
    tree = ElementTree.parse(pages.html / "sitemap.xml")
    found = {each.text for each in tree.iter() if each.tag.endswith("loc")}
    assert found == {f"{URL}book/index.html", f"{URL}notebooks/01_a.html"}


def test_page_names_its_address_and_its_picture(pages):
    text = page(pages, "notebooks/01_a.html")
    meta = dict(re.findall(r'<meta property="(og:[^"]*)" content="([^"]*)"', text))
    address = f"{URL}notebooks/01_a.html"
    assert re.search(f'<link rel="canonical" href="{address}" ?/>', text)
    assert (meta["og:url"], meta["og:title"]) == (address, "A chapter")
    size = meta["og:image:width"], meta["og:image:height"]
    picture = Image.open(pages.html / meta["og:image"].removeprefix(URL))
    assert picture.size == (1200, 630) == tuple(map(int, size))


def test_missing_page_finds_its_way_from_any_depth(pages):
    text = page(pages, "404.html")
    local = re.findall(r'(?:href|src|action)="(?!https?:|#)([^"]*)"', text)
    assert "/some/book/notebooks/01_a.html" in local
    for address in local:
        path = re.sub(r"[?#].*", "", address)
        assert path.startswith("/some/book/"), address
        assert (pages.html / path.removeprefix("/some/book/")).is_file(), address


def test_short_addresses_lead_to_pages_of_the_book(project):
    toc = yaml.safe_load((project.root / "_toc.yml").read_text("utf-8"))
    pages = [each for part in toc["parts"] for each in part["chapters"]]
    pages += [each for above in pages for each in above.get("sections", ())]
    files = [each["file"] for each in pages]
    redirects = real_config(project)["sphinx"]["config"]["redirects"]
    for number, chapter in enumerate(project.chapters(), start=1):
        assert redirects[f"chapter{number}"] == f"notebooks/{chapter.stem}.html"
    for source, target in redirects.items():
        assert target.removesuffix(".html") in files, (source, target)


def test_short_address_keeps_the_place_on_the_page(pages):
    text = page(pages, "setup.html")
    assert '"book/setup.html" + window.location.hash' in text
    assert '<a href="book/setup.html">' in text


@pytest.fixture(scope="module")
def workflow(project) -> dict:
    """The public CI's file."""
    path = project.root / ".github" / "workflows" / "book.yml"
    return yaml.safe_load(path.read_text("utf-8"))


def test_it_runs_what_exists(project, workflow):
    makefile = (project.root / "Makefile").read_text("utf-8")
    targets = re.findall(r"^(\w+):", makefile, re.MULTILINE)
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    runs = [step["run"].split() for step in steps if "run" in step]
    assert {program for program, *_ in runs} == {"make", "bash"}
    for each in (each for _, *arguments in runs for each in arguments):
        assert each in targets or (project.root / each).is_file(), each


def test_it_sets_the_variables_that_the_pages_are_made_from(workflow, monkeypatch):
    steps = workflow["jobs"]["book"]["steps"]
    (step,) = [step for step in steps if step.get("run") == "make book"]
    values = {
        "steps.pages.outputs.base_url": "https://an-owner.example/a-name",
        "github.server_url": "https://github.com",
        "github.repository": "an-owner/a-name",
        "github.ref_name": "main",
    }
    for name, value in step["env"].items():
        filled = re.sub(r"\$\{\{ (\S+) \}\}", lambda m: values[m[1]], value)
        monkeypatch.setenv(name, filled)
    assert read_site() == Site(
        "https://an-owner.example/a-name/", "https://github.com/an-owner/a-name"
    )
