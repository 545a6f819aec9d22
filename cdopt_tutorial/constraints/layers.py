"""Constraint dissolving for the weights of any layer."""

import functools
import threading
from typing import Any

import torch
from cdopt.manifold_torch import oblique_torch, stiefel_torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from cdopt_tutorial.constraints.surface import Manifold, Surface, is_sharded, surface


def dissolve(
    module: nn.Module,
    name: str = "weight",
    manifold: Manifold = "stiefel",
    penalty_param: float = 0.1,
    *,
    blocks: int = 1,
    transpose: bool | None = None,
) -> nn.Module:
    """Make a layer compute with A(W) in place of its weight, projected to start with.

    ``module.weight`` becomes A(W); the free parameter W, which any optimizer moves, is
    ``module.parametrizations.weight.original``. Assigning a weight projects it. Add the
    penalty on W, ``penalty_param`` ‖C(W)‖², to the loss, see
    :func:`~cdopt_tutorial.constraints.measure.penalty`; the papers' β is twice that.
    Dissolve a shared weight in each of its layers; its penalty counts once.
    Source: Xiao, Liu and Toh (2023).

    A weight may be in shards: call ``parallelize_module`` before, DDP, ``fully_shard``
    and ``torch.compile`` after this; :mod:`~cdopt_tutorial.constraints.sharded` says
    what that costs. Each stage of a pipeline adds its own penalty.

    The manifold is "stiefel" (the short side orthonormal), "oblique" (rows of norm 1),
    "sphere" (norm 1), or a class of CDOpt; for ``blocks`` and ``transpose`` see
    :func:`~cdopt_tutorial.constraints.surface.surface`. Raises ValueError if there is
    no such weight, it is parametrized or under ``fully_shard`` already, or it does not
    fit the manifold.
    """
    weight = _free_weight(module, name)
    if not penalty_param > 0:
        raise ValueError(f"penalty_param is {penalty_param}, but must be above 0")
    on = surface(manifold, weight, blocks, transpose)
    padding = getattr(module, "padding_idx", None)
    if padding is not None and _has_unit_rows(on):
        has = f"{type(module).__name__} has padding_idx={padding}"
        raise ValueError(f"{has}, but no row can be 0 on this manifold")
    _extend(module)
    rule = Dissolved(on, penalty_param)
    parametrize.register_parametrization(module, name, rule)
    rule._seen = []  # or a weight that is sharded next would stay in memory, whole
    return module


def _free_weight(module: nn.Module, name: str) -> nn.Parameter:
    """A layer's weight, or a ValueError if it can't be dissolved."""
    kind = type(module).__name__
    if is_under_fsdp(module):
        raise ValueError(f"{kind} is under fully_shard: dissolve before, not after")
    if parametrize.is_parametrized(module, name):
        raise ValueError(f"{name!r} of {kind} is parametrized already")
    weight = dict(module.named_parameters(recurse=False)).get(name)
    if weight is None:
        raise ValueError(f"{kind} has no parameter {name!r}")
    if getattr(module, "sparse", False):
        raise ValueError(f"{kind} has sparse=True, but the gradient of a W is dense")
    return weight


def _has_unit_rows(on: Surface) -> bool:
    return on.make is oblique_torch or (on.make is stiefel_torch and on.transpose)


def dissolve_recurrent(
    rnn: nn.Module,
    manifold: Manifold = "stiefel",
    penalty_param: float = 0.1,
    per_gate: bool = False,
) -> nn.Module:
    """Dissolve each hidden-to-hidden weight of a recurrent layer or cell of torch.nn.

    See :func:`dissolve`. With ``per_gate`` each gate's matrix (h, h) is on a manifold
    of its own; otherwise the stack of them, (4h, h) for an LSTM, is on one, as in
    ``LSTM_cdopt``. Raises ValueError if there is no such weight.
    """
    names = [n for n, _ in rnn.named_parameters(recurse=False) if "weight_hh" in n]
    if not names:
        raise ValueError(f"{type(rnn).__name__} has no weight_hh that is still free")
    for name in names:
        blocks = len(getattr(rnn, name)) // rnn.hidden_size if per_gate else 1
        dissolve(rnn, name, manifold, penalty_param, blocks=blocks)
    return rnn


class Dissolved(nn.Module):
    """The parametrization of a dissolved weight: W to A(W), and ‖C(W)‖²."""

    def __init__(self, on: Surface, penalty_param: float):
        super().__init__()
        self.surface, self.penalty_param = on, penalty_param
        self._seen: list = []  # the last pass: the weight, its state, its distance

    def forward(self, weight: Tensor) -> Tensor:
        """A(W), shaped as W."""
        own = _for_this_call(weight)
        mapped, distance = self.surface.map_and_distance(own)
        if own is weight and self._keeps(weight):
            self._seen = [weight, _state(weight), distance]
        return mapped

    def right_inverse(self, weight: Tensor) -> Tensor:
        """The W of an assigned weight: the nearest feasible one."""
        return self.surface.nearest(weight)

    def distance(self, weight: Tensor) -> Tensor:
        """‖C(W)‖², a scalar; that of the last forward pass if W has not changed since.

        That one is returned only once, since a backward pass frees its graph. Like
        autograd, it does not notice what is written into ``W.data`` in place.
        """
        own = _for_this_call(weight)
        if own is weight and self._keeps(weight) and self._seen:
            last, state, distance = self._seen
            self._seen = []
            if last is weight and state == _state(weight):
                return distance
        return self.surface.distance(own)

    def _keeps(self, weight: Tensor) -> bool:
        """Whether to keep a pass's distance for the penalty.

        Not if FSDP gathers the weight for a pass, since the penalty has the shards; and
        a compiler finds by itself what both have in common.
        """
        gathered = is_under_fsdp(self) and not is_sharded(weight)
        compiling = torch.compiler.is_compiling()
        return torch.is_grad_enabled() and not (compiling or gathered)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_seen": []}


def _for_this_call(weight: Tensor) -> Tensor:
    """The weight to compute with: a copy in threads that answer calls by RPC.

    Another trainer's step may come before this call's backward pass, which needs the
    weight as it was. Nor is the distance kept for a penalty, as graphs must not mix.
    """
    if torch.compiler.is_compiling():
        return weight
    here = threading.current_thread() is threading.main_thread()
    return weight if here else weight.clone()


def _state(weight: Tensor) -> tuple:
    here = weight.to_local() if is_sharded(weight) else weight
    return weight._version, here.data_ptr(), weight.dtype, weight.requires_grad


def is_under_fsdp(module: nn.Module) -> bool:
    """Whether ``fully_shard`` manages a module's parameters."""
    return getattr(module, "_is_fsdp_managed_module", False)


def _extend(module: nn.Module) -> None:
    """Add to a layer's class what torch's parametrizations lack, once."""
    kind = type(module)
    if issubclass(kind, _Portable):
        return
    more = (_Portable, _Fresh) if isinstance(module, nn.RNNBase) else (_Portable,)
    module.__class__ = type(kind.__name__, (*more, kind), {"_kind": kind})


class _Portable:
    """Pickles and copies with its parametrizations, as torch's classes can't."""

    @functools.cached_property  # hidden once a layer has an attribute of that name
    def _distribute_module_applied(self) -> bool:
        """Stops tensor parallel, which looks for this name and would shard A(W)."""
        (name, *_), kind = self.parametrizations, self._kind.__name__
        order = "parallelize_module first, dissolve after it"
        other = "torch.jit does not know such layers, torch.export does"
        raise ValueError(f"{name!r} of {kind} is dissolved already: {order}; {other}")

    def __reduce_ex__(self, protocol: int) -> tuple:
        names = tuple(getattr(self, "parametrizations", ()))
        return _empty, (self._kind, names), self._kind.__getstate__(self)

    __deepcopy__ = None  # or torch would add one that makes copies share a class


def _empty(kind: type, names: tuple[str, ...]) -> nn.Module:
    """A layer without its state; registering again would project its weights."""
    module = kind.__new__(kind)
    _extend(module)
    if names:
        parametrize._inject_new_class(module)
    for name in names:
        parametrize._inject_property(module, name)
    return module


class _Fresh:
    """An RNN that computes its weights once in each forward pass, and keeps none."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        _now.weights = [getattr(self, name) for name in self._flat_weights_names]
        try:
            return super().forward(*args, **kwargs)
        finally:
            _now.weights = None

    @property
    def _flat_weights(self) -> list[Tensor | None]:
        now = getattr(_now, "weights", None)
        return now or [None] * len(self._flat_weights_names)

    @_flat_weights.setter
    def _flat_weights(self, _: list) -> None:
        pass

    def _update_flat_weights(self) -> None:
        pass


_now = threading.local()  # the weights of the pass that each thread is in
