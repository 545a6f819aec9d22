"""Let a trained model write, in one process, whoever trained it."""

from collections.abc import Mapping

import torch
from torch import Tensor

from cdopt_tutorial.data import Vocabulary, detokenize
from cdopt_tutorial.engines.seam.reference import LocalRef
from cdopt_tutorial.parameter_server.model import RNNConfig, RNNModel, build_all

TEMPERATURE = 0.7  # below 1 it prefers likely words


@torch.no_grad()
def write(
    weights: Mapping[str, Tensor],
    config: RNNConfig,
    vocabulary: Vocabulary,
    begin: str,
    length: int = 60,
) -> str:
    """Go on from a first word, never with ``<unk>``, word 0; called by chapter 2."""
    parts = build_all(len(vocabulary), config)
    parts.load_state_dict(weights)
    references = {name: LocalRef(part) for name, part in parts.items()}
    model = RNNModel(references, config).eval()
    generator = torch.Generator().manual_seed(0)
    tokens, hidden = vocabulary.encode([begin]).tolist(), model.start(1)
    while len(tokens) < length:
        logits, hidden = model(torch.tensor([[tokens[-1]]]), hidden)
        chances = torch.softmax(logits[0, 0, 1:] / TEMPERATURE, dim=0)
        tokens.append(1 + torch.multinomial(chances, 1, generator=generator).item())
    return detokenize(vocabulary.decode(tokens))
