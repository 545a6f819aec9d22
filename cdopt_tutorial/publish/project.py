"""Where the book lives on disk."""

from pathlib import Path


class Project:
    """The folder of one book: its sources and everything built from them."""

    def __init__(self, root: Path, output: Path | None = None) -> None:
        self.root = root  #: absolute path of the folder that holds `_config.yml`
        self.package = root / "cdopt_tutorial"  #: what the chapters import
        #: everything built, in `root` or in `output`
        self.build = (output or root) / "_build"
        self.results = self.build / "results"  #: a file for each run of a chapter
        #: the chapters with their outputs, and files that Sphinx copies beside them
        self.pages = self.build / "pages"
        self.html = self.build / "html"  #: the rendered site

    def chapters(self) -> list[Path]:
        """Return the notebooks of all chapters, in order."""
        return sorted((self.root / "notebooks").glob("[!.]*.ipynb"))

    def relative(self, path: Path) -> Path:
        """Return `path` as readers see it: relative to the project, if it is inside."""
        path = path.resolve()
        return path.relative_to(self.root) if path.is_relative_to(self.root) else path


def this_project() -> Project:
    """Return the project around this package; a ValueError if there is no book."""
    root = Path(__file__).resolve().parents[2]
    if not (root / "_config.yml").is_file():
        raise ValueError("the package is not in a book: install it with `make book`")
    return Project(root)
