"""Refuse source files edited since their import: workers would run the new text."""

import os
import sys
from contextlib import suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

_imported: dict[str, tuple] = {}  # by path: its modification time and size


class _Notes(MetaPathFinder):
    """Finds what Python's own finder does, and notes the state of the file."""

    def find_spec(self, *wanted: Any) -> ModuleSpec | None:
        spec = PathFinder.find_spec(*wanted)
        if spec is not None and spec.has_location:
            with suppress(OSError):  # its import will raise it
                _imported[spec.origin] = _state(spec.origin)
        return spec


# Python asks finders for each module that it imports or reloads.
sys.meta_path.insert(sys.meta_path.index(PathFinder), _Notes())


def _state(path: str) -> tuple:
    stats = os.stat(path)
    return stats.st_mtime_ns, stats.st_size


def refuse() -> None:
    """Raise a ValueError if a module was edited since its import."""
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None) or ""
        # Workers don't import __main__: what they need of it is sent by value.
        if not path.endswith(".py") or name in ("__main__", "__mp_main__"):
            continue
        with suppress(OSError):  # its file is gone, and nobody imports it any more
            state = _state(path)
            # Modules imported before this one are new here.
            if _imported.setdefault(path, state) != state:
                raise ValueError(
                    f"{name} was edited since it was imported, so workers would run "
                    "another text: restart the kernel (or importlib.reload it)"
                )
