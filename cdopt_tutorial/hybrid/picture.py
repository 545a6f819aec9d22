"""What a trained model has learnt of each pixel of the digits."""

import torch
from torch import Tensor

from cdopt_tutorial.data.bags import NUM_LEVELS, Bags
from cdopt_tutorial.hybrid.model import Model


@torch.no_grad()
def ink_scores(model: Model, bags: Bags) -> Tensor:
    """What ink on each of p pixels does to the score of each digit, (num_classes, p).

    By how much a score grows, less the mean over the digits, with one standard
    deviation more of ink; 0 for a pixel that is the same in all images. A pixel's part
    of the score is its token's vector, through the dense layer.
    """
    tokens = bags.tokens.view(len(bags), -1)
    levels = (tokens % NUM_LEVELS).double()
    levels = levels - levels.mean(0)
    scores = model.dense(model.table.weight).double()
    scores = scores[tokens]  # (b, p, num_classes), each pixel's part
    scores = scores - scores.mean(2, keepdim=True)
    together = torch.einsum("bp,bpc->cp", levels, scores - scores.mean(0))
    spread = levels.square().sum(0).sqrt()
    grown = together / (len(bags) ** 0.5 * spread)
    return grown.where(spread > 0, 0.0)
