"""Source files edited since their import: workers would run another text than we."""

import os
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from importlib.machinery import SourceFileLoader

_MAIN, _OURS = ("__main__", "__mp_main__"), "cdopt_tutorial."
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib"))

_imported: dict[str, tuple] = {}  # by path: when it was changed last, and its size


def refuse() -> None:
    """Raise a ValueError if a module, other than Python's, was edited since import."""
    for name, path, state in _sources():
        if _imported.setdefault(path, state) != state:
            raise ValueError(
                f"{name} was edited since it was imported, so workers would run "
                "another text: restart the kernel (or importlib.reload it)"
            )


def _sources() -> Iterator[tuple[str, str, tuple]]:
    """Name, path and present state of the modules that came from a source file."""
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None) or ""
        library = path.startswith(_LIBRARIES) and not name.startswith(_OURS)
        # Workers don't import __main__: what they need of it travels by value.
        if path.endswith(".py") and name not in _MAIN and not library:
            with suppress(OSError):
                stats = os.stat(path)
                yield name, path, (stats.st_mtime, stats.st_size)


_path_stats = SourceFileLoader.path_stats


def _note(loader: SourceFileLoader, path: str) -> dict:
    """Python asks here for the state of each file that it reads, but keeps none."""
    stats = _path_stats(loader, path)
    _imported[path] = stats["mtime"], stats["size"]
    return stats


SourceFileLoader.path_stats = _note
_imported |= {path: state for _, path, state in _sources()}
