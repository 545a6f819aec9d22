"""Two tasks for recurrent models: one asks for a long memory, one for a short one."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

from cdopt_tutorial.checks import at_least
from cdopt_tutorial.data import Grammar

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

    Raises:
        ValueError: a value is out of its range.
    """

    num_symbols: int = 8  #: symbols to choose from, at least 2
    num_copies: int = 5  #: K, symbols to remember, at least 1
    #: L, steps from the last symbol to the first of the answer, at least 1.
    delay: int = 30

    def __post_init__(self):
        at_least(self, 2, "num_symbols")
        at_least(self, 1, "num_copies", "delay")

    @property
    def num_inputs(self) -> int:
        """Different inputs: the blank, the symbols and the marker."""
        return self.num_symbols + 2

    @property
    def num_outputs(self) -> int:
        """Different targets: the blank and the symbols."""
        return self.num_symbols + 1

    def batch(
        self, batch_size: int, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Inputs and targets, each (L + 2K, batch_size) int64."""
        shape = self.num_copies, batch_size
        symbols = torch.randint(1, self.num_symbols + 1, shape, generator=generator)
        inputs = torch.full((self.delay + 2 * self.num_copies, batch_size), BLANK)
        targets = inputs.clone()
        inputs[: self.num_copies] = symbols
        inputs[self.num_copies + self.delay - 1] = self.num_symbols + 1
        targets[-self.num_copies :] = symbols
        return inputs, targets

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy over all steps, in nats, a scalar.

        Args:
            logits: (L + 2K, batch_size, num_outputs).
            targets: (L + 2K, batch_size) int64.
        """
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def recall(self, logits: Tensor, targets: Tensor) -> float:
        """Share of the K symbols for which the likeliest answer is right."""
        asked = slice(-self.num_copies, None)
        answers = logits[asked].argmax(dim=-1)
        return (answers == targets[asked]).float().mean().item()


@dataclass(frozen=True)
class NextWord:
    """The next word of a synthetic language, given those before it.

    Raises:
        ValueError: ``seq_len`` or ``text_len`` is too small.
    """

    #: the language. What comes next depends on its last ``order`` words; all that lies
    #: further back is better forgotten.
    grammar: Grammar = Grammar(num_words=8, branching=4, seed=0, order=3)
    seq_len: int = 35  #: words of a sequence, above the grammar's order
    text_len: int = 300_000  #: words of the text from which sequences are cut at random

    def __post_init__(self):
        at_least(self, self.grammar.order + 1, "seq_len")
        at_least(self, self.seq_len + 1, "text_len")

    @property
    def num_inputs(self) -> int:
        """Words of the language."""
        return self.grammar.num_words

    num_outputs = num_inputs

    @property
    def floor(self) -> float:
        """Nats per word of the best model there can be: the entropy rate."""
        return self.grammar.entropy_rate

    def batch(
        self, batch_size: int, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Words cut from the text, and their next, each (seq_len, batch_size) int64."""
        last = self.text_len - self.seq_len
        begin = torch.randint(last, (batch_size,), generator=generator)
        words = self._text[begin + torch.arange(self.seq_len + 1)[:, None]]
        return words[:-1], words[1:]

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy per word in nats, once ``order`` words have been seen."""
        first = self.grammar.order - 1
        return functional.cross_entropy(
            logits[first:].flatten(0, 1), targets[first:].flatten()
        )

    def recall(self, logits: Tensor, targets: Tensor) -> float:
        """Share of the next words that are the likeliest guess."""
        return (logits.argmax(dim=-1) == targets).float().mean().item()

    @cached_property
    def _text(self) -> Tensor:
        return self.grammar.sample(self.text_len)
