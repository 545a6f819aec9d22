"""Stand in for remote objects where there is only one process."""

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from torch.futures import Future


class LocalRef:
    """Looks like an ``RRef`` to its user, but the object lives in this process.

    With it, the same roles run without RPC: this is how a distributed run is held
    against the same run in one process. A synchronous call is a plain call; an
    asynchronous one runs in a thread of its own, as it would on another worker.

    Args:
        value: the object to call.
    """

    def __init__(self, value: Any):
        self._value = value

    def local_value(self) -> Any:
        """The object itself."""
        return self._value

    def rpc_sync(self, timeout: float = 0) -> "_Proxy":
        """Calls made through the result return the method's value."""
        return _Proxy(self._value, _call)

    def rpc_async(self, timeout: float = 0) -> "_Proxy":
        """Calls made through the result return a future of the method's value."""
        return _Proxy(self._value, _call_in_thread)


class _Proxy:
    def __init__(self, value: Any, invoke: Callable):
        self._value, self._invoke = value, invoke

    def __getattr__(self, method: str) -> Callable:
        return partial(self._invoke, getattr(self._value, method))


def _call(method: Callable, *args: Any, **kwargs: Any) -> Any:
    result = method(*args, **kwargs)
    # A method marked with async_execution answers with a future of its result.
    return result.wait() if isinstance(result, Future) else result


def _call_in_thread(method: Callable, *args: Any, **kwargs: Any) -> Future:
    future: Future = Future()

    def run() -> None:
        try:
            future.set_result(_call(method, *args, **kwargs))
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
