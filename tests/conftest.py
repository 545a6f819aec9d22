"""Settings of the tests, and fixtures of several modules."""

import faulthandler
import json
import os
import shutil
import signal
import tempfile
import threading
from functools import partial
from http.server import ThreadingHTTPServer
from pathlib import Path

import hypothesis
import pytest
import torch
from books import run_plainly
from browsing import Quiet, new_context
from filelock import FileLock
from hosts import PATIENCE, lack
from playwright.sync_api import sync_playwright

from cdopt_tutorial import own_network
from cdopt_tutorial import scratch as made
from cdopt_tutorial.cli import main
from cdopt_tutorial.publish import execute
from cdopt_tutorial.publish.project import Project, this_project
from cdopt_tutorial.publish.render import render
from cdopt_tutorial.run import group, on_ray

# Time is never asserted, and a property that fails must fail again on the next run.
hypothesis.settings.register_profile("book", deadline=None, derandomize=True)
hypothesis.settings.load_profile("book")

# Set where a copy is published, but the tests are of unpublished pages.
for name in ("URL", "REPOSITORY"):
    os.environ.pop(f"CDOPT_TUTORIAL_{name}", None)

# Under nohup, or in the background of a script, these are ignored, and all processes
# that tests start and stop would inherit that.
for number in (signal.SIGHUP, signal.SIGQUIT):
    signal.signal(number, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)

# For small models a second thread is of no use, here or in processes that are started,
# and two processes of tests keep two cores busy.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"

# Where the kernel refuses workers a network of their own, each run would warn of it.
if not own_network.is_allowed():
    os.environ[own_network.VARIABLE] = "host"


# The longest first, or one would run alone at the end, on one core of two.
FIRST = ["book", "hands", "sharded_training", "shards", "sharded_maps"]


def pytest_collection_modifyitems(items):
    def place(item):
        mark = item.get_closest_marker("xdist_group")
        return mark is None or mark.args[0] not in FIRST

    items.sort(key=place)


@pytest.fixture(autouse=True)
def seeded():
    """Every test draws the same random numbers, whatever ran before it."""
    torch.manual_seed(0)


@pytest.fixture
def limited():
    """Fails a test that hangs; if it hangs in torch, ends the process."""
    seconds = 2 * PATIENCE

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
    """Notes the arguments of all calls of a function or method, and calls it."""

    def on(owner, name):
        seen, plain = [], getattr(owner, name)

        def note(*args, **kwargs):
            seen.append(args)
            return plain(*args, **kwargs)

        monkeypatch.setattr(owner, name, note)
        return seen

    return on


@pytest.fixture
def no_kernel(monkeypatch):
    """Runs the cells of chapters here, which takes no time."""
    monkeypatch.setattr(execute, "_run_cells", run_plainly)


@pytest.fixture
def engines_installed(monkeypatch):
    """Lets every engine be made, even if its library is not installed."""
    monkeypatch.setattr(on_ray, "find_spec", lambda name: True)


@pytest.fixture
def text(tmp_path) -> Path:
    """A corpus of 1,200 tokens."""
    file = tmp_path / "text"
    file.write_text("the cat sat on the mat , and the dog saw it .\n" * 100)
    return file


@pytest.fixture
def written(tmp_path):
    """Runs a command; gives its JSON, or if it fails, whether it wrote any."""

    def run(*args, code=0):
        file = tmp_path / "out.json"
        file.unlink(missing_ok=True)
        assert main([*map(str, args), "--json", str(file)]) == code
        return json.loads(file.read_text()) if code == 0 else file.exists()

    return run


@pytest.fixture
def scratch(tmp_path_factory, monkeypatch) -> Path:
    """The temporary directory, where a test may leave nothing."""
    made.folder()  # before, since it lives as long as this process
    folder = tmp_path_factory.mktemp("scratch")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    yield folder
    # Importing torch's compiler makes its cache.
    left = [each.name for each in folder.iterdir()]
    assert [name for name in left if not name.startswith("torchinductor_")] == []


@pytest.fixture(scope="session")
def project() -> Project:
    """This book with its chapters' results, but with pages of the tests' own."""
    book = this_project()
    book.short, book.build = True, book.build / "tests/_build"
    book.html = book.build / "html"
    return book


@pytest.fixture(scope="session")
def site(project, testrun_uid) -> Path:
    """The folder of the pages, rendered strictly, by the first process that asks."""
    project.build.mkdir(parents=True, exist_ok=True)
    done = project.build / "pages.done"
    with FileLock(project.build / "pages.lock"):
        if not done.exists() or done.read_text() != testrun_uid:
            assert render(project)
            done.write_text(testrun_uid)
    return project.html


@pytest.fixture(scope="session")
def chromium() -> str:
    """The browser's path; without one, tests are skipped, or fail in CI."""
    names = "chromium", "chromium-browser", "google-chrome"
    if not (installed := [*filter(None, map(shutil.which, names))]):
        lack("no chromium: `apt-get install chromium` to test the pages")
    return installed[0]


# Not for the session, since playwright's event loop keeps a process from running
# chapters.
@pytest.fixture(scope="module")
def browser(chromium):
    """A browser without a page."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium,
            args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"],
        )
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def context(browser):
    """One for all pages of a module, so that shared scripts are loaded once."""
    return new_context(browser, has_touch=True)


@pytest.fixture
def page(context, server):
    """A page of a reader who has never been here."""
    page = context.new_page()
    yield page
    page.goto(f"{server}/_static/guess.js")  # a small file of the same origin
    page.evaluate("localStorage.clear()")
    page.close()


@pytest.fixture(scope="module")
def server(site):
    """The address at which the site is served."""
    handler = partial(Quiet, directory=site)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def root(request, site):
    """The address of the pages: served, or on the disk."""
    if request.param == "file":
        return site.as_uri()
    return request.getfixturevalue("server")
