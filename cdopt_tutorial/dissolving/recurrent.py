"""Recurrent models that differ only in how their hidden-to-hidden weight is held."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize

from cdopt_tutorial import constraints

PENALTY_PARAM = 0.1  # of "Stiefel" and "penalty alone"


def orthogonal_start(num_inputs: int, hidden: int) -> nn.RNN:
    """An RNN that is free, and begins with an orthogonal hidden-to-hidden weight."""
    rnn = nn.RNN(num_inputs, hidden)
    nn.init.orthogonal_(rnn.weight_hh_l0)
    return rnn


def stiefel(num_inputs: int, hidden: int) -> nn.RNN:
    """An RNN whose hidden-to-hidden weight is dissolved."""
    rnn = orthogonal_start(num_inputs, hidden)
    return constraints.dissolve_recurrent(rnn, penalty_param=PENALTY_PARAM)


def _exact(num_inputs: int, hidden: int) -> nn.RNN:
    rnn = orthogonal_start(num_inputs, hidden)
    # Of torch's three maps this was the fastest at a width of 64.
    return parametrizations.orthogonal(rnn, "weight_hh_l0", orthogonal_map="cayley")


def _lstm(num_inputs: int, hidden: int) -> nn.LSTM:
    rnn = nn.LSTM(num_inputs, hidden)
    # Forget gates start open, as Jozefowicz, Zaremba and Sutskever (2015) advise.
    nn.init.ones_(rnn.bias_hh_l0.detach()[hidden : 2 * hidden])
    return rnn


# Each is made of num_inputs and hidden; "penalty alone" has that of "Stiefel".
MODELS: dict[str, Callable[[int, int], nn.RNNBase]] = {
    "free": nn.RNN,
    "orthogonal start": orthogonal_start,
    "Stiefel": stiefel,
    "torch's orthogonal": _exact,
    "LSTM": _lstm,
    "penalty alone": orthogonal_start,
}


class Model(nn.Module):
    """A recurrent layer between one-hot symbols and a linear readout.

    Args:
        name: of ``MODELS``.
        num_inputs: different input symbols.
        num_outputs: different output symbols.
        hidden: width of the recurrent layer.
    """

    def __init__(self, name: str, num_inputs: int, num_outputs: int, hidden: int):
        super().__init__()
        self.name = name
        # Drawn first, so that all models of a seed start with the same readout.
        self.readout = nn.Linear(hidden, num_outputs)
        self.rnn = MODELS[name](num_inputs, hidden)

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits (seq_len, batch, num_outputs) of inputs (seq_len, batch) int64."""
        symbols = functional.one_hot(inputs, self.rnn.input_size)
        # torch's parametrization would be computed several times a pass otherwise.
        with parametrize.cached():
            hidden, _ = self.rnn(symbols.to(self.readout.weight.dtype))
        return self.readout(hidden)

    def penalty(self) -> Tensor | float:
        """What is added to the loss; 0 if the model has no penalty."""
        if self.name == "Stiefel":
            return constraints.penalty(self.rnn)
        if self.name == "penalty alone":
            off = constraints.stiefel_constraint(self.rnn.weight_hh_l0)
            return PENALTY_PARAM * off.square().sum()
        return 0.0

    @torch.no_grad()
    def distances(self) -> tuple[float, float]:
        """‖C‖ of the hidden-to-hidden parameter, and of what the forward pass uses.

        C(W) is WᵀW - I, with or without a constraint.
        """
        if self.name == "Stiefel":
            found = constraints.feasibility(self.rnn)
            return found.weight, found.mapped
        off = constraints.stiefel_constraint(self.rnn.weight_hh_l0).norm().item()
        return off, off
