"""Gradients that cross from worker to worker, and the step taken with them.

In one process autograd does it all. Over torch RPC *distributed autograd* records what
each call carries. Elsewhere a graph is *cut*: the owner of an object keeps its part of
the graph, and is called again for the backward pass.
"""

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed.autograd as dist_autograd
from torch import Tensor, nn, optim
from torch.futures import Future, wait_all
from torch.utils._pytree import tree_leaves

from cdopt_tutorial.calls import network
from cdopt_tutorial.calls.references import Reference, apply, apply_async, call_method

Context = int | str | None  # of distributed autograd, of a cut, or of this process
Where = tuple[str, str]  # a context of a cut, and the name of a call in it


def cut_always() -> None:
    """Cut graphs in this process over torch RPC, too; for ``launch``'s ``attach``."""
    global _cuts
    _cuts = True


@contextmanager
def context() -> Iterator[Context]:
    """One step's context, for one backward pass, on the worker that has the loss.

    A RuntimeError if this thread is in one already.
    """
    worker = network.current().own_name()
    if not worker:
        yield None
    elif isinstance(network.current(), network.RPC) and not _cuts:
        with dist_autograd.context() as number, _enter(number):
            yield number
    else:
        with _enter(f"{worker}/{next(_numbers)}") as part:
            yield part.context
            wait_all(part.drop_rest())


def call(reference: Reference, method: str | Callable, *args: Any) -> Any:
    """Call a method of a module on its owner; tensors stay part of the graph.

    A tensor that needs a gradient must be an argument by itself, and not an
    ``nn.Parameter``, which would arrive without a graph. Where graphs are cut, the
    method must return one tensor or several; elsewhere, if it calls others itself, its
    result must depend on all that these return. A RuntimeError outside of a context,
    unless gradients are switched off.
    """
    if reference.is_owner():
        return apply(reference, method, *args)
    if not torch.is_grad_enabled():
        return apply(reference, _without_graph, method, args)
    part = _this_thread.part or _Part(_torchs_context())
    if isinstance(part.context, int):
        result = _recorded(part, reference, method, args)
    else:
        result = _Cut.apply(part, reference, method, _anchor, *args)
    part.results += _tensors(result)
    return result


def backward(context: Context, loss: Tensor) -> None:
    """Backpropagate a loss to every parameter it depends on, on whichever worker.

    Over torch RPC, a RuntimeError if it is the context's second one, or a call in it
    has failed: torch would wait for gradients that nobody sends.
    """
    if not isinstance(context, int):
        loss.backward()
        return
    part = _this_thread.part or _Part(context)
    if part.over:
        raise RuntimeError(part.over)
    part.over = "a context is for one backward pass: add the losses"
    dist_autograd.backward(context, [_Depends.apply(loss, *part.results)])


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


class _Part:
    """What one thread has done in a context: here, or for a call from elsewhere."""

    def __init__(self, context: int | str):
        self.context = context
        self.results: list[Tensor] = []  # with a graph, which calls have returned
        self.asked: dict[str, Reference] = {}  # calls with a cut, not yet taken back
        self.over = ""  # why it may have no backward pass any more

    def drop_rest(self) -> list[Future]:
        """Have owners forget the graphs that no backward pass has asked for."""
        rest, self.asked = self.asked, {}
        return [apply_async(rest[key], _drop, (self.context, key)) for key in rest]


class _Thread(threading.local):
    part: _Part | None = None


@contextmanager
def _enter(context: int | str) -> Iterator[_Part]:
    """Calls of this thread belong to a context."""
    if _this_thread.part is not None:
        raise RuntimeError("this thread is in a context of gradients already")
    part = _this_thread.part = _Part(context)
    try:
        yield part
    except BaseException:
        with suppress(Exception):  # an owner may be gone, and not worth waiting for
            part.drop_rest()
        raise
    finally:
        _this_thread.part = None


def _torchs_context() -> int:
    """Of ``torch.distributed.autograd.context``, if this thread is in one."""
    try:
        return dist_autograd._current_context()._context_id()
    except RuntimeError:
        text = "a call with a gradient needs a context of gradients around it"
        raise RuntimeError(text) from None


_this_thread = _Thread()
_cuts = False
_numbers = itertools.count()
_adding = threading.Lock()
# Without it autograd would run no backward pass for a lookup, of integers only.
_anchor = torch.zeros((), requires_grad=True)
# On an owner: graphs by context and key, gradients by context.
_kept_graphs: dict[Where, tuple[_Part, list[Tensor], tuple]] = {}
_kept_gradients: dict[str, dict[Tensor, Tensor]] = {}


class _Depends(torch.autograd.Function):
    """Its first argument, in whose backward pass the others have no gradient.

    Distributed autograd waits for a gradient, even none, of all that calls returned.
    """

    @staticmethod
    def forward(ctx, value, *others):
        ctx.set_materialize_grads(False)
        ctx.others = len(others)
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, *(None,) * ctx.others


def _tensors(result: Any) -> list[Tensor]:
    """Those of a call's result that have a graph."""
    leaves = tree_leaves(result)
    return [t for t in leaves if isinstance(t, Tensor) and t.requires_grad]


def _without_graph(module: nn.Module, method: str | Callable, args: tuple) -> Any:
    """Runs on the owner."""
    with torch.no_grad():
        return call_method(module, method, *args)


def _recorded(part: _Part, reference: Reference, method, args: tuple) -> Any:
    """A call in a context of torch's, which records it even if it fails."""
    try:
        return apply(reference, method, *args)
    except BaseException:
        if _tensors(args):
            part.over = "a call of this context has failed: begin another one"
        raise


class _Cut(torch.autograd.Function):
    """A call whose graph stays with the owner of its module."""

    @staticmethod
    def forward(ctx, part, reference, method, anchor, *args):
        ctx.part, ctx.reference = part, reference
        # Several workers may call one object in a context.
        ctx.key = f"{network.current().own_name()}/{next(_numbers)}"
        ctx.needs = ctx.needs_input_grad[4:]
        ctx.set_materialize_grads(False)
        part.asked[ctx.key] = reference
        sent = [a.detach() if isinstance(a, Tensor) else a for a in args]
        where = part.context, ctx.key
        return apply(reference, _forward, where, method, ctx.needs, sent)

    @staticmethod
    def backward(ctx, *grads):
        where = ctx.part.context, ctx.key
        found = iter(apply(ctx.reference, _backward, where, grads))
        ctx.part.asked.pop(ctx.key, None)
        return None, None, None, None, *(next(found) if n else None for n in ctx.needs)


def _forward(module: nn.Module, where: Where, method, needs, args) -> Any:
    """Runs on the owner: the call itself; its graph is kept."""
    args = [
        arg.detach().requires_grad_(need) if isinstance(arg, Tensor) else arg
        for arg, need in zip(args, needs, strict=True)
    ]
    with torch.enable_grad(), _enter(where[0]) as part:
        result = call_method(module, method, *args)
    outputs = (result,) if isinstance(result, Tensor) else tuple(result)
    leaves = [arg for arg, need in zip(args, needs, strict=True) if need]
    _kept_graphs[where] = part, leaves, outputs
    sent = tuple(output.detach() for output in outputs)
    return sent[0] if isinstance(result, Tensor) else sent


def _backward(module: nn.Module, where: Where, grads) -> tuple:
    """Runs on the owner: the call's backward pass; parameters' gradients stay there."""
    part, leaves, outputs = _kept_graphs.pop(where)
    try:
        return _taken_back(module, where[0], leaves, outputs, grads)
    finally:
        wait_all(part.drop_rest())


def _taken_back(module: nn.Module, context: str, leaves, outputs, grads) -> tuple:
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


def _drop(module: nn.Module, where: Where) -> None:
    """Runs on the owner: forget a call that no backward pass has asked for."""
    if where in _kept_graphs:  # else the call has failed
        part, *_ = _kept_graphs.pop(where)
        wait_all(part.drop_rest())
