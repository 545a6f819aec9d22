"""Recurrent models that differ only in how their hidden-to-hidden weight is held."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize

from cdopt_tutorial import constraints


def _free(num_inputs: int, hidden: int, _: float) -> nn.RNN:
    return nn.RNN(num_inputs, hidden)


def _orthogonal(num_inputs: int, hidden: int, _: float) -> nn.RNN:
    rnn = nn.RNN(num_inputs, hidden)
    nn.init.orthogonal_(rnn.weight_hh_l0)
    return rnn


def _stiefel(num_inputs: int, hidden: int, penalty_param: float) -> nn.RNN:
    rnn = _orthogonal(num_inputs, hidden, penalty_param)
    return constraints.dissolve_recurrent(rnn, penalty_param=penalty_param)


def _parametrized(num_inputs: int, hidden: int, penalty_param: float) -> nn.RNN:
    rnn = _orthogonal(num_inputs, hidden, penalty_param)
    # Of torch's three maps this was the fastest at a width of 64.
    return parametrizations.orthogonal(rnn, "weight_hh_l0", orthogonal_map="cayley")


def _lstm(num_inputs: int, hidden: int, _: float) -> nn.LSTM:
    rnn = nn.LSTM(num_inputs, hidden)
    # Forget gates start open, as Jozefowicz, Zaremba and Sutskever (2015) advise.
    nn.init.ones_(rnn.bias_hh_l0.detach()[hidden : 2 * hidden])
    return rnn


# Hidden-to-hidden weights: free; free from an orthogonal start; dissolved; exactly
# orthogonal; an LSTM's; and free with the penalty of the dissolved one.
MODELS: dict[str, Callable[[int, int, float], nn.RNNBase]] = {
    "free": _free,
    "orthogonal start": _orthogonal,
    "Stiefel": _stiefel,
    "torch's orthogonal": _parametrized,
    "LSTM": _lstm,
    "penalty alone": _orthogonal,
}


class Model(nn.Module):
    """A recurrent layer between one-hot symbols and a linear readout.

    Args:
        name: of ``MODELS``.
        num_inputs: different input symbols.
        num_outputs: different output symbols.
        hidden: width of the recurrent layer.
        penalty_param: factor of ‖C(W)‖² in the penalty of "Stiefel" and "penalty
            alone".
    """

    def __init__(
        self,
        name: str,
        num_inputs: int,
        num_outputs: int,
        hidden: int,
        penalty_param: float,
    ):
        super().__init__()
        self.name, self.penalty_param = name, penalty_param
        # Drawn first, so that all models of a seed start with the same readout.
        self.readout = nn.Linear(hidden, num_outputs)
        self.rnn = MODELS[name](num_inputs, hidden, penalty_param)

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
            return self.penalty_param * _violation(self.rnn.weight_hh_l0).square().sum()
        return 0.0

    @torch.no_grad()
    def distances(self) -> tuple[float, float]:
        """‖C‖ of the hidden-to-hidden parameter, and of what the forward pass uses.

        C(W) is WᵀW - I, with or without a constraint.
        """
        if self.name == "Stiefel":
            found = constraints.feasibility(self.rnn)
            return found.weight, found.mapped
        distance = _violation(self.rnn.weight_hh_l0).norm().item()
        return distance, distance


def _violation(weight: Tensor) -> Tensor:
    return weight.T @ weight - torch.eye(weight.shape[1], dtype=weight.dtype)
