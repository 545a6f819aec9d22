"""A synthetic language with a known entropy rate, the floor for every model."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cdopt_tutorial.data.text import Corpus, Vocabulary


@dataclass(frozen=True)
class Grammar:
    """A seeded Markov chain over words, of which everything is known exactly.

    The last word decides which words may follow, the last ``order`` words how likely
    each of them is: with order 2, a bigram model stays above the entropy rate, and only
    a model with memory reaches it.

    A *context* is a walk of ``order`` words, numbered by its first word and, as digits
    to the base ``branching``, the choices after it. The chain is ergodic: the
    successors contain a cycle through all words and one that leaves out a single word.
    """

    num_words: int = 16  #: at least 2
    branching: int = 4  #: successors of each word, from 2 to ``num_words``
    seed: int = 0  #: of the language, at least 0
    order: int = 2  #: words on which the next one depends, at least 1

    @cached_property
    def successors(self) -> NDArray[np.int64]:
        """Words (num_words, branching) that may follow each word."""
        rng = np.random.default_rng([self.seed, 0])
        cycle = rng.permutation(self.num_words)
        table = np.empty((self.num_words, self.branching), dtype=np.int64)
        for place, word in enumerate(cycle):
            # The next in the cycle, and from the first word the next but one, a chord.
            first = np.roll(cycle, -place - 1)[: 2 if place == 0 else 1]
            others = rng.permutation(np.setdiff1d(cycle, first))
            table[word] = np.concatenate([first, others])[: self.branching]
        return table

    @cached_property
    def probabilities(self) -> NDArray[np.float64]:
        """The probability of each choice in each context, (contexts, branching)."""
        rng = np.random.default_rng([self.seed, 1])
        contexts = self.num_words * self._contexts_of_a_word
        weights = rng.dirichlet(np.full(self.branching, 0.5), contexts)
        return 0.9 * weights + 0.1 / self.branching

    @cached_property
    def stationary(self) -> NDArray[np.float64]:
        """The probability of each context, (contexts,): the solution of πP = π."""
        contexts = len(self.probabilities)
        balance = -np.eye(contexts)
        places = self._next_contexts, np.arange(contexts)[:, None]
        np.add.at(balance, places, self.probabilities)
        balance[-1] = 1  # one equation is redundant; the sum takes its place
        return np.linalg.solve(balance, np.eye(contexts)[-1])

    @property
    def entropy_rate(self) -> float:
        """The least loss in nats per word (Cover and Thomas, theorem 4.2.4)."""
        entropies = -(self.probabilities * np.log(self.probabilities)).sum(axis=1)
        return float(self.stationary @ entropies)

    def sample(self, length: int, seed: int = 0) -> Tensor:
        """Words (length,) int64 of a text that starts in a stationary context."""
        rng = np.random.default_rng([self.seed, 2, seed])
        context = rng.choice(len(self.stationary), p=self.stationary)
        # Without the last bound, rounding cannot lead past the last choice.
        bounds = self.probabilities.cumsum(axis=1)[:, :-1].tolist()
        after, contexts = self._next_contexts.tolist(), []
        for chance in rng.random(length).tolist():
            contexts.append(context)
            choice = sum(chance >= bound for bound in bounds[context])
            context = after[context][choice]
        return torch.tensor(contexts, dtype=torch.int64) // self._contexts_of_a_word

    def corpus(self, train_tokens: int, valid_tokens: int) -> Corpus:
        """Two independent samples, in words named ``w0``, ``w1``, ..."""
        words = Vocabulary(tuple(f"w{number}" for number in range(self.num_words)))
        return Corpus(words, self.sample(train_tokens, 0), self.sample(valid_tokens, 1))

    @property
    def _contexts_of_a_word(self) -> int:
        """The number of contexts that begin with a given word."""
        return self.branching ** (self.order - 1)

    @cached_property
    def _next_contexts(self) -> NDArray[np.int64]:
        """The context that each choice leads to, (contexts, branching)."""
        walks = np.arange(self.probabilities.size).reshape(self.probabilities.shape)
        first, choices = np.divmod(walks, self.branching**self.order)
        choice, others = np.divmod(choices, self._contexts_of_a_word)
        return self.successors[first, choice] * self._contexts_of_a_word + others
