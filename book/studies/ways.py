"""The ways to train that chapter 3's certificates compare."""

from collections.abc import Sequence
from typing import Any

from controls import treat
from torch import Tensor, nn, optim
from torch.nn.utils import parametrize

from cdopt_tutorial.constraints import Constraints, dissolve, stiefel_constraint
from cdopt_tutorial.constraints.rivals import Rival

RULES = {"SPEL": "spel", "projected": "projected", "landing": "landing"}
# The others are trained by Adam.
CONTROLS = {
    "torch's orthogonal": "torch's orthogonal", "projected after Adam": "projected",
    "spectral norm": "spectral norm", "same norm": "same norm",
    "free": "orthogonal start", "penalty alone": "orthogonal start",
    "weight decay": "orthogonal start",
}  # fmt: skip
WAYS = [*RULES, "dissolved", "AOL", *CONTROLS]
# Of 0.01, 0.1, 1 and 10 what certified most: at a scale of 2, rates 0.02 and 0.05.
PENALTY_PARAMS = {"dissolved": 0.1, "penalty alone": 1.0}
DECAY = 10.0  # of 0.1, 1, 3, 10 and 30 what certified most, at rates 0.001 to 0.05


class AOL(nn.Module):
    """Scales the short side's rows or columns so that no singular value is above 1.

    Source: Prach and Lampert, Almost-orthogonal Lipschitz layers (2022).
    """

    def forward(self, weight: Tensor) -> Tensor:
        """The scaled weight."""
        if weight.shape[0] < weight.shape[1]:
            return self(weight.mT).mT
        return weight * (weight.mT @ weight).abs().sum(0).rsqrt()


def off(weight: Tensor) -> Tensor:
    """How far a weight is from orthonormal, squared: a scalar."""
    return stiefel_constraint(weight).square().sum()


def prepare(way: str, layers: Sequence[nn.Linear], lr: float) -> dict[str, Any]:
    """Parametrize layers, if a way does; returns its arguments for their training."""
    how: dict[str, Any] = {}
    if way in CONTROLS:
        afterwards = [treat(CONTROLS[way], layer) for layer in layers]
        how["after_step"] = lambda: [each() for each in afterwards]
    elif way == "dissolved":
        for layer in layers:
            dissolve(layer, penalty_param=PENALTY_PARAMS[way])
        how["penalty"] = Constraints(*layers).penalty
    elif way == "AOL":
        for layer in layers:
            parametrize.register_parametrization(layer, "weight", AOL())
    weights = [weight for layer in layers for weight in layer.parameters()]
    if way == "penalty alone":
        how["penalty"] = lambda: PENALTY_PARAMS[way] * sum(map(off, weights))
    if way in RULES:
        return how | {"optimizer": Rival(RULES[way], weights, lr, momentum=0.9)}
    if way == "weight decay":
        return how | {"optimizer": optim.AdamW(weights, lr, weight_decay=DECAY)}
    return how | {"optimizer": optim.Adam(weights, lr)}
