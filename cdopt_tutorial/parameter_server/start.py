"""Where a run begins: given parameters, or those of another run."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from cdopt_tutorial.parameter_server import checkpoint
from cdopt_tutorial.parameter_server.checkpoint import Checkpoint
from cdopt_tutorial.parameter_server.config import RNNConfig
from cdopt_tutorial.parameter_server.model import build
from cdopt_tutorial.parameter_server.steps import PARTS


def begin(
    config: RNNConfig, words: Sequence[str], weights: Mapping[str, Tensor]
) -> Checkpoint:
    """A checkpoint before the first step, with given parameters.

    Args:
        config: of the run.
        words: the vocabulary.
        weights: all parameters by name.
    """
    return checkpoint.make(
        config, words, weights=dict(weights), optimizer={}, losses=[[]],
        epoch=0, window=0, hidden=(),
    )  # fmt: skip


def first_weights(config: RNNConfig, vocab_size: int) -> dict[str, Tensor]:
    """The parameters with which a run begins, by name."""
    return {
        f"{part}.{name}": value
        for part in PARTS
        for name, value in build(part, vocab_size, config).state_dict().items()
    }


@torch.no_grad()
def left_free(config: RNNConfig, words: Sequence[str]) -> tuple[RNNConfig, Checkpoint]:
    """A constrained run's control: it begins as that one, but nothing is held.

    Called by the chapters, to tell what a constraint does from what its start does.

    Returns:
        The free run's config, and the checkpoint from which it begins.
    """
    free = replace(config, manifold="none", per_gate=False)
    begun = first_weights(config, len(words))
    scale = begun.pop("decoder.scale", 1.0)
    weights = {
        name.replace("parametrizations.", "").removesuffix(".original"): value
        for name, value in begun.items()
    }
    weights["decoder.decoder.weight"] = scale * weights["decoder.decoder.weight"]
    return free, begin(free, words, weights)
