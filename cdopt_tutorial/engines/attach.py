"""What is about a system and not part of it attaches from outside, in its workers."""

import functools
import sys
from collections.abc import Callable
from typing import Any


def wrap(function: Callable, around: Callable[..., Any]) -> None:
    """Put something around a function of a module, or a method of a class, in place.

    Called on workers, by what is handed to ``launch`` as ``attach``. In its place is
    called ``around(function, *args, **kwargs)``. Whoever has imported the function by
    its name, not its module, keeps the bare one.
    """
    place = sys.modules[function.__module__]
    *path, name = function.__qualname__.split(".")
    for part in path:
        place = getattr(place, part)

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(function, *args, **kwargs)

    setattr(place, name, wrapped)
