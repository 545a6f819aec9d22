"""What is about a system and not part of it attaches from outside, in its workers."""

import functools
import operator
import sys
from collections.abc import Callable
from typing import Any


def wrap(function: Callable, around: Callable[..., Any]) -> None:
    """Put ``around(function, *args, **kwargs)`` in place of a function or a method.

    Called on workers, by what is handed to ``launch`` as ``attach``. Whoever has
    imported the function by its name, not its module, keeps the bare one.
    """
    path, _, name = function.__qualname__.rpartition(".")
    module = sys.modules[function.__module__]
    place = operator.attrgetter(path)(module) if path else module

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(function, *args, **kwargs)

    setattr(place, name, wrapped)
