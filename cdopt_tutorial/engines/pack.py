"""Pickle what a worker is to run, and refuse at once what it could not import."""

import importlib.util
import io
import pickle
import sys
from typing import Any

_WAY_OUT = (
    "put it into a file (in a notebook: begin the cell with %%writefile my_roles.py), "
    "import it from there, and launch again"
)


def pack(worker: str, content: Any) -> tuple[bytes, set[str]]:
    """Pickle a role for its worker.

    Plain pickle, not multiprocessing's: there torch passes tensors as file
    descriptors, here their values travel.

    Args:
        worker: name of the worker, for the message.
        content: function, positional and keyword arguments.

    Returns:
        The pickle, and the modules that whoever loads it has to import.

    Raises:
        ValueError: something in it can't be pickled, or lives where a fresh process
            can't import it: a notebook, a function body, a module made on the fly.
    """
    try:
        packed = pickle.dumps(content)
        reader = _Importable(io.BytesIO(packed))
        reader.load()
    except Exception as error:
        raise ValueError(f"{worker}: {_explain(error)}") from error
    return packed, reader.modules


class _NotImportable(Exception):
    pass


class _Importable(pickle.Unpickler):
    """Loads a pickle as a worker would, but only what a fresh process can import."""

    def __init__(self, file: io.BytesIO):
        super().__init__(file)
        self.modules: set[str] = set()

    def find_class(self, module: str, name: str) -> Any:
        if module == "__main__" or not _has_source(module):
            raise _NotImportable(f"{name} is defined in {_where(module)}")
        self.modules.add(module)
        return super().find_class(module, name)


def _has_source(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:  # in sys.modules, without a spec
        return module in sys.builtin_module_names


def _where(module: str) -> str:
    return "this notebook or script" if module == "__main__" else f"module {module}"


def _explain(error: Exception) -> str:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
    if isinstance(error, _NotImportable) or "lambda" in reason or "<locals>" in reason:
        return f"{reason}, where a worker process can't import it: {_WAY_OUT}"
    return f"its role can't be sent to a worker: {type(error).__name__}: {reason}"
