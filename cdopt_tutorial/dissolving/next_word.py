"""A task that asks for a short memory only: guess the next word of a grammar."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

from cdopt_tutorial.data import Grammar


@dataclass(frozen=True)
class NextWord:
    """The next word of a synthetic language, given those before it.

    Attributes:
        grammar: the language. What comes next depends on its last ``order`` words;
            all that lies further back is better forgotten.
        seq_len: words of a sequence, above the grammar's order.
        text_len: words of the text from which sequences are cut at random.

    Raises:
        ValueError: ``seq_len`` or ``text_len`` is too small.
    """

    grammar: Grammar = Grammar(num_words=8, branching=4, seed=0, order=3)
    seq_len: int = 35
    text_len: int = 300_000

    def __post_init__(self):
        limits = {"seq_len": self.grammar.order, "text_len": self.seq_len}
        for name, limit in limits.items():
            if getattr(self, name) <= limit:
                value = getattr(self, name)
                raise ValueError(f"{name} is {value}, but must be above {limit}")

    @property
    def num_inputs(self) -> int:
        """Words of the language."""
        return self.grammar.num_words

    num_outputs = num_inputs

    @property
    def floor(self) -> float:
        """Nats per word of the best model there can be: the entropy rate."""
        return self.grammar.entropy_rate

    def batch(self, batch_size: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Cut sequences from the text, (seq_len, batch_size) words and their next."""
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
