"""Links, downloads and the search of the pages."""

import re
from collections import ChainMap, Counter
from html.parser import HTMLParser
from urllib.parse import unquote, urljoin, urlsplit

import pytest
from browsing import pages

from cdopt_tutorial.publish.chapter import programs, read_chapter
from cdopt_tutorial.publish.project import this_project

pytestmark = pytest.mark.xdist_group("book")

CHAPTERS = this_project().chapters()


class Reader(HTMLParser):
    """Notes a page's anchors, links, and the files that it loads."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.files: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        for name, value in attrs:
            value = value or ""
            if name == "id":
                self.ids.append(value)
            elif name in ("href", "xlink:href"):
                is_link = tag == "a" or value.startswith("#")
                (self.links if is_link else self.files).append(value)
            elif name in ("src", "poster", "action"):
                self.files.append(value)
            elif value.startswith("url(#"):
                self.links.append(value[4:-1])


@pytest.fixture(scope="module")
def read(site) -> dict[str, Reader]:
    """Each page, parsed, by its path."""
    names = pages(site, "http")
    return {name: Reader((site / name).read_text("utf-8")) for name in names}


def leaves(link: str) -> bool:
    """Whether a link leads out of the site."""
    return bool(urlsplit(link).scheme or urlsplit(link).netloc)


def target(page: str, link: str) -> tuple[str, str]:
    """The file of the site to which a link leads, and the anchor in it."""
    # A missing page is shown at any address, so its links begin at the root.
    root = "/" if page == "404.html" else "/site/"
    parts = urlsplit(urljoin(f"http://host{root}{page}", link))
    return unquote(parts.path).removeprefix(root), unquote(parts.fragment)


def test_every_link_and_file_leads_to_one_place(site, read):
    files = {str(f.relative_to(site)) for f in site.rglob("*") if f.is_file()}
    meant, twice = set(), set()
    for page, seen in read.items():
        for link in {*seen.links, *seen.files}:
            if not leaves(link):
                path, anchor = target(page, link)
                assert path in files, (page, link)
                assert not anchor or anchor in read[path].ids, (page, link)
                meant.add((path, anchor))
        twice |= {(page, anchor) for anchor, n in Counter(seen.ids).items() if n > 1}
    assert not meant & twice


def test_unpublished_pages_name_their_version_and_no_address(site, read):
    assert not (site / "sitemap.xml").exists()
    assert "/notebooks/01_reinforce.html" in read["404.html"].links
    foot = re.compile(r"Version [\d.]+\b.*Last updated on \d{4}-\d\d-\d\d\b", re.S)
    for page, seen in read.items():
        text = (site / page).read_text("utf-8")
        assert foot.search(text), page
        assert not re.search('<(link rel="canonical|meta property="og:)', text), page
        # Nothing is fetched from elsewhere, and no button leads there.
        assert not [f[:99] for f in seen.files if leaves(f) and f[:5] != "data:"], page
        assert not [u for u in seen.links if re.search("colab.research|mybinder", u)]


def test_download_is_the_chapter_as_it_was_executed(site, read):
    """`execute` runs it in an empty folder, so it needs no other file."""
    for path in CHAPTERS:
        page = f"notebooks/{path.stem}.html"
        (link,) = [link for link in read[page].links if link.endswith(".ipynb")]
        offered = read_chapter(site / target(page, link)[0])
        assert offered.cells == read_chapter(path).cells


def test_programs_are_files_that_their_chapters_link(site, project):
    texts = dict(ChainMap(*(programs(read_chapter(path)) for path in CHAPTERS)))
    pages = [site / "book" / "programs.html", *site.glob("notebooks/*.html")]
    links = [re.findall(r'"\.\./programs/(.+?)" d', page.read_text()) for page in pages]
    assert sorted(sum(links, [])) == sorted([*texts, *texts])
    offered = {path.name: path.read_text() for path in (site / "programs").iterdir()}
    assert offered == texts


@pytest.mark.parametrize("root", ["http", "file"], indirect=True)
def test_search_shows_what_it_finds(page, root):
    page.goto(f"{root}/search.html?q=install+gpu")
    page.wait_for_selector("#search-results li > a[href*='gpu']")


# What readers ask, in their words, and where the answer is; messages are pasted.
ASKED = {
    "book/setup": "how to install; install on windows; how do I run a chapter; conda",
    "book/gpu": "install gpu; run on gpu; nccl",
    "book/programs": "license; download the code",
    "book/own": "write my own system; breakpoint; logging; what can be pickled; lock",
    "book/browser": "colab",
    "book/index": "how to cite; how long does it take; report a bug",
    "book/choose": "which method should I use",
    "book/layers": "my own model",
    "book/hosts": "torchrun; multiple machines; port",
    "book/jobs": "slurm; run on kubernetes",
    "book/network": "who can reach the workers; firewall",
    "book/errors": "out of memory; a worker hangs; timeout; debug",
    "book/messages": "address already in use; deadlock; "
    "RuntimeError: RPCErr:1:RPC ran for more than set timeout (60000 ms) and will; "
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError; "
    "[W rref_context.cpp:156] Detected RRef Leaks during shutdown. This usually; "
    "AttributeError: Can't pickle local object 'main.<locals>.<lambda>'; "
    "Maybe you called ray.init twice by accident",
    "book/moves": "new version of pytorch; change parameters",
    "book/api": "api reference",
    "notebooks/02": "parameter server",
    "notebooks/03": "copying memory; orthogonal weights",
    "notebooks/05": "ddp",
    "notebooks/06": "tensor parallel; fsdp",
    "notebooks/07": "checkpoint; restart after a failure",
    "notebooks/08": "asynchronous",
}
SEARCH = """(query) => Search._performSearch(...Search._parseQuery(query))
    .map(([page]) => page).reverse()"""


def test_a_hit_opens_at_its_passage_even_if_it_was_folded(page, server):
    page.goto(f"{server}/search.html?q=singular+value+forget+gate")
    page.locator("#search-results li > a").first.click()
    arrives_at(page, page.get_by_text("An untrained forget gate"))
    page.evaluate("localStorage.sphinx_highlight_terms = 'fixed ports'")
    page.goto(f"{server}/notebooks/05_ddp_rpc.html")
    arrives_at(page, page.get_by_text("two fixed TCP ports"))


def arrives_at(page, passage):
    """Wait until a passage is in sight."""
    page.wait_for_selector("article span.highlighted", state="attached")
    seen = """(e) => {
        const {top, height} = e.getBoundingClientRect();
        return height > 0 && top > 0 && top < innerHeight;
    }"""
    page.wait_for_function(seen, arg=passage.element_handle())


def test_search_leads_to_the_page_that_answers(page, server):
    page.goto(f"{server}/search.html")
    page.wait_for_function("Search.hasIndex()")
    pages = page.evaluate("Search._index.docnames")
    assert {*page.evaluate("Object.keys(KEYWORDS)")} <= {*pages}
    for answer, questions in ASKED.items():
        for question in questions.split("; "):
            first = [*dict.fromkeys(page.evaluate(SEARCH, question))][:3]
            assert any(name.startswith(answer) for name in first), (question, first)
