"""Wrap functions of a system from outside, in its workers."""

import functools
import operator
import sys
from collections.abc import Callable
from typing import Any


def wrap(function: Callable, around: Callable[..., Any]) -> None:
    """Put ``around(function, *args, **kwargs)`` in place of a function or a method.

    Called in workers, by the function given to ``launch`` as ``attach``. A module that
    has imported the function by name keeps the bare one.
    """
    path, _, name = function.__qualname__.rpartition(".")
    module = sys.modules[function.__module__]
    place = operator.attrgetter(path)(module) if path else module

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(function, *args, **kwargs)

    setattr(place, name, wrapped)
