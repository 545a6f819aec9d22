"""Source files edited since their import: workers would run another text than we."""

import os
import sys
from contextlib import suppress
from importlib.machinery import SourceFileLoader

_imported: dict[str, tuple] = {}  # by path: when it was changed last, and its size
_path_stats = SourceFileLoader.path_stats


def _note(loader: SourceFileLoader, path: str) -> dict:
    """Python asks here for the state of each file that it reads, but keeps none."""
    stats = _path_stats(loader, path)
    _imported[path] = stats["mtime"], stats["size"]
    return stats


SourceFileLoader.path_stats = _note


def refuse() -> None:
    """Raise a ValueError if a module was edited since its import."""
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None) or ""
        # Workers don't import __main__: what they need of it travels by value.
        if not path.endswith(".py") or name in ("__main__", "__mp_main__"):
            continue
        with suppress(OSError):  # it has gone, and nobody imports it any more
            stats = os.stat(path)
            state = stats.st_mtime, stats.st_size
            # One from before this module is seen here for the first time.
            if _imported.setdefault(path, state) != state:
                raise ValueError(
                    f"{name} was edited since it was imported, so workers would run "
                    "another text: restart the kernel (or importlib.reload it)"
                )
