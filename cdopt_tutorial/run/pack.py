"""Pickle what workers are to run, and refuse at once what they could not load.

What a module defines is pickled by name. What ``__main__`` defines, a notebook or a
script, goes by value into every worker's ``__main__``, where torch's pickler finds it.
"""

import io
import pickle
import sys
import traceback
import types
from collections.abc import Mapping
from importlib.machinery import ExtensionFileLoader
from itertools import accumulate
from typing import Any

import cloudpickle

from cdopt_tutorial.calls.errors import WorkerError


def pack(contents: Mapping[str, Any]) -> tuple[dict[str, bytes], tuple[str, ...]]:
    """Pickle a content for each worker; return also the modules that any of them needs.

    A ValueError names the worker, and what can't be pickled or imported there.
    """
    packed, definitions, modules = {}, dict[str, Any](), set[str]()
    for worker, content in contents.items():
        try:
            packed[worker] = _dumps(({}, content), definitions, modules)
        except Exception as error:
            reason = str(error).strip().partition("\n")[0] or repr(error)
            what = f"its role can't be sent to a worker: {type(error).__name__}"
            raise ValueError(f"{worker}: {what}: {reason}") from error
    if definitions:  # all workers need those of any
        for worker, content in contents.items():
            packed[worker] = _dumps((definitions, content), {}, set())
    return packed, tuple(sorted(modules))


def unpack(packed: bytes) -> Any:
    """What :func:`pack` was given for this worker."""
    definitions, content = pickle.loads(packed)
    main_namespace().update(definitions)
    return content


def loads(worker: str, what: str, content: bytes) -> Any:
    """What a worker sent; a WorkerError that names it if that can't be unpickled."""
    try:
        return pickle.loads(content)
    except Exception as error:
        details = "".join(traceback.format_exception(error))
        raise WorkerError(worker, f"{what} what can't be unpickled", details) from None


def main_namespace() -> dict[str, Any]:
    """The namespace of this process's ``__main__``."""
    return vars(sys.modules["__main__"])


class _MainNamespace:
    """Stands in a pickle for the ``__main__`` of the process that loads it."""

    def __reduce__(self):
        return main_namespace, ()


def _dumps(content: Any, definitions: dict[str, Any], modules: set[str]) -> bytes:
    """A pickle; adds to the definitions of ``__main__`` and the modules it needs."""
    file = io.BytesIO()
    _Pickler(file, definitions, modules).dump(content)
    return file.getvalue()


class _Pickler(cloudpickle.Pickler):
    def __init__(self, file: io.BytesIO, definitions: dict, modules: set[str]):
        super().__init__(file)
        self._definitions, self._modules = definitions, modules
        # Functions share the worker's __main__: what one assigns, the others see.
        self.globals_ref[id(main_namespace())] = _MainNamespace()

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, io.TextIOWrapper):  # cloudpickle would send a copy
            raise TypeError("cannot pickle an open file")
        reduced = super().reducer_override(value)
        if isinstance(value, types.ModuleType) and value.__name__ in sys.modules:
            self._note(value.__name__, value.__name__)
        # Functions and classes are pickled by their names unless they are of __main__.
        elif isinstance(value, type | types.FunctionType | types.BuiltinFunctionType):
            name, module = value.__qualname__, value.__module__
            if module == "__main__" and main_namespace().get(name) is value:
                self._definitions[name] = value
            if reduced is NotImplemented and module is not None:
                self._note(module, name)
        return reduced

    def _note(self, module: str, name: str) -> None:
        """Note a module, which a fresh process must import."""
        if module == "__main__" or not _can_be_imported(module):
            raise ImportError(
                f"{name} is defined in module {module}, where a worker "
                "process can't import it: put it into a file or a cell of the "
                "notebook, and launch again"
            )
        for each in accumulate(module.split("."), "{}.{}".format):
            # Where `import` itself looks whether another thread is importing it.
            spec = getattr(sys.modules.get(each), "__spec__", None)
            if getattr(spec, "_initializing", False):
                raise ImportError(
                    f"module {each} launches while it is imported, and its workers "
                    'would do so, too: launch under `if __name__ == "__main__":`'
                )
        self._modules.add(module)


def _can_be_imported(module: str) -> bool:
    """Whether finders know it, and not only this process, which may have made it."""
    package = sys.modules.get(module.rpartition(".")[0])
    if isinstance(getattr(package, "__loader__", None), ExtensionFileLoader):
        return module in sys.modules  # made with it, as torch._C._nn is
    path = getattr(package, "__path__", None)
    return any(finder.find_spec(module, path) for finder in sys.meta_path)
