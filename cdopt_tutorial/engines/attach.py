"""What is about a system and not part of it attaches from outside, in its workers.

Tracing and deadlines wrap a system's functions before its roles begin, so that the code
on the page is the code that a reader would write.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any


def wrap(function: Callable, around: Callable[..., Any]) -> None:
    """Put something around a function of a module, or a method of a class, in place.

    Called on workers, by what is handed to
    :func:`~cdopt_tutorial.engines.launch.launch` as ``attach``. Whoever has imported
    the function by its name, not its module, keeps the bare one.

    Args:
        function: as its module or class has it.
        around: called in its place as ``around(function, *args, **kwargs)``.
    """
    place = sys.modules[function.__module__]
    *path, name = function.__qualname__.split(".")
    for part in path:
        place = getattr(place, part)

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(function, *args, **kwargs)

    setattr(place, name, wrapped)
