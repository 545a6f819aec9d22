"""Gradients that cross from worker to worker, and the step taken with them.

In one process autograd does it all. *Distributed autograd* records what each call
carries. With an *explicit cut* the owner of an object keeps its part of the graph, and
is called again for the backward pass.
"""

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed.autograd as dist_autograd
from torch import Tensor, nn, optim

from cdopt_tutorial.engines.seam import network
from cdopt_tutorial.engines.seam.reference import Reference, apply, call_method

Context = int | str | None  # of distributed autograd, of a cut, or of this process

WAYS = ("distributed", "cut")


@contextmanager
def context(way: str) -> Iterator[Context]:
    """One step's context, by one of ``WAYS``, on the worker that has the loss."""
    if way == "distributed":
        with dist_autograd.context() as context_id:
            yield context_id
        return
    _this_thread.cut = f"{network.current().own_name()}/{next(_numbers)}"
    try:
        yield _this_thread.cut
    finally:
        _this_thread.cut = None


def call(reference: Reference, method: str | Callable, *args: Any) -> Any:
    """Call a method of a module on its owner; tensors stay part of the graph.

    A tensor that needs a gradient must be an argument by itself, and not an
    ``nn.Parameter``, which would arrive without a graph. With an explicit cut the
    method must return one tensor or several.
    """
    cut = getattr(_this_thread, "cut", None)
    if cut is not None and torch.is_grad_enabled():
        return _Cut.apply(cut, reference, method, _anchor, *args)
    return apply(reference, method, *args)


def backward(context: Context, loss: Tensor) -> None:
    """Backpropagate a loss to every parameter it depends on, on whichever worker."""
    if isinstance(context, int):
        dist_autograd.backward(context, [loss])
    else:
        loss.backward()


def gradients(context: Context, parameters: Iterable[Tensor]) -> dict[Tensor, Tensor]:
    """A context's gradients, on their owner, of those parameters that have one."""
    if isinstance(context, int):
        kept = dist_autograd.get_gradients(context)
    else:
        kept = _kept_gradients.get(context, {})
    # In one process, and on the caller's side of a cut, they are in .grad.
    found = {p: kept[p] if p in kept else p.grad for p in parameters}
    return {p: gradient for p, gradient in found.items() if gradient is not None}


def take_sum(
    contexts: Iterable[Context], parameters: Iterable[Tensor]
) -> dict[Tensor, Tensor]:
    """The sum over several contexts, on the parameters' owner, which then drops them.

    They are added in the order of the contexts, because rounding depends on it.
    """
    parameters, total = list(parameters), {}
    for context in contexts:
        for p, gradient in gradients(context, parameters).items():
            total[p] = total[p] + gradient if p in total else gradient
        forget(context)
    return total


def forget(context: Context) -> None:
    """Free what this owner keeps for a cut's context; torch frees its own contexts."""
    _kept_gradients.pop(context, None)


def make_optimizer(parameters: Iterable[Tensor], config: Any) -> optim.Optimizer:
    """A config's ``optimizer``, "sgd" or "adam", with its ``lr`` and ``momentum``.

    Made on the worker that owns the parameters.
    """
    # One by one, on a GPU too: torch's operators on lists can't mix plain and sharded
    # parameters, as tensor parallelism does.
    how = {"lr": config.lr, "foreach": False}
    if config.optimizer == "adam":
        return optim.Adam(parameters, **how)
    return optim.SGD(parameters, momentum=config.momentum, **how)


def squared_norm(found: Iterable[Tensor]) -> float:
    """The sum of the squares of all elements."""
    return sum(gradient.square().sum().item() for gradient in found)


def clip_factor(squared_norm: float, largest: float | None) -> float:
    """The factor by which ``torch.nn.utils.clip_grad_norm_`` scales all gradients."""
    return 1.0 if largest is None else min(1.0, largest / (squared_norm**0.5 + 1e-6))


def move(optimizer: optim.Optimizer, gradients: Mapping[Tensor, Tensor]) -> None:
    """Take one step with these gradients, and clear them, lest they be used twice."""
    for parameter, gradient in gradients.items():
        parameter.grad = gradient
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


_this_thread = threading.local()  # the cut that it is in
_numbers = itertools.count()
_adding = threading.Lock()
# Without it autograd would run no backward pass for a lookup, of integers only.
_anchor = torch.zeros((), requires_grad=True)
# On an owner: graphs by context and key, gradients by context.
_kept_graphs: dict[tuple[str, int], tuple[list[Tensor], Sequence[Tensor]]] = {}
_kept_gradients: dict[str, dict[Tensor, Tensor]] = {}


class _Cut(torch.autograd.Function):
    """A call whose graph stays with the owner of its module."""

    @staticmethod
    def forward(ctx, cut, reference, method, anchor, *args):
        ctx.cut, ctx.reference, ctx.key = cut, reference, next(_numbers)
        ctx.needs = ctx.needs_input_grad[4:]
        ctx.set_materialize_grads(False)
        sent = [a.detach() if isinstance(a, Tensor) else a for a in args]
        return apply(reference, _forward, cut, ctx.key, method, ctx.needs, sent)

    @staticmethod
    def backward(ctx, *grads):
        found = iter(apply(ctx.reference, _backward, ctx.cut, ctx.key, grads))
        return None, None, None, None, *(next(found) if n else None for n in ctx.needs)


def _forward(module: nn.Module, context: str, key: int, method, needs, args) -> Any:
    """Runs on the owner: the call itself; its graph is kept."""
    args = [
        arg.detach().requires_grad_(need) if isinstance(arg, Tensor) else arg
        for arg, need in zip(args, needs, strict=True)
    ]
    with torch.enable_grad():
        result = call_method(module, method, *args)
    outputs = (result,) if isinstance(result, Tensor) else tuple(result)
    leaves = [arg for arg, need in zip(args, needs, strict=True) if need]
    _kept_graphs[context, key] = leaves, outputs
    sent = tuple(output.detach() for output in outputs)
    return sent[0] if isinstance(result, Tensor) else sent


def _backward(module: nn.Module, context: str, key: int, grads) -> tuple:
    """Runs on the owner: the call's backward pass; parameters' gradients stay there."""
    leaves, outputs = _kept_graphs.pop((context, key))
    pairs = zip(outputs, grads, strict=True)
    pairs = [(o, grad) for o, grad in pairs if grad is not None and o.requires_grad]
    if not pairs:
        return (None,) * len(leaves)
    outputs, grads = zip(*pairs, strict=True)
    parameters = [each for each in module.parameters() if each.requires_grad]
    inputs = [*leaves, *parameters]
    found = torch.autograd.grad(outputs, inputs, grads, allow_unused=True)
    with _adding:
        kept = _kept_gradients.setdefault(context, {})
        for parameter, gradient in zip(parameters, found[len(leaves) :], strict=True):
            if gradient is not None:
                kept[parameter] = kept.get(parameter, 0) + gradient
    return found[: len(leaves)]
