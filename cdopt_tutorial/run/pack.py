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
from itertools import accumulate
from typing import Any

import cloudpickle
import torch

from cdopt_tutorial.calls.errors import WorkerError


def pack(contents: Mapping[str, Any]) -> tuple[dict[str, bytes], tuple[str, ...]]:
    """Pickle a content for each worker; return also the modules that any of them needs.

    A ValueError names the worker, and what can't be pickled or imported there.
    """
    packed, definitions, modules = {}, {}, set()
    for worker, content in contents.items():
        try:
            packed[worker] = _dumps(({}, content), definitions, modules)
        except _NotImportable as error:
            raise ValueError(f"{worker}: {error}") from error
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


def dumps(value: Any) -> bytes:
    """A pickle for another process, also of tensors whose dtype plain pickle spoils."""
    _Tensors(file := io.BytesIO()).dump(value)
    return file.getvalue()


class _Tensors(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        return _reduced(value)


def _reduced(value: Any) -> Any:
    if type(value) is not torch.Tensor:
        return NotImplemented
    if value.dtype in torch.storage._dtype_to_storage_type_map():
        return NotImplemented  # plain pickle knows it
    plain = _PLAIN[value.dtype.itemsize]
    return torch.Tensor.view, (value.detach().view(plain), value.dtype)


_PLAIN = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size


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


# Functions and classes, which are pickled by their names unless they are of __main__.
_BY_NAME = type | types.FunctionType | types.BuiltinFunctionType


class _NotImportable(Exception): ...


class _Pickler(cloudpickle.Pickler):
    def __init__(self, file: io.BytesIO, definitions: dict, modules: set[str]):
        super().__init__(file)
        self._definitions, self._modules = definitions, modules
        self._spaces: list[dict[str, Any]] = []  # that are a __main__
        self._add(main_namespace())

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, io.TextIOWrapper):  # cloudpickle would send a copy
            raise TypeError("cannot pickle an open file")
        if isinstance(value, _BY_NAME):
            self._look_for_spaces(value)
        if (reduced := _reduced(value)) is NotImplemented:
            reduced = super().reducer_override(value)
        if isinstance(value, types.ModuleType) and value.__name__ in sys.modules:
            self._note(value.__name__, value.__name__)
        elif isinstance(value, _BY_NAME):
            name, module = value.__qualname__, value.__module__
            is_global = any(space.get(name) is value for space in self._spaces)
            if module == "__main__" and is_global:
                self._definitions[name] = value
            if reduced is NotImplemented and module is not None:
                self._note(module, name)
        return reduced

    def _add(self, space: dict[str, Any]) -> None:
        self._spaces.append(space)
        # Functions share the worker's __main__: what one assigns, the others see.
        self.globals_ref[id(space)] = _MainNamespace()

    def _look_for_spaces(self, value: Any) -> None:
        """The program has a namespace of its own if another runs it, as a profiler."""
        for each in (value, *getattr(value, "__dict__", {}).values()):
            space = getattr(each, "__globals__", {})
            known = any(space is other for other in self._spaces)
            if space.get("__name__") == "__main__" and not known:
                self._add(space)

    def _note(self, module: str, name: str) -> None:
        """Note a module, which a fresh process must import."""
        if module == "__main__" or not _can_be_imported(module):
            raise _NotImportable(
                f"{name} is defined in module {module}, where a worker "
                "process can't import it: put it into a file or a cell of the "
                "notebook, and launch again"
            )
        for each in accumulate(module.split("."), "{}.{}".format):
            # Where `import` itself looks whether another thread is importing it.
            spec = getattr(sys.modules.get(each), "__spec__", None)
            if getattr(spec, "_initializing", False):
                raise _NotImportable(
                    f"module {each} launches while it is imported, and its workers "
                    'would do so, too: launch under `if __name__ == "__main__":`'
                )
        self._modules.add(module)


def _can_be_imported(module: str) -> bool:
    """Whether finders know it, and not only this process, which may have made it."""
    path = None
    for each in accumulate(module.split("."), "{}.{}".format):
        specs = (finder.find_spec(each, path) for finder in sys.meta_path)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is None:
            return False
        path = spec.submodule_search_locations
    return True
