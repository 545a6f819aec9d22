"""Source files that were edited after this process imported them.

Workers import afresh: they would run the new text, and this process the old one.
"""

import os
import sys
from contextlib import suppress
from importlib.machinery import SourceFileLoader

_State = tuple[float, int]
_imported: dict[str, _State] = {}  # by path: when it was changed last, and its size


def _state(path: str) -> _State:
    found = os.stat(path)
    return found.st_mtime, found.st_size


def _sources() -> list[tuple[str, str, _State]]:
    """Name, path and present state of all modules that came from a source file."""
    found = []
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None) or ""
        # Workers don't import __main__: what they need of it travels by value.
        if path.endswith(".py") and name not in ("__main__", "__mp_main__"):
            with suppress(OSError):
                found.append((name, path, _state(path)))
    return found


def refuse() -> None:
    """Raise a ValueError if a module was edited since this process imported it.

    Called by :func:`~cdopt_tutorial.engines.launch.launch`, in the parent.
    """
    for name, path, state in _sources():
        if _imported.setdefault(path, state) != state:
            raise ValueError(
                f"{name} was edited since it was imported, so workers would run "
                "another text: restart the kernel (or importlib.reload it)"
            )


def _noting(path_stats):
    def note(loader: SourceFileLoader, path: str):
        stats = path_stats(loader, path)
        _imported[path] = stats["mtime"], stats["size"]
        return stats

    return note


# Python keeps no record of the text that it has read, but asks its loader for the
# state of each file that it imports or reloads.
SourceFileLoader.path_stats = _noting(SourceFileLoader.path_stats)
for _, _path, _found in _sources():
    _imported.setdefault(_path, _found)
