"""What several test modules need."""

import os
import shutil
from pathlib import Path

import hypothesis
import pytest
import torch
from xdist.scheduler import LoadScopeScheduling

from cdopt_tutorial.publish.execute import execute
from cdopt_tutorial.publish.project import Project, this_project
from cdopt_tutorial.publish.render import render

# Time is never asserted, and a property that fails must fail again on the next run.
hypothesis.settings.register_profile("book", deadline=None, derandomize=True)
hypothesis.settings.load_profile("book")

# On models this small two threads only wait for each other.
torch.set_num_threads(1)


class OneBook(LoadScopeScheduling):
    """Deals the tests one by one, but those of the book to one process, and first.

    A chapter wants all cores, so no two may run at a time; the largest scope begins.
    """

    def _split_scope(self, nodeid):
        of_book = ("tests/test_notebooks.py", "tests/test_pages.py")
        return "book" if nodeid.startswith(of_book) else nodeid


def pytest_xdist_make_scheduler(config, log):
    """With ``-n`` only, as in the Makefile."""
    return OneBook(config, log)


@pytest.fixture(autouse=True)
def seeded():
    """Every test draws the same on every run, whatever ran before it."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def project() -> Project:
    """This book."""
    return this_project()


@pytest.fixture(scope="session")
def site(project) -> Path:
    """The folder of the pages, rendered strictly from chapters that ran."""
    errors = [done.error for done in execute(project.chapters(), project=project)]
    assert not any(errors), "\n".join(filter(None, errors))
    render(project)
    return project.html


@pytest.fixture(scope="session")
def chromium() -> str:
    """The browser; without one the tests are skipped, but not in CI."""
    names = ("chromium", "chromium-browser", "google-chrome")
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        missing = "no chromium: `apt-get install chromium` to test the pages"
        pytest.fail(missing) if os.environ.get("CI") == "true" else pytest.skip(missing)
    return found
