"""How a gradient fares on its way back through time, before any training."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize

from cdopt_tutorial.constraints import dissolve_recurrent
from cdopt_tutorial.dissolving.memory import recurrent

NUM_INPUTS = 10
LAYERS: dict[str, Callable[[int, int], nn.RNNBase]] = {
    "RNN": nn.RNN,
    "Stiefel RNN": partial(recurrent, "Stiefel"),
    "LSTM": nn.LSTM,
    "LSTM, stacked": lambda *sizes: dissolve_recurrent(nn.LSTM(*sizes)),
    "LSTM, per gate": lambda *sizes: dissolve_recurrent(nn.LSTM(*sizes), per_gate=True),
}


def gradient_norms(rnn: nn.RNNBase, inputs: Tensor, direction: Tensor) -> list[float]:
    """Norm of vᵀ ∂h_T/∂s_t for each t from 0 to T, with ``direction`` v, (hidden,).

    The state s_t is all that the layer hands on: h_t, and for an LSTM the cell c_t,
    too; s_0 is 0. ``inputs`` are (T, num_inputs), of the layer's dtype and device.
    """
    is_lstm = isinstance(rnn, nn.LSTM)
    zeros = direction.new_zeros(1 + is_lstm, 1, 1, rnn.hidden_size)
    states = [tuple(part.requires_grad_() for part in zeros.unbind())]
    with parametrize.cached():  # the weight is the same at every step
        for one in inputs:
            state = states[-1] if is_lstm else states[-1][0]
            _, state = rnn(one.view(1, 1, -1), state)
            states.append(state if is_lstm else (state,))
    parts = [part for state in states for part in state]
    loss = states[-1][0].flatten() @ direction
    # What nothing depends on has no gradient: the last cell does not enter h_T again.
    found = torch.autograd.grad(loss, parts, allow_unused=True, materialize_grads=True)
    return torch.stack(found).view(len(states), -1).norm(dim=1).tolist()


def flows(
    hidden: int = 128,
    steps: int = 50,
    seeds: Sequence[int] = (1, 2, 3),
    device: str = "cpu",
) -> dict[str, list[list[float]]]:
    """For each of ``LAYERS``, a list per seed of what :func:`gradient_norms` gives.

    All layers of a seed see the same inputs, one of ten symbols in each of T steps, and
    the same direction, a unit vector.
    """
    found: dict[str, list[list[float]]] = {name: [] for name in LAYERS}
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        symbols = torch.randint(NUM_INPUTS, (steps,), generator=generator)
        inputs = functional.one_hot(symbols, NUM_INPUTS).double()
        direction = torch.randn(hidden, generator=generator, dtype=torch.float64)
        direction = functional.normalize(direction, dim=0)
        given = inputs.to(device), direction.to(device)
        for name, make in LAYERS.items():
            rnn = start(make, hidden, seed).to(device)
            found[name].append(gradient_norms(rnn, *given))
    return found


def start(make: Callable[[int, int], nn.RNNBase], hidden: int, seed: int) -> nn.RNNBase:
    """A layer of ten inputs in float64, drawn with a seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make(NUM_INPUTS, hidden).double()


def gate_singular_values(rnn: nn.RNNBase) -> Tensor:
    """Singular values (gates, hidden) of weight_hh; i, f, g and o are an LSTM's."""
    weight = rnn.weight_hh_l0.detach()
    return torch.linalg.svdvals(weight.unflatten(0, (-1, rnn.hidden_size)))
