"""Where the book lives on disk."""

import os
from pathlib import Path


class Project:
    """The folder of one book, and how its chapters are run."""

    device = "cpu"  #: on which chapters compute
    short = False  #: whether what has no result runs in its short profile

    def __init__(self, root: Path) -> None:
        self.root = root  #: absolute path of the folder that holds `_config.yml`
        self.build = root / "_build"  #: everything built
        self.results = self.build / "results"  #: a file for each run of a chapter
        self.html = self.build / "html"  #: the rendered site

    def chapters(self) -> list[Path]:
        """Return the notebooks of all chapters, in order."""
        return sorted((self.root / "notebooks").glob("[!.]*.ipynb"))

    def relative(self, path: Path) -> str:
        """Return `path` as readers see it: relative to the project."""
        return os.path.relpath(path.resolve(), self.root)


def this_project() -> Project:
    """Return the project around this package; a ValueError if there is no book."""
    root = Path(__file__).resolve().parents[2]
    if not (root / "_config.yml").is_file():
        raise ValueError("the package is not in a book: install it with `make book`")
    return Project(root)
