"""Links, downloads and the search of the pages."""

import re
from collections import ChainMap, Counter
from html.parser import HTMLParser
from urllib.parse import unquote, urljoin, urlsplit

import pytest
from browsing import pages

from cdopt_tutorial.publish.chapter import programs, read_chapter
from cdopt_tutorial.publish.project import this_project
from cdopt_tutorial.publish.render import VERSION

pytestmark = pytest.mark.xdist_group("book")

CHAPTERS = this_project().chapters()
LABELS = {"for", "aria-labelledby", "aria-describedby", "aria-controls"}


class Reader(HTMLParser):
    """Notes a page's anchors, links, labels, and the files that it loads."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.files: list[str] = []
        self.labels: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        for name, value in attrs:
            value = value or ""
            if name == "id":
                self.ids.append(value)
            elif name in LABELS:
                self.labels += value.split()
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


def test_every_link_file_and_label_leads_to_one_place(site, read):
    files = {str(f.relative_to(site)) for f in site.rglob("*") if f.is_file()}
    meant, twice = set(), set()
    for page, seen in read.items():
        for link in {*seen.links, *seen.files}:
            if not leaves(link):
                path, anchor = target(page, link)
                assert path in files, (page, link)
                assert not anchor or anchor in read[path].ids, (page, link)
                meant.add((path, anchor))
        assert {*seen.labels} <= {*seen.ids}, page
        meant |= {(page, label) for label in seen.labels}
        twice |= {(page, anchor) for anchor, n in Counter(seen.ids).items() if n > 1}
    assert not meant & twice


def test_unpublished_pages_name_their_version_and_no_address(site, read):
    assert not (site / "sitemap.xml").exists()
    assert "/notebooks/01_reinforce.html" in read["404.html"].links
    foot = re.compile(rf"Version {re.escape(VERSION)}, \d{{4}}-\d\d-\d\d\b")
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
    assert texts.keys() == {path.name for path in (site / "programs").iterdir()}
    pages = [site / "book" / "programs.html", *site.glob("notebooks/*.html")]
    linked = Counter()
    for page in pages:
        linked.update(re.findall(r'"\.\./programs/(.+?)" download', page.read_text()))
    for name, text in texts.items():
        assert (site / "programs" / name).read_text() == text
        assert linked[name] == 2


@pytest.mark.parametrize("root", ["http", "file"], indirect=True)
def test_search_shows_what_it_finds(page, root):
    page.goto(f"{root}/search.html?q=install+gpu")
    link = "#search-results li > a"
    page.wait_for_selector(f"{link}[href*='gpu']")
    found = [each.get_attribute("href") for each in page.query_selector_all(link)]
    assert any("gpu" in href for href in found[:3])
    # From the disk, only titles are listed.
    if root.startswith("http"):
        page.wait_for_selector("#search-results li p.context")


# What readers ask, in their words, and where the answer is; messages are pasted.
ASKED = {
    "book/setup": "how to install; install on windows; requirements; uninstall; "
    "how do I run a chapter; does it work on a mac; open the notebooks; conda",
    "book/gpu": "install gpu; run on gpu; cuda; nccl",
    "book/programs": "license; download the code",
    "book/own": "write my own system; template; debugger; breakpoint; dataloader in a "
    "worker; logging; print from a worker; what can be pickled; threads; lock; "
    "profile; save a checkpoint; rpc_threads",
    "book/browser": "colab",
    "book/index": "how to cite; how long does it take; report a bug",
    "book/choose": "which method should I use",
    "book/layers": "my own model",
    "book/hosts": "torchrun; multiple machines; port",
    "book/jobs": "slurm; run on kubernetes",
    "book/network": "who can reach the workers; security; firewall",
    "book/errors": "out of memory; a worker hangs; timeout; debug",
    "book/messages": "address already in use; connection refused; deadlock; "
    "RuntimeError: RPCErr:1:RPC ran for more than set timeout (60000 ms) and will; "
    "RuntimeError: one of the variables needed for gradient computation has been "
    "modified by; TimeoutError: The client socket has timed out after 900s while "
    "trying to connect to (10.; RuntimeError: The server socket has failed to listen "
    "on any local network address. port:; "
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError; "
    "AssertionError: daemonic processes are not allowed to have children; "
    "Default process group has not been initialized, please make sure to call; "
    "[W rref_context.cpp:156] Detected RRef Leaks during shutdown. This usually; "
    "AttributeError: Can't pickle local object 'main.<locals>.<lambda>'; "
    "RuntimeError: name:worker1,rank:1 could not find destination name worker0; "
    "FSDP does not support deepcopy; Maybe you called ray.init twice by accident",
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
