"""The copying memory problem: repeat what you saw long ago."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

BLANK = 0


@dataclass(frozen=True)
class CopyingMemory:
    """Symbols, a long pause, and then the same symbols again.

    The input is K symbols, L blanks of which the last is a marker that says "now", and
    K blanks. The target is blank until the marker, and then the K symbols in their
    order. Who does not remember can only guess them. 0 is the blank, 1 to
    ``num_symbols`` are the symbols, ``num_symbols`` + 1 is the marker.

    Source: Hochreiter and Schmidhuber, Long Short-Term Memory, Neural Computation 9
    (1997); in this form Arjovsky, Shah and Bengio, Unitary Evolution Recurrent Neural
    Networks, ICML 2016, section 5.1.

    Attributes:
        num_symbols: symbols to choose from, at least 2.
        num_copies: K, symbols to remember, at least 1.
        delay: L, steps from the last symbol to the first of the answer, at least 1.

    Raises:
        ValueError: a value is out of its range.
    """

    num_symbols: int = 8
    num_copies: int = 5
    delay: int = 30

    def __post_init__(self):
        for name, least in (("num_symbols", 2), ("num_copies", 1), ("delay", 1)):
            if getattr(self, name) < least:
                value = getattr(self, name)
                raise ValueError(f"{name} is {value}, but must be at least {least}")

    @property
    def seq_len(self) -> int:
        """Steps of a sequence, L + 2K."""
        return self.delay + 2 * self.num_copies

    @property
    def num_inputs(self) -> int:
        """Different inputs: the blank, the symbols and the marker."""
        return self.num_symbols + 2

    @property
    def num_outputs(self) -> int:
        """Different targets: the blank and the symbols."""
        return self.num_symbols + 1

    @property
    def chance_loss(self) -> float:
        """Nats per step of the best answer without a memory.

        It knows when to be blank, and guesses each of the K symbols:
        K · ln(num_symbols) / (L + 2K).
        """
        return self.num_copies * math.log(self.num_symbols) / self.seq_len

    @property
    def floor(self) -> float:
        """Nats per step of the best answer with a memory: 0, as nothing is random."""
        return 0.0

    def batch(self, batch_size: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Draw sequences.

        Args:
            batch_size: sequences.
            generator: whose state moves on.

        Returns:
            Inputs and targets, each (seq_len, batch_size) int64.

        Raises:
            ValueError: ``batch_size`` is below 1.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}, but must be at least 1")
        shape = self.num_copies, batch_size
        symbols = torch.randint(1, self.num_symbols + 1, shape, generator=generator)
        inputs = torch.full((self.seq_len, batch_size), BLANK)
        targets = inputs.clone()
        inputs[: self.num_copies] = symbols
        inputs[self.num_copies + self.delay - 1] = self.num_symbols + 1
        targets[-self.num_copies :] = symbols
        return inputs, targets

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy over all steps, in nats, a scalar.

        Args:
            logits: (seq_len, batch, num_outputs).
            targets: (seq_len, batch) int64.
        """
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def recall(self, logits: Tensor, targets: Tensor) -> float:
        """Share of the K symbols for which the likeliest answer is right.

        Args:
            logits: (seq_len, batch, num_outputs).
            targets: (seq_len, batch) int64.
        """
        asked = slice(-self.num_copies, None)
        answers = logits[asked].argmax(dim=-1)
        return (answers == targets[asked]).float().mean().item()
