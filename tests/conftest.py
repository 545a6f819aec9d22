"""What several test modules need."""

import faulthandler
import json
import os
import signal
import tempfile
import threading
from contextlib import contextmanager
from functools import partial
from http.server import ThreadingHTTPServer
from pathlib import Path

import hypothesis
import pytest
import torch
from browsing import Quiet
from filelock import FileLock
from hosts import lack
from playwright.sync_api import sync_playwright

from cdopt_tutorial import own_network
from cdopt_tutorial.cli import main
from cdopt_tutorial.engines.actors import driver
from cdopt_tutorial.engines.launcher import group
from cdopt_tutorial.publish.paper import find_chromium
from cdopt_tutorial.publish.project import Project, this_project
from cdopt_tutorial.publish.render import render
from cdopt_tutorial.scratch import of_process

# Time is never asserted, and a property that fails must fail again on the next run.
hypothesis.settings.register_profile("book", deadline=None, derandomize=True)
hypothesis.settings.load_profile("book")

NOBODY = 65534  # the user who owns nothing

# Whoever publishes a copy may have these set, and the tests are of the plain pages.
for name in ("URL", "REPOSITORY", "BRANCH"):
    os.environ.pop(f"CDOPT_TUTORIAL_{name}", None)

# Under nohup, or in a script's background, they would be ignored, and by all that the
# tests start and stop as well.
for number in (signal.SIGHUP, signal.SIGQUIT):
    signal.signal(number, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)

# On models this small two threads only wait for each other, here and in all that is
# started: two processes of tests keep two cores busy.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"

# Where the kernel refuses it each run says so, and most tests are about something else.
if not own_network.is_allowed():
    os.environ[own_network.VARIABLE] = "host"


# The longest first, or one of them would run alone at the end, on one core of two.
FIRST = ["book", "hands", "sharded_training", "shards", "sharded_maps", "bare"]


def pytest_collection_modifyitems(items):
    """Put groups in the order in which processes of tests are to take them."""

    def place(item):
        mark = item.get_closest_marker("xdist_group")
        own = mark is not None and mark.args[0]
        return FIRST.index(own) if own in FIRST else len(FIRST)

    items.sort(key=place)


@pytest.fixture(autouse=True)
def seeded():
    """Every test draws the same on every run, whatever ran before it."""
    torch.manual_seed(0)


@pytest.fixture
def limited(request):
    """A test that hangs fails; where it waits in torch, its process ends instead."""
    seconds = 300 if request.node.get_closest_marker("engines") else 100

    def ring(*_):
        raise AssertionError(f"hung for {seconds} s")

    signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    faulthandler.dump_traceback_later(seconds + 20, file=2, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()
    signal.alarm(0)


@pytest.fixture
def no_process_starts(monkeypatch):
    """Fails a test in which workers would be started."""

    def start(*_):
        raise AssertionError("a process was about to start")

    monkeypatch.setattr(group.Group, "_start", start)


@pytest.fixture
def spy(monkeypatch):
    """Notes the arguments of all calls of a function or method, which go on."""

    def on(owner, name):
        seen, plain = [], getattr(owner, name)

        def note(*args, **kwargs):
            seen.append(args)
            return plain(*args, **kwargs)

        monkeypatch.setattr(owner, name, note)
        return seen

    return on


@pytest.fixture
def engines_installed(monkeypatch):
    """Every engine can be made, whether its library is here or not."""
    monkeypatch.setattr(driver, "find_spec", lambda name: True)


@pytest.fixture
def text(tmp_path) -> Path:
    """A corpus of 1,200 tokens."""
    file = tmp_path / "text"
    file.write_text("the cat sat on the mat , and the dog saw it .\n" * 100)
    return file


@pytest.fixture
def written(tmp_path):
    """Runs a command; gives what it wrote, or where it fails whether it did."""

    def run(*args, code=0):
        file = tmp_path / "out.json"
        file.unlink(missing_ok=True)
        assert main([*map(str, args), "--json", str(file)]) == code
        return json.loads(file.read_text()) if code == 0 else file.exists()

    return run


@pytest.fixture
def scratch(tmp_path_factory, monkeypatch) -> Path:
    """The temporary directory, in which a test may leave nothing."""
    of_process(os.getpid())  # stays as long as this process does
    folder = tmp_path_factory.mktemp("scratch")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    yield folder
    # Torch's own cache, which whatever imports its compiler begins.
    left = [each.name for each in folder.iterdir()]
    assert [name for name in left if not name.startswith("torchinductor_")] == []


@pytest.fixture(scope="session")
def project() -> Project:
    """This book, with the results of its chapters; tests have pages of their own."""
    book = this_project()
    own = Project(book.root, book.build / "tests")
    own.results = book.results
    return own


@pytest.fixture(scope="session")
def site(project) -> Path:
    """The folder of the pages, rendered strictly from the results of the chapters."""
    project.build.mkdir(parents=True, exist_ok=True)
    with FileLock(project.build / "pages.lock"):
        render(project, short=True)
    return project.html


@pytest.fixture(scope="session")
def chromium() -> str:
    """The browser; without one the tests are skipped, but not in CI."""
    if (found := find_chromium()) is None:
        lack("no chromium: `apt-get install chromium` to test the pages")
    return found


# A session's browser would keep an event loop in the process, and no chapter could
# be run in it any more.
@pytest.fixture(scope="module")
def browser(chromium):
    """A browser that holds no page yet."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium,
            args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"],
        )
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def context(browser):
    """One for the pages of a module, which then read the scripts they share once."""
    return browser.new_context(has_touch=True)


@pytest.fixture
def page(context, server):
    """A page of a reader who has never been here."""
    page = context.new_page()
    yield page
    page.goto(f"{server}/llms.txt")  # small, and of the same origin
    page.evaluate("localStorage.clear()")
    page.close()


@pytest.fixture(scope="module")
def server(site):
    """The address of the site, served as files."""
    handler = partial(Quiet, directory=site)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def root(request, site):
    """The address under which the pages are opened: served, or from the disk."""
    if request.param == "file":
        return site.as_uri()
    return request.getfixturevalue("server")


@pytest.fixture
def as_another():
    """Be, for a while, someone who may read a folder but not write there."""

    @contextmanager
    def become(folder: Path):
        mode, privileged = folder.stat().st_mode, os.geteuid() == 0
        folder.chmod(0o555)
        if privileged:  # root may write anywhere
            os.seteuid(NOBODY)
        try:
            yield
        finally:
            if privileged:
                os.seteuid(0)
            folder.chmod(mode)

    return become
