"""A stand-in for a GPU: the device "meta", and numbers that come back from it."""

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
TINY = 1e-30  # near enough to 0, and can be divided by
INDEXING = aten.index.Tensor, aten.index_put_.default
MOVES = (aten._to_copy.default, aten.copy_.default)


class Elsewhere(TorchDispatchMode):
    """Computes on "meta" by a GPU's rules, and gives numbers where they return.

    An operator on tensors of both devices is an error, as it is on a GPU, unless the
    CPU's are scalars. Only a move, or ``item``, leads back to the CPU: zeros stand for
    what "meta" has not.
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = tensors_in((args, kwargs))
        if func is aten._local_scalar_dense.default and args[0].is_meta:
            return TINY if args[0].is_floating_point() else 0
        if func in INDEXING and args[0].is_meta:
            tensors = tensors_in((args[0], args[2:]))  # indices may be the CPU's
        if func in MOVES:
            return move(func, args, kwargs)
        kinds = {each.device.type for each in tensors if each.ndim or each.is_meta}
        if len(kinds) > 1:
            raise RuntimeError(f"{func} has tensors on cpu and on meta")
        return func(*args, **kwargs)


def move(func, args, kwargs):
    """Run a copying operator; from "meta" to the CPU it gives zeros."""
    if func is aten.copy_.default:
        to, source = args[:2]
        leaves = source.is_meta and not to.is_meta
        return to.zero_() if leaves else func(*args, **kwargs)
    (source,), device = args, kwargs.get("device")
    if source.is_meta and device is not None and device.type == "cpu":
        return torch.zeros(source.shape, dtype=kwargs.get("dtype") or source.dtype)
    return func(*args, **kwargs)


def tensors_in(value) -> list[Tensor]:
    """The tensors in nested lists, tuples and dicts."""
    return [each for each in tree_leaves(value) if isinstance(each, Tensor)]


def where(tensors) -> set[str]:
    """The kinds of devices that tensors are on."""
    return {each.device.type for each in tensors}
