"""Gradients that cross from worker to worker.

In one process autograd does it all. Over torch RPC *distributed autograd* records what
each call carries. Elsewhere a graph is *cut*: the owner of an object keeps its part of
the graph, and is called again for the backward pass.
"""

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed.autograd as dist_autograd
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from cdopt_tutorial.calls import network
from cdopt_tutorial.calls.references import (
    Reference,
    apply,
    apply_async,
    begin,
    call_method,
)

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
            part.drop_rest()


def call(reference: Reference, method: str | Callable, *args: Any) -> Any:
    """Call a method of a module on its owner; tensors stay part of the graph.

    A tensor that needs a gradient must be an argument by itself. Where graphs are cut,
    the method must return one tensor or several; elsewhere a result that the loss does
    not use has a gradient of 0, and not none. A RuntimeError outside of a context,
    unless gradients are switched off.
    """
    return ask(reference, method, *args)()


def ask(reference: Reference, method: str | Callable, *args: Any) -> Callable[[], Any]:
    """Begin such a call; what is returned waits for its result, in the same context.

    So several owners can work at once. What is here is called before this returns.
    """
    part = _part.get()
    if reference.is_owner():
        if part:
            part.modules.append(reference.local_value())
        return begin(reference, method, *args)
    if not torch.is_grad_enabled():
        return begin(reference, _without_graph, method, args)
    if part is None:
        raise RuntimeError(
            "a call with a gradient needs a context of gradients around it"
        )
    if isinstance(part.context, str):
        return _ask_cut(part, reference, method, args)
    return _ask_recorded(part, reference, method, args)


def backward(context: Context, loss: Tensor) -> None:
    """Backpropagate a loss to every parameter it depends on, on whichever worker.

    Over torch RPC, a RuntimeError if it is the context's second one, or a call in it
    has failed or is under way: torch would wait for gradients that nobody sends.
    """
    if not isinstance(context, int):
        loss.backward()
        return
    part = _part.get()
    if part is None:
        raise RuntimeError("a backward pass needs the context of its calls around it")
    if part.open:
        raise RuntimeError(
            "a call of this context has failed or was not waited for: begin another one"
        )
    if part.over:
        raise RuntimeError("a context is for one backward pass: add the losses")
    part.over = True
    dist_autograd.backward(context, [loss, *part.zeros()])


def gradients(context: Context, parameters: Iterable[Tensor]) -> dict[Tensor, Tensor]:
    """A context's gradients, on their owner, of those parameters that have one."""
    if isinstance(context, int):
        kept = dist_autograd.get_gradients(context)
    else:
        kept = _kept_gradients.get(context, {})
    # In one process, and on the caller's side of a cut, they are in .grad.
    either = {p: kept.get(p, p.grad) for p in parameters}
    return {p: gradient for p, gradient in either.items() if gradient is not None}


def take_sum(
    contexts: Iterable[Context], parameters: Iterable[Tensor]
) -> dict[Tensor, Tensor]:
    """The sum over several contexts, on the parameters' owner, which then drops them.

    They are added in the order of the contexts, because rounding depends on it. In one
    process there is no more than one: a RuntimeError otherwise.
    """
    contexts, parameters = list(contexts), list(parameters)
    if contexts.count(None) > 1:
        raise RuntimeError(
            "in one process all contexts share their gradients: let one trainer have "
            "the whole batch there"
        )
    total: dict[Tensor, Tensor] = {}
    for context in contexts:
        for p, gradient in gradients(context, parameters).items():
            total[p] = total[p] + gradient if p in total else gradient
        _kept_gradients.pop(context, None)  # torch frees its own contexts
    return total


@dataclass
class _Part:
    """What one thread has done in a context: here, or for a call from elsewhere."""

    context: int | str
    # Of distributed autograd: what calls returned, how many have not returned, and
    # whether there was a backward pass.
    results: list[Tensor] = field(default_factory=list)
    open: int = 0
    over: bool = False
    # Of a cut: modules that ran here, and calls whose graphs their owners still keep.
    modules: list[nn.Module] = field(default_factory=list)
    kept: dict[str, Reference] = field(default_factory=dict)

    def zeros(self) -> list[Tensor]:
        """Losses of no element, which give all results a gradient, if only of 0.

        Distributed autograd waits for one of each result of an owner that it reaches.
        """
        return [result.flatten()[:0].sum() for result in self.results]

    def drop_rest(self) -> None:
        """Have owners forget their graphs, without waiting: they may be gone."""
        rest, self.kept = self.kept, {}
        for key, reference in rest.items():
            with suppress(Exception):
                apply_async(reference, _drop, (self.context, key))


@contextmanager
def _enter(context: int | str) -> Iterator[_Part]:
    """Calls of this thread belong to a context."""
    if _part.get():
        raise RuntimeError("this thread is in a context of gradients already")
    before = _part.set(part := _Part(context))
    try:
        yield part
    except BaseException:
        part.drop_rest()
        raise
    finally:
        _part.reset(before)


_cuts = False
_numbers = itertools.count()
_part: ContextVar[_Part | None] = ContextVar("part", default=None)  # of this thread
# Without it a lookup, of integers only, would have no backward pass.
_anchor = torch.zeros((), requires_grad=True)
# On an owner: a call's part, arguments and results; gradients by context.
_kept_graphs: dict[Where, tuple[_Part, tuple, tuple[Tensor, ...]]] = {}
_kept_gradients: dict[Context, dict[Tensor, Tensor]] = {}
_adding = threading.Lock()


def _tensors(value: Any) -> list[Tensor]:
    """Those in nested values that need a gradient."""
    leaves = tree_leaves(value)
    return [t for t in leaves if isinstance(t, Tensor) and t.requires_grad]


def _without_graph(module: nn.Module, method: str | Callable, args: tuple) -> Any:
    """Runs on the owner."""
    with torch.no_grad():
        return call_method(module, method, *args)


def _ask_recorded(
    part: _Part, reference: Reference, method: str | Callable, args: tuple
) -> Callable[[], Any]:
    """A call in a context of torch's, which records it even if it fails."""
    # A parameter itself would arrive without a graph.
    args = tree_map_only(nn.Parameter, lambda p: p.view_as(p), args)
    part.open += 1  # until it has returned
    wait = begin(reference, _record, method, part.context, args)

    def finish() -> Any:
        result, zeros, still_open, over = wait()
        part.results += _tensors(result) + zeros
        part.open += still_open - 1
        part.over = part.over or over
        return result

    return finish


def _record(module: nn.Module, method, context: int, args: tuple) -> tuple:
    """Runs on the owner: the result, and what its own calls leave to the caller."""
    with _enter(context) as part:
        result = call_method(module, method, *args)
        return result, part.zeros(), part.open, part.over


def _ask_cut(
    part: _Part, reference: Reference, method: str | Callable, args: tuple
) -> Callable[[], Any]:
    """A call whose graph stays with the owner of its module."""
    # Several workers may call one object in a context.
    key = f"{network.current().own_name()}/{next(_numbers)}"
    sent = tree_map_only(Tensor, _leaf, args)
    part.kept[key] = reference
    wait = begin(reference, _forward, method, (part.context, key), sent)
    return partial(_Cut.apply, part, key, wait, _anchor, *args)


class _Cut(torch.autograd.Function):
    """The caller's side of it."""

    @staticmethod
    def forward(ctx, part, key, wait, anchor, *args):
        ctx.part, ctx.key = part, key
        ctx.set_materialize_grads(False)
        return wait()

    @staticmethod
    def backward(ctx, *grads):
        reference = ctx.part.kept[ctx.key]
        of_args = apply(reference, _backward, (ctx.part.context, ctx.key), grads)
        del ctx.part.kept[ctx.key]
        return None, None, None, None, *of_args


def _leaf(tensor: Tensor) -> Tensor:
    """The same tensor without its graph."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _forward(module: nn.Module, method, where: Where, args: tuple) -> Any:
    """Runs on the owner: the call itself; its graph is kept."""
    with torch.enable_grad(), _enter(where[0]) as part:
        part.modules.append(module)
        result = call_method(module, method, *args)
    outputs = (result,) if isinstance(result, Tensor) else tuple(result)
    _kept_graphs[where] = part, args, outputs
    sent = tuple(output.detach() for output in outputs)
    return sent[0] if isinstance(result, Tensor) else sent


def _backward(module: nn.Module, where: Where, grads: tuple) -> list[Tensor | None]:
    """Runs on the owner: the gradients of the arguments; the parameters' stay there."""
    part, args, outputs = _kept_graphs.pop(where)
    parameters = {p for m in part.modules for p in m.parameters() if p.requires_grad}
    # With the anchor the pass goes through all calls that the method itself has made.
    inputs = [_anchor, *_tensors(args), *parameters]
    both = zip(outputs, grads, strict=True)
    pairs = [(o, grad) for o, grad in both if grad is not None and o.requires_grad]
    outputs, grads = zip(*pairs, strict=True) if pairs else ((), ())
    try:
        computed = torch.autograd.grad(outputs, inputs, grads, allow_unused=True)
    finally:
        part.drop_rest()
    found = {i: g for i, g in zip(inputs, computed, strict=True) if g is not None}
    with _adding:
        kept = _kept_gradients.setdefault(where[0], {})
        for parameter in parameters & found.keys():
            kept[parameter] = kept.get(parameter, 0) + found[parameter]
    return [found.get(arg) if isinstance(arg, Tensor) else None for arg in args]


def _drop(module: nn.Module, where: Where) -> None:
    """Runs on the owner: forget a call that no backward pass has asked for."""
    part, *_ = _kept_graphs.pop(where)
    part.drop_rest()
