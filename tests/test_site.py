"""The published book: two variables decide its addresses; by default it has none."""

import re
import shutil
from importlib.metadata import version
from urllib.parse import urljoin
from xml.etree import ElementTree

import pytest
import yaml
from books import run, run_plainly, smallest_book, write_contents
from PIL import Image

from cdopt_tutorial.publish.project import Project
from cdopt_tutorial.publish.render import render

pytestmark = pytest.mark.xdist_group("site")

URL = "https://books.example/some/book/"
PLACE = "an-owner/a.name"


def real_config(project: Project) -> dict:
    return yaml.safe_load((project.root / "_config.yml").read_text("utf-8"))


def test_title_and_version_of_the_book_are_the_same_everywhere(project):
    citation = yaml.safe_load((project.root / "CITATION.cff").read_text())
    config, now = real_config(project), version("cdopt-tutorial")
    assert (citation["title"], citation["version"]) == (config["title"], now)
    foot = config["sphinx"]["config"]["html_theme_options"]["extra_footer"]
    assert foot == f"Version {now}"


@pytest.fixture(scope="module")
def published(tmp_path_factory, project) -> Project:
    """The small book as it is published."""
    small = smallest_book(tmp_path_factory.mktemp("published") / "book")
    config = real_config(project)
    static = small.root / "book/_static"
    config["sphinx"]["config"]["html_static_path"] = ["book/_static"]
    write_contents(small, config)
    static.mkdir()
    for name in "../references.bib", "book.css", "guess.js", "turn.js", "found.js":
        (static / name).touch()
    shutil.copytree(project.root / "book/_templates", small.root / "book/_templates")
    for name in "book/_static/preview.png", "book/_static/favicon.svg":
        shutil.copy(project.root / name, small.root / name)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("cdopt_tutorial.publish.execute._run_cells", run_plainly)
        run(small)
        monkeypatch.setenv("CDOPT_TUTORIAL_URL", URL.rstrip("/"))
        repository = f"https://github.com/{PLACE}/"
        monkeypatch.setenv("CDOPT_TUTORIAL_REPOSITORY", repository)
        render(small)
    return small


def page(book: Project, name: str) -> str:
    return (book.html / name).read_text("utf-8")


def test_buttons_open_the_notebook_and_the_repository(published):
    links = re.findall('href="(https:[^"]*)"', page(published, "notebooks/01_a.html"))
    for link in (
        f"https://colab.research.google.com/github/{PLACE}/blob/main/notebooks/01_a.ipynb",
        f"https://mybinder.org/v2/gh/{PLACE}/main?urlpath=lab/tree/notebooks/01_a.ipynb",
        f"https://github.com/{PLACE}",
    ):
        assert link in links
    front = page(published, "book/index.html")
    assert f'"https://github.com/{PLACE}"' in front and "colab.research" not in front


def test_pages_name_their_address_and_their_picture(published):
    tree = ElementTree.parse(published.html / "sitemap.xml")
    places = {each.text for each in tree.iter() if each.tag.endswith("loc")}
    assert places == {f"{URL}book/index.html", f"{URL}notebooks/01_a.html"}
    text = page(published, "notebooks/01_a.html")
    meta = dict(re.findall(r'<meta property="(og:[^"]*)" content="([^"]*)"', text))
    address = f"{URL}notebooks/01_a.html"
    assert re.search(f'<link rel="canonical" href="{address}" ?/>', text)
    assert (meta["og:url"], meta["og:title"]) == (address, "A chapter")
    size = meta["og:image:width"], meta["og:image:height"]
    picture = Image.open(published.html / meta["og:image"].removeprefix(URL))
    assert picture.size == (1200, 630) == tuple(map(int, size))


def test_missing_page_finds_its_way_from_any_depth(published):
    text = page(published, "404.html")
    local = re.findall(r'(?:href|src|action)="(?!https?:|#)([^"?#]*)', text)
    assert "/some/book/notebooks/01_a.html" in local
    for path in local:
        assert path.startswith("/some/book/"), path
        assert (published.html / path.removeprefix("/some/book/")).is_file(), path


def test_short_addresses_lead_to_pages_of_the_book(project, published):
    pages = re.findall(r"file: (\S+)", (project.root / "_toc.yml").read_text("utf-8"))
    redirects = real_config(project)["sphinx"]["config"]["redirects"]
    for number, chapter in enumerate(project.chapters(), start=1):
        name = f"chapter{number}"
        asked = f"a new chapter needs the redirect {name} in _config.yml"
        assert redirects.get(name) == f"notebooks/{chapter.stem}.html", asked
    for source, target in redirects.items():  # as a browser follows it
        _, place = urljoin(f"http://host/{source}.html", target).split("//host/")
        assert place.removesuffix(".html") in pages, (source, target)
    setup = page(published, "setup.html")  # which keeps the place on the page
    assert '"book/setup.html" + window.location.hash' in setup
    assert '<a href="book/setup.html">' in setup
